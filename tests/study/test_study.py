"""The driver of a study: what it draws, reports and tells, on Optuna's own storages."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.samplers import RandomSampler
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from dagsel.errors import SearchError
from dagsel.flow import Direction, Sampling
from dagsel.study import StudyDriver
from dagsel.study.checks import check_metrics

METRICS: dict[str, Direction | None] = {"loss": "minimize", "accuracy": "maximize", "score": None}


def make_study(storage: Any = None, **options: Any) -> optuna.Study:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(
            study_name="test", storage=storage, **{"direction": "maximize", **options}
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def suggest_two(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "n": trial.suggest_int("n", 1, 9),
    }


def validate(driver: StudyDriver, *, grid: bool = False) -> list[Any]:
    """Validate, and give the configurations that were checked."""
    checked: list[Any] = []
    check_metrics(driver.study, [driver.metric], METRICS)
    driver.validate(grid=grid, check=checked.append)
    return checked


def walk(driver: StudyDriver, sizes: Iterator[int]) -> list[dict[str, Any]]:
    """Draw the whole grid, so many at a time."""
    configs: list[dict[str, Any]] = []
    exhausted = False
    while not exhausted:
        drawn, exhausted = driver.ask(next(sizes), "grid")
        configs += drawn.values()
    assert driver.ask(3, "grid") == ({}, True)
    return configs


# ---- The grid walks every leaf of a define-by-run tree, once.


@dataclass(frozen=True)
class Node:
    """Suggests a parameter; each of its choices leads to further nodes, one after the other."""

    name: str
    kind: str
    branches: tuple[tuple[Node, ...], ...]

    def suggest(self, trial: optuna.Trial) -> int:
        n = len(self.branches)
        match self.kind:
            case "categorical":
                choices = [f"c{index}" for index in range(n)]
                return choices.index(str(trial.suggest_categorical(self.name, choices)))
            case "int":
                return (trial.suggest_int(self.name, 3, 3 + 2 * (n - 1), step=2) - 3) // 2
            case "float":
                high = round(0.1 + 0.2 * (n - 1), 1)
                return round((trial.suggest_float(self.name, 0.1, high, step=0.2) - 0.1) / 0.2)
        raise AssertionError(self.kind)


@dataclass
class Names:
    """A generator of distinct names for the nodes of a tree."""

    n: int = 0

    def new(self) -> str:
        self.n += 1
        return f"p{self.n}"


def sequences(depth: int, names: Names) -> st.SearchStrategy[tuple[Node, ...]]:
    most = 2 if depth else 0
    return st.lists(nodes(depth, names), max_size=most).map(tuple) if most else st.just(())


@st.composite
def nodes(draw: st.DrawFn, depth: int, names: Names) -> Node:
    kind = draw(st.sampled_from(["categorical", "int", "float"]))
    n = draw(st.integers(1, 3))
    name = names.new()
    branches = tuple(draw(sequences(depth - 1, names)) for _ in range(n))
    return Node(name, kind, branches)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Node, ...]:
    names = Names()
    first = draw(nodes(2, names))
    return (first, *draw(sequences(2, names)))


def leaves(sequence: tuple[Node, ...]) -> list[dict[str, int]]:
    """All choices that a walk through the nodes may come by, without dagsel and Optuna."""
    if not sequence:
        return [{}]
    first, *rest = sequence
    return [
        {first.name: choice, **inner, **later}
        for choice, branch in enumerate(first.branches)
        for inner in leaves(branch)
        for later in leaves(tuple(rest))
    ]


def as_space(sequence: tuple[Node, ...]) -> Callable[[optuna.Trial], dict[str, int]]:
    def follow(nodes: tuple[Node, ...], trial: optuna.Trial, config: dict[str, int]) -> None:
        for node in nodes:
            config[node.name] = node.suggest(trial)
            follow(node.branches[config[node.name]], trial, config)

    def space(trial: optuna.Trial) -> dict[str, int]:
        config: dict[str, int] = {}
        follow(sequence, trial, config)
        return config

    return space


def multiset(configs: list[dict[str, Any]]) -> Counter[Any]:
    return Counter(tuple(sorted(config.items())) for config in configs)


@given(tree=trees(), sizes=st.lists(st.integers(1, 5), min_size=1))
@settings(max_examples=60, deadline=None)
def test_a_grid_walks_every_leaf_once(tree: tuple[Node, ...], sizes: list[int]) -> None:
    expected = leaves(tree)
    if len(expected) > 200:
        return
    study = make_study()
    driver = StudyDriver(study, as_space(tree), "accuracy")
    validate(driver, grid=True)
    found = walk(driver, (sizes[index % len(sizes)] for index in range(10**6)))
    assert multiset(found) == multiset(expected)
    assert len(study.trials) == len(expected)


def test_the_grid_leaves_out_what_was_enqueued() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "first": trial.suggest_categorical("first", ["a", "b"]),
            "second": trial.suggest_int("second", 1, 3),
        }

    study = make_study()
    study.enqueue_trial({"first": "b"})
    driver = StudyDriver(study, space, "accuracy")
    first, *rest = walk(driver, iter([2, 2, 9]))
    assert first == {"first": "b", "second": 1}
    points = [{"first": f, "second": s} for f in "ab" for s in (1, 2, 3)]
    assert multiset([first, *rest]) == multiset(points)


def test_a_space_reads_and_writes_the_attributes_of_its_study() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        top = trial.study.user_attrs.get("most", 99)
        trial.study.set_user_attr("last", trial.number)
        return {"n": trial.suggest_int("n", 1, top)}

    study = make_study()
    study.set_user_attr("most", 3)
    seen = list[Any]()
    driver = StudyDriver(study, space, "accuracy")
    driver.validate(grid=False, check=seen.append)
    configs, _ = driver.ask(3, "random")
    assert max(config["n"] for config in [*seen, *configs.values()]) <= 3
    assert study.user_attrs["last"] == 2


def test_an_enqueued_trial_that_the_space_rejects_is_pruned_and_others_are_drawn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        n = trial.suggest_int("n", 1, 9)
        if n > 5:
            raise optuna.TrialPruned(f"{n} is too many")
        return {"n": n}

    study = make_study()
    for n in (7, 2):
        study.enqueue_trial({"n": n})
    driver = StudyDriver(study, space, "accuracy")
    configs, _ = driver.ask(3, "random")
    assert [*configs] == [1, 2, 3]
    assert configs[1] == {"n": 2}
    assert study.trials[0].state == TrialState.PRUNED
    assert "7 is too many" in study.trials[0].user_attrs["dagsel:reason"]
    assert "trial 0 was enqueued, and is not trained" in caplog.text


def test_an_enqueued_trial_that_cannot_be_is_told_with_its_reason() -> None:
    study = make_study()
    study.enqueue_trial({"s": "c"})
    driver = StudyDriver(study, lambda t: {"s": t.suggest_categorical("s", ["a", "b"])}, "loss")
    with pytest.raises(SearchError, match="was enqueued with .*'c'.*cannot suggest"):
        driver.ask(1, "random")
    assert study.trials[0].state == TrialState.FAIL
    assert "'c' not in" in study.trials[0].user_attrs["dagsel:reason"]


def test_what_a_space_raises_is_told_with_its_parameters() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"n": trial.suggest_int("n", 4, 4) / 0}

    driver = StudyDriver(make_study(), space, "loss")
    with pytest.raises(ZeroDivisionError) as raised:
        driver.ask(1, "random")
    (note,) = raised.value.__notes__
    assert "the space raised it for {'n': 4}" in note
    assert "optuna.TrialPruned" in note


# ---- Who draws, and what is left behind.


@pytest.mark.parametrize("sampling", ["study", "random", "grid"])
@pytest.mark.parametrize("fails", [False, True])
def test_drawing_leaves_the_studys_sampler_as_it_was(sampling: Any, fails: bool) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        if fails:
            raise RuntimeError("this space is broken")
        return {"n": trial.suggest_int("n", 1, 9)}

    own = optuna.samplers.TPESampler(seed=3)
    study = make_study(sampler=own)
    driver = StudyDriver(study, space, "accuracy")
    if fails:
        with pytest.raises(RuntimeError, match="this space is broken"):
            driver.ask(2, sampling)
        driver.fail_live("the run ended")
        assert study.trials == []
    else:
        assert list(driver.ask(2, sampling)[0]) == [0, 1]
    assert study.sampler is own


def test_random_draws_depend_on_the_seed_alone() -> None:
    def draw(seed: int, sizes: list[int]) -> list[dict[str, Any]]:
        random.seed(len(sizes))
        driver = StudyDriver(make_study(), suggest_two, "accuracy", seed=seed)
        validate(driver)
        return [config for n in sizes for config in driver.ask(n, "random")[0].values()]

    assert draw(5, [6]) == draw(5, [1, 2, 3])
    assert draw(5, [6]) != draw(6, [6])


def test_the_studys_own_sampler_draws_when_it_is_asked() -> None:
    class Sevens(optuna.samplers.RandomSampler):
        def sample_independent(self, *args: Any) -> Any:
            return 7

    study = make_study(sampler=Sevens())
    driver = StudyDriver(study, lambda trial: {"n": trial.suggest_float("n", 1, 9)}, "accuracy")
    assert driver.ask(2, "study") == ({0: {"n": 7}, 1: {"n": 7}}, False)


def test_validation_draws_nothing_from_the_study() -> None:
    study = make_study()
    driver = StudyDriver(study, suggest_two, "accuracy")
    (config,) = validate(driver)
    assert set(config) == {"lr", "n"}
    assert study.trials == []
    drawn, _ = driver.ask(1, "random")
    assert drawn[0] == config  # what was checked is what comes first


# ---- What does not fit together is refused.

BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "several directions": (
        {"directions": ["maximize", "minimize"], "direction": None}, {}, "has 2 directions"),
    "an unknown metric": (
        {}, {"metric": "f1"}, "no metric 'f1', it gives loss, accuracy, score"),
    "the metric's other direction": (
        {"direction": "minimize"}, {}, "create the study with direction='maximize'"),
    "a space that suggests nothing": ({}, {"space": lambda trial: {}}, "suggests nothing"),
    "a space that returns no dict": (
        {}, {"space": lambda trial: trial.suggest_int("n", 1, 2)}, "as a dict, got int"),
    "a continuous parameter of a grid": ({}, {}, "'lr' is continuous; give it a step"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    options, changes, text = BAD[name]
    study = make_study(**options)
    driver = StudyDriver(study, **{"space": suggest_two, "metric": "accuracy", **changes})
    with pytest.raises(SearchError, match=text):
        validate(driver, grid="grid" in name)
    assert study.trials == []


def test_a_grid_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagsel.study.checks.MAX_GRID_POINTS", 20)
    study = make_study()
    for n, fits in [(20, True), (21, False)]:

        def space(trial: optuna.Trial, n: int = n) -> dict[str, Any]:
            return {"n": trial.suggest_int("n", 1, n)}

        driver = StudyDriver(study, space, "score")
        if fits:
            validate(driver, grid=True)
        else:
            with pytest.raises(SearchError, match="more than 20 points; use RandomSearch"):
                validate(driver, grid=True)


def test_a_metric_without_a_direction_goes_with_either() -> None:
    for direction in ("minimize", "maximize"):
        driver = StudyDriver(make_study(direction=direction), suggest_two, "score")
        validate(driver)
        assert driver.directions == (direction,)


# ---- What is told, on every kind of storage.


@pytest.fixture(params=["memory", "sqlite", "journal"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Opens a storage; again and again the same one, where it is on disk."""
    opened: list[RDBStorage] = []
    memory = InMemoryStorage()

    def open_it() -> Any:
        match request.param:
            case "sqlite":
                opened.append(RDBStorage(f"sqlite:///{tmp_path / 'study.db'}"))
                return opened[-1]
            case "journal":
                return JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
        return memory

    yield open_it
    for rdb in opened:
        rdb.remove_session()
        rdb.engine.dispose()


