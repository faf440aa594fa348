"""Search procedures and the engine: events go to a flow, decisions come from it.

A *flow* is a search procedure: a configuration, and a state that belongs to one run. It decides
which trials start, which train on and which stop. It uses no Dask, no Optuna, no clock, no file and
no global random numbers. The driver (`dagsel.driver.runner`) performs its decisions, on a cluster
or in virtual time, and tells it what happened.

A trial is *live* from `Asked` to `Stop` or `TrialFailed`. A live trial that has no epoch to train,
or was suspended by `Pause` or by the end of its ``Train(seconds=)``, is *paused*: only its state is
kept, in the store. The next `Train` resumes it on any workers, at the sample where it stopped, as
if it had never paused.
"""

from __future__ import annotations

from dagsel.flow.decisions import (
    DECISIONS,
    Add,
    Ask,
    Clone,
    Decision,
    Finish,
    Outcome,
    Pause,
    Sampling,
    Scale,
    Stop,
    Train,
    Wake,
)
from dagsel.flow.events import (
    EVENTS,
    Asked,
    DeadlineReached,
    Event,
    Paused,
    Reported,
    Tick,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flow.procedure import (
    Context,
    Direction,
    Flow,
    Goal,
    Keep,
    Traits,
    load_state,
    save_state,
)
from dagsel.planning.capacity import (
    Plan,
)
from dagsel.planning.losses import (
    Losses,
)
from dagsel.steering import (
    Commanded,
    Ended,
    Extended,
)

__all__ = [
    "DECISIONS",
    "EVENTS",
    "Add",
    "Ask",
    "Asked",
    "Clone",
    "Commanded",
    "Context",
    "DeadlineReached",
    "Decision",
    "Direction",
    "Ended",
    "Event",
    "Extended",
    "Finish",
    "Flow",
    "Goal",
    "Keep",
    "Losses",
    "Outcome",
    "Pause",
    "Paused",
    "Plan",
    "Reported",
    "Sampling",
    "Scale",
    "Stop",
    "Tick",
    "Train",
    "Traits",
    "TrialFailed",
    "Wake",
    "WorkersChanged",
    "load_state",
    "save_state",
]


def __dir__() -> list[str]:
    return __all__
