"""What an extension of a search is: its trials, epochs and limits, and why it is none."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from dagsel.checks import short_traceback, whole
from dagsel.errors import SearchError
from dagsel.flow import Decision, Ended, Extended, Finish, Flow, Traits
from dagsel.history.record import Record
from dagsel.history.settings import Settings
from dagsel.history.tables import ranked
from dagsel.history.tariff import Tariff
from dagsel.steering import SetLimits


def can_train_on(record: Record) -> tuple[Ended, ...]:
    """List the trials that have ended and can train on, the best first.

    One that has failed cannot, nor one that has gone on from another one's state. As in its reports
    (`as_heard`), one that breaks a constraint is worth nothing.
    """
    return tuple(
        Ended(it.number, len(it.epochs), it.last_values[0] if it.is_feasible else math.nan)
        for it in ranked(record)
        if it.epochs and not it.is_live and not it.adoptions
    )


@short_traceback
def extension(
    traits: Traits,
    settings: Settings,
    record: Record,
    n_trials: int,
    max_epochs: int | None,
    n_best: int | None,
) -> Extended:
    """Return what a flow is told of an extension; raise a `SearchError` if it is none."""
    n_trials = whole("n_trials", n_trials, least=0)
    if max_epochs is not None:
        max_epochs = whole("max_epochs", max_epochs, least=traits.max_epochs or 1)
    elif not n_trials:
        raise SearchError("say how much more is to be trained: n_trials=, max_epochs=, or both")
    if n_best is not None:
        n_best = whole("n_best", n_best, least=0)
        if max_epochs is None:
            raise SearchError(f"n_best={n_best} trials would train on to no end; give max_epochs=")
    most = settings.top_k if n_best is None and "n_best" in traits.extends else n_best or 0
    return Extended(n_trials, max_epochs, most, can_train_on(record))


@short_traceback
def check_flow_extends(flow: Flow, more: Extended) -> None:
    """Raise a `SearchError` if a flow does not take what it is to be told."""
    name, takes = type(flow).__name__, flow.traits.extends
    if not takes:
        raise SearchError(
            f"{name} cannot go on once it has ended: it plans its trials and epochs before it "
            "begins; search again on the same study, which remembers its trials"
        )
    wanted = {"n_trials": more.n_trials, "max_epochs": more.max_epochs, "n_best": more.n_best}
    for option in wanted.keys() - {*takes}:
        if wanted[option]:
            raise SearchError(
                f"{name} decides by itself what {option} would say; leave it out and give "
                f"{' and '.join(f'{name}=' for name in takes)}"
            )


def limited(
    more: Extended, tariff: Tariff, record: Record, deadline: Any, budget: float | str | None
) -> Extended:
    """Add deadline and budget, which count from now on; there are no others."""
    taken = record.seconds, record.worker_seconds, record.money
    return replace(more, **asdict(tariff.limits(SetLimits(), taken, deadline, budget)))


def check_work(decisions: list[Decision], more: Extended) -> None:
    """Raise a `SearchError` if a flow has found nothing to train."""
    if all(isinstance(decision, Finish) for decision in decisions):
        wanted = f"n_trials={more.n_trials}, max_epochs={more.max_epochs}"
        raise SearchError(
            f"with {wanted} nothing is left to train: no trial that would train on has fewer "
            "epochs, and the space has no more configurations, if trials were asked for"
        )


def said(more: Extended, record: Record) -> str:
    """Say what is to be trained, and of which trials the states are there."""
    kept = ", ".join(str(best.trial) for best in record.top)
    told = [f"{more.n_trials} more trials"] if more.n_trials else []
    told += [f"up to {more.max_epochs} epochs"] if more.max_epochs else []
    return (
        f"run {record.run} goes on: {', '.join(told)}; of the trials that there are, the states of "
        f"{kept or 'none'} are kept; any other that trains on is first trained again as it was"
    )
