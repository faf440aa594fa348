"""Training of Flax NNX modules with optax: `FlaxWorkload`.

- `workload`: the workload.
- `programs`: what is compiled for a configuration, and the arrays that go through it.

Importing this package imports neither JAX nor Flax.
"""

from dagsel.workloads.flax.workload import FlaxWorkload

__all__ = ["FlaxWorkload"]

FlaxWorkload.__module__ = __name__  # the public path, which run directories name
