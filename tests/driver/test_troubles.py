"""A run ends where all its trials fail in one way before any was scored, and only there.

- Five trials that fail alike are enough, if none that has begun did otherwise.
- Another line, another class of error, a loss of NaN, a lost worker: the run goes on.
- Once a trial was scored, nothing ends the run any more.
- A trial that is being trained counts, unless it has begun after enough have failed; one that waits
  does not.
- Configurations that are refused before they are sent do not end a search that goes on: one has
  passed the check before the run began.
- A line of code that workers cannot read, as of a notebook, is read here.
- A journal that ends so is read as what it was.
- A run also ends where nothing is under way for a minute and its flow waits for nothing.
"""

from __future__ import annotations

import json
from typing import Any

import optuna
import pytest

from dagsel.dispatch.events import TrialRests, UnitTrains
from dagsel.dispatch.units import Unit
from dagsel.driver.runner import Runner
from dagsel.driver.troubles import ENOUGH, Troubles
from dagsel.errors import AllTrialsFailedError, SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Decision,
    Event,
    Finish,
    Pause,
    Reported,
    Scale,
    Stop,
    Tick,
    Train,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.history.record import Record
from dagsel.messages import ENTRIES, Message, TrialReport, Turn
from dagsel.study import StudyDriver
from dagsel.workloads.raised import Raised

from .hand_engine import HandEngine, Kept, epoch_of, read_into, search
from .scripted import Scripted

HERE = Raised("ValueError", "no", "train.py:3 loss", '  File "train.py", line 3, in loss')
THERE = Raised("ValueError", "no", "train.py:4 loss")
OTHER = Raised("TypeError", "no", "train.py:3 loss")
EARLY = Raised("ValueError", "no", "train.py:1 model", by_check=True)


def drawn(n: int) -> Record:
    record = Record("run", n_shards=1)
    params: dict[int, Any] = {trial: {} for trial in range(n)}
    record.add(Turn(Asked(tuple(params)), (), params=params))
    record.decide([Train(trial, 1) for trial in params])
    return record


def fail(record: Record, trial: int, raised: Raised | None) -> None:
    record.add(Turn(TrialFailed(trial, "no"), (), raised=raised))


def watch(*fails: Raised | None, n: int = 30, begun: tuple[int, ...] = ()) -> Troubles:
    record = drawn(0)
    troubles = Troubles(record)
    record.add(Turn(Asked(tuple(range(n))), (), params={trial: {} for trial in range(n)}))
    for trial in (*begun, *range(len(fails))):
        troubles.begins(trial)
    for trial, raised in enumerate(fails):
        fail(record, trial, raised)
    return troubles


def test_five_that_fail_alike_end_the_run() -> None:
    assert watch(*[HERE] * (ENOUGH - 1)).verdict is None
    verdict = watch(*[HERE] * ENOUGH).verdict
    assert verdict is not None
    assert verdict.text.splitlines() == [
        "all trials that have ended (5) failed alike, before any was scored:",
        '  File "train.py", line 3, in loss',
        "ValueError: no",
    ]


@pytest.mark.parametrize("other", [THERE, OTHER, EARLY, None])
@pytest.mark.parametrize("place", [0, ENOUGH])
def test_one_that_fails_otherwise_lets_it_go_on(other: Raised | None, place: int) -> None:
    fails: list[Raised | None] = [HERE] * (2 * ENOUGH)
    fails.insert(place, other)
    assert watch(*fails).verdict is None


def test_a_trial_that_is_being_trained_counts() -> None:
    troubles = watch(*[HERE] * ENOUGH, begun=(20,))
    assert troubles.verdict is None
    fail(troubles.record, 20, HERE)
    assert troubles.verdict is not None


def test_those_that_are_refused_before_they_are_sent_end_no_search_that_goes_on() -> None:
    troubles = watch(*[EARLY] * 30, n=30)
    assert troubles.verdict is None
    troubles.record.decide([Finish()])
    assert troubles.verdict is not None


