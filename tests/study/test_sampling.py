"""The sampler is told the truth, no point is drawn twice, and the study holds what was drawn."""

from __future__ import annotations

import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.samplers import (
    BruteForceSampler,
    GridSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState, create_trial
from scipy.stats import wilcoxon

from dagsel.errors import SearchError
from dagsel.flow import Traits
from dagsel.study import StudyDriver, enqueued
from dagsel.study.enqueued import claim
from dagsel.study.resume import give_up
from dagsel.study.sampler import CLAIM, is_of_run


def make_study(sampler: Any = None, storage: Any = None, **options: Any) -> optuna.Study:
    return optuna.create_study(study_name="test", sampler=sampler, storage=storage, **options)


def one_float(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0, 1)}


# ---- What the sampler sees.


class Spy(RandomSampler):
    """Notes what a sampler sees of the trials before its own."""

    def __init__(self, n_startup: int = 1) -> None:
        super().__init__(0)
        self._n_startup_trials = n_startup
        self.seen: list[tuple[str, float | None]] = []

    def before_trial(self, study: optuna.Study, trial: Any) -> None:
        self.seen = [(t.state.name, t.value) for t in study.get_trials(deepcopy=False)][:-1]


def expected(
    reports: list[list[float]], ends: list[str], n_startup: int
) -> list[tuple[str, float | None]]:
    """What is to be seen, without dagsel: the rung is found by trying each epoch."""
    there = [[] if end == "fail" else values for values, end in zip(reports, ends, strict=True)]
    enough = max(n_startup, 1 + 3)
    rung, most = 0, 0
    for epoch in range(1, 6):
        n = sum(len(values) >= epoch for values in there)
        if n and min(n, enough) >= most:
            rung, most = epoch, min(n, enough)
    return [
        ("COMPLETE", values[rung - 1])
        if rung and len(values) >= rung
        else ("RUNNING" if end == "live" else "FAIL", None)
        for values, end in zip(there, ends, strict=True)
    ]


values = st.lists(st.floats(0, 1), max_size=5)
ends = st.sampled_from(["live", "live", "complete", "prune", "fail"])


