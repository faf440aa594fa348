"""Commands of the user: each is performed once, wherever the driver is killed, or changes nothing.

The searches run in virtual time. A command that was not answered when the driver was killed is
given again under its id, as by a process that wrote it to a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.driver.consistency import without_interruptions
from dagsel.driver.inbox import Inbox, Order
from dagsel.driver.recovery import catch_up
from dagsel.driver.runner import Runner
from dagsel.driver.steered import BY_USER, ENDED_BY_USER, Steered
from dagsel.errors import CheckpointNotFoundError, SearchCancelledError, SearchError
from dagsel.flow import Clone, Commanded, Flow
from dagsel.flows import ASHA, HyperSched, Lookahead, RandomSearch
from dagsel.history.record import Record
from dagsel.messages import ENTRIES, Entry, SessionEnded, Turn
from dagsel.reopening import adopt
from dagsel.simulation import PowerLaw, SimulatedCluster
from dagsel.simulation.engine import VirtualEngine
from dagsel.simulation.run import _NoStates
from dagsel.steering import (
    AddTrial,
    CloneTrial,
    ExtendLimits,
    FinishSearch,
    PauseTrial,
    ResumeTrial,
    ScaleCluster,
    SetLimits,
    StopTrial,
    UserCommand,
)
from dagsel.storage.runs.journal import Journal
from dagsel.study import StudyDriver
from tests.storage.os_calls import os_calls

from .hand_engine import read_into

FLOWS: dict[str, Flow] = {
    "random search": RandomSearch(max_epochs=3, n_trials=5, n_concurrent=3),
    "asha": ASHA(max_epochs=4, n_trials=6, reduction_factor=2, n_concurrent=3),
    "long": RandomSearch(max_epochs=8, n_trials=5, n_concurrent=3),
    "hypersched": HyperSched(deadline="30 s", budget="60 worker-seconds", max_epochs=4),
    "lookahead": Lookahead(deadline="30 s", budget="60 worker-seconds", max_epochs=4),
}
N_SHARDS = 2
#: After so many looks for messages the search is told to finish: one that is paused would not.
LAST = 200


def space(trial: optuna.Trial) -> dict[str, Any]:
    config: dict[str, Any] = {"x": trial.suggest_float("x", 0.0, 1.0)}
    config["kind"] = trial.suggest_categorical("kind", ["a", "b"])
    if config["kind"] == "b":
        config["n"] = trial.suggest_int("n", 1, 4)
    return config


class Killed(BaseException):
    """The driver is killed."""


@dataclass
class Kept:
    """A journal that outlives the driver, which is killed right after one of its writes."""

    entries: list[Mapping[str, Any]] = field(default_factory=list)
    n_left: int | None = None

    def append(self, entries: Sequence[Entry]) -> None:
        self.entries.extend(map(ENTRIES.encode, entries))
        if entries and self.n_left is not None:
            self.n_left -= 1
            if self.n_left < 0:
                raise Killed


class Stored(Kept):
    """A journal in a folder. The driver is killed after so many calls of the operating system."""

    def __init__(self, folder: Path, n_calls: int) -> None:
        self.folder, self.n_left = folder, n_calls
        self.n_calls = 0

    @property
    def entries(self) -> list[Any]:  # type: ignore[override]
        return Journal(str(self.folder)).read()

    def append(self, entries: Sequence[Entry]) -> None:
        with os_calls(("open", "write", "close", "fsync", "replace", "mkdir"), self._counted):
            journal = self.__dict__.setdefault("journal", Journal(str(self.folder)))
            journal.append(list(map(ENTRIES.encode, entries)))

    def _counted(self, _: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.n_calls += 1
            if self.n_left is not None and self.n_calls > self.n_left:
                raise Killed
            return function(*args, **kwargs)

        return call


@dataclass
class Reached:
    """A store that has the state of each trial after its last reported epoch."""

    record: Record
    saved: set[int] = field(default_factory=set)  # clones that have a state to begin with

    def load_latest(
        self, trial: int, at_most: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], bytes, dict[str, Any]] | None:
        told = self.record.trials[trial]
        place = at_most or (len(told.epochs), N_SHARDS - 1)
        if place[0] == 0 and trial not in self.saved:
            return None
        meta = {"shard": 0, "visits": [*range(N_SHARDS)], "adoptions": len(told.adoptions)}
        return place, b"", meta

    def save(self, trial: int, *args: Any, **options: Any) -> None:
        self.saved.add(trial)

    def load(self, *args: Any, **options: Any) -> Any:
        raise CheckpointNotFoundError("nothing was trained")

    def list(self, trial: int, *, partial: bool = False) -> tuple[tuple[int, int], ...]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return getattr(_NoStates(), name)


@dataclass
class User:
    """Gives commands, each when trials have ended so many epochs; the last one after a while."""

    plan: Mapping[str, tuple[int, UserCommand]]  # by id
    answers: dict[str, int | BaseException | None] = field(default_factory=dict)
    n_looks: int = 0

    def look(self, inbox: Inbox, n_epochs: int) -> None:
        self.n_looks += 1
        for id_, (when, command) in self.plan.items():
            is_time = self.n_looks > LAST if id_ == "end" else n_epochs >= when
            if is_time and id_ not in self.answers:
                order = Order(command, id_)
                order.answer.add_done_callback(partial(self.hear, id_))
                inbox.post(order)

    def hear(self, id_: str, answer: Any) -> None:
        error = answer.exception()
        if not isinstance(error, Killed):
            self.answers.setdefault(id_, error or answer.result())


def session(flow: Flow, kept: Kept, user: User) -> Record:
    """One driver's part of a search: from the beginning of the journal, or from its end."""
    steered = Steered(flow.fresh())
    entries = [ENTRIES.decode(entry) for entry in kept.entries]
    entries = without_interruptions(entries, goes_on=True)
    record = read_into(Record("run", N_SHARDS), entries)
    catch_up(steered, entries, "the run")
    study = optuna.create_study()
    driver = StudyDriver(study, space, "loss", 0, run="run", sampler_seed=0, traits=flow.traits)
    driver.validate(grid=False, check=lambda config: None)
    adopt(driver, record)
    curves = PowerLaw(epoch_s=1.0)
    cluster = SimulatedCluster(n_workers=2, n_shards=N_SHARDS, max_workers=4)
    engine = VirtualEngine(curves, cluster, {"loss": curves})
    inbox, looks = Inbox(), engine.messages

    def messages(*, timeout_s: float) -> Any:
        user.look(inbox, record.n_epochs)
        return looks(timeout_s=min(timeout_s, 0.5))

    engine.messages = messages  # type: ignore[method-assign]
    engine.check_alive = lambda: None  # type: ignore[method-assign]  # a user may give it work
    states: Any = Reached(record, {t.number for t in record.trials.values() if t.adoptions})
    limits = asdict(record.limits or SetLimits())
    runner = Runner(steered, driver, engine, states, kept, record, "loss", inbox=inbox, **limits)
    try:
        runner.run()
    except BaseException as error:
        inbox.close(error)
        raise
    inbox.close()
    assert not study.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    return record


