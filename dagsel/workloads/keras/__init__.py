"""Training of Keras 3 models on its PyTorch or JAX backend: `KerasWorkload`.

- `workload`: the workload; `backend`: which backend a worker imports Keras with.
- `models`: compiled models, their metrics and arrays.
- `on_jax`, `on_torch`: a training step and an evaluation on the one and the other backend.

Importing this package does not import Keras: a worker must know the backend first.
"""

from dagsel.workloads.keras.workload import KerasWorkload

__all__ = ["KerasWorkload"]

KerasWorkload.__module__ = __name__  # the public path, which run directories name
