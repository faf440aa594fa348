"""Dividing workers: never more than there are, none idle while a job waits, first come first.

And on the node on paper: Marble with a linear λ is LSF, and with any other is no slower but for the
3% of speed that a best number may give up and for its switches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import Ask, Asked, Context, Decision, Event, Flow, Reported, Train
from dagsel.flows import JobQueue, Marble
from dagsel.flows.allocation import Job, Work, WorkBook, keep
from dagsel.flows.baselines import LSF, MarginalGain
from dagsel.flows.baselines.lsf import lsf
from dagsel.flows.baselines.marginal_gain import marginal_gain
from dagsel.flows.baselines.optimus import over_nodes, split
from dagsel.flows.marble import marble
from dagsel.planning.scaling import Scaling, ScalingModel, UniversalScaling
from tests.driver.scripted import Scripted
from tests.flows.node import Node, Piece

laws = st.builds(UniversalScaling, st.floats(0.0, 0.4), st.floats(0.0, 0.1))


@st.composite
def jobs_of(draw: st.DrawFn, n_workers: int) -> list[Job]:
    """Draw jobs that wait, that run, that may not change, and more workers than there are now."""
    jobs, free = [], n_workers + draw(st.integers(0, 3))
    for trial in range(draw(st.integers(1, 8))):
        gang = draw(st.integers(0, free))
        free -= gang
        kind = draw(st.sampled_from(["free", "free", "timed", "stopping"])) if gang else "free"
        least = gang if kind == "stopping" else min(gang, 1)
        most = n_workers if kind == "free" else gang
        left_s = draw(st.none() | st.floats(0.0, 100.0))
        jobs.append(Job(trial, gang, least, most, draw(laws), left_s))
    return jobs


# What the docstrings say, once more and in another way: the product is not its own judge.


def speed(job: Job, n: int) -> float:
    law = job.scaling
    assert isinstance(law, UniversalScaling)
    return 1 / ((1 + law.contention * (n - 1) + law.coherence * n * (n - 1)) / n)


def best_number(job: Job, n_workers: int) -> int:
    speeds = {n: speed(job, n) for n in range(1, n_workers + 1)}
    return min(n for n in speeds if speeds[n] >= 0.97 * max(speeds.values()))


def saved_s(job: Job, gang: int, more: int) -> float:
    return (
        math.inf
        if job.left_s is None
        else job.left_s * (1 / speed(job, gang) - 1 / speed(job, more))
    )


def kept_workers(jobs: list[Job], n_workers: int) -> dict[int, int]:
    """One worker after the other is taken from the last job that may have fewer."""
    kept = {job.trial: job.gang for job in jobs}
    while sum(kept.values()) > n_workers:
        givers = [job.trial for job in jobs if kept[job.trial] > job.least]
        if not givers:
            break
        kept[givers[-1]] -= 1
    return kept


@given(st.data(), st.integers(1, 8), st.floats(0.0, 30.0))
def test_marble_divides_well(data: st.DataObject, n_workers: int, switch_s: float) -> None:
    jobs = data.draw(jobs_of(n_workers))
    gangs = marble(jobs, n_workers, switch_s)
    check_division(jobs, gangs, n_workers)
    free = n_workers - sum(gangs.values())
    began = [gangs[job.trial] > 0 for job in jobs if not job.gang]
    assert began == sorted(began, reverse=True), "a job overtakes another one"
    assert all(began) or free <= 0, "a worker idles while a job waits"
    kept = kept_workers(jobs, n_workers)
    for job in jobs:
        best, gang = best_number(job, n_workers), gangs[job.trial]
        assert gang >= kept[job.trial], "a job loses workers for another one's sake"
        assert gang <= max(best, job.gang), "a job gets more than is good for it"
        if kept[job.trial] < gang and job.gang:
            assert saved_s(job, kept[job.trial], gang) > switch_s - 1e-9, "it does not pay"
        elif free > 0 and gang < min(best, job.most):
            assert saved_s(job, gang, min(best, gang + free)) <= switch_s + 1e-9, "it is missed"


def test_promotions_go_before_new_jobs() -> None:
    curve = Scaling({4: 4.0})
    urgent, secondary = Job(0, 0, 0, 6, curve), Job(1, 1, 1, 6, curve, left_s=60.0)
    assert marble([urgent, secondary], 6) == {0: 2, 1: 4}


@given(st.data(), st.integers(1, 8))
def test_lsf_gives_the_node_to_one(data: st.DataObject, n_workers: int) -> None:
    jobs = data.draw(jobs_of(n_workers))
    gangs = lsf(jobs, n_workers)
    check_division(jobs, gangs, n_workers)
    began = [job.trial for job in jobs if not job.gang and gangs[job.trial]]
    if any(job.gang for job in jobs):
        assert not began
    else:
        assert began == [0]
        assert gangs[0] == n_workers


@given(st.data(), st.integers(1, 8))
def test_marginal_gain_leaves_no_worker_that_helps(data: st.DataObject, n_workers: int) -> None:
    jobs = data.draw(jobs_of(n_workers))
    gangs = marginal_gain(jobs, n_workers)
    check_division(jobs, gangs, n_workers)
    if sum(gangs.values()) < n_workers:
        for job in jobs:
            gang = gangs[job.trial]
            assert gang, "a worker idles while a job waits"
            if job.left_s and gang < job.most:
                assert saved_s(job, gang, gang + 1) <= 1e-9


concave = st.builds(UniversalScaling, st.floats(0.0, 0.4), st.just(0.0))


@given(st.lists(st.tuples(concave, st.floats(1.0, 100.0)), min_size=1, max_size=3))
def test_marginal_gain_finds_the_least_total_time(given_: list[tuple[ScalingModel, float]]) -> None:
    jobs = [Job(trial, 0, 0, 6, scaling, left_s) for trial, (scaling, left_s) in enumerate(given_)]

    def total_s(gangs: tuple[int, ...]) -> float:
        return sum((job.left_s or 0) / speed(job, n) for job, n in zip(jobs, gangs, strict=True))

    every = (gangs for gangs in product(range(1, 7), repeat=len(jobs)) if sum(gangs) <= 6)
    assert total_s(tuple(marginal_gain(jobs, 6).values())) == pytest.approx(
        min(map(total_s, every))
    )


@given(st.data(), st.integers(2, 9), st.floats(0.0, 2.0))
def test_optimus_gives_a_job_two_nodes_or_none(
    data: st.DataObject, n_nodes: int, traffic: float
) -> None:
    """A worker without a parameter server trains nothing; jobs begin in their order."""
    speeds = over_nodes(n_nodes, traffic=traffic)
    n_jobs = data.draw(st.integers(1, 6))
    gangs = data.draw(st.lists(st.integers(2, 3), max_size=min(n_jobs, n_nodes // 3)))
    jobs = [
        Job(trial, gang, min(gang, 1), n_nodes, speeds, data.draw(st.floats(1.0, 100.0)))
        for trial, gang in enumerate([*gangs, *[0] * (n_jobs - len(gangs))])
    ]
    given_ = list(marginal_gain(jobs, n_nodes, first=2).values())
    assert sum(given_) <= n_nodes
    began = min(n_jobs, n_nodes // 2)
    assert all(gang >= 2 for gang in given_[:began])
    assert not any(given_[began:])
    assert sum(given_) == n_nodes or n_nodes - sum(given_) < 2 or traffic > 0


@given(st.integers(3, 12), st.floats(0.0, 2.0))
def test_each_further_node_is_what_makes_the_job_faster(n_nodes: int, traffic: float) -> None:
    def speed_of(workers: int, servers: int) -> float:
        return workers / (1 + traffic * workers / servers)

    workers, servers = split(n_nodes - 1, traffic=traffic)
    more = [(workers + 1, servers), (workers, servers + 1)]
    assert split(n_nodes, traffic=traffic) in more
    best = max(speed_of(*nodes) for nodes in more)
    assert over_nodes(n_nodes, traffic=traffic).speedup(n_nodes) == pytest.approx(best)
    if not traffic:
        assert split(n_nodes, traffic=traffic) == (n_nodes - 1, 1)


@given(st.dictionaries(st.integers(2, 8), st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])))
def test_a_table_that_is_refused_hides_a_better_number_from_a_greedy_search(
    speeds: dict[int, float],
) -> None:
    """And one that is taken hides none: from one worker on, one more at a time finds the top."""
    table = Scaling(speeds)
    most = max(table.speedups)
    found = 1
    while found < most and table.speedup(found + 1) > table.speedup(found):
        found += 1
    is_hidden = table.speedup(found) < max(table.speedups.values())
    if is_hidden:
        with pytest.raises(SearchError, match="does not rise"):
            MarginalGain(JobQueue(), {"a": table})
    else:
        MarginalGain(JobQueue(), {"a": table})


def check_division(jobs: list[Job], gangs: dict[int, int], n_workers: int) -> None:
    assert list(gangs) == [job.trial for job in jobs]
    assert sum(gangs.values()) <= max(n_workers, sum(job.least for job in jobs))
    for job in jobs:
        assert job.least <= gangs[job.trial] <= max(job.most, job.least)


@given(st.lists(st.lists(st.floats(0.0, 100.0), max_size=4), max_size=20))
@example([[float(n)] for n in range(30)])
def test_a_switch_costs_the_median_of_the_last_twenty(costs: list[list[float]]) -> None:
    book = WorkBook(live={0: Work("resnet", left=len(costs))})
    for epoch, switches in enumerate(costs, 1):
        book.count(Reported(0, epoch, 0.5, {}, seconds=epoch, switches=tuple(switches)))
    last = sorted([cost_s for switches in costs for cost_s in switches][-20:])
    middle = [last[(len(last) - 1) // 2], last[len(last) // 2]] if last else [1.0]
    assert book.switch_s("resnet") == pytest.approx(sum(middle) / len(middle))


@given(st.integers(1, 5), st.floats(0.0, 50.0), st.floats(0.0, 50.0))
def test_what_is_left_shrinks_until_an_epoch_is_late_and_grows_then(
    left: int, early: float, late: float
) -> None:
    def left_s(this_s: float) -> float:
        book = WorkBook(trained={"resnet": (100.0, 2)})
        return book.left_s(Work("resnet", left=left, worked_s=this_s)) or 0.0

    assert left_s(early) == pytest.approx(50.0 * left - early)
    assert left_s(50.0 + late) == pytest.approx(50.0 * (left - 1) + left * late)


# ---- whole queues on the node on paper


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[dict[str, float | str]], dict[str, ScalingModel]]:
    scaling: dict[str, ScalingModel] = {name: draw(laws) for name in "abc"}
    n_jobs = draw(st.integers(1, 9))
    return [
        {
            "architecture": draw(st.sampled_from("abc")),
            "epochs": draw(st.integers(1, 5)),
            "epoch_s": draw(st.floats(1.0, 20.0)),
        }
        for _ in range(n_jobs)
    ], scaling


# The last job takes longer than those before: what it has left is not over when it is late.
@example(
    (
        [{"architecture": "a", "epochs": 1, "epoch_s": s} for s in (1.0, 1.0, 1.0, 1.0, 5.0, 4.0)],
        dict.fromkeys("abc", UniversalScaling(0.0, 3 / 64)),
    ),
    5,
    0.0,
    1,
)
@settings(max_examples=60)
@given(queues(), st.integers(1, 7), st.sampled_from([0.0, 1.0, 20.0]), st.integers(1, 9))
def test_marble_loses_to_lsf_only_what_it_gives_up(
    queue: tuple[list[dict[str, float | str]], dict[str, ScalingModel]],
    n_workers: int,
    switch_s: float,
    n_concurrent: int,
) -> None:
    jobs, scaling = queue
    node = Node(jobs, scaling, n_workers, switch_s)
    seconds = node.run(Marble(JobQueue(), scaling, switch_s=switch_s))
    whole = Node(jobs, scaling, n_workers).run(LSF(JobQueue(n_concurrent=n_concurrent)))
    # While all workers are busy, λ(p)/p that falls makes Marble no slower than the whole node for
    # each job in turn; when some are not, all jobs have their best number, or would not win more
    # than a switch costs.
    n_switches = len(node.pieces) - len(jobs)
    assert seconds <= whole / 0.97 + switch_s * (n_switches + len(jobs)) + 1e-6
    begins = {piece.job: piece.begin_s for piece in reversed(node.pieces)}
    assert all(begins[a] <= begins[b] for a, b in pairwise(sorted(begins)))


@settings(max_examples=30)
@given(queues(), st.integers(1, 7))
def test_marble_is_lsf_where_speed_is_linear(
    queue: tuple[list[dict[str, float | str]], dict[str, ScalingModel]], n_workers: int
) -> None:
    jobs, _ = queue
    linear = dict.fromkeys("abc", Scaling({n_workers: float(n_workers)}))
    marble_s, lsf_s = (
        Node(jobs, linear, n_workers).run(flow)
        for flow in (Marble(JobQueue(), linear), LSF(JobQueue()))
    )
    assert marble_s == pytest.approx(lsf_s)


@settings(max_examples=30)
@given(queues(), st.integers(1, 7), st.floats(1.0, 50.0))
def test_marginal_gain_ends_every_queue(
    queue: tuple[list[dict[str, float | str]], dict[str, ScalingModel]],
    n_workers: int,
    interval_s: float,
) -> None:
    jobs, scaling = queue
    node = Node(jobs, scaling, n_workers)
    node.run(MarginalGain(JobQueue(), scaling, interval_s=interval_s))
    changes = {piece.begin_s for piece in node.pieces}
    ends = {piece.end_s for piece in node.pieces}
    assert all(
        s in ends or abs(s / interval_s - round(s / interval_s)) < 1e-6 for s in changes - {0}
    )


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1), st.integers(1, 30))
def test_where_workers_were_lost_the_jobs_that_are_served_last_give_theirs_up_first(
    sizes: list[tuple[int, int]], n_workers: int
) -> None:
    jobs = [Job(k, gang=least + more, least=least) for k, (least, more) in enumerate(sizes)]
    kept = keep(jobs, n_workers)
    for job, later in pairwise(jobs):
        assert kept[job.trial] == job.gang or kept[later.trial] == later.least
    total = sum(job.gang for job in jobs)
    assert sum(kept.values()) == max(min(total, n_workers), sum(job.least for job in jobs))


INCEPTION = Scaling({2: 1.8, 3: 2.45, 4: 3.0, 6: 3.0})
RESNET = Scaling({2: 1.5, 3: 2.0, 6: 2.0})


def timeline(flow: Flow, jobs: list[dict[str, float | str]], switch_s: float) -> list[Piece]:
    node = Node(jobs, {"inception": INCEPTION, "resnet": RESNET}, 6, switch_s)
    node.run(flow)
    return sorted(node.pieces, key=lambda piece: (piece.begin_s, piece.job))


def test_a_queue_as_computed_by_hand() -> None:
    jobs: list[dict[str, float | str]] = [
        {"architecture": "inception", "epochs": 3, "epoch_s": 30.0},
        {"architecture": "resnet", "epochs": 10, "epoch_s": 15.0},
        {"architecture": "inception", "epochs": 2, "epoch_s": 30.0},
    ]
    scaling = {"inception": INCEPTION, "resnet": RESNET}
    # The ResNet is a secondary of 2. After 30 s it has trained 3 of its 10 epochs and is promoted
    # to 3, which takes 5 s; the next job gets the 3 that are left, and 4 once the ResNet is done.
    *pieces, last = timeline(Marble(JobQueue(), scaling, switch_s=5.0), jobs, 5.0)
    assert pieces == [Piece(0, 0.0, 30.0, 4), Piece(1, 0.0, 30.0, 2), Piece(1, 30.0, 87.5, 3)]
    assert (last.job, last.begin_s, last.gang) == (2, 30.0, 3)
    assert last.end_s == pytest.approx(30.0 + 60.0 / 2.45)
    # The promotion wins 70.0 - 52.5 = 17.5 s.
    pieces = timeline(Marble(JobQueue(), scaling, switch_s=17.6), jobs, 17.6)
    assert [(piece.job, piece.gang) for piece in pieces] == [(0, 4), (1, 2), (2, 4)]
    pieces = timeline(Marble(JobQueue(), scaling, switch_s=17.4), jobs, 17.4)
    assert [(piece.job, piece.gang) for piece in pieces] == [(0, 4), (1, 2), (1, 3), (2, 3)]
    # The whole node for each: 90 / 3, 150 / 2 and 60 / 3.
    assert [piece.end_s for piece in timeline(LSF(JobQueue()), jobs, 5.0)] == [30.0, 105.0, 125.0]


class Divided(MarginalGain):
    """Divides the workers as it is told."""

    divisions: list[dict[int, int]]

    def divide(self, jobs: Sequence[Job], n_workers: int) -> dict[int, int]:
        return self.divisions.pop(0) if len(self.divisions) > 1 else self.divisions[0]


def trains(decisions: Iterable[Decision]) -> list[tuple[int, int]]:
    return [(d.trial, d.gang) for d in decisions if isinstance(d, Train)]


def around(kind: type[Any], answer: Callable[[Event], list[Decision]]) -> Any:
    """A search of trials 0, 1 and 2, in something that divides the workers."""
    names = () if kind is LSF else ({"a": Scaling({2: 1.8, 4: 3.0})},)
    return kind(Scripted([Ask(3)], answer), *names)


CONFIGS = 3 * ({"architecture": "a"},)


@pytest.mark.parametrize("n", [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
@pytest.mark.parametrize("then", [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_workers_are_given_up_before_they_are_given_to_others(
    n: tuple[int, ...], then: tuple[int, ...]
) -> None:
    def answer(event: Event) -> list[Decision]:
        return [Train(trial, 9) for trial in range(3)] if isinstance(event, Asked) else []

    flow = around(Divided, answer)
    flow.divisions = [{}, dict(enumerate(n)), dict(enumerate(then))]
    flow.start(Context(4))
    begun = flow.handle(Asked((0, 1, 2), configs=CONFIGS))
    assert sorted(trains(begun)) == list(enumerate(n))
    told = trains(flow.handle(Reported(0, 1, 0.5, {}, 1.0)))
    assert sorted(told) == [(i, gang) for i, gang in enumerate(then) if gang != n[i]]
    gives = [then[trial] < n[trial] for trial, _ in told]
    assert gives == sorted(gives, reverse=True)


@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_trial_keeps_its_place_while_it_trains_and_else_goes_to_the_end(
    is_at_once: bool,
) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(trial, 1) for trial in range(3)]
            case Reported(trial, 1) if trial == (0 if is_at_once else 1):
                return [Train(0, 1)]
        return []

    flow = around(LSF, answer)
    flow.start(Context(4))
    order = [trial for trial, _ in trains(flow.handle(Asked((0, 1, 2), configs=CONFIGS)))]
    done = dict.fromkeys(range(3), 0)
    while len(order) > sum(done.values()):
        trial = order[-1]
        done[trial] += 1
        event = Reported(trial, done[trial], 0.5, {}, float(len(order)))
        order += [trial for trial, _ in trains(flow.handle(event))]
    assert order == ([0, 0, 1, 2] if is_at_once else [0, 1, 2, 0])
