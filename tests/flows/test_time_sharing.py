"""Turns go by the rule of each scheduler; a worker has one at a time, and none waits too long."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    Decision,
    Direction,
    Finish,
    Flow,
    Losses,
    Pause,
    Paused,
    Reported,
    Stop,
    Train,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flows import Hermes, RoundRobin
from dagsel.flows.baselines import FIFO, SLAQ
from dagsel.flows.hermes import convergence, loss_of
from dagsel.flows.time_sharing import TimeSharing
from dagsel.testing import FlowSuite
from dagsel.testing.world import Step, Tape, World, replay


class TestFifo(FlowSuite):
    def make_flow(self) -> Flow:
        return FIFO(max_epochs=2, n_trials=6)


class TestRoundRobin(FlowSuite):
    def make_flow(self) -> Flow:
        return RoundRobin(max_epochs=2, n_trials=6, max_trials_per_worker=2)


class TestSlaq(FlowSuite):
    direction: Direction = "maximize"

    def make_flow(self) -> Flow:
        return SLAQ(max_epochs=2, n_trials=6, aging=2, migrate=False)


class TestHermes(FlowSuite):
    def make_flow(self) -> Flow:
        return Hermes(max_epochs=3, n_trials=6, max_trials_per_worker=3)


class TestHermesWithAllOptions(FlowSuite):
    n_workers = 1

    def make_flow(self) -> Flow:
        return Hermes(2, 5, quantum=5.0, milestones=(0.1,), aging=1, normalize=True)


def range_of(losses: list[float]) -> Losses:
    return Losses(len(losses), min(losses), max(losses))


def test_convergence_of_the_paper() -> None:
    # Worked by hand: (2.3 - 1.8) / 4, then ((2.3 + 1.8) / 2 - (1.7 + 1.3) / 2) / 4, and so on.
    quanta = [[2.3, 2.1, 1.9, 1.8], [1.7, 1.3, 1.6, 1.5], [1.4, 1.35], [1.6, 1.5]]
    before, found = None, []
    for losses in map(range_of, quanta):
        found.append(convergence(losses, before))
        before = loss_of(losses)
    assert found == pytest.approx([0.125, 0.1375, 0.0625, -0.0875])


def test_a_loss_that_is_no_number_converges_least() -> None:
    for bad in (Losses(3), Losses(3, 1.0, math.inf), Losses()):
        assert loss_of(bad) == math.inf
        assert convergence(bad, 1.0) == convergence(bad) == -math.inf
    assert convergence(Losses(2, 1.0, 3.0), before=math.inf) == 1.0


def begun(flow: TimeSharing, n_workers: int = 1) -> list[Decision]:
    (ask,) = flow.start(Context(n_workers))
    assert isinstance(ask, Ask)
    return flow.handle(Asked(tuple(range(ask.n))))


def turn(flow: Flow, trial: int, low: float, high: float, n: int = 10) -> Decision:
    """End a trial's turn; give the next one."""
    (decision,) = flow.handle(Paused(trial, 0.5, 1.0, 10.0, Losses(n, low, high)))
    return decision


def again(trial: int, seconds: float = 10.0) -> Train:
    return Train(trial, 0, seconds=seconds)


def test_the_trial_that_converges_fastest_runs_next() -> None:
    flow = Hermes(max_epochs=4, n_trials=3)
    assert begun(flow) == [Train(0, 4, seconds=10.0)]
    assert turn(flow, 0, 1.9, 2.1) == Train(1, 4, seconds=10.0)  # new ones first; C = 0.02
    assert turn(flow, 1, 1.8, 2.2) == Train(2, 4, seconds=10.0)  # C = 0.04
    assert turn(flow, 2, 1.5, 1.8) == again(1)  # C = 0.03
    assert turn(flow, 1, 1.85, 1.95) == again(2)  # (2.0 - 1.9) / 10 = 0.01
    assert turn(flow, 2, 1.4, 1.6) == again(0)  # (1.65 - 1.5) / 10 = 0.015


def test_losses_may_be_divided_by_the_first_one() -> None:
    def runs_next(*, normalize: bool) -> Decision:
        flow = Hermes(max_epochs=4, n_trials=2, normalize=normalize)
        begun(flow)
        turn(flow, 0, 90.0, 100.0)
        return turn(flow, 1, 1.0, 2.0)

    assert (runs_next(normalize=False), runs_next(normalize=True)) == (again(0), again(1))