def test_a_line_that_workers_cannot_read_is_read_here() -> None:
    place = f'  File "{__file__}", line 1, in loss'
    unread = Raised("ValueError", "no", "x", f"{place}\n{place}\n    known")
    text = watch(*[unread] * ENOUGH).verdict
    assert text is not None
    assert text.text.splitlines()[1:-1] == [
        place,
        '    """A run ends where all its trials fail in one way before any was scored, and only '
        "there.",
        place,
        "    known",
    ]


def test_those_that_lived_as_a_driver_was_lost_may_have_begun() -> None:
    record = drawn(ENOUGH + 1)
    for trial in range(ENOUGH):
        fail(record, trial, HERE)
    troubles = Troubles(record)
    assert troubles.verdict is None
    fail(record, ENOUGH, HERE)
    assert troubles.verdict is not None


def test_a_trial_that_begins_after_enough_have_failed_does_not_count() -> None:
    """Where a metric raises, the next trial trains already as one fails."""
    troubles = watch(*[HERE] * (ENOUGH - 1), begun=(20,))
    fail(troubles.record, ENOUGH - 1, HERE)
    troubles.begins(21)
    assert troubles.verdict is None
    fail(troubles.record, 20, HERE)
    assert troubles.verdict is not None


def test_once_a_trial_was_scored_the_run_goes_on() -> None:
    troubles = watch(*[HERE] * (ENOUGH - 1))
    trained, scored, *_ = epoch_of(10, 1, 0.5)
    troubles.record.add(trained)  # type: ignore[arg-type]
    troubles.record.add(scored)  # type: ignore[arg-type]
    assert not troubles.record.has_scored  # a metric of the whole set may raise yet
    troubles.record.add(Turn(Reported(10, 1, 0.5, {"loss": 0.5}, 1.0), ()))
    for trial in range(ENOUGH - 1, 10):
        fail(troubles.record, trial, HERE)
    assert troubles.verdict is None


@pytest.mark.parametrize(("stopped", "ends"), [(False, True), (True, False)])
def test_a_search_that_ends_is_judged_by_all_its_trials(stopped: bool, ends: bool) -> None:
    troubles = watch(HERE, HERE, n=3)
    if stopped:
        troubles.record.decide([Stop(2, "")])
    else:
        fail(troubles.record, 2, HERE)
    troubles.record.decide([Finish()])
    assert (troubles.verdict is not None) is ends


def run_until_failed(n: int) -> tuple[HandEngine, Kept, optuna.Study, Record]:
    """A search of which trials 0 to 4 of `n` fail alike on the cluster."""

    def fails(engine: HandEngine) -> list[Message]:
        begun = [UnitTrains(Unit("train", trial, 1, 0), "w") for trial in range(ENOUGH)]
        return [*begun, *(TrialReport(t, HERE.reason, "", HERE) for t in range(ENOUGH))]

    def answer(event: Event) -> list[Decision]:
        return [Train(trial, 1) for trial in event.trials] if isinstance(event, Asked) else []

    class Flow(Scripted):
        def handle(self, event: Event) -> list[Decision]:
            return answer(event)

    engine = HandEngine([fails])
    kept, record = Kept(engine), Record("run", n_shards=1)
    study = optuna.create_study(direction="minimize")
    driver = StudyDriver(study, lambda trial: {"x": trial.suggest_float("x", 0, 1)}, "loss")
    runner = Runner(Flow([Ask(n)], answer), driver, engine, kept, kept, record, "loss")
    with pytest.raises(AllTrialsFailedError, match="ValueError: no"):
        runner.run()
    return engine, kept, study, record


