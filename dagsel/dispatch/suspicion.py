"""Whether a unit kills its workers, or was there when they died: a comparison of two rates.

Under a unit that does no harm workers die as often as without it. So of `n + m` deaths, `n` while
it trained and `m` elsewhere, each falls on its training with the chance
``r = own_s / (own_s + other_s)``: the share of its seconds in all seconds of workers. That `n` or
more do has the chance of a binomial tail. Where that is below `CHANCE` the unit is the cause.

The seconds are those since the first of its deaths, or since one of the last few: a quiet hour
before a storm says nothing of the storm. For both numbers to mean something a unit that has died
repeatedly waits: the others run without it for `CONTROL` times as long as its last attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, lgamma, log, log1p

from dagsel.dispatch.events import Worker

#: How small the chance must be that a harmless unit has so many deaths.
CHANCE = 1e-6
#: After a death a suspect waits until workers have run without it for so many times the seconds of
#: its last attempt, but no more seconds of workers than these.
CONTROL = 8.0
MOST_CONTROL_S = 60.0
#: A gang's workers that are lost so soon after the first of them count as one death.
LATE_S = 1.0
#: Times `max_strikes`: so many deaths before the unit had begun are suspicious, too.
MOST_UNBEGUN = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """What was known at a moment, of the run and of a unit."""

    worker_s: float = 0.0  # seconds of all workers, idle ones too
    n_lost: int = 0  # workers that were lost
    own_s: float = 0.0  # seconds of workers that the unit has trained for
    n_own: int = 0  # workers that were lost under it


@dataclass(frozen=True, slots=True)
class Evidence:
    """Deaths while a unit trained and elsewhere, and seconds of workers with it and without it."""

    n_own: int
    own_s: float
    n_other: int
    other_s: float

    @property
    def chance(self) -> float:
        """The chance that so many of the deaths, or more, fall on a unit that does no harm.

        Examples
        --------
        >>> Evidence(3, own_s=1.0, n_other=0, other_s=9.0).chance
        0.001
        >>> Evidence(3, own_s=10.0, n_other=27, other_s=90.0).chance > 0.5
        True
        """
        seconds = self.own_s + self.other_s
        share = self.own_s / seconds if seconds > 0 else 1.0
        return binomial_tail(self.n_own, self.n_own + self.n_other, share)


def binomial_tail(n: int, total: int, share: float) -> float:
    """Return the chance of `n` or more of `total`, if each comes with the chance `share`."""
    if n <= 0 or share >= 1.0:
        return 1.0
    if share <= 0.0:
        return 0.0
    terms = (
        lgamma(total + 1) - lgamma(k + 1) - lgamma(total - k + 1)
        + k * log(share) + (total - k) * log1p(-share)
        for k in range(n, total + 1)
    )  # fmt: skip
    return round(min(1.0, sum(map(exp, terms))), 12)


@dataclass(slots=True)
class Suspect:
    """A unit under which a worker was lost, and what was seen of it since."""

    deaths: list[Seen] = field(default_factory=list)  # before each attempt that ended with one
    own_s: float = 0.0
    n_own: int = 0
    # Workers that were lost under it before it had begun, and what was seen before the first.
    n_unbegun: int = 0
    unbegun_since: Seen = field(default_factory=Seen)
    # It waits until the run's seconds of workers are so many; None if it does not.
    waits_until: float | None = None
    is_ready: bool = False  # an evaluating one that waits would be bound else
    gang: set[Worker] = field(default_factory=set)  # the other workers of its last attempt
    died_s: float = -inf  # when that ended with a death
    # Before that attempt, if its gang broke and no loss of a worker is known.
    broke: Seen | None = None

    def seen(self, worker_s: float, n_lost: int) -> Seen:
        """Return what is known now."""
        return Seen(worker_s, n_lost, self.own_s, self.n_own)

    def was_in_gang(self, worker: Worker, now_s: float) -> bool:
        """Whether the loss of the worker belongs to the end of the last attempt."""
        return worker in self.gang and (self.broke is not None or now_s <= self.died_s + LATE_S)

    def others_since(self, then: Seen, now: Seen) -> int:
        """Count the workers that were lost elsewhere."""
        return now.n_lost - then.n_lost - (now.n_own - then.n_own)

    def evidence(self, n: int, now: Seen) -> Evidence:
        """Return what speaks for and against it since the attempt of its nth last death."""
        then = self.deaths[-n]
        own_s = now.own_s - then.own_s
        other_s = max(0.0, now.worker_s - then.worker_s - own_s)
        return Evidence(n, own_s, self.others_since(then, now), other_s)

    def verdict(self, now: Seen, max_strikes: int) -> Evidence | None:
        """Return the evidence if the unit is to blame; None if it may try again."""
        most = 2 * max_strikes - 1
        for n in {len(self.deaths), min(len(self.deaths), most)}:
            if n >= max_strikes:
                evidence = self.evidence(n, now)
                # With few workers there may be little to compare with.
                if evidence.chance <= CHANCE or (n >= most and not evidence.n_other):
                    return evidence
        return None
