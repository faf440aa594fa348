"""Searches in virtual time: the same flows, runner and dispatcher, on workers that are a model.

- `run`: the call.
- `cluster`: what the workers are like; `curves`, `recorded`: what trials do, and what they cost.
- `engine`: plays the cluster for the runner; `order`: reports in the order of another run.
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