@dataclass
class Searched:
    """A study by hand: three trials complete, one pruned, one failed, one left to the end."""

    driver: StudyDriver
    heard: list[tuple[str, int, str]] = field(default_factory=list)

    def search(self) -> None:
        driver = self.driver
        trials, _ = driver.ask(6, "random")
        for epoch in (1, 2, 3):
            for trial in trials:
                if epoch == 1 or trial not in (3, 4):
                    driver.report(trial, epoch, (trial + 1) * epoch / 10)
            if epoch == 1:
                driver.prune(3)
                driver.fail(4, "RuntimeError: broken", "Traceback: the whole of it")
        for trial in (2, 0, 1):
            driver.complete(trial, (trial + 1) * 3 / 10)
        driver.fail_live("the run ended before the trial did")


@pytest.fixture
def searched(storage: Callable[[], Any]) -> Searched:
    heard: list[tuple[str, int, str]] = []

    def hear(study: optuna.Study, trial: FrozenTrial) -> None:
        heard.append((study.study_name, trial.number, trial.state.name))

    driver = StudyDriver(make_study(storage()), suggest_two, "accuracy", callbacks=[hear])
    searched = Searched(driver, heard)
    searched.search()
    return searched


def test_the_study_holds_what_was_told(searched: Searched, storage: Callable[[], Any]) -> None:
    study = optuna.load_study(study_name="test", storage=storage())
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "COMPLETE", "PRUNED", "FAIL", "FAIL"]
    assert study.best_trial.number == 2
    assert study.best_value == pytest.approx(0.9)
    assert study.trials[1].intermediate_values == pytest.approx({0: 0.2, 1: 0.4, 2: 0.6})
    assert study.trials[3].value == pytest.approx(0.4)  # its last report
    broken, left = study.trials[4:]
    run = {"dagsel:run": searched.driver.run}
    assert broken.user_attrs == run | {
        "dagsel:reason": "RuntimeError: broken",
        "dagsel:traceback": "Traceback: the whole of it",
    }
    assert left.user_attrs == run | {"dagsel:reason": "the run ended before the trial did"}
    assert left.intermediate_values == pytest.approx({0: 0.6, 1: 1.2, 2: 1.8})


