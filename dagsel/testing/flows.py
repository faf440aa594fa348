"""`FlowSuite`: what every search procedure must keep, as tests to inherit.

The suite plays runs in a small world (`dagsel.testing.world`). Hypothesis looks for the order of
events that breaks a law.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any
from unittest import SkipTest

import numpy as np

from dagsel.arguments import check_flow
from dagsel.flow import (
    DECISIONS,
    Clone,
    Context,
    Decision,
    Direction,
    Flow,
    Goal,
    Paused,
    Reported,
    Stop,
    Train,
    Traits,
    load_state,
    save_state,
)
from dagsel.flows.wrapper import Wrapper
from dagsel.planning.brackets import StagePlan
from dagsel.planning.budget import Budget
from dagsel.planning.capacity import ClusterCapacity
from dagsel.planning.prices import Price
from dagsel.testing.world import Tape, World, replay

_OTHER: dict[Direction, Direction] = {"minimize": "maximize", "maximize": "minimize"}


class FlowSuite:
    """Tests of a `Flow`. Inherit the class under a name that begins with ``Test``.

    Write `make_flow`, and keep the search small: ten trials of ten epochs find more faults than
    hundreds do. The tests need Hypothesis (``pip install hypothesis``). Its profile says how many
    runs each test plays.

    Attributes
    ----------
    direction
        Direction of the runs. One of the laws mirrors it.
    goals
        The metrics of the runs, if the flow is to search for several; then these have directions.
    n_workers
        Workers at the start of a run.
    n_points
        Size of the search space; None for an infinite one. Smaller ones are tried in any case.
    n_concurrent
        The most trials that the flow trains at once; None if it sets no limit.

    Examples
    --------
    >>> from dagsel.flows import RandomSearch
    >>> class TestMine(FlowSuite):
    ...     n_concurrent = 3
    ...
    ...     def make_flow(self):
    ...         return RandomSearch(max_epochs=2, n_trials=5, n_concurrent=3)
    ...
    ...     def configs(self, trial):
    ...         return {"lr": 0.1 * (trial + 1)}
    >>> tests = TestMine()
    >>> tests.make_flow().n_trials, tests.configs(0)
    (5, {'lr': 0.1})
    >>> tests.test_no_more_than_n_concurrent_train_at_once()
    """

    direction: Direction = "minimize"
    goals: tuple[Goal, ...] = ()
    n_workers: int = 2
    n_points: int | None = None
    n_concurrent: int | None = None

    def make_flow(self) -> Flow:
        """Return a new flow, with the same configuration at each call."""
        raise NotImplementedError

    def configs(self, trial: int) -> Mapping[str, Any]:
        """Return the configuration of a trial; override it if your flow reads configurations.

        Parameters
        ----------
        trial
            Number of the trial.
        """
        return {"x": trial % 7 / 7}

    def test_is_a_flow(self) -> None:
        """It has the members of `Flow`, it equals its copies, and it can be pickled."""
        flow = self.make_flow()
        check_flow(flow)
        assert is_dataclass(flow.state), "the state must be a dataclass"
        for twin in (
            self.make_flow(),
            copy.deepcopy(flow),
            pickle.loads(_pickled(flow)),  # noqa: S301
        ):
            assert twin == flow, "flows of the same configuration must be equal"
            assert _text(twin) == _text(flow), "flows of the same configuration begin alike"

    def test_a_fresh_flow_has_not_begun(self) -> None:
        """`fresh` returns an equal flow in its initial state, which shares nothing with the first.

        Each run takes a fresh flow, so no run sees or changes what another one learns.
        """
        begins_with = _text(self.make_flow())

        def law(tape: Tape) -> None:
            world = self._play(tape)
            flow = self.make_flow()
            ran = flow.fresh()
            for step, _ in replay(ran, world.context, world.steps):
                assert _text(flow) == begins_with, f"they share their state after {step.event}"
            assert flow == ran == ran.fresh(), "a fresh flow has another configuration"
            assert _text(ran.fresh()) == begins_with, "a fresh flow has begun already"

        _for_all(law)

    def test_a_wrapper_loses_no_trait(self) -> None:
        """What an inner flow says of itself, a flow around it says too: each field of `Traits`."""
        flow: Any = self.make_flow()
        parts = {f.name: getattr(flow, f.name) for f in fields(flow) if f.init}
        inner = {name: part for name, part in parts.items() if isinstance(part, Flow)}
        if not inner:
            raise SkipTest("the flow is not around another one")
        for name, part in inner.items():
            told = replace(flow, **{name: _Telling(part)}).traits
            if told.reads_configs:  # it may read more of them
                told = replace(told, reads_configs=_TOLD.reads_configs)
            names = [f.name for f in fields(Traits)]
            lost = [name for name in names if getattr(told, name) != getattr(_TOLD, name)]
            assert not lost, f"{type(flow).__name__}.traits loses {', '.join(lost)} of {name}"

    def test_decisions_are_legal_and_the_search_ends(self) -> None:
        """However the cluster orders what happens, the flow goes on, and at last it finishes.

        So does one that is extended when it has finished, if its traits say that it can be.

        It decides nothing about a trial that was stopped or has failed, and nothing after `Finish`;
        it clones only from a trial that has reported to one that has nothing to train; it resumes
        only what has something to train, and pauses or resumes no trial whose `Pause` is not
        answered yet; it finishes when no trial trains. While it has not finished, a trial trains on
        workers that are there, or a `Wake` is set: workers that it asks for may never come.
        """

        def law(tape: Tape) -> None:
            for step in self._play(tape).steps:
                for decision in step.decisions:
                    written = json.loads(json.dumps(DECISIONS.encode(decision)))
                    assert DECISIONS.decode(written) == decision, f"{decision} cannot be recorded"

        _for_all(law)

    def test_no_more_than_n_concurrent_train_at_once(self) -> None:
        """The flow keeps its promise, whatever fails and however workers come and go."""
        most = self.n_concurrent
        if most is None:
            raise SkipTest("the flow sets no limit: n_concurrent is None")

        def law(tape: Tape) -> None:
            world = self._play(tape)
            assert world.most_training <= most, (
                f"{world.most_training} trials train at once, {most} were promised"
            )

        _for_all(law)

    def test_the_same_events_give_the_same_decisions(self) -> None:
        """A run depends on the flow, the context and the events, and on nothing else.

        No global random numbers are drawn, and a run sees nothing of the runs before it.
        """

        def law(tape: Tape) -> None:
            with _random_streams_left_alone():
                world = self._play(tape)
            for flow in (self.make_flow(), pickle.loads(_pickled(self.make_flow()))):  # noqa: S301
                for step, decisions in replay(flow, world.context, world.steps):
                    assert decisions == step.decisions, f"two copies differ after {step.event}"

        _for_all(law)

    def test_a_state_goes_through_json_between_any_two_events(self) -> None:
        """A flow that was never started goes on from another one's state as that one does."""

        def law(tape: Tape) -> None:
            world = self._play(tape)
            flow = self.make_flow()
            flow.start(world.context)
            for step in world.steps[1:]:
                if tape.choose(3) == 0:
                    text = _text(flow)
                    flow = self.make_flow()
                    load_state(flow, json.loads(text))
                    assert _text(flow) == text, "a state does not come back as it was"
                assert step.event is not None
                decisions = tuple(flow.handle(step.event))
                assert decisions == step.decisions, f"restored, it differs after {step.event}"

        _for_all(law)

    def test_a_deadline_ends_the_search_at_once(self) -> None:
        """At any moment `DeadlineReached` is answered by `Stop` and `Finish` alone."""

        def law(tape: Tape) -> None:
            n_events = len(self._play(tape).steps) - 1
            tape.rewind()
            deadline = tape.choose(n_events)
            tape.rewind()
            self._play(tape, deadline=deadline)

        _for_all(law)

    def test_a_mirrored_metric_changes_nothing(self) -> None:
        """To maximize a metric is to minimize its negative."""

        def mirrored(name: str, value: float) -> float:
            return -value

        def law(tape: Tape) -> None:
            world = self._play(tape)
            other = _OTHER[world.context.direction]
            goals = tuple(Goal(g.metric, _OTHER[g.direction]) for g in world.context.goals)
            context = replace(world.context, direction=other, goals=goals)
            flow = self.make_flow()
            for step, decisions in replay(flow, context, world.steps, mirrored):
                assert _bare(decisions) == _bare(step.decisions), (
                    f"the mirrored search differs after {step.event}"
                )

        _for_all(law)

    def test_what_is_not_finite_ranks_last(self) -> None:
        """NaN and infinities are one and the same, and never better than the worst finite value.

        With a very bad finite value in place of each, a flow may treat the trial as well as
        before or better, but no trial whose value is not finite may train on, be cloned or end as
        complete where it would not with the bad value.
        """
        turned = {"nan": math.inf, "inf": -math.inf, "-inf": math.nan}

        def turn(name: str, value: float) -> float:
            return turned.get(str(value), value)

        def law(tape: Tape) -> None:
            context = self._context(tape)
            worst = {"minimize": 1e30, "maximize": -1e30}
            directions = {goal.metric: goal.direction for goal in context.goals}

            def bounded(name: str, value: float) -> float:
                bad = worst[directions.get(name, context.direction)]
                return value if math.isfinite(value) else bad

            world = self._play(tape, context=context)
            for step, decisions in replay(self.make_flow(), context, world.steps, turn):
                assert _bare(decisions) == _bare(step.decisions), (
                    f"NaN, inf and -inf are not treated alike after {step.event}"
                )
            flow, bad, paused = self.make_flow(), set[int](), set[int]()
            for step, decisions in replay(flow, context, world.steps, bounded):
                if isinstance(step.event, Reported | Paused) and step.event.value is not None:
                    is_finite = all(map(math.isfinite, step.event.metrics.values()))
                    (bad.discard if is_finite else bad.add)(step.event.trial)
                if isinstance(step.event, Paused):
                    paused.add(step.event.trial)
                if _bare(decisions) != _bare(step.decisions):
                    # Clones of other configurations need other workers, so that others may train;
                    # and a trial that is cloned to is not at its end.
                    alike = _clones(step.decisions) == _clones(decisions)
                    ours = _favoured(step.decisions, paused, train=alike)
                    theirs = _favoured(decisions, paused, train=alike)
                    favoured = (ours - theirs) & bad
                    if self.goals and theirs - ours <= bad:
                        break  # which of such trials is the least bad is not said
                    assert not favoured, (
                        f"trials {sorted(favoured)} are not finite, yet preferred to bad ones "
                        f"after {step.event}: {step.decisions} instead of {decisions}"
                    )
                    break
                paused -= {decision.trial for decision in decisions if isinstance(decision, Train)}

        _for_all(law)

    def test_a_run_leaves_the_flow_as_it_was(self) -> None:
        """A run on a copy does not touch the flow, and no run touches the configuration."""

        def law(tape: Tape) -> None:
            flow = self.make_flow()
            fresh, ran = _text(flow), copy.deepcopy(flow)
            self._play(tape, flow=ran)
            assert ran == flow, "the configuration has changed, or the state is compared with it"
            assert _text(flow) == fresh, "a flow and its copy share their state"
            pickle.loads(_pickled(ran))  # noqa: S301

        _for_all(law)

    def _context(self, tape: Tape) -> Context:
        most = (None, self.n_workers, 2 * self.n_workers)[tape.choose(3)]
        startup_s = 0.5 * tape.choose(2)
        capacity = ClusterCapacity(most, startup_s)
        direction = self.goals[0].direction if self.goals else self.direction
        told = (self.n_workers, direction, tape.choose(256), capacity, startup_s)
        return Context(*told, goals=self.goals, n_shards=(1, 4)[tape.choose(2)])

    def _play(
        self,
        tape: Tape,
        *,
        context: Context | None = None,
        flow: Flow | None = None,
        deadline: int | None = None,
    ) -> World:
        context = context or self._context(tape)
        n_points = self.n_points
        if tape.choose(4) == 3:
            n_points = tape.choose(n_points or 12) + 1
        world = World(flow or self.make_flow(), context, tape, self.configs, n_points, deadline)
        world.run()
        _check_longest(world)
        extends = world.flow.traits.extends
        for _ in range(tape.choose(3) if extends and not world.context.goals else 0):
            more = (tape.choose(4), tape.choose(9) if "max_epochs" in extends else 0)
            n_best = tape.choose(4) if "n_best" in extends else 0
            world.extend(*more, n_best, (None, None, tape.choose(12))[tape.choose(3)])
            _check_longest(world)
        return world


