"""What the world of `dagsel.testing.world` knows of a live trial, and the tape of its choices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dagsel.flow import Losses, Pause, Paused, Reported, Train

#: Batches of an epoch: a trial pauses after any of them.
BATCHES = 4


@dataclass(slots=True)
class Tape:
    """Choices, one a byte, over and over; zeros make the simplest run."""

    choices: bytes
    place: int = 0

    def choose(self, n: int) -> int:
        """Choose one of n."""
        byte = self.choices[self.place % len(self.choices)]
        self.place += 1
        return byte % n

    def rewind(self) -> None:
        """Go back to the first choice."""
        self.place = 0

    def value(self) -> float:
        """Choose a value of the metric."""
        if self.choose(6) == 5:
            return (math.nan, math.inf, -math.inf)[self.choose(3)]
        return (self.choose(32) - 8) / 8  # few enough for ties

    def losses(self, n: int) -> Losses:
        """Choose the training losses of n batches."""
        if not n:
            return Losses()
        low = self.choose(32) / 8
        return Losses(n, low, low + (self.choose(8) / 8 if n > 1 else 0.0))


@dataclass(slots=True)
class LiveTrial:
    """A live trial: how far it is, what it is to do, and what the flow waits for."""

    number: int
    epochs: int = 0  # that it has reported
    batches: int = 0  # of its next epoch
    left: int = 0  # epochs that it was given and has not reported
    gang: int = 1
    priority: float = 0.0
    limit_s: float | None = None
    trained_s: float = 0.0  # since its last Train
    n_losses: int = 0  # since its last Train
    suspended: bool = False
    awaited: Pause | None = None  # what is not answered yet
    asked_at: int = 0  # after how many events that was
    value: float | None = None  # of its state, if that was evaluated
    stalled: bool = False  # paused without a batch: the next time it must come on

    @property
    def trains(self) -> bool:
        """Whether it goes on, as soon as there are workers."""
        return self.left > 0 and not self.suspended

    def take(self, train: Train) -> None:
        """Do what a `Train` says, or assert why it cannot be done."""
        assert train.epochs >= 0, f"{train} takes epochs away"
        assert train.gang >= 1, f"{train} has no worker"
        assert train.seconds is None or train.seconds > 0, f"{train} has no time"
        assert not self.awaited, f"{train}, but {self.awaited} is not answered yet"
        if not train.epochs:
            assert self.left, f"{train} trains nothing: the trial has no epoch left"
            how = (train.priority, train.gang) != (self.priority, self.gang)
            timed = train.seconds is not None or self.limit_s is not None  # a time begins anew
            assert self.suspended or how or timed, f"{train} changes nothing: it trains like that"
        self.left += train.epochs
        self.gang, self.priority, self.limit_s = train.gang, train.priority, train.seconds
        self.suspended, self.trained_s, self.n_losses = False, 0.0, 0

    def go_on(self, tape: Tape, *, runs: bool, prunes: bool) -> Paused | Reported:
        """Train for a while, if there are workers; say what comes of it, but not when."""
        room = BATCHES - 1 - self.batches  # so many, and no epoch ends
        missing_s = max(0.0, (self.limit_s or 0.0) - self.trained_s)
        if self.awaited:
            may_pause = room > 0 or not self.stalled
            if not runs or (may_pause and tape.choose(2) == 0):
                least = 1 if self.stalled else 0
                self._train(min(least + tape.choose(BATCHES), room) if runs else 0, 0.0, tape)
                return self._pause(tape)
        elif self.limit_s is not None and not missing_s:
            return self._pause(tape)
        elif self.limit_s is not None and room and tape.choose(2) == 0:
            self._train(min(1 + tape.choose(BATCHES), room), missing_s, tape)
            return self._pause(tape)
        return self._report(tape, prunes=prunes)

    def _train(self, batches: int, least_s: float, tape: Tape) -> None:
        self.stalled = not batches
        if batches:
            self.batches += batches
            self.n_losses += batches
            self.trained_s += max(least_s, 1.0 + tape.choose(3))
            self.value = None

    def _pause(self, tape: Tape) -> Paused:
        value, trained = None, self.epochs + self.batches / BATCHES
        if self.awaited and self.awaited.evaluate and trained:
            self.value = value = tape.value() if self.value is None else self.value
        self.suspended, self.awaited = True, None
        metrics = {} if value is None else {"metric": value}
        losses = tape.losses(self.n_losses)
        return Paused(self.number, trained, 0.0, self.trained_s, losses, value, metrics)

    def _report(self, tape: Tape, *, prunes: bool) -> Reported:
        self._train(BATCHES - self.batches, 0.0, tape)
        self.epochs, self.batches, self.left = self.epochs + 1, 0, self.left - 1
        self.value = value = tape.value()
        prune = prunes and tape.choose(6) == 5
        return Reported(self.number, self.epochs, value, {"metric": value}, 0.0, prune)