COMMANDS = st.one_of(
    st.builds(StopTrial, st.integers(0, 6)),
    st.builds(PauseTrial, st.integers(0, 6)),
    st.builds(ResumeTrial, st.integers(0, 6)),
    st.builds(CloneTrial, st.integers(0, 6), st.just({}) | st.just({"x": 0.25})),
    st.builds(AddTrial, st.sampled_from([{"x": 0.5, "kind": "a"}, {"x": 0.5}, {"x": 7.0}])),
    st.builds(ScaleCluster, st.integers(1, 5)),
    st.builds(ExtendLimits, st.none() | st.just(2.0), st.none() | st.just(5.0)),
)
PLANS = st.lists(st.tuples(st.integers(0, 12), COMMANDS), max_size=6).map(
    lambda some: {str(n): given for n, given in enumerate(some)} | {"end": (0, FinishSearch())}
)


def performed(name: str, plan: Mapping[str, tuple[int, UserCommand]], kills: list[int]) -> Record:
    """Search with drivers that are killed after so many writes; check that all is done once."""
    kept, user = Kept(), User(plan)
    for n_left in [*kills, None]:
        kept.n_left = n_left
        try:
            record = session(FLOWS[name], kept, user)
            break
        except Killed:
            continue
    assert record.finished
    assert not record.n_live
    entries = [ENTRIES.decode(entry) for entry in kept.entries]
    turns = [entry for entry in entries if isinstance(entry, Turn)]
    done = [turn.event for turn in turns if isinstance(turn.event, Commanded)]
    ids = [event.id for event in done]
    assert len(ids) == len({*ids})
    refused = {id_ for id_, answer in user.answers.items() if isinstance(answer, Exception)}
    assert not refused & {*ids}
    assert {id_ for id_ in user.answers if id_ not in refused} <= {*ids}
    added = [event.command for event in done if isinstance(event.command, AddTrial)]
    n_drawn = FLOWS[name].n_trials  # type: ignore[attr-defined]
    n_stopped = sum(isinstance(event.command, StopTrial) for event in done)
    assert len(added) <= len(record.trials) <= n_drawn + len(added) + n_stopped
    clones = [d for turn in turns for d in turn.decisions if isinstance(d, Clone)]
    assert len(clones) == sum(command.source is not None for command in added)
    for event in done:
        if isinstance(event.command, StopTrial):
            assert record.trials[event.command.trial].reason == BY_USER
    for clone in clones:
        (adoption,) = record.trials[clone.target].adoptions
        assert (adoption.after, adoption.source) == (0, clone.source)
    return record


