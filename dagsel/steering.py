"""What a user tells a search: commands while it goes on, and more work when it has finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, get_args

from dagsel.codec import LATER, Tagged


@dataclass(frozen=True, slots=True)
class StopTrial:
    """End a trial; it is pruned, or complete if it is the best."""

    trial: int


@dataclass(frozen=True, slots=True)
class PauseTrial:
    """Let a trial rest at its next batch, until it is resumed."""

    trial: int


@dataclass(frozen=True, slots=True)
class ResumeTrial:
    """Let a trial go on that a command has paused."""

    trial: int


@dataclass(frozen=True, slots=True)
class CloneTrial:
    """Train a copy of a trial with some other parameters; the driver makes it an `AddTrial`."""

    trial: int
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AddTrial:
    """Train a configuration.

    Parameters
    ----------
    params
        Its parameters, with labels for those that have no form in JSON.
    epochs
        How long it trains; None until the driver has checked it.
    source
        The trial from whose state it begins, as of its last epoch; None if it begins anew.
    """

    params: Mapping[str, Any]
    epochs: int | None = None
    source: int | None = None


@dataclass(frozen=True, slots=True)
class ScaleCluster:
    """Make the cluster have so many workers."""

    n_workers: int


@dataclass(frozen=True, slots=True)
class ExtendLimits:
    """Give the search another deadline or budget; the driver makes it a `SetLimits`.

    Parameters
    ----------
    deadline_s
        Seconds from now on; None for the one that there is.
    budget
        What the workers may cost from now on, as `dagsel.optimize` takes it; None likewise.
    """

    deadline_s: float | None = None
    budget: float | str | None = None


@dataclass(frozen=True, slots=True)
class SetLimits:
    """The limits of a search from now on, counted from the beginning of the run.

    Parameters
    ----------
    deadline_s, budget_s, budget_money
        Seconds, worker-seconds, and money if the workers differ in their price; None for no limit.
    """

    deadline_s: float | None = None
    budget_s: float | None = None
    budget_money: float | None = None


@dataclass(frozen=True, slots=True)
class FinishSearch:
    """End the search with the best so far.

    Parameters
    ----------
    resumable
        Whether `dagsel.resume` goes on from there, as after Ctrl-C: what lived then is kept.
    """

    resumable: bool = field(default=False, metadata={LATER: True})


UserCommand: TypeAlias = (
    StopTrial
    | PauseTrial
    | ResumeTrial
    | CloneTrial
    | AddTrial
    | ScaleCluster
    | ExtendLimits
    | SetLimits
    | FinishSearch
)
USER_COMMANDS: Tagged[UserCommand] = Tagged(*get_args(UserCommand))


@dataclass(frozen=True, slots=True)
class Commanded:
    """The user has given a command. It was checked and can be performed.

    Parameters
    ----------
    command
        Which.
    id
        A name that no other command has; none is performed twice.
    seconds
        Time since the run began.

    Examples
    --------
    >>> Commanded(StopTrial(3), id="a1", seconds=60.0).command
    StopTrial(trial=3)
    """

    command: Annotated[UserCommand, USER_COMMANDS]
    id: str
    seconds: float

    @property
    def adds(self) -> str | None:
        """Its id if it adds a trial."""
        return self.id if isinstance(self.command, AddTrial) else None


@dataclass(frozen=True, slots=True)
class Ended:
    """A trial of a search that has finished, which can train on.

    Parameters
    ----------
    trial, epochs
        Its number, and how far it has trained.
    value
        The metric after its last epoch; NaN if it breaks a constraint.

    Examples
    --------
    >>> Ended(3, epochs=9, value=0.97).epochs
    9
    """

    trial: int
    epochs: int
    value: float


@dataclass(frozen=True, slots=True)
class Extended:
    """A search that has finished goes on.

    Only a flow whose `Traits.extends` is not empty gets this. `Train` may name an ended trial then.

    Parameters
    ----------
    n_trials
        How many more trials to draw.
    max_epochs
        Epochs of the longest trial from now on; None for as many as before.
    n_best
        How many of the best ended trials train on, where the flow trains all to the end.
    ended
        The trials that can train on, the best first.
    deadline_s, budget_s, budget_money
        Limits from now on, since the beginning of the run.

    Examples
    --------
    >>> Extended(n_trials=4, deadline_s=600.0).limits
    SetLimits(deadline_s=600.0, budget_s=None, budget_money=None)
    """

    n_trials: int = 0
    max_epochs: int | None = None
    n_best: int = 0
    ended: tuple[Ended, ...] = ()
    deadline_s: float | None = None
    budget_s: float | None = None
    budget_money: float | None = None

    @property
    def limits(self) -> SetLimits:
        """The limits from now on."""
        return SetLimits(self.deadline_s, self.budget_s, self.budget_money)
