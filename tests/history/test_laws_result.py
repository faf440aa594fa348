"""Laws of what a search came to: its price, and why there is no best trial."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.errors import NoCompletedTrialError
from dagsel.flow import Asked, TrialFailed
from dagsel.history.record import Record
from dagsel.history.result import Result, Run
from dagsel.messages import SessionBegun, Turn
from dagsel.storage import RunDir

NOTHING: Any = None  # the study and the workload, which are not asked


def record(n_trials: int = 0, **spent: Any) -> Record:
    """Make the record of a run all of whose trials failed."""
    made = Record("run", n_shards=1, direction="minimize")
    made.add(SessionBegun(0.0, 0.0))
    trials = tuple(range(n_trials))
    made.add(Turn(Asked(trials), (), params={trial: {} for trial in trials}, **spent))
    for trial in trials:
        made.add(Turn(TrialFailed(trial, f"because of {trial}"), (), **spent))
    return made


@settings(deadline=None)
@given(
    st.integers(1, 10**6),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 1000),
)
def test_workers_cost_what_was_paid_or_their_hours_at_their_price(
    worker_seconds: int, per_hour: int | None, paid: int | None
) -> None:
    run_dir = RunDir(f"memory://{uuid.uuid4().hex}")
    about = {} if per_hour is None else {"price_per_worker_hour": per_hour, "currency": "EUR"}
    run_dir.claim("run", about)
    spent = {"worker_seconds": float(worker_seconds), "seconds": 1.0}
    done = record(1, **spent, **({} if paid is None else {"money": float(paid)}))
    run = Run(NOTHING, "loss", done, NOTHING, run_dir)
    hours = worker_seconds / (60 * 60)
    if paid is not None:
        assert run.money == paid
    elif per_hour is None:
        assert run.money is None
    else:
        assert run.money == pytest.approx(hours * per_hour)
    assert run.currency == ("" if per_hour is None else "EUR")


@pytest.mark.parametrize("n_failed", [0, 1, 3, 4, 9])
def test_an_error_names_the_reasons_of_three_failures(n_failed: int) -> None:
    found = Result(NOTHING, "loss", record(n_failed))
    with pytest.raises(NoCompletedTrialError) as raised:
        _ = found.best
    told = [f"trial {trial}: because of {trial}" for trial in range(n_failed)]
    assert ("; ".join(told[:3]) or "none was started") in str(raised.value)
    assert str(raised.value).count("because of") == min(3, n_failed)


def test_what_has_no_stages_has_a_plan_that_says_what_was_done() -> None:
    done = record(2, worker_seconds=4.0, seconds=2.0)
    report = Result(NOTHING, "loss", done).plan
    assert (report.seconds, report.worker_seconds, report.n_trials) == (2.0, 4.0, 0)
