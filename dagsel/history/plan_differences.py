"""Sentences on what was done otherwise than it was planned, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from dagsel.console import amount, counted, span
from dagsel.history.course import Course, Moment
from dagsel.history.plan_rows import PlanRow, PlanSpan, first_training
from dagsel.history.record import Record
from dagsel.planning.budget import Budget
from dagsel.planning.capacity import Plan

#: What differs by less is not told: so many seconds or worker-seconds, and such a share.
_LEAST, _SHARE = 0.05, 0.02
#: A place is billed no more if the bill of a second is lower by so many workers.
_PLACE = 0.5


def differences(
    record: Record,
    rows: Sequence[PlanRow],
    deadline_s: float | None,
    budget: Budget | None,
) -> list[str]:
    """Return a sentence for each difference, in the order of time."""
    if not rows:
        return []
    course = Course(record.course)
    told = [*_plans(record), *_sessions(record, course)]
    told += _growth(record, course) if record.plans else ()
    for row in rows:
        if row.planned is None and row.done is not None and row.name == "start" and record.plans:
            cost = counted(row.done.worker_seconds, "worker-second")
            took = f"the start took {span(row.done.lasts_s)} and {cost}"
            told.append((row.done.begins_s, f"{took}; the plan was made for what was left"))
        if row.planned is not None:
            at = row.planned.ends_s if row.name == "start" else row.planned.begins_s
            told += [(at, sentence) for sentence in _row(record, course, row, row.planned)]
    told.sort(key=lambda pair: pair[0])
    sentences = [sentence for _, sentence in told]
    sentences += _ends(record, course, rows, deadline_s, budget)
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences]


def _plans(record: Record) -> Iterator[tuple[float, str]]:
    for at, plan in record.plans[1:]:
        yield at, f"planned again at {span(at)}" + (f": {plan.reason}" if plan.reason else "")


def _far(one: float, other: float) -> bool:
    return abs(one - other) > max(_LEAST, _SHARE * max(abs(one), abs(other)))


def _begin(plan: Plan) -> float:
    return min((stage.begins_s for stage in plan.stages), default=math.inf)


def _were(n: int) -> str:
    return "was" if n == 1 else "were"


def _row(record: Record, course: Course, row: PlanRow, planned: PlanSpan) -> Iterator[str]:
    name, done = row.name, row.done
    if done is None:
        yield f"{name} did not begin: {span(planned.begins_s)} was its planned begin"
        return
    if name == "start":
        if _far(done.lasts_s, planned.lasts_s):
            yield (
                f"the first unit began after {span(done.lasts_s)}, "
                f"{span(planned.lasts_s)} were planned"
            )
    else:
        if _far(done.begins_s, planned.begins_s):
            late = done.begins_s - planned.begins_s
            how = "later" if late > 0 else "earlier"
            yield f"{name} began at {span(done.begins_s)}, {span(abs(late))} {how} than planned"
        if _far(done.lasts_s, planned.lasts_s):
            yield f"{name} lasted {span(done.lasts_s)}, not {span(planned.lasts_s)}"
        if done.n_trials != planned.n_trials:
            n, of = done.n_trials, planned.n_trials
            is_cut = any(abs(_begin(plan) - planned.ends_s) < 1e-6 for _, plan in record.plans[1:])
            again = "; it was planned again before its end" if is_cut else ""
            yield f"{name} trained {counted(n, 'trial')}, not {of}{_ended(record, done)}{again}"
        why = _why_others(course, done, planned.n_workers)
        if why:
            yield f"{name} had {_range(course, done)}, not {amount(planned.n_workers)}: {why}"
    if _far(done.worker_seconds, planned.worker_seconds):
        billed = counted(done.worker_seconds, "worker-second")
        yield (
            f"{'the start' if name == 'start' else name} was billed {billed}, "
            f"{amount(planned.worker_seconds)} were planned"
        )


def _ended(record: Record, done: PlanSpan) -> str:
    ends: dict[int, float] = {}
    for one in record.trained:
        ends[one.trial] = max(one.end, ends.get(one.trial, 0.0))
    here = {trial for trial, end in ends.items() if done.begins_s <= end < done.ends_s}
    n_failed = len(here & {trial.number for trial in record.failures})
    n_whole = sum(record.trials[trial].reason.startswith("trained to the end") for trial in here)
    told = f"; {n_whole} trained to the end" if n_whole else ""
    return told + (f"; {n_failed} failed" if n_failed else "")


def _range(course: Course, done: PlanSpan) -> str:
    there = [moment.n_workers for moment in course.between(done.begins_s, done.ends_s)]
    low, high = min(there), max(there)
    return counted(high, "worker") if low == high else f"{low} to {counted(high, 'worker')}"


def _why_others(course: Course, done: PlanSpan, planned: float) -> str:
    """Return why other workers were there than planned; nothing if the planned ones were."""
    n = round(planned)
    moments = course.between(done.begins_s, done.ends_s)
    if not moments or all(moment.n_workers == n for moment in moments):
        return ""
    begin, parts = moments[0], []
    if begin.n_workers != n:
        until = next((m.seconds for m in moments if m.n_workers == n), None)
        few = "only " if begin.n_workers < n else ""
        when = "to its end" if until is None else f"until {span(until)}"
        parts.append(f"{few}{begin.n_workers} {_were(begin.n_workers)} there {when}")
    parts += _losses(course, moments)
    wanted = [m for m in moments if m.n_wanted is not None and m.n_wanted < n]
    if wanted:
        fewest = min(m.n_wanted or 0 for m in wanted)
        parts.append(f"only {fewest} {_were(fewest)} wanted from {span(wanted[0].seconds)} on")
    return "; ".join(parts)


def _losses(course: Course, moments: Sequence[Moment]) -> Iterator[str]:
    for before, after in pairwise(moments):
        n = before.n_workers - after.n_workers
        if n <= 0 or (after.n_wanted is not None and after.n_workers >= after.n_wanted):
            continue
        at, later = after.seconds, [m for m in course.moments if m.seconds > after.seconds]
        back = next((m.seconds for m in later if m.n_workers >= before.n_workers), None)
        bars = course.bars()
        rate = next((n for begin, lasts, n in bars if begin < at <= begin + lasts), math.inf)
        after_it = (begin for begin, _, n in bars if begin >= at and n < rate - _PLACE)
        freed = next(after_it, None)
        one = n == 1
        told = f"{'one' if one else n} {_were(n)} lost at {span(at)}"
        if freed is not None and (back is None or freed < back):
            billed_until = f"billed until {span(freed)}"
        else:
            billed_until = "billed on"
        told += f" and {'its place was' if one else 'their places were'} {billed_until}"
        if back is not None:
            told += f"; {'another one was' if one else 'others were'} there at {span(back)}"
        yield told


def _growth(record: Record, course: Course) -> Iterator[tuple[float, str]]:
    """Tell how long workers took to come that were asked for."""
    startups = [(at, plan.startup_s) for at, plan in record.plans]
    moments = [m for m in course.moments if m.seconds <= course.search_end.seconds]
    pairs = [(None, moments[0]), *pairwise(moments)]
    for index, (before, asked) in enumerate(pairs):
        wanted, n_before = asked.n_wanted, before and before.n_wanted
        if wanted is None or wanted == n_before or wanted <= asked.n_workers:
            continue
        n, at, later = wanted - asked.n_workers, asked.seconds, moments[index + 1 :]
        # Until the flow wants another number.
        same = [m for i, m in enumerate(later) if all(x.n_wanted == wanted for x in later[: i + 1])]
        came = next((m.seconds for m in same if m.n_workers >= wanted), None)
        planned = next((s for made, s in reversed(startups) if made <= at), startups[0][1])
        who = f"the {counted(n, 'worker')} that {_were(n)} asked for at {span(at)}"
        if came is None:
            most = max((m.n_workers for m in same), default=asked.n_workers) - asked.n_workers
            came_too = "none" if most <= 0 else f"only {most}"
            yield at, f"of {who} {came_too} came while so many were wanted"
        elif _far(came - at, planned):
            yield at, f"{who} came after {span(came - at)}, {span(planned)} were planned"


def _sessions(record: Record, course: Course) -> Iterator[tuple[float, str]]:
    begins = [m for m in course.moments if m.mark == "session"][1:]
    for begin in begins:
        first = min(first_training(record.trained, begin.seconds), course.search_end.seconds)
        cost = course.cost(first) - begin.worker_seconds
        yield (
            begin.seconds,
            (
                f"another session went on at {span(begin.seconds)}; its first unit began at "
                f"{span(first)}, after {counted(cost, 'worker-second')}"
            ),
        )


def _ends(
    record: Record,
    course: Course,
    rows: Sequence[PlanRow],
    deadline_s: float | None,
    budget: Budget | None,
) -> list[str]:
    end, told = course.search_end, []
    late = 0.0 if deadline_s is None else end.seconds - deadline_s
    if late > _LEAST:
        told.append(f"the search ended {span(late)} after the deadline of {span(deadline_s or 0)}")
    release = next((row.done for row in rows if row.name == "release"), None)
    if release is not None and release.lasts_s > _LEAST:
        told.append(
            f"the release of the workers took {span(release.lasts_s)} and "
            f"{counted(release.worker_seconds, 'worker-second')}"
        )
    if budget is None or budget.worker_seconds == math.inf:
        return told
    left = budget.worker_seconds - course.end.worker_seconds
    of = counted(abs(left), "worker-second")
    if left > _LEAST:
        told.append(f"{of} of {amount(budget.worker_seconds)} were not used: {_why(record, end)}")
    elif left < -_LEAST:
        told.append(f"the bill is {of} above the budget of {amount(budget.worker_seconds)}")
    return told


def _why(record: Record, end: Moment) -> str:
    """Say why the search ended, as its flow has said it of the trial that it found best."""
    parts = (trial.reason.partition("; it is the best") for trial in record.trials.values())
    said, found, _ = next((part for part in parts if part[1]), ("", "", ""))
    ended = "the search ended" if record.finished else "nothing is known after"
    return f"{ended} at {span(end.seconds)}" + (f", as {said}" if found else "")
