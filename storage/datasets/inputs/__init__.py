"""What people have, as the arrays of a data set.

- `read`: tells what it is; `arrays`: lists and the like; `classes`: text becomes numbers.
- `reading`: how, and what has been read; `labels`: the column that divides samples;
  `decoding`: samples in processes of their own.
- `tables`: of pandas, polars and Arrow; `parquet`: files of them.
- `samples`: data sets of PyTorch and the like, streams of samples; `images`: pictures in folders;
  `webdataset`: tar files; `paths`: what paths with braces and asterisks name.
"""