def test_a_milestone_lengthens_the_quantum_for_good() -> None:
    flow = Hermes(max_epochs=4, n_trials=1, quantum="4 s", milestones=(0.25, 0.5), growth=3.0)
    begun(flow)
    losses = [2.0, 1.75, 1.5, 0.5, 3.0]
    quanta = [turn(flow, 0, loss, loss) for loss in losses]
    assert quanta == [again(0, seconds) for seconds in (4.0, 4.0, 12.0, 36.0, 36.0)]


def test_a_first_turn_may_be_shorter() -> None:
    flow = Hermes(max_epochs=4, n_trials=2, first_quantum="2.5 s")
    assert begun(flow) == [Train(0, 4, seconds=2.5)]
    assert turn(flow, 0, 1.0, 2.0) == Train(1, 4, seconds=2.5)
    assert turn(flow, 1, 1.9, 2.0) == again(0, 10.0)
    assert turn(flow, 0, 0.7, 0.7) == again(0, 20.0)
    with pytest.raises(SearchError, match="first_quantum"):
        Hermes(max_epochs=4, n_trials=2, first_quantum="soon")


def test_slaq_runs_the_largest_loss() -> None:
    flow = SLAQ(max_epochs=4, n_trials=3)
    begun(flow)
    assert turn(flow, 0, 1.0, 2.0) == Train(1, 4, seconds=10.0)
    assert turn(flow, 1, math.nan, math.nan) == Train(2, 4, seconds=10.0)
    assert turn(flow, 2, 1.1, 1.7) == again(0)
    assert turn(flow, 0, 0.5, 0.7) == again(2)
    assert turn(flow, 2, 0.5, 0.6) == again(0)  # the one without a number would be last


def test_round_robin_goes_round() -> None:
    flow = RoundRobin(max_epochs=4, n_trials=4, max_trials_per_worker=3)
    begun(flow)
    turns = [turn(flow, trial, 1.0, 2.0) for trial in (0, 1, 2, 0)]
    assert turns == [Train(1, 4, seconds=10.0), Train(2, 4, seconds=10.0), again(0), again(1)]
    assert flow.handle(TrialFailed(1, "it broke")) == [Ask(1), again(2)]
    assert flow.handle(Asked((9,))) == []
    assert turn(flow, 2, 1.0, 2.0) == again(0)
    assert turn(flow, 0, 1.0, 2.0) == Train(9, 4, seconds=10.0)


def test_first_in_first_out() -> None:
    flow = FIFO(max_epochs=2, n_trials=3)
    assert begun(flow, n_workers=2) == [Train(0, 2), Train(1, 2)]
    assert flow.handle(Reported(1, 1, 0.5, {}, 1.0)) == []
    stop = Stop(1, "trained to the end", "complete")
    assert flow.handle(Reported(1, 2, 0.5, {}, 2.0)) == [stop, Ask(1)]
    assert flow.handle(Asked((2,))) == [Train(2, 2)]


def test_trials_move_to_a_worker_that_would_idle() -> None:
    for migrate in (True, False):
        flow = RoundRobin(4, 8, migrate=migrate)
        begun(flow, n_workers=2)  # the even ones on one worker, the odd ones on the other
        answers = [flow.handle(TrialFailed(trial, "it broke")) for trial in (0, 2, 4, 6)]
        moved = [Train(3, 4, seconds=10.0)] if migrate else []
        assert answers == [[Train(trial, 4, seconds=10.0)] for trial in (2, 4, 6)] + [moved]


def test_a_new_worker_takes_its_share() -> None:
    flow = RoundRobin(max_epochs=4, n_trials=4)
    begun(flow)
    assert flow.handle(WorkersChanged(2)) == [Train(1, 4, seconds=10.0)]
    assert [len(worker.trials) for worker in flow.state.workers] == [2, 2]


def test_what_lost_its_worker_first_is_the_first_to_go_on() -> None:
    flow = FIFO(max_epochs=2, n_trials=3)
    begun(flow, n_workers=3)
    assert [flow.handle(WorkersChanged(n)) for n in (2, 1)] == [[Pause(2)], [Pause(1)]]
    assert [flow.handle(Paused(trial, 0.5, 1.0)) for trial in (1, 2)] == [[], []]
    assert flow.handle(WorkersChanged(2)) == [Train(2, 0)]


def test_a_worker_that_goes_leaves_its_trials_to_the_others() -> None:
    flow = RoundRobin(max_epochs=4, n_trials=5, max_trials_per_worker=2)
    begun(flow, n_workers=2)
    assert flow.handle(WorkersChanged(1)) == [Pause(1)]
    assert flow.handle(Paused(1, 0.5, 1.0)) == []
    assert [turn(flow, trial, 1.0, 2.0) for trial in (0, 2)] == [
        Train(2, 4, seconds=10.0),
        again(0),
    ]
    # Trial 1, which had begun, comes before trial 3, and both before what was not yet drawn.
    assert flow.handle(WorkersChanged(2)) == [again(1)]
    assert turn(flow, 1, 1.0, 2.0) == Train(3, 4, seconds=10.0)
    assert flow.handle(WorkersChanged(3)) == [Ask(1)]


