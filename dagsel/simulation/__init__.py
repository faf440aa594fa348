"""Searches in virtual time: the same flows, runner and dispatcher, on a model of the workers.

- `run`: `simulate`; `preview`: what a search will take, without running it.
- `cluster`: what the workers are like; `curves`, `recorded`, `traces`: what trials do and cost.
- `engine`: the runner's engine in virtual time, on a `virtual_cluster`; `order`: keeps the order of
  reports of another run.
"""

from dagsel.simulation.cluster import SimulatedCluster
from dagsel.simulation.curves import Curves, PowerLaw
from dagsel.simulation.order import decision_log
from dagsel.simulation.recorded import Recorded
from dagsel.simulation.run import SimulatedRun, simulate
from dagsel.simulation.traces import Traces

__all__ = [
    "Curves",
    "PowerLaw",
    "Recorded",
    "SimulatedCluster",
    "SimulatedRun",
    "Traces",
    "decision_log",
    "simulate",
]


def __dir__() -> list[str]:
    return __all__