@pytest.mark.parametrize("n", [ENOUGH, 30])
def test_the_runner_writes_the_end_and_tells_all_trials_as_failed(n: int) -> None:
    engine, kept, study, record = run_until_failed(n)
    assert {trial.state.name for trial in study.trials} == {"FAIL"}
    assert len(study.trials) == n
    assert sorted(set(engine.all_told("stop"))) == list(range(n))
    assert record.finished
    # It is written before it is told, and read as what it was.
    entries = [ENTRIES.decode(json.loads(json.dumps(entry))) for entry in kept.entries]
    read = read_into(Record("run"), entries)
    assert read.finished
    assert read.failed_alike.endswith("ValueError: no")
    assert {trial.state for trial in read.trials.values()} == {"failed"}
    assert [trial.raised for trial in read.trials.values()][:ENOUGH] == [HERE] * ENOUGH
    assert Troubles(read).verdict is None  # it is said once


def test_a_configuration_that_is_refused_among_others_ends_nothing() -> None:
    def check(config: Any) -> None:
        if config["x"] < 0.5:
            raise ValueError("too small")

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked(trials):
                return [Train(trial, 1) for trial in trials]
            case TrialFailed():
                failed.append(event.trial)
                return [Wake(1e9)]
        return [Finish()]

    failed: list[int] = []
    done = search(
        [Ask(40)],
        answer,
        lambda engine: epoch_of(engine.all_told("submit")[0][0][0], 1, 0.5),
        check=check,
    )
    assert ENOUGH <= len(failed) < 40
    states = [t.state for t in done.record.trials.values() if t.state != "failed"]
    assert sorted(states) == ["complete", *["pruned"] * (39 - len(failed))]


def passes(seconds: float) -> Any:
    def wait(engine: HandEngine) -> list[Message]:
        engine.seconds += seconds
        return []

    return wait


def rests(event: Event) -> list[Decision]:
    """Train each trial for an epoch, and then do nothing more."""
    return [Train(trial, 1) for trial in event.trials] if isinstance(event, Asked) else []


def pauses(event: Event) -> list[Decision]:
    """Pause a trial in its first epoch, and then do nothing more."""
    return [*rests(event), Pause(0)] if isinstance(event, Asked) else []


@pytest.mark.parametrize(
    ("begin", "answer", "happens"),
    [
        ([], lambda event: [], []),
        ([Ask(0)], lambda event: [], []),
        ([Ask(2)], lambda event: [], []),
        ([Ask(1)], rests, [lambda engine: epoch_of(0, 1, 0.5)]),
        ([Ask(1)], pauses, [lambda engine: [TrialRests(0, 2)]]),
    ],
)
def test_a_flow_that_waits_for_nothing_does_not_hang(
    begin: list[Decision], answer: Any, happens: list[Any]
) -> None:
    told = "for 60 s no trial has trained, and the flow waits for nothing: .* Finish"
    with pytest.raises(SearchError, match=told):
        search(begin, answer, *happens, *[passes(25.0)] * 4)


def loses_all(engine: HandEngine) -> list[Message]:
    engine.n_workers = 0
    return []


@pytest.mark.parametrize(
    ("begin", "wanted"),
    [
        ([Wake(200.0)], 1),
        ([Scale(9)], 1),  # more workers may come
        ([Ask(1)], 0),  # all have gone
    ],
)
def test_a_flow_may_wait(begin: list[Decision], wanted: int) -> None:
    def ends(engine: HandEngine) -> list[Message]:
        engine.n_workers = 9
        return []

    def answer(event: Event) -> list[Decision]:
        if isinstance(event, WorkersChanged | Tick):
            return [Finish()]
        return []

    engine = HandEngine((), n_workers=wanted or 1)
    search(
        begin,
        answer,
        *([] if wanted else [loses_all]),
        *[passes(50.0)] * 3,
        ends,
        passes(100.0),
        engine=engine,
    )


def test_a_trial_that_trains_for_long_is_waited_for() -> None:
    happens = [*[passes(50.0)] * 4, lambda engine: epoch_of(0, 1, 0.5)]

    def answer(event: Event) -> list[Decision]:
        return [Finish()] if isinstance(event, Reported) else rests(event)

    assert search([Ask(1)], answer, *happens).record.finished
