"""Training of scikit-learn estimators with ``partial_fit``: `SklearnWorkload`.

- `workload`: the workload; `objects`: estimators as arrays and JSON, without pickle.
"""

from dagsel.workloads.sklearn.workload import SklearnWorkload

__all__ = ["SklearnWorkload"]

SklearnWorkload.__module__ = __name__  # the public path, which run directories name
