"""OptunaPruner: a trial ends where the pruner says so, which is where it ends in a script."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna import pruners

from dagsel.errors import SearchError
from dagsel.flow import Ask, Asked, Context, Decision, Event, Reported, Stop, Train
from dagsel.flows import OptunaPruner
from dagsel.simulation import SimulatedCluster, simulate
from dagsel.study import StudyDriver
from dagsel.testing import FlowSuite


class TestOptunaPruner(FlowSuite):
    n_concurrent = 4

    def make_flow(self) -> OptunaPruner:
        return OptunaPruner(max_epochs=4, n_trials=10, n_concurrent=4)


def test_the_pruner_has_the_word_before_the_last_epoch() -> None:
    flow = OptunaPruner(3, 5, optuna.pruners.HyperbandPruner(), n_concurrent=2)
    flow.start(Context(n_workers=1))
    flow.handle(Asked((0, 1)))
    assert flow.handle(Reported(0, 1, 0.5, {}, 1.0)) == []
    assert flow.handle(Reported(0, 2, 0.5, {}, 1.0, prune=True)) == [
        Stop(0, "the pruner ended it after epoch 2", "pruned"),
        Ask(1),
    ]
    assert flow.handle(Reported(1, 3, 0.5, {}, 1.0, prune=True)) == [
        Stop(1, "trained to the end", "complete"),
        Ask(1),
    ]


@pytest.mark.parametrize("bad", ["median", optuna.pruners.MedianPruner, 3])
def test_what_is_no_pruner_is_refused(bad: object) -> None:
    with pytest.raises(SearchError, match="pruner must be one of Optuna's"):
        OptunaPruner(3, 5, bad)


# ---- A script of Optuna's, and the same search here.

MAX_EPOCHS, N_TRIALS = 6, 6
#: A pruner of each kind, by three small numbers.
PRUNERS: dict[str, Callable[[int, int, int], Any]] = {
    "median": lambda a, b, c: pruners.MedianPruner(a, b, c + 1),
    "percentile": lambda a, b, c: pruners.PercentilePruner(30.0, a, b, c + 1),
    "halving": lambda a, b, c: pruners.SuccessiveHalvingPruner(a + 1, b + 2, 0, c),
    "halving, by what it sees": lambda a, b, c: pruners.SuccessiveHalvingPruner("auto", b + 2),
    "hyperband": lambda a, b, c: pruners.HyperbandPruner(a + 1, MAX_EPOCHS, b + 2),
    "hyperband, by what it sees": lambda a, b, c: pruners.HyperbandPruner(a + 1, "auto", b + 2),
    "patient": lambda a, b, c: pruners.PatientPruner(None, a),
    "patient median": lambda a, b, c: pruners.PatientPruner(pruners.MedianPruner(a, b), c),
    "threshold": lambda a, b, c: pruners.ThresholdPruner(0.1, 0.9, a, b + 1),
    "wilcoxon": lambda a, b, c: pruners.WilcoxonPruner(p_threshold=0.3, n_startup_steps=a + b),
    "none": lambda a, b, c: pruners.NopPruner(),
}
#: The epochs of each trial, and whether it was pruned.
Ends: TypeAlias = list[tuple[int, bool]]
Value: TypeAlias = Callable[[int, int], float]


def space(trial: Any) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def study_of(pruner: Any) -> optuna.Study:
    return optuna.create_study(study_name="simulated-0", pruner=pruner)


def by_script(pruner: Any, value: Value) -> Ends:
    """Train as a script does that reports its epochs from 0."""
    ends: Ends = []

    def objective(trial: optuna.Trial) -> float:
        ends.append((MAX_EPOCHS, False))
        for epoch in range(MAX_EPOCHS):
            trial.report(value(trial.number, epoch + 1), step=epoch)
            if trial.should_prune():
                ends[-1] = (epoch + 1, True)
                raise optuna.TrialPruned
        return value(trial.number, MAX_EPOCHS)

    study_of(pruner).optimize(objective, n_trials=N_TRIALS)
    return ends


def by_flow(pruner: Any, value: Value, study: optuna.Study, first_step: int | None = None) -> Ends:
    """Train one trial after another as the flow decides, and tell the study."""
    flow = OptunaPruner(MAX_EPOCHS, N_TRIALS, pruner, n_concurrent=1)
    driver = StudyDriver(study, space, "loss", traits=flow.traits, first_step=first_step)
    ends: dict[int, tuple[int, bool]] = {}
    todo: deque[Event | Decision] = deque(flow.start(Context(n_workers=1, prunes_last=True)))
    while todo:
        match step := todo.popleft():
            case Ask(n, sampling):
                todo.append(Asked(tuple(driver.ask(n, sampling)[0])))
            case Train(trial, epochs):
                todo.extend(Reported(trial, n, 0.0, {}, 1.0) for n in range(1, epochs + 1))
            case Reported(trial, epoch) if trial not in ends:
                driver.report(trial, epoch, value(trial, epoch))
                told = replace(step, prune=driver.should_prune(trial))
                decided = flow.handle(told)
                for stop in (d for d in decided if isinstance(d, Stop)):
                    ends[trial] = (epoch, stop.outcome == "pruned")
                    is_pruned = ends[trial][1]
                    driver.prune(trial) if is_pruned else driver.complete(
                        trial, value(trial, epoch)
                    )
                todo.extendleft(reversed([d for d in decided if not isinstance(d, Stop)]))
            case Asked():
                todo.extend(flow.handle(step))
    return [ends[trial] for trial in sorted(ends)]


small = st.integers(0, 2)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:.*Wilcoxon")
@pytest.mark.parametrize("kind", PRUNERS)
@given(
    numbers=st.tuples(small, small, small),
    values=st.lists(
        st.lists(st.floats(0, 1), min_size=MAX_EPOCHS, max_size=MAX_EPOCHS),
        min_size=N_TRIALS,
        max_size=N_TRIALS,
    ),
)
@settings(max_examples=25, deadline=None)
def test_it_prunes_where_a_script_prunes(
    kind: str, numbers: tuple[int, int, int], values: list[list[float]]
) -> None:
    def value(trial: int, epoch: int) -> float:
        return values[trial][epoch - 1]

    expected = by_script(PRUNERS[kind](*numbers), value)
    pruner = PRUNERS[kind](*numbers)
    assert by_flow(pruner, value, study_of(None)) == expected


@dataclass(frozen=True)
class Falling:
    """Each trial's own curve: it falls, and those of higher numbers are worse or better."""

    evaluation_share: float = 0.0

    def value(self, config: Any, epoch: float, *, trial: int) -> float:
        return float(1 / epoch + (trial * 7 % 5) / 10)

    def seconds(self, config: Any, *, trial: int) -> float:
        return 1.0


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:.*Wilcoxon")
@pytest.mark.parametrize("kind", PRUNERS)
def test_a_script_that_moves_over_prunes_the_same_trials_at_the_same_epochs(kind: str) -> None:
    curves, numbers = Falling(), (1, 1, 0)
    expected = by_script(
        PRUNERS[kind](*numbers), lambda trial, epoch: curves.value({}, epoch, trial=trial)
    )
    flow = OptunaPruner(MAX_EPOCHS, N_TRIALS, PRUNERS[kind](*numbers), n_concurrent=1)
    run = simulate(flow, curves, SimulatedCluster(n_workers=1), space=space)
    assert [(len(t.epochs), t.state == "pruned") for t in run.record.trials.values()] == expected
    for trial in run.study.trials:
        assert sorted(trial.intermediate_values) == list(range(expected[trial.number][0]))


