"""A flow for one test: it answers events as a function says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dagsel.flow import Context, DeadlineReached, Decision, Event, Finish, Flow, TrialFailed


@dataclass
class Log:
    n_events: int = 0


@dataclass
class Scripted(Flow):
    begin: Sequence[Decision]
    answer: Callable[[Event], list[Decision]]
    state: Log = field(default_factory=Log, init=False)

    def start(self, context: Context) -> list[Decision]:
        return list(self.begin)

    def handle(self, event: Event) -> list[Decision]:
        self.state.n_events += 1
        answer = self.answer(event)
        is_over = isinstance(event, TrialFailed | DeadlineReached)
        return answer or ([Finish()] if is_over else [])