def test_callbacks_hear_of_each_trial_that_was_told(searched: Searched) -> None:
    assert searched.heard == [
        ("test", 3, "PRUNED"),
        ("test", 4, "FAIL"),
        ("test", 2, "COMPLETE"),
        ("test", 0, "COMPLETE"),
        ("test", 1, "COMPLETE"),
    ]


def test_a_trial_that_has_ended_is_live_no_more(searched: Searched) -> None:
    for end in (searched.driver.prune, lambda trial: searched.driver.complete(trial, 1.0)):
        with pytest.raises(KeyError):
            end(0)
    searched.driver.fail_live("once more")
    assert len(searched.heard) == 5


def test_callbacks_may_stop_the_study_as_in_optuna() -> None:
    study = make_study()
    driver = StudyDriver(
        study, suggest_two, "accuracy", callbacks=[optuna.study.MaxTrialsCallback(2)]
    )
    driver.ask(3, "random")
    stopped = []
    for number in (0, 1):
        driver.complete(number, 0.5)
        stopped.append(driver.stopped)
    assert stopped == ["", "a callback has stopped the study"]
    with pytest.raises(RuntimeError, match="inside an objective function or a callback"):
        study.stop()
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    assert len(study.trials) == 5, "Optuna's own loop is not stopped by it"