@given(st.lists(st.tuples(values, ends), min_size=1, max_size=12), st.integers(1, 7), st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_sampler_sees_one_value_a_trial_at_the_rung_that_enough_have_reached(
    trials: list[tuple[list[float], str]], n_startup: int, random: Any
) -> None:
    spy = Spy(n_startup)
    study = make_study(spy)
    driver = StudyDriver(study, one_float, "loss")
    numbers = list(driver.ask(len(trials), "study")[0])
    reports: list[list[float]] = [[] for _ in trials]
    state = ["live"] * len(trials)
    todo = [n for n in numbers for _ in range(len(trials[n][0]) + 1)]
    random.shuffle(todo)
    for number in todo:
        all_values, end = trials[number]
        if len(reports[number]) < len(all_values):
            reports[number].append(all_values[len(reports[number])])
            driver.report(number, len(reports[number]), reports[number][-1])
        elif end != "live":
            last = reports[number][-1] if reports[number] else 0.5
            telling = {"complete": (last,), "prune": (), "fail": ("broken",)}[end]
            getattr(driver, end)(number, *telling)
            state[number] = end
        if random.random() < 0.3:
            drawn, _ = driver.ask(1, "study")
            assert spy.seen[: len(trials)] == expected(reports, state, n_startup)
            driver.fail(next(iter(drawn)), "drawn to look")
    driver.ask(1, "study")
    assert spy.seen[: len(trials)] == expected(reports, state, n_startup)
    running = {trial.number for trial in study.trials if trial.state == TrialState.RUNNING}
    assert {n for n in numbers if state[n] == "live"} <= running


def test_the_sampler_sees_what_trials_of_other_searches_have_come_to(
    open_storage: Callable[[], Any],
) -> None:
    spy = Spy()
    study = make_study(spy, open_storage())
    good, failed, _ = (study.ask() for _ in range(3))
    for x in (0.1, 0.9):
        study.enqueue_trial({"x": x})
    driver = StudyDriver(study, one_float, "loss")
    driver.ask(1, "study")
    states: list[tuple[str, float | None]] = [*[("RUNNING", None)] * 4, ("FAIL", None)]
    assert spy.seen[:3] == states[:3]
    was_waiting = study.ask()
    driver.ask(1, "study")
    states[4] = ("RUNNING", None)
    assert spy.seen == states
    good.suggest_float("x", 0, 1)
    study.tell(good, 0.25)
    study.tell(failed, state=TrialState.FAIL)
    study.tell(was_waiting, 0.75)
    driver.ask(1, "study")
    states[0], states[1], states[4] = ("COMPLETE", 0.25), ("FAIL", None), ("COMPLETE", 0.75)
    assert spy.seen[:5] == states
    assert driver._view._study.trials[0].params == good.params


def test_what_another_search_draws_and_completes_beside_a_run_is_not_drawn_again() -> None:
    study = make_study(RandomSampler(seed=0))
    other = study.ask()
    driver = StudyDriver(study, lambda trial: {"n": trial.suggest_int("n", 0, 3)}, "loss")
    mine = [config["n"] for config in driver.ask(1, "study")[0].values()]
    other.suggest_int("n", 0, 3)
    study.tell(other, 0.5)
    mine += [config["n"] for config in driver.ask(4, "study")[0].values()]
    assert sorted([*mine, other.params["n"]]) == [0, 1, 2, 3]


def test_what_was_complete_before_the_run_counts_with_its_value() -> None:
    spy = Spy()
    study = make_study(spy)
    floats: dict[str, Any] = {"x": optuna.distributions.FloatDistribution(0, 1)}
    for value, steps in ((0.5, {}), (0.7, {100: 0.1, 200: 0.7})):
        study.add_trial(
            create_trial(
                value=value, params={"x": 0.1}, distributions=floats, intermediate_values=steps
            )
        )
    earlier = StudyDriver(study, one_float, "loss")
    for number in earlier.ask(2, "random")[0]:
        for epoch in (1, 2):
            earlier.report(number, epoch, number + epoch / 10)
    earlier.complete(2, 2.2)
    earlier.fail_live("lost")
    driver = StudyDriver(study, one_float, "loss", traits=Traits(max_epochs=1))
    driver.ask(1, "study")
    assert spy.seen == [("COMPLETE", 0.5), ("COMPLETE", 0.7), ("COMPLETE", 2.1), ("FAIL", None)]


@pytest.mark.parametrize("first_step", [0, 1])
def test_steps_of_an_earlier_run_are_its_epochs_wherever_they_begin(first_step: int) -> None:
    spy = Spy()
    study = make_study(spy)
    steps = {first_step + n: 0.25 * n for n in range(3)}
    study.add_trial(
        create_trial(value=0.5, user_attrs={"dagsel:run": "old"}, intermediate_values=steps)
    )
    driver = StudyDriver(study, one_float, "loss", traits=Traits(max_epochs=2))
    driver.ask(1, "study")
    assert spy.seen == [("COMPLETE", 0.25)]


class Spies(RandomSampler):
    """Notes which lists of values a sampler sees of the trials before its own."""

    _n_startup_trials = 1
    seen: list[tuple[str, list[float] | None]]

    def before_trial(self, study: optuna.Study, trial: Any) -> None:
        self.seen = [(t.state.name, t.values) for t in study.get_trials(deepcopy=False)][:-1]


pairs = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4)


