"""What people have, as the arrays of a data set.

- `read`: tells what it is; `arrays`: lists and the like; `classes`: text becomes numbers.
- `tables`: of pandas, polars and Arrow; `parquet`: files of them.
- `samples`: data sets of PyTorch and the like; `images`: pictures in folders.
"""
