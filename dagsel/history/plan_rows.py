"""What was planned beside what was done: a row for each span of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dagsel.history.course import Course, TrainedSpan, billed_spans
from dagsel.history.record import Record
from dagsel.planning.capacity import Plan, PlannedStage

_NOTHING_S = 1e-6


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """A span of a run, as it was planned or as it was done.

    Parameters
    ----------
    begins_s, lasts_s
        Its begin, in seconds since the run began, and its length.
    n_trials
        How many trials train in it.
    worker_seconds
        What its workers are billed.
    money
        The same in money, if workers differ in their price; else None.

    Examples
    --------
    >>> span = PlanSpan(begins_s=60.0, lasts_s=30.0, n_trials=4, worker_seconds=120.0)
    >>> span.n_workers, span.ends_s
    (4.0, 90.0)
    """

    begins_s: float
    lasts_s: float
    n_trials: int
    worker_seconds: float
    money: float | None = None

    @property
    def n_workers(self) -> float:
        """Workers that are billed, on average."""
        return self.worker_seconds / self.lasts_s if self.lasts_s else 0.0

    @property
    def ends_s(self) -> float:
        """Its end, in seconds since the run began."""
        return self.begins_s + self.lasts_s


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What was planned for a span of a run, and what was done.

    Parameters
    ----------
    name
        What the span is: ``"start"``, ``"stage 1"`` or ``"part 1"`` and so on, ``"release"``.
    planned
        What was planned; None for nothing.
    done
        What was done; None for nothing.

    Examples
    --------
    >>> row = PlanRow("stage 1", PlanSpan(0.0, 60.0, 8, 240.0), PlanSpan(0.0, 66.0, 8, 264.0))
    >>> row.done.lasts_s - row.planned.lasts_s
    6.0
    """

    name: str
    planned: PlanSpan | None
    done: PlanSpan | None


def planned_stages(plans: Sequence[tuple[float, Plan]]) -> list[PlannedStage]:
    """Return the stages that were planned last for each time; a later plan cuts those before it.

    Examples
    --------
    >>> first = Plan((PlannedStage(0.0, 6.0, 2, (4,)), PlannedStage(6.0, 6.0, 1, (1,))), (1,))
    >>> again = Plan((PlannedStage(4.0, 9.0, 3, (3,)),), (1,))
    >>> [(s.begins_s, s.seconds) for s in planned_stages([(0.0, first), (4.0, again)])]
    [(0.0, 4.0), (4.0, 9.0)]
    """
    stages: list[PlannedStage] = []
    for _, plan in plans:
        begin = min((stage.begins_s for stage in plan.stages), default=float("inf"))
        stages = [cut for stage in stages if (cut := _until(stage, begin)) is not None]
        stages += [stage for stage in plan.stages if stage.seconds > _NOTHING_S]
    return sorted(stages, key=lambda stage: stage.begins_s)


def _until(stage: PlannedStage, end: float) -> PlannedStage | None:
    seconds = min(stage.seconds, end - stage.begins_s)
    if seconds <= _NOTHING_S:
        return None
    return PlannedStage(stage.begins_s, seconds, stage.n_workers, stage.n_trials)


def n_trials_in(trained: Iterable[TrainedSpan], start: float, stop: float) -> int:
    """Count the trials that trained between two times of the run."""
    inner = start + _NOTHING_S, stop - _NOTHING_S
    return len({one.trial for one in trained if one.begin < inner[1] and one.end > inner[0]})


def first_training(trained: Iterable[TrainedSpan], since: float) -> float:
    """Return when training began after a time; that time itself if none did.

    Examples
    --------
    >>> first_training([TrainedSpan(0, 4.5, 6.0), TrainedSpan(1, 4.1, 5.0)], since=1.0)
    4.1
    """
    return max(since, min((one.begin for one in trained if one.end > since), default=since))


def plan_rows(record: Record) -> list[PlanRow]:
    """Return the rows: the start, the stages or the spans of one number of workers, the release.

    What is done adds up to the time of the run and to its bill. A stage has begun with the decision
    that let trials train on and is nearest to its planned begin; a run without a plan has a span
    for each number of billed workers.
    """
    if not record.course:
        return []
    course, stages = Course(record.course), planned_stages(record.plans)
    end = course.search_end
    started = min(first_training(record.trained, course.begin), end.seconds)
    times = [started]
    if stages:
        times += _stage_begins(course, stages, started)[1:]
        names = [f"stage {number}" for number in range(1, len(stages) + 1)]
    else:
        spans = billed_spans(course.costs(started, end.seconds), noise=0.1)
        times += [span.start for span in spans[1:]]
        names = [f"part {number}" for number in range(1, len(spans) + 1)]
    spent = [(at, course.cost(at), course.money(at)) for at in times]
    last = (end.seconds, end.worker_seconds, end.money or 0.0)
    spent = [(course.begin, 0.0, 0.0), *(spent if names else ()), last]
    is_paid = record.money is not None
    done = [
        PlanSpan(
            begin,
            stop - begin,
            n_trials_in(record.trained, begin, stop),
            after - before,
            paid_after - paid_before if is_paid else None,
        )
        for (begin, before, paid_before), (stop, after, paid_after) in pairwise(spent)
    ]
    first = _planned_start(record, stages[0]) if stages else None
    planned = [first, *(_planned(stage) for stage in stages)]
    planned += [None] * (1 + len(names) - len(planned))
    rows = [
        PlanRow(name, before, _unless_empty(after))
        for name, before, after in zip(["start", *names], planned, done, strict=True)
    ]
    if course.end.mark == "end":
        release_s = course.end.seconds - end.seconds
        cost = course.end.worker_seconds - end.worker_seconds
        paid = (course.end.money or 0.0) - (end.money or 0.0) if is_paid else None
        rows.append(PlanRow("release", None, PlanSpan(end.seconds, release_s, 0, cost, paid)))
    return [row for row in rows if row.planned is not None or row.done is not None]


def _unless_empty(span: PlanSpan) -> PlanSpan | None:
    return span if span.lasts_s > 0 or span.worker_seconds > 0 else None


def _planned(stage: PlannedStage) -> PlanSpan:
    cost = stage.seconds * stage.n_workers
    return PlanSpan(stage.begins_s, stage.seconds, sum(stage.n_trials), cost)


def _planned_start(record: Record, first: PlannedStage) -> PlanSpan | None:
    start_s = min(record.plans[0][1].startup_s, first.begins_s)
    if start_s <= 0:  # the workers were there before the plan was made
        return None
    n_billed, context = first.n_workers, record.context
    if context is not None and not context.capacity.bills_requests:
        n_billed = context.n_workers  # the others wait in a queue
    return PlanSpan(0.0, first.begins_s, 0, start_s * n_billed)


def _stage_begins(course: Course, stages: Sequence[PlannedStage], started: float) -> list[float]:
    """Return when each stage has begun; those that have not, at the end."""
    marks = [moment.seconds for moment in course.moments if moment.mark == "stage"]
    end, begins = course.search_end.seconds, [started]
    for before, stage in pairwise(stages):
        early, late = stage.begins_s - before.seconds / 2, stage.begins_s + stage.seconds / 2
        near = [at for at in marks if max(early, begins[-1]) <= at < late]
        at = min(near, key=lambda at: abs(at - stage.begins_s), default=stage.begins_s)
        begins.append(min(max(at, begins[-1]), end))
    return begins
