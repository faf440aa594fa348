"""Data sets as shuffled Zarr shards.

- `dataset`: `ShardedDataset`; `manifest`: what stands beside the shards; `zarr_shard`: one shard.
- `sources`: what is read; `plan`, `permutation`: what goes where; `shuffled_write`: writes it in
  bounded memory; `transaction`: so that a data set is there as a whole or not at all.
- `profiles`: scaling profiles kept with the data; `repr`: how a data set is shown.
"""
