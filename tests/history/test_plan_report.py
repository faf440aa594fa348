"""`Run.plan`: what was done adds up to the bill, and each difference has its sentence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.units import Unit
from dagsel.flow import Asked, Context, Finish, Scale, Stop, Train, Wake, WorkersChanged
from dagsel.flows import ASHA
from dagsel.history.plan_report import PlanReport
from dagsel.history.plan_rows import planned_stages
from dagsel.history.record import Record
from dagsel.messages import SessionBegun, SessionEnded, Turn, UnitRecord
from dagsel.planning.budget import Budget
from dagsel.planning.capacity import ClusterCapacity, Plan, PlannedStage
from dagsel.planning.prices import Price
from dagsel.simulation import PowerLaw, SimulatedCluster, simulate

BEGAN_AT = 1_000_000.0  # seconds since 1970


class Story:
    """Makes the record of a run as its journal would: time passes, and some workers are billed."""

    def __init__(self) -> None:
        self.record = Record("told", n_shards=1, direction="maximize")
        self.seconds = self.cost = 0.0
        self.record.add(SessionBegun(BEGAN_AT, 0.0))

    def wait(self, until: float, billed: float) -> Story:
        self.cost += (until - self.seconds) * billed
        self.seconds = until
        return self

    def turn(self, event: Any, *decisions: Any, **about: Any) -> Story:
        spent: dict[str, Any] = {"seconds": self.seconds, "worker_seconds": self.cost}
        self.record.add(Turn(event, decisions, **spent, **about))
        return self

    def begin(
        self, n_trials: int, *decisions: Any, n_workers: int = 1, queue: bool = False
    ) -> Story:
        capacity = ClusterCapacity(bills_requests=not queue)
        context = Context(n_workers, "maximize", capacity=capacity)
        self.turn(None, *decisions, context=context)
        trials = range(n_trials)
        trains = [Train(trial, 9) for trial in trials]
        params: dict[int, Any] = {trial: {} for trial in trials}
        return self.turn(Asked(tuple(trials)), *trains, params=params)

    def trained(self, trial: int, lasted: float) -> Story:
        stop = BEGAN_AT + self.seconds
        work = (Unit("train", trial, 1, 0), "w", 0, stop - lasted, stop, False)
        self.record.add(UnitRecord(*work, seconds=self.seconds, worker_seconds=self.cost))
        return self

    def ended(self, seconds: float, billed: float, money: float | None = None) -> Story:
        self.wait(seconds, billed)
        self.record.add(SessionEnded(BEGAN_AT + seconds, seconds, self.cost, money))
        return self

    def report(self, deadline_s: float | None = None, budget: Budget | None = None) -> PlanReport:
        return PlanReport.of(self.record, deadline_s, budget)


def plan(*stages: tuple[float, float, int, int], startup_s: float = 3.0, reason: str = "") -> Plan:
    made = tuple(PlannedStage(begin, lasts, n, (trials,)) for begin, lasts, n, trials in stages)
    return Plan(made, (1,), startup_s, reason)


def one_lost() -> Story:
    """Tell of four workers that come late, and of which one is lost in the second stage."""
    story = Story().wait(0.2, 0)
    first = plan((3.2, 16.8, 4, 8), (20.0, 40.0, 4, 4), reason="the search begins")
    story.begin(8, Scale(4), first, Wake(20.0), n_workers=0)
    story.wait(4.3, 4).turn(WorkersChanged(4))
    story.wait(5.3, 4)
    for trial in range(8):
        story.trained(trial, 1.0)
    story.wait(20.4, 4)
    stops = [Stop(trial, "stage 1: not among the best") for trial in range(4, 8)]
    story.turn(None, *stops, *(Train(trial, 1) for trial in range(4)), Wake(60.0))
    story.wait(31.0, 4).turn(WorkersChanged(3))
    story.wait(34.0, 4).trained(0, 2.0)
    story.wait(58.0, 3)
    for trial in range(1, 4):
        story.trained(trial, 30.0)
    story.turn(None, Finish())
    return story.ended(58.8, 3)


def test_what_was_planned_and_done_stand_side_by_side() -> None:
    report = one_lost().report(60.0, Budget(240.0))
    title, *lines = repr(report).splitlines()
    assert title == "<Run told: 58 s of 60 s, 3.49 of 4 worker-minutes"
    assert (
        "\n".join(lines[:13])
        == """\
         planned                                     | done
         begins   lasts  trials  workers  worker-min | begins   lasts  trials  workers  worker-min
 start      0 s   3.2 s             3.75         0.2 |    0 s   4.3 s             3.81       0.273
 stage 1  3.2 s  16.8 s       8        4        1.12 |  4.3 s  16.1 s       8        4        1.07
 stage 2   20 s    40 s       4        4        2.67 | 20.4 s  37.6 s       4     3.36        2.11
 release                                             |   58 s   0.8 s                3        0.04
 total             60 s       8                 3.99 |         58.8 s       8                 3.49

 4 |##################################..........................
   |###########################################################.
   |###########################################################.
   |###########################################################.
 0 +------------------------------------------------------------"""
    )
    assert lines[13:15] == [
        "    0 s                                                     60 s",
        "   workers: # planned and billed, . only planned, + only billed",
    ]


def test_each_difference_has_a_sentence() -> None:
    report = one_lost().report(60.0, Budget(240.0))
    assert report.differences == (
        "The 4 workers that were asked for at 0.2 s came after 4.1 s, 3 s were planned.",
        "The first unit began after 4.3 s, 3.2 s were planned.",
        "The start was billed 16.4 worker-seconds, 12 were planned.",
        "Stage 1 began at 4.3 s, 1.1 s later than planned.",
        "Stage 1 lasted 16.1 s, not 16.8 s.",
        "Stage 1 was billed 64.4 worker-seconds, 67.2 were planned.",
        "Stage 2 lasted 37.6 s, not 40 s.",
        "Stage 2 had 3 to 4 workers, not 4: one was lost at 31 s and its place was billed until "
        "34 s.",
        "Stage 2 was billed 126 worker-seconds, 160 were planned.",
        "The release of the workers took 0.8 s and 2.4 worker-seconds.",
        "30.4 worker-seconds of 240 were not used: the search ended at 58 s.",
    )


def test_what_a_budget_in_money_has_bought_is_in_the_table() -> None:
    report = one_lost().report(None, Budget(240.0, Price(2.5, "USD")))
    assert report.money == pytest.approx((58 - 0.2) * 4 / 3600 * 2.5, abs=0.02)
    assert "0.15 USD" in repr(report).splitlines()[0]
    assert repr(report).splitlines()[2].count("USD") == 2
    assert "<th>USD, planned</th>" in report._repr_html_()


def test_workers_that_differ_in_price_are_in_each_row_at_what_they_cost() -> None:
    story = Story().begin(1, plan((0.0, 4.0, 1, 1), (4.0, 6.0, 1, 1), startup_s=0.0))
    story.wait(4.0, 1).trained(0, 4.0).turn(None, Train(0, 1), Wake(10.0), money=4.0)
    story.wait(10.0, 1).trained(0, 6.0).turn(None, Finish(), money=5.5)  # a quarter of the price
    report = story.report(10.0, Budget(20.0, Price(3600.0, "EUR")))
    assert [row.done.money for row in report.rows if row.done] == [4.0, 1.5]
    assert report.money == 5.5
    assert [row.planned.money for row in report.rows if row.planned] == [None, None]
    assert [line.split()[-1] for line in repr(report).splitlines()[3:6]] == ["4.00", "1.50", "5.50"]


def test_a_notebook_shows_the_same() -> None:
    report = one_lost().report(60.0, Budget(240.0))
    shown = report._repr_html_()
    for sentence in report.differences:
        assert f"<li>{sentence}</li>" in shown
    assert shown.count("<tr>") == len(report.rows) + 2
    assert shown.count('fill="none"') == len(report.planned) == 3
    assert shown.count("<rect") == len(report.planned) + len(report.billed)


def test_a_run_as_planned_has_no_differences() -> None:
    story = Story().begin(1, plan((0.0, 10.0, 1, 1), startup_s=0.0), Wake(10.0))
    story.wait(10.0, 1).trained(0, 10.0).turn(None, Finish())
    report = story.report(10.0, Budget(10.0))
    assert report.differences == ()
    assert report.rows[0].planned == report.rows[0].done


def test_a_lost_worker_that_is_replaced_is_billed_on() -> None:
    story = Story().begin(2, Scale(2), plan((0.0, 10.0, 2, 2), startup_s=0.0), n_workers=2)
    story.wait(4.0, 2).turn(WorkersChanged(1)).wait(6.0, 2).turn(WorkersChanged(2)).wait(10.0, 2)
    story.trained(0, 10.0).trained(1, 10.0).turn(None, Finish())
    (told,) = story.report().differences
    assert told == (
        "Stage 1 had 1 to 2 workers, not 2: one was lost at 4 s and its place was billed on; "
        "another one was there at 6 s."
    )


def test_what_is_released_later_was_no_place_of_the_lost() -> None:
    story = Story().begin(2, Scale(2), plan((0.0, 10.0, 2, 2), startup_s=0.0), n_workers=2)
    story.wait(4.0, 2).turn(WorkersChanged(1)).wait(6.0, 2).turn(WorkersChanged(2)).wait(8.0, 2)
    story.turn(None, Scale(1)).turn(WorkersChanged(1)).wait(10.0, 1)
    story.trained(0, 10.0).trained(1, 10.0).turn(None, Finish())
    assert story.report().differences == (
        "Stage 1 had 1 to 2 workers, not 2: one was lost at 4 s and its place was billed on; "
        "another one was there at 6 s; only 1 was wanted from 8 s on.",
        "Stage 1 was billed 18 worker-seconds, 20 were planned.",
    )


def test_workers_that_never_came_are_told() -> None:
    story = Story().begin(2, Scale(3), plan((0.0, 10.0, 3, 2), startup_s=1.0), n_workers=1)
    story.wait(2.0, 3).turn(WorkersChanged(2)).wait(10.0, 3)
    story.trained(0, 10.0).trained(1, 10.0).turn(None, Finish())
    assert story.report(10.0, Budget(30.0)).differences == (
        "Of the 2 workers that were asked for at 0 s only 1 came while so many were wanted.",
        "Stage 1 had 1 to 2 workers, not 3: only 1 was there to its end.",
    )


def test_a_plan_that_is_made_again_replaces_the_rest_of_the_first() -> None:
    first = plan((0.0, 4.0, 2, 4), (4.0, 6.0, 1, 1), startup_s=0.0)
    again = plan((3.0, 7.0, 1, 2), startup_s=0.0, reason="a unit takes 2 s, not 1 s")
    story = Story().begin(4, first, Wake(4.0), n_workers=2).wait(3.0, 2)
    for trial in range(4):
        story.trained(trial, 3.0)
    story.turn(None, Train(0, 1), Scale(1), again, Wake(10.0)).turn(WorkersChanged(1))
    story.wait(10.0, 1).trained(0, 5.0).trained(1, 5.0).turn(None, Finish())
    report = story.report(10.0, Budget(13.0))
    assert [row.planned.lasts_s for row in report.rows if row.planned] == [3.0, 7.0]
    assert report.differences == ("Planned again at 3 s: a unit takes 2 s, not 1 s.",)
    assert sum(row.planned.worker_seconds for row in report.rows if row.planned) == 13.0


def test_trials_that_did_not_train_before_a_plan_was_made_again_are_told() -> None:
    story = Story().begin(1, plan((0.0, 4.0, 1, 4), startup_s=0.0)).wait(3.0, 1).trained(0, 3.0)
    story.turn(None, plan((3.0, 2.0, 1, 1), startup_s=0.0), Train(0, 1), Wake(5.0)).wait(5.0, 1)
    story.trained(0, 2.0).turn(None, Finish())
    assert story.report().differences == (
        "Stage 1 trained 1 trial, not 4; it was planned again before its end.",
        "Planned again at 3 s.",
    )


def test_a_pause_in_a_stage_begins_no_stage() -> None:
    story = Story().begin(2, plan((0.0, 6.0, 1, 2), (6.0, 4.0, 1, 1), startup_s=0.0))
    story.wait(4.5, 1).trained(0, 4.0).turn(None, Train(0, 1), Wake(6.0))  # to measure something
    story.wait(6.5, 1).trained(1, 2.0).turn(None, Stop(1, "stage 1"), Train(0, 1), Wake(10.0))
    story.wait(10.0, 1).trained(0, 3.5).turn(None, Finish())
    done = [row.done.begins_s for row in story.report().rows if row.done and row.planned]
    assert done == [0.5, 6.5]


def test_the_start_is_not_planned_by_a_plan_that_is_made_after_it() -> None:
    story = Story().wait(5.0, 2).begin(1, plan((5.0, 5.0, 2, 1), startup_s=0.0), n_workers=2)
    story.wait(10.0, 2).trained(0, 5.0).turn(None, Finish())
    report = story.report()
    assert report.rows[0].planned is None
    assert report.differences == (
        "The start took 5 s and 10 worker-seconds; the plan was made for what was left.",
    )


@pytest.mark.parametrize(("queue", "planned"), [(False, 4.0 * 5.0), (True, 1.0 * 5.0)])
def test_no_cost_is_planned_for_jobs_that_wait_in_a_queue(queue: bool, planned: float) -> None:
    first = plan((6.0, 10.0, 4, 4), startup_s=5.0)
    story = Story().wait(1.0, 1).begin(1, Scale(4), first, queue=queue)
    (start, *_) = story.wait(6.0, 1).trained(0, 1.0).report().rows
    assert start.planned is not None
    assert start.planned.worker_seconds == planned


def test_a_stage_that_did_not_begin_is_told() -> None:
    story = Story().begin(1, plan((0.0, 4.0, 1, 1), (6.0, 4.0, 1, 1), startup_s=0.0))
    story.wait(4.0, 1).trained(0, 4.0).turn(None, Finish())
    report = story.report(10.0, Budget(8.0))
    assert report.rows[-1].done is None
    assert report.differences == (
        "Stage 2 did not begin: 6 s was its planned begin.",
        "4 worker-seconds of 8 were not used: the search ended at 4 s.",
    )


def test_a_bill_above_the_budget_and_a_late_end_are_told() -> None:
    story = Story().begin(1).wait(12.0, 1).trained(0, 12.0).turn(None, Finish()).ended(13.0, 1)
    assert story.report(10.0, Budget(10.0)).differences == (
        "The search ended 2 s after the deadline of 10 s.",
        "The release of the workers took 1 s and 1 worker-second.",
        "The bill is 3 worker-seconds above the budget of 10.",
    )


def test_another_session_is_told_with_what_its_start_has_cost() -> None:
    story = Story().begin(1).wait(5.0, 1).trained(0, 5.0)
    story.record.add(SessionBegun(BEGAN_AT + 100.0, 5.0))
    story.wait(8.0, 2)
    work = (Unit("train", 0, 2, 0), "w", 0, BEGAN_AT + 102.0, BEGAN_AT + 103.0, False)
    story.record.add(UnitRecord(*work, seconds=8.0, worker_seconds=story.cost))
    story.turn(None, Finish())
    assert story.report().differences == (
        "Another session went on at 5 s; its first unit began at 7 s, after 4 worker-seconds.",
    )


def test_time_and_cost_that_are_not_read_at_once_make_no_workers() -> None:
    story = Story().begin(1)
    for number in range(1, 400):
        story.wait(number / 20, 4)
        story.cost += 0.004 * (-1) ** number  # a millisecond of four workers
        story.turn(WorkersChanged(4))
    report = story.trained(0, story.seconds).report()
    assert [row.name for row in report.rows] == [f"part {n}" for n in range(1, 5)]
    assert all(n == pytest.approx(4, abs=0.1) for _, _, n in report.billed)


def test_a_session_that_goes_on_before_the_release_of_the_last_one_takes_no_time_back() -> None:
    story = Story().begin(1).wait(5.0, 1).trained(0, 5.0).ended(6.0, 1)
    story.record.add(SessionBegun(BEGAN_AT + 100.0, 5.0))
    story.wait(9.0, 1).turn(None, Finish())
    report = story.report()
    assert [one.mark for one in story.record.course if one.mark] == ["session", "end", "session"]
    assert (report.seconds, report.worker_seconds) == (9.0, 9.0)
    assert report.rows[-1].name != "release"


# ---- laws, for any run

tenths = st.integers(0, 500).map(lambda n: n / 10)  # of a second
spans = st.lists(
    st.tuples(
        tenths,  # how long it lasts
        st.integers(0, 5),  # workers that are billed
        st.integers(1, 5),  # workers that are there after it
        st.none() | st.integers(1, 5),  # workers that are wanted from then on
        st.none() | st.tuples(st.integers(0, 3), tenths),  # a trial that trained
        st.booleans(),  # whether a stage begins
        st.booleans(),  # whether another session begins
    ),
    max_size=12,
)
stages = st.lists(
    st.tuples(tenths.filter(bool), st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4
)


def any_plan(begin: float, drawn: list[tuple[float, int, int]]) -> Plan:
    made = []
    for lasts, n_workers, n_trials in drawn:
        made.append((begin, lasts, n_workers, n_trials))
        begin += lasts
    return plan(*made, reason="drawn")


@settings(deadline=None)
@given(spans, st.lists(stages, max_size=2), tenths, st.none() | tenths)
def test_what_is_done_adds_up_to_the_time_and_the_bill(
    drawn: list[Any], plans: list[Any], first: float, release: float | None
) -> None:
    story = Story().wait(first, 1)
    story.begin(4, *(any_plan(first, made) for made in plans[:1]))
    for number, (lasts, billed, there, wanted, trained, stage, session) in enumerate(drawn):
        story.wait(story.seconds + lasts, billed)
        story.turn(WorkersChanged(there), *([] if wanted is None else [Scale(wanted)]))
        if trained is not None:
            story.trained(*trained)
        if stage:
            story.turn(None, Train(0, 1), Wake(story.seconds + 9))
        if session:
            story.record.add(SessionBegun(BEGAN_AT + story.seconds, story.seconds))
        if number == 2 and len(plans) > 1:
            story.turn(None, any_plan(story.seconds, plans[1]))
    if release is not None:
        story.ended(story.seconds + release, 2)
    report = story.report(60.0, Budget(120.0, Price(1.0, "EUR")))
    done = [row.done for row in report.rows if row.done is not None]
    assert report.worker_seconds == pytest.approx(story.cost)
    assert report.seconds == pytest.approx(story.seconds)
    assert all(one.lasts_s >= 0 and one.worker_seconds >= -1e-9 for one in done)
    for before, after in pairwise(done):
        assert after.begins_s == pytest.approx(before.ends_s)
    assert all(one.n_workers <= 5 + 1e-6 for one in done if one.lasts_s > 1e-3)
    assert repr(report).startswith("<Run told")
    assert report._repr_html_().count("<li>") == len(report.differences)


@settings(deadline=None)
@given(st.lists(st.tuples(tenths, stages), min_size=1, max_size=3))
def test_each_time_has_the_stage_that_was_planned_last(drawn: list[Any]) -> None:
    made = sorted(drawn, key=lambda pair: pair[0])
    plans = [(at, any_plan(at, stages)) for at, stages in made]
    kept = planned_stages(plans)
    for one, other in pairwise(kept):
        assert one.begins_s + one.seconds <= other.begins_s + 1e-6
    last = list(plans[-1][1].stages)
    assert kept[len(kept) - len(last) :] == last
    for at, plan_ in plans:
        assert any(s.begins_s <= at + 1e-6 and at <= s.begins_s + s.seconds for s in kept), plan_


# ---- a search in virtual time


def test_a_search_without_stages_shows_what_it_has_done() -> None:
    run = simulate(
        ASHA(max_epochs=9, n_trials=12),
        PowerLaw(epoch_s=2.0),
        SimulatedCluster(n_workers=4),
        space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 0.1)},
        budget="5 worker-minutes",
    )
    report = run.plan
    assert not report.planned
    assert [row.name for row in report.rows] == [f"part {n}" for n in range(1, 5)]
    assert {row.planned for row in report.rows} == {None}
    assert report.worker_seconds == pytest.approx(run.cost)
    assert report.n_trials == 12
    assert "planned" not in repr(report)
    assert f"of 300 were not used: the search ended at {run.seconds:.3g} s." in repr(report)


@pytest.mark.parametrize("n", [0, 1])
def test_a_run_that_has_done_nothing_is_shown(n: int) -> None:
    record = Record("new")
    if n:
        record.add(SessionBegun(BEGAN_AT, 0.0))
    report = PlanReport.of(record, 60.0, Budget(120.0))
    assert report.seconds == report.worker_seconds == 0
    assert "new" in repr(report)
    assert "new" in report._repr_html_()


@pytest.mark.parametrize("n_came", [0, 1, 3])
def test_workers_that_come_when_fewer_are_wanted_are_not_those_that_were_asked_for(
    n_came: int,
) -> None:
    story = Story()
    story.begin(8, Scale(4), plan((3.0, 40.0, 4, 8)), n_workers=0)
    if n_came:
        story.wait(2.0, n_came).turn(WorkersChanged(n_came))
    story.wait(5.0, n_came).turn(None, Scale(2))
    story.wait(6.0, 4).turn(WorkersChanged(4))
    story.wait(9.0, 4).turn(None, Finish())
    came = f"only {n_came}" if n_came else "none"
    told = f"of the 4 workers that were asked for at 0 s {came} came while so many were wanted"
    assert told in repr(story.ended(10.0, 4).report(50.0)).lower()


@pytest.mark.parametrize("late_s", [2.0, 9.0])
def test_workers_that_were_asked_for_later_are_timed_from_then(late_s: float) -> None:
    story = Story()
    story.begin(8, Scale(2), plan((3.0, 60.0, 2, 8)), n_workers=2)
    story.wait(10.0, 2).turn(None, Scale(6))
    story.wait(10.0 + late_s, 2).turn(WorkersChanged(6))
    story.wait(40.0, 6).turn(None, Finish())
    told = repr(story.ended(41.0, 6).report(70.0))
    n_told = told.count("4 workers that were asked for at 10 s came after")
    assert n_told == 1
    assert f"at 10 s came after {late_s:g} s, 3 s were planned" in told


@pytest.mark.parametrize("later_s", [-1.0, 0.5])
def test_a_stage_was_planned_again_if_the_next_plan_begins_before_its_end(later_s: float) -> None:
    story = Story()
    story.begin(8, Scale(4), plan((3.0, 10.0, 4, 9)), n_workers=4)
    story.wait(5.0, 4)
    for trial in range(8):
        story.trained(trial, 1.0)
    story.wait(12.0, 4).turn(None, plan((13.0 + later_s, 20.0, 4, 8)), Train(0, 1))
    story.wait(30.0, 4).trained(0, 9.0).turn(None, Finish())
    told = repr(story.ended(31.0, 4).report(40.0))
    assert "Stage 1 trained 8 trials, not 9" in told
    assert ("planned again before its end" in told) is (later_s < 0)


@pytest.mark.parametrize(
    ("marks", "begins"),
    [
        ((), [10.0, 16.0]),  # as planned
        ((6.0,), [6.0, 16.0]),  # nearest to its plan, of those from the middle of the stage before
        ((4.0,), [10.0, 16.0]),
        ((6.0, 11.0), [11.0, 16.0]),
        ((12.9,), [12.9, 16.0]),
        ((13.0,), [10.0, 13.0]),  # from the middle of the stage on the next one begins
        ((11.0, 15.0), [11.0, 15.0]),
        ((11.0, 19.0), [11.0, 19.0]),
        ((12.5, 20.5), [12.5, 20.5]),
        ((12.5, 21.0), [12.5, 16.0]),
    ],
)
def test_a_stage_has_begun_with_the_decision_that_is_nearest_to_its_plan(
    marks: tuple[float, ...], begins: list[float]
) -> None:
    stages = plan((0.0, 10.0, 1, 3), (10.0, 6.0, 1, 2), (16.0, 10.0, 1, 1), startup_s=0.0)
    story = Story().begin(3, stages)
    for trial, at in enumerate(marks, 1):
        story.wait(at, 1).trained(0, 1.0).turn(None, Stop(trial, "stage"), Train(0, 1), Wake(26.0))
    story.wait(26.0, 1).trained(0, 26.0).turn(None, Finish())
    rows = [row for row in story.report().rows if row.name in ("stage 2", "stage 3")]
    assert [row.done.begins_s for row in rows if row.done] == begins


def test_no_stage_begins_before_the_one_before_it() -> None:
    """What was decided at 7.5 s, before the first unit began at 8 s, begins no stage."""
    stages = plan((0.0, 10.0, 1, 3), (10.0, 8.0, 1, 2), startup_s=0.0)
    story = Story().begin(3, stages)
    story.wait(7.5, 1).turn(None, Stop(1, "stage"), Train(0, 1), Wake(28.0))
    story.wait(9.0, 1).trained(0, 1.0)
    story.wait(12.6, 1).turn(None, Stop(2, "stage"), Train(0, 1), Wake(28.0))
    story.wait(18.0, 1).trained(0, 5.0).turn(None, Finish())
    assert [row.done.begins_s for row in story.report().rows if row.done] == [0.0, 8.0, 12.6]


@pytest.mark.parametrize(
    ("billed", "back_s", "told"),
    [
        (1.5, 8.0, "billed on; another one was there at 8 s"),  # half a worker is no place
        (1.4, 8.0, "billed until 6 s; another one was there at 8 s"),
        (1.0, 6.0, "billed on; another one was there at 6 s"),  # it was taken at once
    ],
)
def test_the_place_of_a_lost_worker_is_free_when_a_worker_less_is_billed(
    billed: float, back_s: float, told: str
) -> None:
    story = Story().begin(2, Scale(2), plan((0.0, 10.0, 2, 2), startup_s=0.0), n_workers=2)
    story.wait(4.0, 2).turn(WorkersChanged(1)).wait(6.0, 2)
    if back_s > 6.0:
        story.turn(None).wait(back_s, billed)
    story.turn(WorkersChanged(2)).wait(10.0, billed)
    story.trained(0, 10.0).trained(1, 10.0).turn(None, Finish())
    assert f"one was lost at 4 s and its place was {told}" in story.report().differences[0]


def test_workers_that_cost_nothing_cost_nothing_until_they_are_released() -> None:
    story = Story().begin(1, plan((0.0, 4.0, 1, 1), startup_s=0.0)).wait(4.0, 1).trained(0, 4.0)
    story.turn(None, Finish(), money=0.0).ended(6.0, 1, money=0.0)
    assert [row.done.money for row in story.report(4.0).rows if row.done] == [0.0, 0.0]
