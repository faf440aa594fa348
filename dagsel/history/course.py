"""The course of a run: what it had taken at each moment, and how many workers it had."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from dagsel.messages import UnitWork

#: What happened at a moment: a session began; a stage did, for which a flow ends trials or plans
#: again, lets others train, and asks to be woken; or the workers were released.
Mark: TypeAlias = Literal["", "session", "stage", "end"]
#: If there are more spans, neighbours are shown as one.
MOST_SPANS = 12
#: Equal parts in which a run is shown if the number of its workers never changes.
N_PARTS = 4
#: Moments that are closer than this, in seconds, say nothing of how many workers are billed.
LEAST_S = 0.2
_NOTHING_S = 1e-9


@dataclass(frozen=True, slots=True)
class Moment:
    """What a run had taken at a moment, and its workers."""

    seconds: float  # since the run began
    worker_seconds: float  # billed until then
    n_workers: int  # that were there, as the flow was told
    n_wanted: int | None = None  # by the flow; None if it has not said
    mark: Mark = ""
    money: float | None = None  # paid until then, if workers differ in their price


class TrainedSpan(NamedTuple):
    """When a trial trained: seconds since the run began, by the worker's clock."""

    trial: int
    begin: float
    end: float

    @classmethod
    def of(cls, work: UnitWork, began_at: float, heard_s: float) -> TrainedSpan:
        """Return the span of a unit in a run that has begun at a time, in seconds since 1970.

        The driver has heard of it when it was over, whatever the worker's clock says.
        """
        end = min(work.stop - began_at, heard_s)
        return cls(work.unit.trial, max(0.0, end - (work.stop - work.start)), end)


