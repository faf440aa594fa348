"""Training of Lightning's modules without a Trainer: `LightningWorkload`.

- `workload`: the workload; `trials`: module, optimizers and schedules of a state.
- `hooks`: which hooks of a module are called, and which are refused.
- `trainer`: what a module is told where it asks for its Trainer; `loop`: epochs, batches, scores.
- `travel`: what travels with a trial beside weights and moments; `scores`: metrics of all shards.

Lightning's own parts do the steps: its strategy, precision plugin, loops of optimization and
collections of logged values. Those whose names begin with an underscore are imported in `trainer`
alone.
"""

from dagsel.errors import WorkloadError

try:
    import lightning.pytorch as _  # noqa: F401
except ImportError as error:
    raise WorkloadError(
        f'LightningWorkload needs Lightning: pip install "dagsel[lightning]" ({error})'
    ) from None

from dagsel.workloads.lightning.workload import LightningWorkload

__all__ = ["LightningWorkload"]

LightningWorkload.__module__ = __name__  # the public path, which run directories name