@pytest.mark.parametrize("name", ["random search", "asha"])
@settings(max_examples=20)
@given(plan=PLANS, kills=st.lists(st.integers(0, 40), max_size=3))
def test_each_command_is_performed_once_wherever_the_driver_is_killed(
    name: str, plan: dict[str, tuple[int, UserCommand]], kills: list[int]
) -> None:
    performed(name, plan, kills)


def test_a_kill_after_any_entry_of_the_journal_changes_nothing_of_what_is_commanded() -> None:
    plan: dict[str, tuple[int, UserCommand]] = {
        "pause": (0, PauseTrial(2)),
        "stop": (1, StopTrial(1)),
        "clone": (5, CloneTrial(0, {"x": 0.25})),
        "add": (6, AddTrial({"x": 0.5, "kind": "a"})),
        "resume": (8, ResumeTrial(2)),
        "end": (0, FinishSearch()),
    }
    for n_left in range(24):
        record = performed("long", plan, [n_left])
        assert record.commands.keys() >= plan.keys() - {"end"}, n_left
        ends = {trial.reason for trial in record.trials.values()}
        assert ends == {BY_USER, "trained to the end"}, n_left
        assert len(record.trials) == 7


@settings(max_examples=25)
@given(
    name=st.sampled_from(["random search", "asha"]),
    moments=st.lists(st.tuples(st.integers(0, 14), st.booleans()), min_size=1, max_size=3),
    kill=st.none() | st.integers(0, 30),
)
def test_a_search_that_ctrl_c_has_ended_goes_on_as_if_it_had_not(
    name: str, moments: list[tuple[int, bool]], kill: int | None
) -> None:
    """Also where a second Ctrl-C was faster than the session's last entry."""
    kept, ended = Kept(), 0
    for moment, is_left_at_once in moments:
        record = session(FLOWS[name], kept, User({"it": (moment, FinishSearch(resumable=True))}))
        assert record.finished
        assert len(record.top) == bool(record.n_epochs)
        ended += bool(record.interrupted)
        if not is_left_at_once:
            kept.append([SessionEnded(0.0, record.seconds, record.worker_seconds)])
    kept.n_left = kill
    try:
        record = session(FLOWS[name], kept, User({}))
    except Killed:
        kept.n_left = None
        record = session(FLOWS[name], kept, User({}))
    undisturbed, _ = told(name, {})
    assert {n: t.params for n, t in record.trials.items()} == {
        n: t.params for n, t in undisturbed.trials.items()
    }
    reasons = {trial.reason for trial in record.trials.values()}
    assert reasons.isdisjoint({"the time or the budget is over", ENDED_BY_USER})
    if name == "random search":
        assert [len(t.epochs) for t in record.trials.values()] == [3] * 5
    whole = without_interruptions([ENTRIES.decode(e) for e in kept.entries], goes_on=False)
    assert not [e for e in whole if isinstance(e, Turn) and isinstance(e.event, Commanded)]
    n_ended = sum(not is_left_at_once for _, is_left_at_once in moments)
    assert sum(isinstance(entry, SessionEnded) for entry in whole) == n_ended