@st.composite
def schedulers(draw: st.DrawFn) -> TimeSharing:
    size: Any = {"max_epochs": draw(st.integers(1, 3)), "n_trials": draw(st.integers(1, 9))}
    share: dict[str, Any] = {
        "max_trials_per_worker": draw(st.integers(1, 3)),
        "migrate": draw(st.booleans()),
    }
    aging: dict[str, Any] = {"aging": draw(st.none() | st.integers(1, 3))}
    kinds: list[TimeSharing] = [
        FIFO(**size),
        RoundRobin(**size, **share),
        SLAQ(**size, **share, **aging),
        Hermes(**size, **share, **aging, milestones=(0.01, 0.1)),
    ]
    return draw(st.sampled_from(kinds))


@example(
    # Two trials that are about to leave a worker that is gone would fill another one.
    flow=RoundRobin(max_epochs=1, n_trials=8, max_trials_per_worker=2),
    choices=b"\x00" * 39 + b"\x1f\x00\x18\x01",
    n=3,
)
@settings(deadline=None)
@given(flow=schedulers(), choices=st.binary(min_size=30, max_size=120), n=st.integers(1, 3))
def test_turns_and_places_at_every_moment(flow: TimeSharing, choices: bytes, n: int) -> None:
    context = Context(n)
    world = World(flow, context, Tape(choices), lambda trial: {})
    world.run()
    fresh = type(flow)(**{k: v for k, v in vars(flow).items() if k not in ("state", "_")})
    most = 1 if isinstance(flow, FIFO) else int(vars(flow)["max_trials_per_worker"])
    running, leaving, quanta = set[int](), set[int](), dict[int, float]()
    for step, _ in replay(fresh, context, world.steps):
        over(step, running, leaving, flow.max_epochs)
        if isinstance(step.event, WorkersChanged):
            n = max(1, step.event.n_workers)
        for decision in step.decisions:
            match decision:
                case Pause(trial):
                    running.discard(trial)
                    leaving.add(trial)
                case Train(trial, seconds=seconds):
                    assert trial not in running | leaving
                    running.add(trial)
                    assert (seconds or 0.0) >= quanta.get(trial, 0.0)
                    quanta[trial] = seconds or 0.0
        if Finish() in step.decisions:
            return
        state = fresh.state
        assert len(state.workers) == n
        assert all(len(worker.trials) <= most for worker in state.workers)
        placed = [trial for worker in state.workers for trial in worker.trials]
        assert sorted(placed + state.waiting) == sorted(state.trials)
        assert sorted(w.turn for w in state.workers if w.turn is not None) == sorted(running)
        asked = any(isinstance(decision, Ask) for decision in step.decisions)
        if vars(flow).get("migrate", True) and not state.n_awaited and not asked:
            ready = len(set(placed) - leaving)
            assert len(running) == min(n, ready), "a worker idles while a trial waits"


def over(step: Step, running: set[int], leaving: set[int], max_epochs: int) -> None:
    """Forget the trials whose turn is over."""
    match step.event:
        case Paused(trial) | TrialFailed(trial):
            running.discard(trial)
            leaving.discard(trial)
        case Reported(trial, epoch) if epoch == max_epochs:
            running.discard(trial)
            leaving.discard(trial)


@settings(deadline=None)
@given(
    kind=st.sampled_from([Hermes, SLAQ]),
    aging=st.integers(1, 5),
    share=st.integers(2, 4),
    losses=st.lists(st.integers(0, 20), min_size=30, max_size=60),
)
def test_with_aging_none_waits_longer_than_the_bound(
    kind: type[Hermes | SLAQ], aging: int, share: int, losses: list[int]
) -> None:
    flow = kind(99, share, max_trials_per_worker=share, aging=aging)
    waited = longest_wait(flow, losses)
    assert waited <= aging + share - 2


def longest_wait(flow: Hermes | SLAQ, losses: list[int]) -> int:
    """Play so many turns on a worker; say how many a trial had to wait for, at most."""
    (decision,) = begun(flow)
    waits, longest = dict.fromkeys(range(flow.n_trials), 0), 0
    for loss in losses:
        assert isinstance(decision, Train)
        longest = max(longest, waits[decision.trial])
        waits = {trial: n + 1 for trial, n in waits.items()} | {decision.trial: 0}
        decision = turn(flow, decision.trial, float(loss), float(loss))
    return max(longest, *waits.values())