#: Traits of which none is the default.
_TOLD = Traits(
    max_epochs=7,
    sampling="grid",
    uses_pruner=True,
    pruner="a pruner",
    deadline_s=60.0,
    budget=Budget(120.0, Price(2.5, "USD")),
    plan=StagePlan((), ()),
    reads_configs="reads them",
    scores_parts=True,
    takes_several=True,
    extends=("n_trials",),
    n_trials=8,
)


@dataclass
class _Telling(Wrapper):
    @property
    def traits(self) -> Traits:
        return _TOLD


def _for_all(law: Callable[[Tape], None]) -> None:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    @settings(
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(choices=st.binary(min_size=40, max_size=240))
    def holds(choices: bytes) -> None:
        law(Tape(choices))

    holds()


def _check_longest(world: World) -> None:
    most = world.flow.traits.max_epochs or math.inf
    trained = {**world.stopped, **world.live}
    over = {number: trial.epochs for number, trial in trained.items() if trial.epochs > most}
    assert not over, f"trials have trained {over} epochs, above traits.max_epochs, {most}"


def _bare(decisions: tuple[Decision, ...]) -> list[Decision]:
    # A reason may name the value.
    return [replace(d, reason="") if isinstance(d, Stop) else d for d in decisions]


def _favoured(decisions: tuple[Decision, ...], paused: set[int], *, train: bool) -> set[int]:
    favoured = set()
    for decision in decisions:
        match decision:
            case Train(trial, 0) if trial not in paused:
                continue  # it trains in any case, and its priority may even fall
            case Train() | Stop() if not train:
                continue
            case Train(trial) | Clone(source=trial) | Stop(trial, _, "complete"):
                favoured.add(trial)
    return favoured


def _clones(decisions: tuple[Decision, ...]) -> list[Clone]:
    return [decision for decision in decisions if isinstance(decision, Clone)]


def global_streams() -> tuple[Any, ...]:
    """Return the state of the random streams of the process; equal if nothing was drawn."""
    name, keys, *place = np.random.get_state()
    return random.getstate(), name, bytes(np.asarray(keys)), *place


@contextmanager
def _random_streams_left_alone() -> Iterator[None]:
    before = global_streams()
    yield
    assert global_streams() == before, "the flow draws from the random numbers of the process"


def _text(flow: Flow) -> str:
    return json.dumps(save_state(flow))


def _pickled(flow: Flow) -> bytes:
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(flow)
    return pickled