def test_a_kill_at_any_call_of_the_operating_system_performs_each_command_once(
    tmp_path: Path,
) -> None:
    plan: dict[str, tuple[int, UserCommand]] = {
        "stop": (1, StopTrial(1)),
        "clone": (3, CloneTrial(0, {"x": 0.25})),
        "limits": (3, ExtendLimits(deadline_s=1000.0)),
        "add": (4, AddTrial({"x": 0.5, "kind": "a"})),
        "workers": (4, ScaleCluster(3)),
    }
    whole = Stored(tmp_path / "whole", 10**9)
    session(FLOWS["random search"], whole, User(plan))
    assert whole.n_calls > 60
    for n_calls in range(whole.n_calls):
        stored, user = Stored(tmp_path / str(n_calls), n_calls), User(plan)
        with pytest.raises(Killed):
            session(FLOWS["random search"], stored, user)
        again = Stored(stored.folder, 10**9)
        record = session(FLOWS["random search"], again, user)
        assert record.finished
        turns = [entry.get("event") for entry in again.entries if entry["is"] == "turn"]
        ids = [event["id"] for event in turns if event and event["is"] == "Commanded"]
        assert sorted(ids) == sorted(plan), n_calls
        assert len(record.trials) == 7, n_calls
        assert (record.wanted, record.trials[1].reason) == (3, BY_USER)


def told(name: str, plan: Mapping[str, tuple[int, UserCommand]]) -> tuple[Record, User]:
    user = User({**plan, "end": (0, FinishSearch())})
    return session(FLOWS[name], Kept(), user), user


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (StopTrial(77), "trial 77 cannot be stopped: the search has no such trial"),
        (PauseTrial(77), "cannot be paused"),
        (ResumeTrial(1), "trial 1 was not paused by a command"),
        (CloneTrial(77, {}), "trial 77 cannot be cloned"),
        (CloneTrial(0, {"y": 1}), "does not suggest 'y' here; it suggests x, kind"),
        (CloneTrial(0, {"x": 3.0}), "x=3.0 is outside of the space"),
        (CloneTrial(0, {"kind": "c"}), "kind='c' is outside of the space"),
        (AddTrial({"x": 0.5}), "'kind' is missing"),
        (AddTrial({"x": 0.5, "kind": "b"}), "'n' is missing"),
        (AddTrial({"x": "half", "kind": "a"}), "outside of the space"),
        (ScaleCluster(5), "5 workers are more than the cluster can have: 4"),
        (ExtendLimits(), "deadline=, budget=, or both"),
        (ExtendLimits(budget="2 USD"), "budget='2 USD' is money, and what a worker costs is not"),
    ],
)
def test_a_command_that_cannot_be_performed_says_why_and_changes_nothing(
    command: UserCommand, why: str
) -> None:
    record, user = told("random search", {"it": (4, command)})
    undisturbed, _ = told("random search", {})
    with pytest.raises(SearchError, match=why):
        raise user.answers["it"]  # type: ignore[misc]
    assert {n: t.params for n, t in record.trials.items()} == {
        n: t.params for n, t in undisturbed.trials.items()
    }
    assert record.n_epochs == undisturbed.n_epochs


def test_a_trial_that_has_ended_takes_no_command() -> None:
    commands: list[UserCommand] = [StopTrial(0), PauseTrial(0), CloneTrial(0, {})]
    again = {str(n): (4, command) for n, command in enumerate(commands)}
    _, user = told("random search", {"it": (1, StopTrial(0)), **again})
    assert user.answers["it"] is None
    for id_ in again:
        with pytest.raises(SearchError, match=r"trial 0 .*it is \w+ \(stopped by the user\)"):
            raise user.answers[id_]  # type: ignore[misc]