def began(sessions: Sequence[tuple[float, float]]) -> float:
    """Return when a run would have begun had it never lain dead, in seconds since 1970.

    Examples
    --------
    >>> began([(1000.0, 1000.0), (5000.0, 4970.0)])
    4970.0
    """
    return sessions[-1][1] if sessions else 0.0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Chains that were decided together."""

    number: int  # number of the round in its run
    epochs: frozenset[tuple[int, int]]  # trials and their epochs that are in it
    start: float  # when it was sent: seconds since the epoch, by the driver's clock


@dataclass(frozen=True, slots=True)
class BilledSpan:
    """A span of time in which the same number of workers was billed, or about the same."""

    start: float
    stop: float
    n_workers: int  # the most at a time
    cost: float  # worker-seconds

    def parts(self, n: int) -> list[BilledSpan]:
        """Divide it equally."""
        length = (self.stop - self.start) / n
        starts = [self.start + i * length for i in range(n)]
        return [BilledSpan(s, s + length, self.n_workers, self.cost / n) for s in starts]

    def __add__(self, other: BilledSpan) -> BilledSpan:
        most = max(self.n_workers, other.n_workers)
        return BilledSpan(self.start, other.stop, most, self.cost + other.cost)

    def excess(self, other: BilledSpan) -> float:
        """Return the worker-seconds that are drawn too many if both are shown as one."""
        most = max(self.n_workers, other.n_workers)
        return sum((most - one.n_workers) * (one.stop - one.start) for one in (self, other))


def billed_spans(costs: Sequence[tuple[float, float]], *, noise: float = 1e-6) -> list[BilledSpan]:
    """Return the spans in each of which the same number of workers is billed.

    If there are many, neighbours are one, first those for which it is least wrong. If there is
    one, it is shown in equal parts.

    Parameters
    ----------
    costs
        Pairs of time and the worker-seconds that are billed until then, in their order.
    noise
        A number of workers that is above a whole one by so little is that one.

    Examples
    --------
    >>> billed_spans([(0.0, 0.0), (1.0, 2.0), (2.0, 4.0), (5.0, 7.0)])
    [BilledSpan(start=0.0, stop=2.0, n_workers=2, cost=4.0), \
BilledSpan(start=2.0, stop=5.0, n_workers=1, cost=3.0)]
    """
    spans = [
        BilledSpan(
            start, stop, math.ceil((after - before) / (stop - start) - noise), after - before
        )
        for (start, before), (stop, after) in pairwise(costs)
        if stop - start > _NOTHING_S
    ]
    while len(spans) > 1:
        excess, at = min((a.excess(b), at) for at, (a, b) in enumerate(pairwise(spans)))
        if excess > 0 and len(spans) <= MOST_SPANS:
            break
        spans[at : at + 2] = [spans[at] + spans[at + 1]]
    return spans if len(spans) != 1 else spans[0].parts(N_PARTS)


@dataclass(frozen=True, slots=True)
class Course:
    """The moments of a run in their order, of which there is at least one; time never goes back."""

    moments: Sequence[Moment]

    @property
    def begin(self) -> float:
        """When the run began: 0, unless what came before was not written down."""
        return self.moments[0].seconds

    @property
    def search_end(self) -> Moment:
        """The last moment before the workers were released."""
        is_released = self.end.mark == "end" and len(self.moments) > 1
        return self.moments[-2 if is_released else -1]

    @property
    def end(self) -> Moment:
        """The last moment."""
        return self.moments[-1]

    def cost(self, seconds: float) -> float:
        """Return the worker-seconds that were billed until a time."""
        return self._until(seconds, lambda moment: moment.worker_seconds)

    def money(self, seconds: float) -> float:
        """Return what was paid until a time; 0 if all workers have one price."""
        return self._until(seconds, lambda moment: moment.money or 0.0)

    def _until(self, seconds: float, value: Callable[[Moment], float]) -> float:
        at = bisect_right(self.moments, seconds, key=_seconds)
        if at in (0, len(self.moments)):
            return 0.0 if at == 0 else value(self.end)
        a, b = self.moments[at - 1 : at + 1]
        share = (seconds - a.seconds) / (b.seconds - a.seconds)
        return value(a) + share * (value(b) - value(a))

    def between(self, start: float, stop: float) -> list[Moment]:
        """Return the moment that holds at the start of a span, and those in it."""
        first = max(0, bisect_right(self.moments, start, key=_seconds) - 1)
        return [m for m in self.moments[first:] if m.seconds < stop]

    def costs(self, start: float, stop: float) -> list[tuple[float, float]]:
        """Return times between two and what was billed until each, for rates between them.

        Time and cost of a moment are not read at once, so moments that are close say nothing. The
        start of a batch system's job is billed when its worker has come. More than all workers can
        cost is billed at once then, and belongs to the time before.
        """
        lasts_s = self.end.seconds - self.begin
        least_s = max(LEAST_S, lasts_s / 1000)
        points = [(start, self.cost(start))]
        for moment in self.moments:
            if moment.seconds - points[-1][0] >= least_s and stop - moment.seconds >= least_s:
                points.append((moment.seconds, moment.worker_seconds))
        points.append((stop, self.cost(stop)))
        # Workers may be billed that the flow is not told of, as those that share a process.
        mean = (self.end.worker_seconds - self.moments[0].worker_seconds) / max(lasts_s, least_s)
        most = max(mean, *(max(it.n_workers, it.n_wanted or 0) for it in self.moments))
        allowed = 2.0
        for at in range(len(points) - 1, 0, -1):
            (begin, before), (end, after) = points[at - 1 : at + 1]
            least = after - most * (end - begin)
            is_late = after - before > allowed * most * (end - begin)
            points[at - 1] = (begin, max(least, before) if is_late else before)
            allowed = 1.0 if is_late else 2.0  # those that are taken back are billed beside others
        return points

    def bars(self) -> list[tuple[float, float, float]]:
        """Return spans as a drawing has them: begin, length, workers that are billed."""
        return [
            (start, stop - start, (after - before) / (stop - start))
            for (start, before), (stop, after) in pairwise(self.costs(self.begin, self.end.seconds))
            if stop - start > _NOTHING_S
        ]


def _seconds(moment: Moment) -> float:
    return moment.seconds
