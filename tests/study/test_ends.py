"""Whatever ends a run, no trial of it stays running; pruners decide as they do in Optuna."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.pruners import (
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)
from optuna.samplers import BruteForceSampler, GridSampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState, create_trial

from dagsel.errors import SearchError
from dagsel.flow import Traits
from dagsel.study import StudyDriver


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"n": trial.suggest_int("n", 0, 99), "x": trial.suggest_categorical("x", ["a", "b"])}


def make_study(storage: Any = None, **options: Any) -> optuna.Study:
    return optuna.create_study(study_name="test", storage=storage, **options)


# ---- Ends.


class Interrupted(InMemoryStorage):
    """Ctrl-C comes after so many writes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_left = math.inf

    def _count(self, result: Any) -> Any:
        self.n_left -= 1
        if self.n_left == 0:
            raise KeyboardInterrupt
        return result

    def create_new_trial(self, *args: Any, **options: Any) -> int:
        return int(self._count(super().create_new_trial(*args, **options)))

    def set_trial_state_values(self, *args: Any, **options: Any) -> bool:
        return bool(self._count(super().set_trial_state_values(*args, **options)))

    def set_trial_intermediate_value(self, *args: Any, **options: Any) -> None:
        self._count(super().set_trial_intermediate_value(*args, **options))

    def set_trial_user_attr(self, *args: Any, **options: Any) -> None:
        self._count(super().set_trial_user_attr(*args, **options))

    def set_trial_param(self, *args: Any, **options: Any) -> None:
        self._count(super().set_trial_param(*args, **options))


def search(driver: StudyDriver) -> None:
    numbers = list(driver.ask(4, "study")[0])
    for number in numbers:
        driver.report(number, 1, 0.5)
    driver.complete(numbers[0], 0.5)
    driver.prune(numbers[1])
    driver.fail(numbers[2], "broken", "the whole")


def test_no_trial_stays_running_wherever_the_search_is_interrupted() -> None:
    for n in itertools.count(1):
        storage = Interrupted()
        study = make_study(storage)
        study.enqueue_trial({"n": 3})
        study.add_trial(create_trial(state=TrialState.RUNNING))
        driver = StudyDriver(study, space, "loss")
        storage.n_left = n
        interrupted = True
        try:
            search(driver)
            interrupted = False
        except KeyboardInterrupt:
            pass
        storage.n_left = math.inf
        driver.fail_live("interrupted")
        running = [trial.number for trial in study.trials if trial.state == TrialState.RUNNING]
        assert running == [1], f"after write {n}"
        if not interrupted:
            break
    assert n > 15


@pytest.mark.parametrize("end", ["complete", "prune", "fail"])
def test_no_callback_leaves_a_trial_live(end: str) -> None:
    def raise_it(study: optuna.Study, trial: Any) -> None:
        raise RuntimeError("the user's")

    study = make_study()
    driver = StudyDriver(study, space, "loss", callbacks=[raise_it])
    driver.ask(2, "random")
    getattr(driver, end)(0, *{"complete": (1.0,), "prune": (), "fail": ("broken",)}[end])
    assert repr(driver.error) == 'RuntimeError("the user\'s")'
    assert driver.stopped == "a callback raised RuntimeError: the user's"
    state = study.trials[0].state
    assert state.is_finished()
    driver.fail_live("the run ended")
    assert [trial.state for trial in study.trials] == [state, TrialState.FAIL]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_is_told_as_optuna_takes_it(
    value: float, open_storage: Callable[[], Any]
) -> None:
    study = make_study(open_storage(), load_if_exists=True)
    driver = StudyDriver(study, space, "loss")
    driver.ask(3, "study")
    driver.report(0, 1, 0.5)
    for number in (0, 1):
        driver.report(number, 2, value)
    driver.complete(0, value)
    driver.prune(1)
    driver.ask(1, "study")
    driver.complete(2, 0.5)
    complete, pruned, _, _ = study.trials
    if math.isnan(value):
        assert complete.state == TrialState.FAIL
        assert complete.user_attrs["dagsel:reason"] == "loss is NaN"
        assert (pruned.state, pruned.value) == (TrialState.PRUNED, None)
    else:
        assert (complete.state, complete.value) == (TrialState.COMPLETE, value)
        assert (pruned.state, pruned.value) == (TrialState.PRUNED, value)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: GridSampler({"n": [0, 99], "x": ["a", "b"]}, seed=0),
        lambda: BruteForceSampler(seed=0),
    ],
)
def test_a_sampler_that_would_stop_the_study_does_not_break_the_run(sampler: Any) -> None:
    def small(trial: optuna.Trial) -> dict[str, Any]:
        n = trial.suggest_int("n", 0, 99, step=99)
        return {"n": n, "x": trial.suggest_categorical("x", ["a", "b"])}

    heard: list[int] = []
    driver = StudyDriver(
        make_study(sampler=sampler()),
        small,
        "loss",
        callbacks=[lambda s, t: heard.append(t.number)],
    )
    drawn, _ = driver.ask(4, "study")
    for number in drawn:
        driver.complete(number, float(number))
    assert heard == [0, 1, 2, 3]
    assert len({tuple(config.values()) for config in drawn.values()}) == 4
    assert {trial.state for trial in driver.study.trials} == {TrialState.COMPLETE}


