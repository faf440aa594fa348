"""Data sets as shuffled Zarr shards.

- `dataset`: `ShardedDataset`, and the scaling profiles stored with it; `summary`: what it holds.
- `manifest`: the description of a data set; `zarr_shard`: one shard.
- `inputs`: what people have; `sources`: the arrays and streams made of it.
- `plan`, `permutation`: where samples go; `shuffled_write`: writes them in bounded memory;
  `transaction`: a data set is written as a whole or not at all.
"""
