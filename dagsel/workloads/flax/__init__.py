"""Training of Flax NNX modules with optax: `FlaxWorkload`.

- `workload`: the workload.
- `programs`: what is compiled for a configuration, and the arrays that go through it.
"""

from dagsel.workloads.arrays import imported, settle_jax

settle_jax()
for _module in ("jax", "flax", "optax"):
    imported(_module, "jax")

from dagsel.workloads.flax.workload import FlaxWorkload  # noqa: E402

__all__ = ["FlaxWorkload"]

FlaxWorkload.__module__ = __name__  # the public path, which run directories name
