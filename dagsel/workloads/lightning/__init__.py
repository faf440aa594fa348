"""Training of Lightning's modules without a Trainer: `LightningWorkload`.

- `workload`: the workload; `trials`: module, optimizers and schedules of a state.
- `hooks`: which hooks of a module are called, and which are refused.
- `trainer`: what a module is told where it asks for its Trainer; `loop`: epochs, batches, scores.
- `travel`: what travels with a trial beside weights and moments; `scores`: metrics of all shards.

Lightning's own parts do the steps: its strategy, precision plugin, loops of optimization and
collections of logged values. Those whose names begin with an underscore are imported in `trainer`
alone.
"""

from dagsel.checks import imported
from dagsel.errors import WorkloadError

imported("lightning.pytorch", "lightning", by="LightningWorkload", error=WorkloadError)

from dagsel.workloads.lightning.workload import LightningWorkload  # noqa: E402 - see above

__all__ = ["LightningWorkload"]

LightningWorkload.__module__ = __name__  # the public path, which run directories name