@pytest.mark.parametrize("sampling", ["random", "study"])
def test_a_study_that_goes_on_draws_fresh_configurations(sampling: Sampling) -> None:
    def draws(study: optuna.Study, **known: Any) -> list[Any]:
        study.sampler = RandomSampler(seed=7)
        driver = StudyDriver(study, suggest_two, "accuracy", **known)
        configs, _ = driver.ask(3, sampling)
        for number in configs:
            driver.complete(number, 0.5)
        return list(configs.values())

    study = make_study()
    first, second = draws(study), draws(study)
    assert all(config not in first for config in second)
    assert draws(make_study()) == first, "an empty study draws what its seed says"
    other = make_study()
    other.add_trials(study.trials[:3])
    assert draws(other) == second, "and one with as many trials likewise"


def test_no_callback_leaves_a_trial_running() -> None:
    def raise_it(study: optuna.Study, trial: FrozenTrial) -> None:
        raise KeyboardInterrupt

    study = make_study()
    driver = StudyDriver(study, suggest_two, "accuracy", callbacks=[raise_it])
    driver.ask(3, "random")
    with pytest.raises(KeyboardInterrupt):
        driver.complete(1, 0.5)
    driver.fail_live("interrupted")
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "FAIL"]


class CountedReads(RDBStorage):
    """A database that counts how often trials are read."""

    n_reads = 0

    def _get_trials(self, *args: Any, **options: Any) -> Any:
        self.n_reads += 1
        return super()._get_trials(*args, **options)