@given(st.lists(st.tuples(pairs, ends), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_of_several_metrics_the_sampler_sees_a_list_where_it_would_see_a_value(
    trials: list[tuple[list[tuple[float, float]], str]],
) -> None:
    one, two = Spy(), Spies(0)
    alone = StudyDriver(make_study(one), one_float, "loss")
    both = StudyDriver(make_study(two, directions=["minimize", "maximize"]), one_float, "loss")
    for driver in (alone, both):
        driver.ask(len(trials), "random")
    for number, (reports, end) in enumerate(trials):
        for epoch, (first, second) in enumerate(reports, start=1):
            alone.report(number, epoch, first)
            both.report(number, epoch, first, second)
        last = reports[-1] if reports else (0.5, 0.5)
        match end:
            case "complete":
                alone.complete(number, last[0])
                both.complete(number, *last)
            case "prune" | "fail":
                telling = () if end == "prune" else ("broken",)
                getattr(alone, end)(number, *telling)
                getattr(both, end)(number, *telling)
    alone.ask(1, "study")
    both.ask(1, "study")
    assert [(s, None if v is None else v[0]) for s, v in two.seen] == one.seen
    lists = [set(reports) for reports, _ in trials]
    assert all(
        v is None or tuple(v) in reports for (_, v), reports in zip(two.seen, lists, strict=True)
    )
    for trial, (reports, end) in zip(both.study.trials, trials, strict=False):
        assert trial.intermediate_values == {}
        told = (reports[-1] if reports else (0.5, 0.5)) if end == "complete" else None
        assert trial.values == (None if told is None else list(told))


def test_in_a_study_with_several_directions_ended_trials_count_with_their_values() -> None:
    spy = Spies(0)
    study = make_study(spy, directions=["minimize", "maximize"])
    earlier = StudyDriver(study, one_float, "loss")
    earlier.ask(2, "random")
    for number in (0, 1):
        earlier.report(number, 1, 0.5, 0.5 + number)
    earlier.complete(0, 0.5, 0.5)
    earlier.prune(1)
    study.add_trial(create_trial(values=[0.1, 0.2]))
    driver = StudyDriver(study, one_float, "loss")
    driver.ask(1, "study")
    assert spy.seen == [("COMPLETE", [0.5, 0.5]), ("FAIL", None), ("COMPLETE", [0.1, 0.2])]


def searched(sampler: Any) -> optuna.Study:
    """Search for two metrics; what is best lies between 0.2 and 0.3."""
    study = make_study(sampler, directions=["minimize", "minimize"])
    driver = StudyDriver(study, one_float, "a")
    for number in range(40):
        ((drawn, config),) = driver.ask(1, "study")[0].items()
        assert drawn == number
        for epoch in (1, 2):
            losses = [abs(config["x"] - best) + epoch for best in (0.2, 0.3)]
            driver.report(drawn, epoch, *losses)
        driver.complete(drawn, *losses)
    return study


def test_tpe_learns_of_several_metrics() -> None:
    late = [t.params["x"] for t in searched(TPESampler(seed=0, n_startup_trials=4)).trials[20:]]
    assert sum(0.1 < x < 0.4 for x in late) >= 12  # 6 by chance


def test_nsga_ii_goes_from_generation_to_generation() -> None:
    trials = searched(NSGAIISampler(population_size=4, seed=0)).trials
    generations = [trial.system_attrs["NSGAIISampler:generation"] for trial in trials]
    assert generations == [number // 4 for number in range(40)]


def test_nan_is_not_shown() -> None:
    spy = Spy()
    driver = StudyDriver(make_study(spy), one_float, "loss")
    driver.ask(2, "study")
    driver.report(0, 1, math.nan)
    driver.report(1, 1, math.inf)
    driver.ask(1, "study")
    assert spy.seen == [("RUNNING", None), ("COMPLETE", math.inf)]


@pytest.mark.parametrize(("direction", "worst"), [("minimize", math.inf), ("maximize", -math.inf)])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_value_is_shown_as_the_worst_and_kept_as_it_is(
    value: float, direction: str, worst: float
) -> None:
    spy = Spy()
    study = make_study(spy, direction=direction)
    study.add_trial(create_trial(value=value))
    driver = StudyDriver(study, one_float, "loss")
    driver.ask(1, "study")
    driver.report(1, 1, value)
    driver.ask(1, "study")
    assert spy.seen == [("COMPLETE", worst), ("COMPLETE", worst)]
    driver.complete(1, value)
    assert [trial.value for trial in study.trials[:2]] == [value, value]
    assert study.trials[1].intermediate_values == {0: value}


def test_of_several_metrics_an_infinite_value_is_shown_as_the_worst_of_its_direction() -> None:
    sampler = TPESampler(seed=0, n_startup_trials=2)
    study = make_study(sampler, directions=["minimize", "maximize"])
    driver = StudyDriver(study, one_float, "loss")
    driver.ask(5, "study")
    for number, values in enumerate([(-math.inf, math.inf), (0.1, math.inf), (0.2, 0.2)]):
        driver.report(number, 1, *values)
    driver.ask(1, "study")
    shown = [trial.values for trial in driver._view._study.get_trials(deepcopy=False)][:3]
    assert shown == [[math.inf, -math.inf], [0.1, -math.inf], [0.2, 0.2]]


def test_what_the_sampler_notes_on_a_trial_it_sees_later() -> None:
    class Noting(RandomSampler):
        def sample_independent(self, study: Any, trial: Any, *args: Any) -> Any:
            cached = study._get_trials(deepcopy=False, use_cache=True)
            self.seen = [(t.system_attrs.get("drawn"), t.system_attrs.get("told")) for t in cached]
            study._storage.set_trial_system_attr(trial._trial_id, "drawn", True)
            return super().sample_independent(study, trial, *args)

        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            study._storage.set_trial_system_attr(trial._trial_id, "told", state.name)

    sampler = Noting(0)
    study = make_study(sampler)
    driver = StudyDriver(study, one_float, "loss")
    study.enqueue_trial({})  # x is open
    driver.ask(3, "study")
    driver.complete(0, 1.0)
    driver.prune(1)
    study.enqueue_trial({})
    driver.ask(1, "study")
    assert sampler.seen == [(True, "COMPLETE"), (True, "PRUNED"), (True, None), (None, None)]


def test_a_sampler_that_has_drawn_for_another_study_can_draw() -> None:
    # Optuna's own refuse: "cannot handle multiple studies".
    sampler = TPESampler(seed=0, n_startup_trials=2)
    storage = InMemoryStorage()
    for name in ("one", "two"):
        study = optuna.create_study(study_name=name, storage=storage, sampler=sampler)
        driver = StudyDriver(study, one_float, "loss")
        for _ in range(5):
            (number,) = driver.ask(1, "study")[0]
            driver.report(number, 1, 0.5)
            driver.complete(number, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["branin", "hartmann6"])
def test_tpe_finds_better_than_random_search(function: str) -> None:
    space, objective = FUNCTIONS[function]
    best = {sampling: [search(space, objective, s, sampling) for s in range(20)] for sampling in
            ("study", "random")}  # fmt: skip
    assert np.median(best["study"]) < np.median(best["random"])
    assert wilcoxon(best["study"], best["random"], alternative="less").pvalue < 0.05


def search(space: Any, objective: Any, seed: int, sampling: Any) -> float:
    driver = StudyDriver(make_study(TPESampler(seed=seed)), space, "loss", seed=seed)
    for _ in range(64):
        ((number, config),) = driver.ask(1, sampling)[0].items()
        value = objective(**config)
        driver.report(number, 1, value)
        driver.complete(number, value)
    return float(driver.study.best_value)


def branin(x: float, y: float) -> float:
    a = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return a**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


_A = np.array([[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14],
               [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]])  # fmt: skip
_P = 1e-4 * np.array([[1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
                      [2348, 1451, 3522, 2883, 3047, 6650],
                      [4047, 8828, 8732, 5743, 1091, 381]])  # fmt: skip


def hartmann6(**x: float) -> float:
    point = np.array(list(x.values()))
    return -float(np.array([1, 1.2, 3, 3.2]) @ np.exp(-(_A * (point - _P) ** 2).sum(axis=1)))


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "branin": (
        lambda t: {"x": t.suggest_float("x", -5, 10), "y": t.suggest_float("y", 0, 15)},
        branin,
    ),
    "hartmann6": (
        lambda t: {f"x{i}": t.suggest_float(f"x{i}", 0, 1) for i in range(6)},
        hartmann6,
    ),
}


# ---- Duplicates.

N_POINTS = 2 * 3 + 4


def finite(trial: optuna.Trial) -> dict[str, Any]:
    """Ten points: two branches."""
    if trial.suggest_categorical("kind", ["a", "b"]) == "a":
        return {"n": trial.suggest_int("n", 1, 2), "z": trial.suggest_float("z", 0, 1, step=0.5)}
    return {
        "s": trial.suggest_float("s", 0.1, 0.7, step=0.2),
        "one": trial.suggest_int("one", 1, 1),
    }


def flat(trial: optuna.Trial) -> dict[str, Any]:
    return {"n": trial.suggest_int("n", 0, 1), "s": trial.suggest_float("s", 0, 1, step=0.25)}


GRID: dict[str, list[float]] = {"n": [0, 1], "s": [0.0, 0.25, 0.5, 0.75, 1.0]}
SAMPLERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "tpe": (lambda: TPESampler(seed=1, n_startup_trials=2), finite),
    "random": (lambda: RandomSampler(1), finite),
    "qmc": (lambda: QMCSampler(seed=1, warn_independent_sampling=False), flat),
    "grid": (lambda: GridSampler(GRID, seed=1), flat),
    "brute force": (lambda: BruteForceSampler(seed=1), finite),
    "nsga-ii": (lambda: optuna.samplers.NSGAIISampler(seed=1, population_size=4), flat),
}


def make_sampler(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return SAMPLERS[name][0]()


def as_set(configs: list[dict[str, Any]]) -> Counter[Any]:
    return Counter(tuple((name, f"{value:.9g}") for name, value in c.items()) for c in configs)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("sampling", ["study", "random", "grid"])
def test_a_finite_space_is_drawn_once_and_then_exhausted(name: str, sampling: Any) -> None:
    driver = StudyDriver(make_study(make_sampler(name)), SAMPLERS[name][1], "loss")
    configs: list[dict[str, Any]] = []
    for n in (1, 3, 4, 1, 5):
        drawn, exhausted = driver.ask(n, sampling)
        assert exhausted == (len(configs) + n > N_POINTS or
                             (sampling == "grid" and len(configs) + n == N_POINTS))  # fmt: skip
        for number, config in drawn.items():
            configs.append(config)
            if number % 3:
                driver.report(number, 1, float(number))
                driver.complete(number, float(number))
    assert len(configs) == N_POINTS
    assert set(as_set(configs).values()) == {1}
    assert driver.ask(2, sampling) == ({}, True)
    driver.fail_live("the end")
    assert len(driver.study.trials) == N_POINTS


@pytest.mark.parametrize("sampling", ["study", "random"])
def test_what_has_ended_in_the_study_is_not_drawn_again(sampling: Any) -> None:
    study = make_study(TPESampler(seed=0))
    first = StudyDriver(study, finite, "loss")
    old, _ = first.ask(6, "random")
    for number in list(old)[:4]:
        first.complete(number, 0.5)
    first.fail_live("broken off")  # two that failed may be drawn again
    new, exhausted = StudyDriver(study, finite, "loss").ask(9, sampling)
    assert exhausted
    assert len(new) == N_POINTS - 4
    assert not set(as_set(list(old.values())[:4])) & set(as_set(list(new.values())))


@pytest.mark.parametrize("sampling", ["study", "random"])
def test_searches_of_one_seed_that_share_a_study_do_not_draw_the_same(sampling: Any) -> None:
    """Neither those that run side by side, nor one that begins beside another."""
    study = make_study(RandomSampler(seed=1))
    drivers = [StudyDriver(study, one_float, "loss", seed=4, run=f"r{n}") for n in range(4)]
    configs = [config for _ in range(3) for driver in drivers for config in drawn(driver, sampling)]
    late = StudyDriver(study, one_float, "loss", seed=4, run="late")
    configs += [config for _ in range(3) for config in drawn(late, sampling)]
    assert len({config["x"] for config in configs}) == len(configs) == 15
    assert late.n_before == 12


def drawn(driver: StudyDriver, sampling: Any) -> list[dict[str, Any]]:
    return [*driver.ask(1, sampling)[0].values()]


def test_of_a_finite_space_what_trains_elsewhere_comes_last() -> None:
    """Whoever has begun it may be dead."""
    study = make_study(RandomSampler(seed=1))
    other = StudyDriver(study, finite, "loss", seed=1)
    theirs = as_set([*other.ask(5, "random")[0].values()])
    driver = StudyDriver(study, finite, "loss", seed=1)
    mine, exhausted = driver.ask(1_000, "random")
    assert exhausted
    assert as_set([*mine.values()][-5:]) == theirs


def test_a_continuous_branch_is_never_exhausted() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        if trial.suggest_categorical("kind", ["a", "b"]) == "a":
            return {}
        return {"x": trial.suggest_float("x", 0, 1)}

    configs, exhausted = StudyDriver(make_study(TPESampler(seed=0)), space, "loss").ask(30, "study")
    assert (len(configs), exhausted) == (30, False)
    assert sum(not config for config in configs.values()) == 1


# ---- A space that rejects draws.


def small(trial: optuna.Trial) -> dict[str, Any]:
    """Accept 10 of 25 points."""
    a, b = trial.suggest_int("a", 1, 5), trial.suggest_int("b", 1, 5)
    if a * b > 5:
        raise optuna.TrialPruned("too large")
    return {"a": a, "b": b}


@pytest.mark.parametrize(
    ("sampler", "sampling"),
    [
        (TPESampler(seed=0), "study"),
        (TPESampler(seed=0), "random"),
        (TPESampler(seed=0), "grid"),
        (NSGAIISampler(seed=0), "study"),
    ],
)
def test_what_a_space_rejects_is_no_trial_and_all_else_is_drawn(
    sampler: Any, sampling: Any
) -> None:
    driver = StudyDriver(make_study(sampler), small, "loss")
    driver.validate(grid=sampling == "grid", check=lambda config: None)
    configs, _ = driver.ask(10, sampling)
    assert set(as_set(list(configs.values())).values()) == {1}
    assert driver.ask(1, sampling) == ({}, True)
    assert [trial.number for trial in driver.study.trials] == list(configs) == list(range(10))


@pytest.mark.parametrize("sampler", [TPESampler(seed=0), RandomSampler(seed=0)])
def test_one_draw_of_a_hundred_is_enough(sampler: Any) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        config = one_float(trial)
        if config["x"] > 0.01:
            raise optuna.TrialPruned
        return config

    configs, exhausted = StudyDriver(make_study(sampler), space, "loss").ask(5, "study")
    assert (len(configs), exhausted) == (5, False)
    assert all(config["x"] <= 0.01 for config in configs.values())


def test_a_space_with_a_continuous_branch_may_reject_too() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        if trial.suggest_categorical("kind", ["a", "b"]) == "a":
            return {}
        if (x := trial.suggest_float("x", 0, 1)) > 0.2:
            raise optuna.TrialPruned
        return {"x": x}

    configs, exhausted = StudyDriver(make_study(TPESampler(seed=0)), space, "loss").ask(30, "study")
    assert (len(configs), exhausted) == (30, False)
    assert sum(not config for config in configs.values()) == 1


def test_a_space_that_comes_to_reject_all_is_told_of_what_it_rejects() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        config = one_float(trial)
        if driver.study.trials:
            raise optuna.TrialPruned("one is enough")
        return config

    driver = StudyDriver(make_study(), space, "loss")
    driver.ask(1, "random")
    with pytest.raises(
        SearchError, match=r"1,000 times .*TrialPruned \(one is enough\) for {'x': "
    ):
        driver.ask(1, "random")
    assert len(driver.study.trials) == 1


def test_grid_sampler_is_told_apart_as_it_leaves_out_nothing() -> None:
    grid = GridSampler({"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 5]}, seed=0)
    with pytest.raises(SearchError, match=r"TrialPruned .*: take Grid as the flow"):
        StudyDriver(make_study(grid), small, "loss").ask(25, "study")


def test_parameters_that_the_user_gives_and_the_space_rejects_are_named() -> None:
    driver = StudyDriver(make_study(), small, "loss")
    told = r"TrialPruned \(too large\) for {'a': 5, 'b': 5}: it wants others"
    with pytest.raises(SearchError, match=told):
        driver.add({"a": 5, "b": 5})
    with pytest.raises(SearchError, match=rf"{told}; give parameters") as error:
        driver.complete_params({"a": 5, "b": 5})
    assert error.type is SearchError
    assert driver.study.trials == []


# ---- What is written to the study.


def test_the_study_holds_what_was_drawn(open_storage: Callable[[], Any]) -> None:
    storage = open_storage()
    numbers = []

    def space(trial: optuna.Trial) -> dict[str, Any]:
        numbers.append(trial.number)
        trial.set_user_attr("mine", ["kept", trial.number])
        lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
        optimizer = trial.suggest_categorical("optimizer", ["sgd", "adam", None])
        return {"lr": lr, "optimizer": optimizer, "n": trial.suggest_int("n", 1, 64, log=True)}

    study = make_study(TPESampler(seed=0, n_startup_trials=2), storage)
    study.add_trial(create_trial(value=0.1))
    driver = StudyDriver(study, space, "loss", run="r1")
    drawn: dict[int, Any] = {}
    for n in (2, 1, 3):
        drawn |= driver.ask(n, "study")[0]
        for number in drawn:
            driver.report(number, n, 1.0 * number)
    trials = study.trials[1:]
    assert [trial.number for trial in trials] == list(drawn) == numbers == [1, 2, 3, 4, 5, 6]
    for trial in trials:
        assert trial.state == TrialState.RUNNING
        assert trial.params == drawn[trial.number] == driver.params(trial.number)
        assert trial.user_attrs == {"mine": ["kept", trial.number], "dagsel:run": "r1"}


def test_enqueued_trials_come_first_as_they_are(open_storage: Callable[[], Any]) -> None:
    storage = open_storage()
    study = make_study(TPESampler(seed=0), storage)
    for x in (0.25, 0.5):
        study.enqueue_trial({"x": x}, user_attrs={"whose": "mine"})
    driver = StudyDriver(study, lambda t: one_float(t) | {"n": t.suggest_int("n", 1, 9)}, "loss")
    first, _ = driver.ask(1, "study")
    study.enqueue_trial({"x": 0.75, "n": 3})
    second, _ = driver.ask(3, "random")
    configs = first | second
    assert [config["x"] for config in configs.values()][:3] == [0.25, 0.5, 0.75]
    assert list(configs) == [0, 1, 2, 3]
    assert configs[2]["n"] == 3
    assert [trial.params for trial in study.trials] == list(configs.values())
    assert {trial.user_attrs["dagsel:run"] for trial in study.trials} == {driver.run}
    assert [trial.user_attrs.get("whose") for trial in study.trials][:2] == ["mine"] * 2
    driver.fail_live("the end")
    assert {trial.state for trial in study.trials} == {TrialState.FAIL}


def test_an_enqueued_trial_that_two_runs_want_is_of_the_one_that_begins_it(
    open_storage: Callable[[], Any],
) -> None:
    study = make_study(storage=open_storage())
    study.enqueue_trial({"x": 0.5})
    mine, other = (StudyDriver(study, one_float, "loss", run=run) for run in ("mine", "other"))
    (waiting,) = study.trials
    assert list(mine.ask(1, "study")[0]) == [0]
    assert not claim(study, waiting, other.run)
    other.fail_live("the end of the other")
    assert study.trials[0].state == TrialState.RUNNING
    mine.complete(0, 0.25)
    assert (study.trials[0].value, study.trials[0].user_attrs) == (0.25, {"dagsel:run": "mine"})
    assert not claim(study, waiting, other.run)


class LetsAllBegin(InMemoryStorage):
    """A storage that lets so many begin a trial, as SQLite does if all look at once."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.meet = threading.Barrier(n)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Any = None) -> bool:
        self.meet.wait(60)
        super().set_trial_state_values(trial_id, state, values)
        return True


@pytest.mark.parametrize("n_runs", [1, 2, 3])
def test_of_runs_that_a_storage_lets_begin_a_trial_one_has_it(n_runs: int) -> None:
    study = make_study(storage=LetsAllBegin(n_runs))
    runs = [f"run-{number}" for number in range(n_runs)]
    for x in (0.25, 0.5, 0.75):
        study.enqueue_trial({"x": x})
        trial = study.trials[-1]
        with ThreadPoolExecutor(n_runs) as threads:
            took = list(threads.map(lambda run, of=trial: claim(study, of, run), runs))
        assert took == [True, *[False] * (n_runs - 1)]
        held = study.trials[-1]
        assert [run for run in runs if is_of_run(held, run)] == runs[:1]


def test_a_run_that_has_died_while_it_took_a_trial_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enqueued, "_PATIENCE_S", 0.1)
    study = make_study()
    study.enqueue_trial({"x": 0.5})
    study._storage.set_trial_system_attr(0, f"{CLAIM}dead", True)
    assert claim(study, study.trials[0], "mine")


@pytest.mark.parametrize("end", ["fail_live", "adopt", "give_up"])
def test_a_run_that_is_interrupted_while_it_takes_a_trial_finds_it(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study()
    study.enqueue_trial({"x": 0.5})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(study._storage, "set_trial_user_attr", interrupted)
        driver = StudyDriver(study, one_float, "loss", run="mine")
        with pytest.raises(KeyboardInterrupt):
            driver.ask(1, "study")
    for run, state in (("other", TrialState.RUNNING), ("mine", TrialState.FAIL)):
        again = StudyDriver(study, one_float, "loss", run=run)
        if end == "give_up":
            give_up(study, run, {})
        else:
            getattr(again, end)("the end" if end == "fail_live" else {})
        assert study.trials[0].state == state


def test_a_trial_that_another_adds_meanwhile_is_let_be() -> None:
    spy = Spy()
    study = make_study(spy)

    def space(trial: optuna.Trial) -> dict[str, Any]:
        if trial.number == 1:
            study.add_trial(create_trial(value=7.0))
        return one_float(trial)

    driver = StudyDriver(study, space, "loss")
    drawn, _ = driver.ask(3, "study")
    assert list(drawn) == [0, 2, 3]
    assert spy.seen == [("RUNNING", None), ("COMPLETE", 7.0), ("RUNNING", None)]
    assert [study.trials[number].params for number in drawn] == list(drawn.values())
    driver.report(2, 1, 0.5)
    driver.complete(2, 0.5)
    driver.ask(1, "study")
    states = [("RUNNING", None), ("COMPLETE", 7.0), ("COMPLETE", 0.5), ("RUNNING", None)]
    assert spy.seen == states


def test_a_space_that_fails_leaves_no_trial() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        config = one_float(trial)
        if fails:
            raise RuntimeError("this space is broken")
        return config

    spy = Spy()
    driver = StudyDriver(make_study(spy), space, "loss")
    fails = True
    with pytest.raises(RuntimeError, match="broken"):
        driver.ask(1, "study")
    fails = False
    assert list(driver.ask(2, "study")[0]) == [0, 1]
    assert spy.seen == [("RUNNING", None)]


def test_choices_that_differ_from_the_studys_are_refused() -> None:
    study = make_study()
    choices = optuna.distributions.CategoricalDistribution(["a", "b"])
    study.add_trial(create_trial(value=1.0, params={"c": "a"}, distributions={"c": choices}))
    driver = StudyDriver(study, lambda t: {"c": t.suggest_categorical("c", ["b", "z"])}, "loss")
    with pytest.raises(ValueError, match="dynamic value space"):
        driver.ask(1, "random")
    assert len(study.trials) == 1


# ---- Random numbers.


@pytest.mark.parametrize("seeds", [(7, 7), (7, 8), (None, None)])
def test_the_samplers_own_seed_decides(seeds: tuple[int | None, int | None]) -> None:
    def draw(seed: int | None, sizes: list[int]) -> list[Any]:
        driver = StudyDriver(make_study(TPESampler(seed=seed)), one_float, "loss")
        return [config for n in sizes for config in driver.ask(n, "study")[0].values()]

    one, other = draw(seeds[0], [5]), draw(seeds[1], [1, 3, 1])
    assert (one == other) == (seeds == (7, 7))
    assert len(as_set(one)) == 5