def test_a_point_that_was_drawn_and_never_trained_is_drawn_again() -> None:
    """A search that is stopped leaves trials that have not begun."""
    study = make_study()
    finite = lambda trial: {"n": trial.suggest_int("n", 1, 3)}  # noqa: E731
    first = StudyDriver(study, finite, "loss")
    first.ask(2, "study")
    first.report(0, 1, 0.5)
    for number in (0, 1):
        first.prune(number)
    second = StudyDriver(study, finite, "loss")
    configs, is_exhausted = second.ask(3, "study")
    assert is_exhausted
    assert len(configs) == 2
    points = [trial.params["n"] for trial in study.trials]
    assert sorted(points) == sorted([1, 2, 3, points[1]])


def test_a_grid_of_the_studys_sampler_ends_with_its_last_point() -> None:
    """Optuna's begins anew then, and draws a point of the grid for the second time."""
    grid = GridSampler({"n": [0, 33, 99], "x": [0.25, 0.5]}, seed=0)

    def wider(trial: optuna.Trial) -> dict[str, Any]:
        return {"n": trial.suggest_int("n", 0, 99), "x": trial.suggest_float("x", 0, 1)}

    driver = StudyDriver(make_study(sampler=grid), wider, "loss")
    drawn, is_all = driver.ask(4, "study")
    assert not is_all
    for number in drawn:
        driver.complete(number, float(number))
    rest, is_all = driver.ask(4, "study")
    assert is_all
    assert driver.why_no_more() == "GridSampler's grid has no further points: this run has drawn 6"
    points = {tuple(config.values()) for config in (drawn | rest).values()}
    assert points == {(n, x) for n in (0, 33, 99) for x in (0.25, 0.5)}


# ---- Pruners.

PRUNERS: dict[str, Callable[[], Any]] = {
    "median": lambda: MedianPruner(n_startup_trials=2, n_warmup_steps=2),
    "percentile": lambda: PercentilePruner(30.0, n_startup_trials=1, interval_steps=2),
    "halving": lambda: SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "hyperband": lambda: HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3),
    "patient": lambda: PatientPruner(None, patience=1),
    "threshold": lambda: ThresholdPruner(upper=0.9, n_warmup_steps=3),
    "wilcoxon": lambda: WilcoxonPruner(p_threshold=0.3),
    "none": NopPruner,
}
EPOCHS = 9


def curve(number: int, epoch: int) -> float:
    return 0.5 + 0.5 * math.sin(number * 13.7 + epoch * (number % 5) / 3)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("whose", ["study", "flow"])
@pytest.mark.parametrize("name", PRUNERS)
def test_a_pruner_decides_as_in_optuna(name: str, whose: str) -> None:
    plain = make_study(pruner=PRUNERS[name]())
    expected = []
    for number in range(8):
        trial = plain.ask()
        expected.append(EPOCHS)
        for epoch in range(1, EPOCHS + 1):
            trial.report(curve(number, epoch), epoch - 1)
            if trial.should_prune():
                expected[-1] = epoch
                break
        plain.tell(trial, state=TrialState.PRUNED) if expected[-1] < EPOCHS else plain.tell(
            trial, curve(number, EPOCHS)
        )

    pruner = PRUNERS[name]()
    study = make_study(pruner=pruner if whose == "study" else NopPruner())
    traits = Traits(uses_pruner=True, pruner=None if whose == "study" else pruner)
    driver = StudyDriver(study, space, "loss", traits=traits)
    for number in range(8):
        driver.ask(1, "random")
        for epoch in range(1, expected[number] + 1):
            driver.report(number, epoch, curve(number, epoch))
            ends = driver.should_prune(number)
            assert ends == (epoch == expected[number] and epoch < EPOCHS) or epoch == EPOCHS
        driver.prune(number) if ends else driver.complete(number, curve(number, epoch))
    assert name == "none" or min(expected) < EPOCHS


def test_no_pruner_is_asked_unless_the_flow_wants_one() -> None:
    study = make_study(pruner=ThresholdPruner(upper=0.0))
    for use_pruner in (False, True):
        driver = StudyDriver(study, space, "loss", traits=Traits(uses_pruner=use_pruner))
        (number,) = driver.ask(1, "random")[0]
        driver.report(number, 1, 0.5)
        assert driver.should_prune(number) is use_pruner


NEVER = [
    (lambda: MedianPruner(n_warmup_steps=8), 9),
    (lambda: PercentilePruner(10.0, n_warmup_steps=12), 13),
    (lambda: ThresholdPruner(upper=1.0, n_warmup_steps=8), 9),
    (lambda: SuccessiveHalvingPruner(min_resource=8), 9),
    (
        lambda: SuccessiveHalvingPruner(
            min_resource=3, reduction_factor=3, min_early_stopping_rate=1
        ),
        10,
    ),
    (lambda: HyperbandPruner(min_resource=10, max_resource=100), 11),
    (lambda: PatientPruner(None, patience=7), 9),
    (lambda: PatientPruner(MedianPruner(n_warmup_steps=9), patience=1), 10),
    (lambda: WilcoxonPruner(n_startup_steps=9), 9),
]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(("make", "first"), NEVER)
def test_a_pruner_that_never_acts_is_refused(make: Any, first: int) -> None:
    pruner = make()
    study = make_study(pruner=pruner)

    def validate(max_epochs: int | None, *, uses_pruner: bool = True, pruner: Any = None) -> None:
        traits = Traits(max_epochs, uses_pruner=uses_pruner, pruner=pruner)
        driver = StudyDriver(study, space, "loss", traits=traits)
        driver.validate(grid=False, check=lambda config: None)

    with pytest.raises(SearchError, match=f"ends no trial before epoch {first}, and a trial has 9"):
        validate(9)
    with pytest.raises(SearchError, match=type(pruner).__name__):
        validate(9, pruner=pruner)
    validate(9, pruner=NopPruner())
    validate(9, uses_pruner=False)
    validate(None)
    validate(first + 1)
