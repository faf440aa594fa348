"""A runner whose engine is a test: what it is told is written down, what comes back is by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna

from dagsel.dispatch.units import Round, Unit
from dagsel.driver.runner import Runner
from dagsel.errors import CheckpointNotFoundError
from dagsel.flow import DeadlineReached, Decision, Event, Finish
from dagsel.history.record import Record
from dagsel.messages import ENTRIES, Entry, Message, StatePlace, UnitRecord
from dagsel.planning.bill import Bill
from dagsel.planning.capacity import ClusterCapacity
from dagsel.reopening import adopt
from dagsel.study import StudyDriver

from .scripted import Scripted

#: What happens between two turns of the runner: messages, or a change of the engine and none.
Happens = Callable[["HandEngine"], Sequence[Message]]


def read_into(record: Record, entries: Iterable[Entry]) -> Record:
    """Take the entries of a journal into a record; return it."""
    for entry in entries:
        record.add(entry)
    return record


@dataclass
class HandEngine:
    """Performs nothing."""

    happens: Sequence[Happens]
    n_workers: int = 2
    most_workers: int | None = None
    capacity: ClusterCapacity = field(default_factory=ClusterCapacity)
    bill: Bill = field(default_factory=Bill)
    seconds: float = 0.0
    told: list[tuple[str, Any]] = field(default_factory=list)  # in order
    n_heard: int = 0
    stall_s: float = 60.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds

    def submit(self, round_: Round, configs: Mapping[int, Mapping[str, Any]]) -> None:
        self.told.append(("submit", [(chain.trial, chain.epochs) for chain in round_.chains]))

    def stop(self, trial: int) -> None:
        self.told.append(("stop", trial))

    def raised(self, trial: int) -> None:
        return None

    def release(self, trial: int, epoch: int) -> None:
        self.told.append(("release", (trial, epoch)))

    def tell(self, command: Any) -> None:
        self.told.append(("tell", command))

    def check(
        self, trial: int, number: int, place: StatePlace, configs: Any, *, halvings: int = 0
    ) -> None:
        self.told.append(("check", (trial, number, place)))

    @property
    def why_fixed(self) -> str:
        return ""

    def limit(self, at: float) -> None:
        self.told.append(("limit", at))

    def scale(self, n_workers: int) -> None:
        self.told.append(("scale", n_workers))

    def messages(self, *, timeout_s: float) -> Iterator[Message]:
        assert self.n_heard < len(self.happens), f"the search goes on: {self.told}"
        happens = self.happens[self.n_heard]
        self.n_heard += 1
        yield from happens(self)

    def check_alive(self) -> None:
        pass

    def all_told(self, what: str) -> list[Any]:
        """What it was told of one kind."""
        return [about for kind, about in self.told if kind == what]


@dataclass
class Kept:
    """A store that says what was done to it, and a journal that says when it was written."""

    engine: HandEngine
    entries: list[Mapping[str, Any]] = field(default_factory=list)

    def append(self, entries: Sequence[Entry]) -> None:
        self.entries.extend(map(ENTRIES.encode, entries))
        self.engine.told.append(("written", len(self.entries)))

    def load_latest(
        self, trial: int, at_most: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], bytes, dict[str, Any]] | None:
        return None if at_most is None else (at_most, b"", {})

    def load(
        self, trial: int, epoch: int, position: int, *, partial: bool = False
    ) -> tuple[bytes, dict[str, Any]]:
        raise CheckpointNotFoundError("nothing was trained")

    def save(
        self, trial: int, epoch: int, position: int, blob: bytes, meta: Mapping[str, Any]
    ) -> None:
        self.engine.told.append(("save", (trial, epoch, position)))

    def keep_check(
        self, trial: int, number: int, epoch: int, position: int, *, partial: bool
    ) -> None:
        self.engine.told.append(("keep_check", (trial, number)))

    def load_check(self, trial: int, number: int) -> tuple[bytes, dict[str, Any]]:
        raise CheckpointNotFoundError("nothing was trained")

    def load_scores(self, trial: int, kind: Any, number: int, shard: int) -> bytes:
        raise CheckpointNotFoundError("nothing was scored")

    def drop_scores(self, trial: int, kind: Any, number: int) -> None:
        self.engine.told.append(("drop scores", (trial, kind, number)))

    def delete(
        self, trial: int, epoch: int, position: int, *, partial: bool = False, digest: str = ""
    ) -> None:
        self.engine.told.append(("delete", (trial, epoch, position)))

    def trials(self) -> Sequence[int]:
        return range(100)

    def drop(self, trial: int) -> None:
        self.engine.told.append(("drop", trial))

    def list(self, trial: int, *, partial: bool = False) -> tuple[tuple[int, int], ...]:
        return ()


@dataclass
class Search:
    """A search of a runner by hand, and all that it told."""

    engine: HandEngine
    kept: Kept
    study: StudyDriver
    record: Record
    events: list[Event]  # what the flow was told

    def told(self, what: str) -> list[Any]:
        return self.engine.all_told(what)


def search(
    begin: Sequence[Decision],
    answer: Callable[[Event], list[Decision]],
    *happens: Happens,
    engine: HandEngine | None = None,
    record: Record | None = None,
    states: Any = None,
    journal: Kept | None = None,
    **options: Any,
) -> Search:
    """Run a flow that answers as told on an engine on which happens what is told.

    Its states are in `states`, or in no store. It goes on from `record`, if that has begun.
    """
    events: list[Event] = []

    def note(event: Event) -> list[Decision]:
        events.append(event)
        return [Finish()] if isinstance(event, DeadlineReached) else answer(event)

    engine = engine or HandEngine(happens)
    engine.happens = happens
    kept = journal or Kept(engine)
    record = record or Record("run", n_shards=1)
    study = optuna.create_study(direction="minimize")
    driver = StudyDriver(
        study, lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)}, "loss", sampler_seed=0
    )
    if record.trials:
        adopt(driver, record)
    flow = Scripted(begin, note)
    Runner(flow, driver, engine, states or kept, kept, record, "loss", **options).run()
    return Search(engine, kept, driver, record, events)


def epoch_of(trial: int, epoch: int, loss: float) -> list[Message]:
    """The units of an epoch on one shard: trained, and scored."""
    about: dict[str, Any] = {"worker": "a", "shard": 0, "hop": False, "n_samples": 4}
    about |= {"start": 0.0, "stop": 1.0}
    return [
        UnitRecord(Unit("train", trial, epoch, 0), **about, loss=0.5),
        UnitRecord(Unit("evaluate", trial, epoch, 0), **about, metrics={"loss": loss}),
    ]
