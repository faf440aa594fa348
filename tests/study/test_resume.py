"""A search by hand whose driver dies goes on as if it never had, on every kind of storage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
import pytest
from optuna.samplers import NSGAIISampler, QMCSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from dagsel.errors import SearchError
from dagsel.study import Adopted, StudyDriver


def mixed(trial: optuna.Trial) -> dict[str, Any]:
    """Conditional, so that samplers have to find out which parameters are common."""
    trial.set_user_attr("space", "mixed")
    config = {"lr": trial.suggest_float("lr", 1e-4, 1, log=True)}
    if trial.suggest_categorical("kind", ["a", "b"]) == "a":
        config["momentum"] = trial.suggest_float("momentum", 0, 1)
    return config | {"n": trial.suggest_int("n", 1, 64, log=True)}


def flat(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0, 1), "y": trial.suggest_float("y", -1, 1)}


def finite(trial: optuna.Trial) -> dict[str, Any]:
    return {"n": trial.suggest_int("n", 0, 6), "s": trial.suggest_float("s", 0.1, 0.7, step=0.2)}


@dataclass
class Search:
    """Asks, reports and tells in turn, and keeps a journal of it."""

    driver: StudyDriver
    sampling: Any = "study"
    journal: dict[int, Adopted] = field(default_factory=dict)
    configs: dict[int, Any] = field(default_factory=dict)

    def ask(self, n: int) -> None:
        configs, _ = self.driver.ask(n, self.sampling)
        self.configs |= configs
        for number in configs:
            about = self.driver.params(number), self.driver.attrs(number)
            self.journal[number] = Adopted(about[0], attrs=about[1])

    def step(self, *, enqueue: bool = False) -> None:
        """Draw one, let each live trial report, and end those whose time has come."""
        if enqueue:
            self.driver.study.enqueue_trial({"lr": 0.5, "x": 0.5})
        self.ask(1)
        for number, trial in list(self.journal.items()):
            if trial.state != "running":
                continue
            epoch = len(trial.reports) + 1
            value = math.sin(number * 7 + epoch)
            self.driver.report(number, epoch, value)
            trial = replace(trial, reports=(*trial.reports, (epoch, value)), values=(value,))
            if number % 4 == 1 and epoch == 1:
                trial = replace(trial, state="failed", reason="broken", traceback="the whole")
                self.driver.fail(number, "broken", "the whole")
            elif number % 3 == 0 and epoch == 2:
                trial = replace(trial, state="pruned")
                self.driver.prune(number)
            elif epoch == 3:
                trial = replace(trial, state="complete")
                self.driver.complete(number, value)
            self.journal[number] = trial

    def again(self, study: optuna.Study) -> Search:
        """Go on in another process, with what the journal holds."""
        old = self.driver
        driver = StudyDriver(
            study,
            old.space,
            "loss",
            seed=old.seed,
            run=old.run,
            sampler_seed=old.sampler_seed,
            n_before=old.n_before,
        )
        assert driver.adopt(self.journal) == self.configs
        return Search(driver, self.sampling, dict(self.journal), dict(self.configs))


def make_study(storage: Any, sampler: Any = None) -> optuna.Study:
    return optuna.create_study(
        study_name="test", storage=storage, sampler=sampler, load_if_exists=True
    )


def contents(study: optuna.Study) -> list[Any]:
    return [
        (t.number, t.state, t.value, t.params, t.intermediate_values, t.user_attrs)
        for t in study.trials
    ]


CASES: dict[str, tuple[Any, Any, Any]] = {
    "tpe": (mixed, lambda seed: TPESampler(seed=seed, n_startup_trials=3), "study"),
    "independent tpe": (
        mixed, lambda seed: TPESampler(seed=seed, n_startup_trials=3, multivariate=False), "study"),
    "random": (mixed, lambda seed: RandomSampler(seed), "study"),
    "uniform": (mixed, lambda seed: None, "random"),
    "finite tpe": (finite, lambda seed: TPESampler(seed=seed, n_startup_trials=3), "study"),
    "grid": (finite, lambda seed: None, "grid"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_drawn_after_a_death_is_what_would_have_been(
    case: str, open_storage: Callable[[], Any]
) -> None:
    space, sampler, sampling = CASES[case]
    whole = Search(StudyDriver(make_study(None, sampler(5)), space, "loss", run="r"), sampling)
    for n in range(14):
        whole.step(enqueue=n == 7)
    parts = Search(
        StudyDriver(make_study(open_storage(), sampler(5)), space, "loss", run="r"), sampling
    )
    for n in (1, 6, 7):
        for step in range(n):
            parts.step(enqueue=n == 7 and step == 0)
        if n != 7:
            # Another seed: what is drawn comes from that of the run.
            parts = parts.again(make_study(open_storage(), sampler(6)))
    assert parts.configs == whole.configs
    assert contents(parts.driver.study) == contents(whole.driver.study)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("open_storage", ["sqlite", "journal"], indirect=True)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: QMCSampler(seed=1, warn_independent_sampling=False),
        lambda: NSGAIISampler(seed=1, population_size=3),
    ],
)
def test_what_a_sampler_has_noted_in_the_study_survives(
    sampler: Any, open_storage: Callable[[], Any]
) -> None:
    def begin(storage: Any) -> Search:
        return Search(StudyDriver(make_study(storage, sampler()), flat, "loss", seed=4, run="r"))

    whole, parts = begin(None), begin(open_storage())
    for n in range(30):
        if n in (8, 25):
            parts = parts.again(make_study(open_storage(), sampler()))
        whole.step(enqueue=n == 22)
        parts.step(enqueue=n == 22)
    assert parts.configs == whole.configs
    assert len({str(config) for config in whole.configs.values()}) > 20


def dead(open_storage: Callable[[], Any]) -> Search:
    search = Search(
        StudyDriver(
            make_study(open_storage(), TPESampler(seed=1, n_startup_trials=2)), mixed, "loss"
        )
    )
    for _ in range(9):  # trials 7 and 8 are live
        search.step()
    return search


def test_the_study_is_brought_in_line_with_the_journal(open_storage: Callable[[], Any]) -> None:
    # The journal is ahead of the study: it is written first.
    search = dead(open_storage)
    ended, still = 7, 8
    search.journal[ended] = replace(
        search.journal[ended],
        state="complete",
        reports=((1, 0.5), (2, 0.3), (3, 0.4)),
        values=(0.3,),
    )
    search = search.again(make_study(open_storage()))
    trials = search.driver.study.trials
    assert [trial.state.name for trial in trials] == [
        {"running": "RUNNING", "complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}[
            t.state
        ]
        for t in search.journal.values()
    ]
    for number, adopted in search.journal.items():
        if number != ended:
            assert trials[number].intermediate_values == adopted.steps
    assert trials[ended].value == 0.3
    assert trials[ended].intermediate_values.keys() == {0, 1, 2}
    assert trials[1].user_attrs == {
        "space": "mixed",
        "dagsel:run": search.driver.run,
        "dagsel:reason": "broken",
        "dagsel:traceback": "the whole",
    }
    search.driver.report(still, 3, 0.1)
    search.driver.complete(still, 0.1)
    assert search.driver.study.trials[still].value == 0.1


@pytest.mark.parametrize("open_storage", ["sqlite", "journal"], indirect=True)
def test_what_the_journal_does_not_know_has_failed(open_storage: Callable[[], Any]) -> None:
    search = dead(open_storage)
    search.driver.ask(2, "study")
    theirs = search.driver.study.ask()
    search = search.again(make_study(open_storage()))
    *known, one, two, other = search.driver.study.trials
    assert len(known) == 9
    assert one.state == two.state == TrialState.FAIL
    assert one.user_attrs["dagsel:reason"] == "the driver died before it was recorded"
    assert (other.number, other.state) == (theirs.number, TrialState.RUNNING)
    search.ask(1)
    assert search.configs.keys() == {*range(9), 12}


@pytest.mark.parametrize("open_storage", ["sqlite", "journal"], indirect=True)
def test_after_an_end_that_was_told_a_new_trial_stands_for_the_old(
    open_storage: Callable[[], Any],
) -> None:
    # As after Ctrl-C: Optuna lets no trial that has been told go on.
    search = dead(open_storage)
    for round_ in (1, 2):
        search.driver.fail_live("interrupted")
        search = search.again(make_study(open_storage()))
        study = search.driver.study
        assert len(study.trials) == 9 + 2 * round_
        for number, trial in zip((7, 8), study.trials[-2:], strict=True):
            assert trial.state == TrialState.RUNNING
            assert trial.params == study.trials[number].params
            assert trial.intermediate_values == study.trials[number].intermediate_values
            assert trial.user_attrs["dagsel:trial"] == number
            assert trial.system_attrs == study.trials[number].system_attrs != {}
    for number in (7, 8):
        search.driver.report(number, 9, 0.125)
        search.driver.complete(number, 0.125)
    assert [trial.value for trial in study.trials[-2:]] == [0.125] * 2
    search.ask(1)
    assert max(search.configs) == 13


def boosted(trial: optuna.Trial) -> dict[str, Any]:
    boost = trial.user_attrs.get("boost", 0)
    return {"lr": trial.suggest_float("lr", 0.0, 1.0), "boost": boost, "of": trial.study.study_name}


def test_a_space_finds_again_what_a_trial_was_enqueued_with(
    open_storage: Callable[[], Any],
) -> None:
    study = make_study(open_storage())
    study.enqueue_trial({"lr": 0.4}, user_attrs={"boost": 5})
    search = Search(StudyDriver(study, boosted, "loss", seed=1))
    search.ask(2)
    assert [config["boost"] for config in search.configs.values()] == [5, 0]
    again = make_study(open_storage())
    search.again(again)  # the configurations are equal
    assert [trial.user_attrs.get("boost") for trial in again.trials] == [5, None]


def test_a_lost_study_is_filled_at_the_same_numbers() -> None:
    study = make_study(None)
    study.add_trials([create_trial(value=1.0), create_trial(value=2.0)])
    search = Search(StudyDriver(study, mixed, "loss"))
    search.ask(3)
    again = search.again(make_study(None))
    trials = again.driver.study.trials
    assert [trial.state.name for trial in trials] == ["FAIL"] * 2 + ["RUNNING"] * 3
    assert [trial.params for trial in trials[2:]] == [trial.params for trial in study.trials[2:]]


def test_a_study_with_other_trials_in_their_places_is_refused() -> None:
    search = dead(lambda: None)
    other = make_study(None)
    StudyDriver(other, mixed, "loss").ask(2, "random")
    before = contents(other)
    with pytest.raises(SearchError, match=r"trial 0 of study 'test' is not of run .*; resume with"):
        search.again(other)
    assert contents(other) == before


@pytest.mark.parametrize("space", [flat, lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1)}])
def test_another_space_is_refused(space: Any) -> None:
    search = dead(lambda: None)
    driver = StudyDriver(make_study(None), space, "loss", run=search.driver.run)
    with pytest.raises(SearchError, match="the space is not the one that trial 0 was drawn from"):
        driver.adopt(search.journal)
    assert driver.study.trials == []