def test_a_paused_trial_rests_until_it_is_resumed() -> None:
    plan: dict[str, tuple[int, UserCommand]] = {"pause": (1, PauseTrial(0))}
    rested, _ = told("random search", plan)
    assert rested.trials[0].reason == ENDED_BY_USER
    assert all(rested.trials[n].state == "complete" for n in (1, 2, 3, 4))
    went_on, _ = told("random search", {**plan, "resume": (9, ResumeTrial(0))})
    assert went_on.trials[0].state == "complete"
    at = [t.epochs[-1].seconds for t in went_on.trials.values()]
    assert at[0] == max(at)


def test_a_search_that_waits_for_the_user_alone_says_so(caplog: pytest.LogCaptureFixture) -> None:
    told("random search", {"pause": (1, PauseTrial(0)), "resume": (9, ResumeTrial(0))})
    assert "nothing is left" not in caplog.text
    told("random search", {"pause": (1, PauseTrial(0))})
    assert caplog.text.count("what a command has paused (trial 0)") == 1


def test_a_clone_trains_the_epochs_that_its_source_had_left() -> None:
    record, user = told("random search", {"it": (4, CloneTrial(0, {"x": 0.25}))})
    number = user.answers["it"]
    assert isinstance(number, int)
    clone = record.trials[number]
    (adoption,) = clone.adoptions
    assert len(clone.epochs) == 3 - adoption.source_epoch
    assert clone.params == {**record.trials[0].params, "x": 0.25}
    assert clone.config == clone.params


def test_the_text_of_a_number_is_that_number() -> None:
    record, user = told("random search", {"it": (1, AddTrial({"x": "0.25", "kind": "a"}))})
    number = user.answers["it"]
    assert isinstance(number, int)
    added = record.trials[number]
    assert added.params == added.config == {"x": 0.25, "kind": "a"}


def test_the_cluster_has_the_workers_that_were_asked_for() -> None:
    plan: dict[str, tuple[int, UserCommand]] = {"more": (2, ScaleCluster(4))}
    record, _ = told("long", plan)
    assert record.n_workers == 4
    assert told("long", {})[0].n_workers == 2
    fewer, _ = told("long", {**plan, "fewer": (12, ScaleCluster(1))})
    assert (fewer.n_workers, fewer.wanted) == (1, 1)
    assert fewer.n_epochs == record.n_epochs


def test_a_search_ends_by_the_deadline_and_the_budget_that_it_was_given_last() -> None:
    undisturbed, _ = told("long", {})
    short, _ = told("long", {"it": (4, ExtendLimits(deadline_s=2))})
    assert short.limits is not None
    assert short.limits.deadline_s == pytest.approx(short.seconds)
    assert short.seconds < undisturbed.seconds
    assert "the time or the budget is over" in {trial.reason for trial in short.trials.values()}
    cheap, _ = told("long", {"it": (4, ExtendLimits(budget="6 worker-seconds"))})
    assert cheap.limits is not None
    assert cheap.limits.budget_s == pytest.approx(cheap.worker_seconds)
    assert cheap.worker_seconds < undisturbed.worker_seconds
    plan: dict[str, tuple[int, UserCommand]] = {
        "short": (4, ExtendLimits(deadline_s=2)),
        "long": (5, ExtendLimits(deadline_s=1000)),
    }
    longer, _ = told("long", plan)
    assert {trial.reason for trial in longer.trials.values()} == {"trained to the end"}


@pytest.mark.parametrize("command", [ScaleCluster(3), ExtendLimits(deadline_s=9.0)])
def test_a_procedure_that_plans_with_its_own_limits_keeps_them(command: UserCommand) -> None:
    _, user = told("hypersched", {"it": (1, command)})
    with pytest.raises(SearchError, match="has planned stages and workers by a deadline"):
        raise user.answers["it"]  # type: ignore[misc]


def test_a_cancelled_search_ends_at_once() -> None:
    inbox = Inbox()
    inbox.cancel()
    with pytest.raises(SearchCancelledError):
        inbox.next()


def test_an_inbox_that_is_closed_refuses_what_is_in_it_and_what_comes() -> None:
    inbox = Inbox()
    before = inbox.post(Order(FinishSearch()))
    inbox.close()
    for answer in (before, inbox.post(Order(FinishSearch()))):
        with pytest.raises(SearchError, match="the search has ended"):
            answer.result(0)