def test_a_study_whose_steps_begin_at_1_goes_on_so() -> None:
    for first_step, before in ((1, {1: 0.5, 2: 0.4}), (0, {0: 0.5, 1: 0.4}), (0, {10: 0.1})):
        study = study_of(None)
        study.add_trial(optuna.trial.create_trial(value=0.5, intermediate_values=before))
        by_flow(pruners.NopPruner(), lambda trial, epoch: 0.5, study)
        steps = set(range(first_step, first_step + MAX_EPOCHS))
        assert all(set(trial.intermediate_values) == steps for trial in study.trials[1:])


def test_a_run_keeps_the_count_that_it_began_with() -> None:
    warm = pruners.ThresholdPruner(upper=0.0, n_warmup_steps=2)
    assert {by_flow(warm, lambda *_: 0.5, study_of(None), first)[0] for first in (0, 1)} == {
        (3, True),
        (2, True),
    }


def test_after_the_last_epoch_a_pruner_ends_a_trial_as_in_a_script_but_not_in_runs_of_before() -> (
    None
):
    for prunes_last, outcome in ((True, "pruned"), (False, "complete")):
        flow = OptunaPruner(3, 1)
        flow.start(Context(n_workers=1, prunes_last=prunes_last))
        flow.handle(Asked((0,)))
        stop = flow.handle(Reported(0, 3, 0.5, {}, 1.0, prune=True))[0]
        assert isinstance(stop, Stop)
        assert stop.outcome == outcome