def test_without_aging_a_slow_trial_starves() -> None:
    assert longest_wait(Hermes(99, 2, max_trials_per_worker=2), [5, *range(50, 9, -1)]) > 30
    assert (
        longest_wait(Hermes(99, 2, max_trials_per_worker=2, aging=4), [5, *range(50, 9, -1)]) == 4
    )


@pytest.mark.parametrize(
    ("kind", "bad", "text"),
    [
        (Hermes, {"quantum": 0}, "quantum must be above 0"),
        (RoundRobin, {"quantum": "soon"}, "quantum='soon' is no time"),
        (SLAQ, {"max_trials_per_worker": 0}, "max_trials_per_worker must be a whole number of 1"),
        (Hermes, {"milestones": (0.5, 0.2)}, r"ascending order, .* got \(0.5, 0.2\)"),
        (Hermes, {"milestones": (0.0, 0.5)}, "above 0"),
        (Hermes, {"milestones": (0.5, 50.0)}, "at most 1"),
        (Hermes, {"milestones": (math.nan,)}, "milestones must be"),
        (Hermes, {"growth": 0.5}, "growth must be 1 or more"),
        (Hermes, {"aging": 0}, "aging must be a whole number of 1"),
        (FIFO, {"n_trials": 0}, "n_trials must be a whole number of 1"),
    ],
)
def test_bad_input_is_refused(kind: Any, bad: dict[str, Any], text: str) -> None:
    with pytest.raises(SearchError, match=text):
        kind(**{"max_epochs": 2, "n_trials": 2} | bad)


def test_a_workload_that_reports_no_loss_is_named() -> None:
    flow = Hermes(max_epochs=2, n_trials=2)
    begun(flow)
    with pytest.raises(SearchError, match="Hermes shares time by training losses.* use RoundRobin"):
        flow.handle(Paused(0, 0.5, 10.0, trained_s=10.0))
    flow = Hermes(max_epochs=2, n_trials=2)
    begun(flow)
    assert turn(flow, 0, math.nan, math.nan) == Train(1, 2, seconds=10.0)
    with pytest.raises(SearchError, match="reports none for trial 0"):
        flow.handle(Reported(0, 1, 0.5, {}, 12.0))


def test_a_trial_that_diverges_beside_others_is_served_last() -> None:
    flow = Hermes(max_epochs=2, n_trials=2)
    begun(flow)
    turn(flow, 0, math.nan, math.nan)
    assert turn(flow, 1, 1.0, 1.0) == again(1)
    assert turn(flow, 1, 9.0, 9.0) == again(1)
    assert flow.handle(Paused(1, 0.5, 1.0, trained_s=10.0)) == [again(0)]  # nor has this one a loss
    assert flow.handle(Reported(0, 1, 0.1, {}, 12.0)) == []


def test_before_its_first_batch_a_trial_has_no_losses() -> None:
    flow = Hermes(max_epochs=2, n_trials=1)
    begun(flow)
    assert flow.handle(Paused(0, 0.0, 1.0)) == [again(0)]


def test_a_quantum_shorter_than_a_batch_is_warned_of_once() -> None:
    flow = RoundRobin(max_epochs=2, n_trials=1, quantum=5)
    begun(flow)

    def turns(*turns: tuple[float, int]) -> None:
        for took_s, n in turns:
            flow.handle(Paused(0, 0.1, 1.0, took_s, Losses(n, 1.0, 1.0)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turns((9.0, 1), (6.0, 3), (90.0, 1), (4.0, 1), (9.0, 1))  # each may be a busy machine's
    with pytest.warns(UserWarning, match=r"a batch of trial 0 took 6 s.*raise quantum"):
        turns((6.0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turns((9.0, 1), (9.0, 1))


@pytest.mark.parametrize(("low", "high"), [(90.0, 110.0), (1.0, 2.0), (-1.0, 1.0), (-3.0, -1.0)])
def test_the_urgency_is_the_convergence_or_its_share_of_the_first_loss(
    low: float, high: float
) -> None:
    first = abs((low + high) / 2) or 1.0  # a loss of 0 divides nothing
    for normalize in (False, True):
        flow = Hermes(max_epochs=4, n_trials=1, normalize=normalize)
        begun(flow)
        assert flow.urgency(0) == math.inf
        turn(flow, 0, low, high)
        expected = convergence(Losses(10, low, high)) / (first if normalize else 1.0)
        assert flow.urgency(0) == pytest.approx(expected)