def test_a_draw_reads_trials_of_a_database_only_if_others_have_some(tmp_path: Path) -> None:
    """Else each draw would read all live trials, of which a search may have thousands."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    storage = CountedReads(url)
    driver = StudyDriver(make_study(storage), suggest_two, "accuracy")
    driver.ask(1, "study")
    before = storage.n_reads
    for _ in range(5):
        driver.ask(1, "study")
    assert storage.n_reads == before
    theirs = optuna.load_study(study_name="test", storage=url)
    running = theirs.ask()
    theirs.enqueue_trial({"lr": 0.01, "n": 7})
    drawn, _ = driver.ask(1, "study")
    assert [*drawn.values()] == [{"lr": 0.01, "n": 7}]
    before = storage.n_reads
    driver.ask(1, "study")
    assert storage.n_reads > before  # somebody trains a trial there that may end
    theirs.tell(running, 0.5)
    driver.ask(1, "study")
    before = storage.n_reads
    driver.ask(1, "study")
    assert storage.n_reads == before


def test_trials_of_others_in_the_study_are_left_alone() -> None:
    study = make_study()
    theirs = study.ask()
    driver = StudyDriver(study, suggest_two, "accuracy")
    drawn, _ = driver.ask(2, "random")
    assert list(drawn) == [1, 2]
    driver.fail_live("the end")
    assert study.trials[theirs.number].state == TrialState.RUNNING


@pytest.mark.parametrize(
    "plot",
    [
        "plot_intermediate_values",
        "plot_optimization_history",
        "plot_param_importances",
        "plot_timeline",
        "plot_slice",
        "plot_parallel_coordinate",
    ],
)
def test_the_study_opens_in_optunas_visualization(searched: Searched, plot: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        figure = getattr(optuna.visualization, plot)(searched.driver.study)
    assert sum(len(trace.x if trace.x is not None else trace.dimensions) for trace in figure.data)


@pytest.mark.parametrize("n_bad", [0, 1, 9, 10])
def test_one_of_ten_configurations_has_to_be_one_that_can_be_trained(
    n_bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    checked: list[Any] = []

    def check(config: Any) -> None:
        checked.append(config)
        if len(checked) <= n_bad:
            raise ArithmeticError(f"no. {len(checked)}")

    driver = StudyDriver(make_study(), suggest_two, "loss")
    if n_bad == 10:
        with pytest.raises(ArithmeticError, match=r"^no\. 1\b") as caught:
            driver.validate(grid=False, check=check)
        assert f"configuration lr={checked[0]['lr']}, n=" in caught.value.__notes__[0]
    else:
        driver.validate(grid=False, check=check)
    assert len(checked) == min(10, n_bad + 1)
    warned = f"such trials fail: of {checked[0]} it is said: ArithmeticError: no. 1"
    assert (warned in caplog.text) == (0 < n_bad < 10)


def test_where_there_is_one_configuration_its_error_ends_the_search() -> None:
    def check(config: Any) -> None:
        raise ArithmeticError("it cannot")

    driver = StudyDriver(make_study(), lambda trial: {"n": trial.suggest_int("n", 1, 1)}, "loss")
    with pytest.raises(ArithmeticError, match="it cannot"):
        driver.validate(grid=True, check=check)
