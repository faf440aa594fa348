"""What a search procedure answers: decisions, which the driver performs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from dagsel.codec import Tagged
from dagsel.planning.capacity import Plan

Sampling: TypeAlias = Literal["study", "random", "grid"]
Outcome: TypeAlias = Literal["complete", "pruned"]


@dataclass(frozen=True, slots=True)
class Ask:
    """Draw new trials; answered by `Asked`.

    What has happened together with the event that led to it may be told before the answer.

    Parameters
    ----------
    n
        How many.
    sampling
        Who draws: the study's own sampler, a uniform one, or the next points of the grid.

    Examples
    --------
    >>> Ask(4)
    Ask(n=4, sampling='study')
    """

    n: int
    sampling: Sampling = "study"


@dataclass(frozen=True, slots=True)
class Add:
    """Create a trial with these parameters; answered by `Asked`.

    Parameters
    ----------
    params
        All parameters of the trial, by name. A label, such as the name of a function, stands for a
        value that has no form in JSON.

    Examples
    --------
    >>> Add({"lr": 0.01})
    Add(params={'lr': 0.01})
    """

    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Train:
    """Train a trial for more epochs; each is answered by `Reported`, or all by `TrialFailed`.

    All ``Train`` decisions of one answer are scheduled together.

    Parameters
    ----------
    trial
        Number of the trial.
    epochs
        How many more; 0 to go on with those that it was given before.
    priority
        Trials of a higher priority train first.
    gang
        Workers that train it together, each on its part of every batch. The global batch is the
        same for any number. A trial that is training with another number stops at its next batch
        and goes on with this one.
    seconds
        Suspend it after so many seconds of training, at a batch boundary; answered by `Paused`
        unless its epochs end before. None for no limit.

    Examples
    --------
    >>> Train(3, epochs=2, gang=4)
    Train(trial=3, epochs=2, gang=4)
    """

    trial: int
    epochs: int
    priority: float = 0.0
    gang: int = 1
    seconds: float | None = None

    def __repr__(self) -> str:
        default = Train(self.trial, self.epochs)
        rest = (f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name))
        told = "".join(f", {name}={getattr(self, name)!r}" for name in rest)
        return f"Train(trial={self.trial}, epochs={self.epochs}{told})"


@dataclass(frozen=True, slots=True)
class Pause:
    """Suspend a trial at its next batch boundary; answered by `Paused`, or by `TrialFailed`.

    Epochs that end before are reported as always.

    Parameters
    ----------
    trial
        Number of the trial.
    evaluate
        Whether the state at which the trial stops is scored.

    Examples
    --------
    >>> Pause(3, evaluate=True)
    Pause(trial=3, evaluate=True)
    """

    trial: int
    evaluate: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """End a trial for good.

    Parameters
    ----------
    trial
        Number of the trial.
    reason
        Kept in the record of the run.
    outcome
        ``"complete"`` if it has come as far as it should, ``"pruned"`` if it ends early. A pruned
        trial that is the best of all is complete too, unless ``keep="last"``.

    Examples
    --------
    >>> Stop(3, reason="rung 1")
    Stop(trial=3, reason='rung 1', outcome='pruned')
    """

    trial: int
    reason: str
    outcome: Outcome = "pruned"


@dataclass(frozen=True, slots=True)
class Clone:
    """Replace a trial's state by a copy of another one's, and change its configuration.

    The source must have reported an epoch. The target must be paused, and stays paused. It keeps
    its number and its count of epochs. If that is 0, its own configuration lies under `config`.

    Parameters
    ----------
    source
        Its model and optimizer state are copied, as of its last reported epoch.
    target
        The trial that loses its own state.
    config
        The target's configuration from its next epoch on, over that of the source. Values must have
        a form in JSON.

    Examples
    --------
    >>> Clone(source=0, target=3, config={"lr": 0.02})
    Clone(source=0, target=3, config={'lr': 0.02})
    """

    source: int
    target: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """Make the cluster have so many workers from now on; `WorkersChanged` says when they are there.

    Parameters
    ----------
    n_workers
        How many.

    Examples
    --------
    >>> Scale(8)
    Scale(n_workers=8)
    """

    n_workers: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Ask for a `Tick` at a time of the run; a later decision replaces an earlier one.

    Parameters
    ----------
    seconds
        When, in seconds since the run began.

    Examples
    --------
    >>> Wake(60.0)
    Wake(seconds=60.0)
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    """End the search; trials that are still live are pruned.

    Examples
    --------
    >>> Finish()
    Finish()
    """


Decision: TypeAlias = Ask | Add | Train | Pause | Stop | Clone | Scale | Wake | Plan | Finish

DECISIONS: Tagged[Decision] = Tagged(*get_args(Decision))
