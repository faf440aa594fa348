"""Lookahead: extrapolate learning curves; train what is expected to be best at the deadline."""

from __future__ import annotations

import math
import sys
from dataclasses import KW_ONLY, dataclass, field

from dagsel.flow import (
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Pause,
    Paused,
    Reported,
    Scale,
    Stop,
    Tick,
    Train,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.flows.budgeted import (
    EPOCHS_AHEAD,
    LAST_PAUSE,
    BudgetedFlow,
    check_scaling,
    check_staged,
    n_billed,
    note_workers,
)
from dagsel.flows.lookahead_state import LookaheadState, LookaheadTrial
from dagsel.planning.learning_curves import choose, forecast
from dagsel.planning.remainder import Remainder, share
from dagsel.planning.scaling import ScalingModel, UniversalScaling

#: Trials that begin, for each worker that the budget pays for until the deadline.
FIRST_TRIALS = 4
#: Share of the time after which trials are scored where they are if no epoch has ended.
FIRST_LOOK = 0.1
#: Share of the budget for the first scores of all trials; and after which share of the time a trial
#: is first scored, if an epoch takes less.
FIRST_SHARE = 0.2
FIRST_SCORE = 1 / 60
#: Trials that go on train until they have so many times their epochs.
GROWTH = 3
#: A new trial is reckoned to cost so many times the epochs that it takes to catch up: it is trained
#: on, and has to be told from the others.
DRAW_COST = 2 * GROWTH
#: λ of a trial whose scaling is not known: Amdahl's law.
CAUTIOUS = UniversalScaling(contention=0.05, coherence=0.0)
#: Share of the time between two wake-ups at least.
LEAST_WAIT = LAST_PAUSE / 10
#: No more trials than these are live at once.
MOST_LIVE = 512


@dataclass
class Lookahead(BudgetedFlow):
    """Search until a deadline, within a budget, for the best model at the end of the time.

    It begins with many trials at once, a worker each. It looks ahead after their first epoch, and
    again whenever the remaining trials have three times as many epochs, or half of the time or
    budget that was left is used. Looking ahead means: it extrapolates the learning curves, with
    their errors, and estimates the best value that k trials would reach if they shared all that is
    left. It keeps the k trials for which this is best. If new trials promise more, it draws them
    first. So it narrows fast where curves are predictable, and keeps several trials where they are
    not. It draws new trials as long as there is time to train them.

    The workers are those that use up the budget by the deadline, at least one a trial: many in the
    beginning, fewer later. A rule of this project, not of a paper. Its page in
    `docs/measured/papers` compares it with `SEER` (Dunlap et al., SoCC 2021) and `HyperSched`
    (Liaw et al., SoCC 2019), from which it has its parts: stages that narrow, an elastic cluster,
    and workers that go to the best.

    Parameters
    ----------
    deadline, budget, max_epochs, price_per_worker_hour
        In seconds, worker-seconds, epochs and money; see `SEER`.
    max_workers_per_trial
        At most; None for no limit.
    scaling
        λ, the speed of a trial on so many workers; None for Amdahl's law with 5% that only one
        worker at a time can do.

    Raises
    ------
    SearchError
        If a value is wrong.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context
    >>> flow = Lookahead(deadline="10 min", budget="40 worker-minutes")
    >>> flow.start(Context(n_workers=4))
    [Scale(n_workers=16), Wake(seconds=60.0), Ask(n=16, sampling='study')]
    >>> flow.handle(Asked(trials=(0, 1)))[0]
    Train(trial=0, epochs=2)
    """

    _: KW_ONLY
    max_workers_per_trial: int | None = None
    scaling: ScalingModel | None = None
    state: LookaheadState = field(
        default_factory=LookaheadState, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_staged(max_workers_per_trial=self.max_workers_per_trial)
        check_scaling(self.scaling)
        super().__post_init__()

    # ---- what is left

    def workers_to_begin(self, context: Context) -> int:
        """Return the workers of the first trials; raise if none can come in time."""
        left = (self.deadline_s - context.seconds, self.cost.worker_seconds)
        context.capacity.check(left[0], left[1] - context.worker_seconds, context.n_workers)
        return self._n_first(self._left(context, context.seconds, context.worker_seconds))

    def _left(self, context: Context, seconds: float, spent: float) -> Remainder:
        left_s = max(self.deadline_s - seconds, 1e-9)
        left = max(self.cost.worker_seconds - spent, 1e-9)
        most = context.capacity.affordable(left_s, left, self.state.n_workers or context.n_workers)
        return Remainder(
            left_s,
            left,
            epoch_s=self.state.epoch_s or left_s,
            most_workers=sys.maxsize if most is None else most,
            most_per_trial=self.max_workers_per_trial,
            scaling=self.scaling or CAUTIOUS,
        )

    def _now(self) -> Remainder:
        return self._left(self.state.context, self.state.seconds, self.state.spent)

    def _n_first(self, left: Remainder) -> int:
        return min(FIRST_TRIALS * left.n_workers, left.most_workers, MOST_LIVE)

    def _end_s(self) -> float:
        """Return when the trials are evaluated for the last time."""
        state = self.state
        left = self.cost.worker_seconds - state.spent
        end_s = min(self.deadline_s, state.seconds + left / max(1, n_billed(state)))
        return end_s - max(LAST_PAUSE * self.deadline_s, state.pause_s or 0.0)

    def _scale(self, n_workers: int) -> list[Decision]:
        state, n_workers = self.state, max(1, n_workers)
        if n_workers == state.n_wanted:
            return []
        state.n_wanted = n_workers
        state.n_billed = max(state.n_billed, n_billed(state))
        return [Scale(n_workers)]

    def _wake(self) -> Wake:
        state, end_s = self.state, self._end_s()
        at = min(state.looks_at, end_s)
        if state.pause_s is None:  # how long a pause takes is not known yet
            at = min(at, max(state.seconds, (state.seconds + end_s) / 2))
        # A later wake-up than now, so that rounding errors cannot bring one after the other.
        return Wake(max(at, state.seconds + LEAST_WAIT * self.deadline_s))

    # ---- events

    def start(self, context: Context) -> list[Decision]:
        """Ask for workers, and for a trial for each."""
        state = self.state
        state.context, state.n_workers = context, context.n_workers
        state.seconds, state.spent = context.seconds, context.worker_seconds
        return self._draw(self._n_first(self._now()), 1)

    def handle(self, event: Event) -> list[Decision]:
        """Train until the stage is over, then look ahead."""
        state = self.state
        if state.finished:
            return []
        if isinstance(event, Reported | Paused | Tick | DeadlineReached):
            passed_s = event.seconds - state.seconds
            state.spent += max(state.n_billed, state.n_workers) * passed_s
            state.seconds, state.n_billed = event.seconds, n_billed(state)
        match event:
            case Asked(trials):
                state.receive(event)
                state.trials |= {trial: LookaheadTrial(n_looks=state.n_looks) for trial in trials}
                return [*self._release(), *self._train(), *self._go_on()]
            case Reported(trial) if trial in state.trials:
                return self._note_epoch(event)
            case Paused(trial) if trial in state.pausing:
                return self._note_pause(event)
            case TrialFailed(trial) if trial in state.trials:
                del state.trials[trial]
                return self._go_on_without(trial)
            case WorkersChanged(n_workers):
                is_lost = n_workers < min(state.n_workers, state.n_wanted)
                note_workers(state, event)
                is_paid = state.context.capacity.bills_requests
                if is_paid and n_workers <= state.n_wanted:  # those that were released are gone
                    state.n_billed = state.n_wanted
                again: list[Decision] = [Scale(state.n_wanted)] if is_lost else []
                if state.halts:
                    return again
                wake = [] if is_paid else [self._wake()]  # the budget lasts until another time
                return [*again, *self._train(), *wake]
            case Tick() if not state.halts:
                return self._note_time()
            case DeadlineReached():
                return self._finish("the time or the budget is over")
            case _:
                return []

    def _note_epoch(self, event: Reported) -> list[Decision]:
        state, one = self.state, self.state.trials[event.trial]
        self._note_training(one, float(event.epoch), event.seconds)
        state.n_stage += 1
        one.epochs = event.epoch
        one.score(float(event.epoch), state.context.loss(event.value))
        if event.epoch == self.max_epochs:
            del state.trials[event.trial]
            stop = state.complete(event.trial, one.loss, event.epoch)
            return [stop, *self._go_on_without(event.trial)]
        if state.halts or event.trial in state.pausing:
            return []
        if one.epochs == one.n_given:
            one.gang = 0
        return self._go_on() or self._train()

    def _note_pause(self, event: Paused) -> list[Decision]:
        state, one = self.state, self.state.trials[event.trial]
        self._note_training(one, event.epochs, event.seconds)
        one.trained, one.is_paused, one.gang = max(one.trained, event.epochs), True, 0
        if event.value is not None:
            one.score(event.epochs, state.context.loss(event.value))
        return self._go_on_without(event.trial)

    def _note_training(self, one: LookaheadTrial, epochs: float, seconds: float) -> None:
        """Note what training has taken."""
        state, more = self.state, epochs - one.trained
        if one.gang and more > 0 and not state.is_crowded:
            speed = self._now().speed(one.gang)
            state.n_timed += more
            state.timed_s += speed * max(0.0, seconds - one.since)
        one.trained, one.since = max(one.trained, epochs), seconds

    def _note_time(self) -> list[Decision]:
        """End the stage if its time is over; else pause for the last time, or to time a pause."""
        state, is_late = self.state, self.state.seconds >= self._end_s()
        if state.seconds >= state.looks_at and not is_late:
            return self._end_stage()
        return self._halt(evaluate=True) if is_late or state.pause_s is None else [self._wake()]

    def _go_on(self) -> list[Decision]:
        """End the stage if all trials have come so far."""
        state = self.state
        if state.halts or state.pausing or state.n_awaited:
            return []
        waits = any(one.epochs < self._target_of(one) for one in state.trials.values())
        return [] if state.trials and (waits or state.is_last) else self._end_stage()

    def _go_on_without(self, trial: int) -> list[Decision]:
        """Go on after a trial has paused or ended."""
        state = self.state
        state.pausing.discard(trial)
        if state.halts:
            return [] if state.pausing else self._resume()
        return self._go_on() or self._train()

    # ---- training

    def _target_of(self, one: LookaheadTrial) -> int:
        return min(self.state.target, self.max_epochs or sys.maxsize)

    def _train(self) -> list[Decision]:
        """Share the workers that are there; a stage of draws trains what is behind, one each."""
        state, decisions = self.state, list[Decision]()
        if state.halts:
            return []
        n = max(1, min(state.n_workers, state.n_wanted))
        trains = {
            trial: one
            for trial, one in state.trials.items()
            if trial not in state.pausing and (not state.draws or self._is_behind(one))
        }
        state.is_crowded |= len(trains) > state.n_wanted
        gangs = share(n, len(trains), 1 if state.draws else self._now().best_gang)
        for (trial, one), gang in zip(trains.items(), gangs, strict=True):
            until = min(one.epochs + EPOCHS_AHEAD, self.max_epochs or sys.maxsize)
            if state.is_crowded:  # they take turns: an epoch each, and wait where the stage ends
                until = min(one.epochs + 1, max(self._target_of(one), one.n_given))
            decisions += self._train_until(trial, until, gang)
        return decisions

    def _is_behind(self, one: LookaheadTrial) -> bool:
        return one.n_looks == self.state.n_looks or one.epochs < self._target_of(one)

    def _train_until(self, trial: int, until: int, gang: int) -> list[Decision]:
        one = self.state.trials[trial]
        n = max(0, until - one.n_given)
        has_rest = one.n_given > one.epochs and (one.is_paused or gang != one.gang)
        if not (n or has_rest):
            return []
        if not one.gang:
            one.since = self.state.seconds
        one.n_given, one.gang, one.is_paused = one.n_given + n, gang, False
        return [Train(trial, n, gang=gang)]

    def _release(self) -> list[Decision]:
        """Release what was asked for trials that are not there: the space had no more."""
        state = self.state
        n_behind = sum(map(self._is_behind, state.trials.values()))
        return self._scale(min(state.n_wanted, n_behind)) if not state.n_awaited else []

    # ---- looking ahead

    def _look(self) -> list[Decision]:
        """Stop what does not promise the best in the end; train the others, or draw more."""
        state = self.state
        self._time_epoch()
        state.n_looks += 1
        left, end_s = self._now(), self._end_s()
        ranked = sorted(state.trials, key=lambda trial: (state.trials[trial].loss, trial))
        known = [trial for trial in ranked if state.trials[trial].curve]
        target = 0
        if state.n_looks == 1 and known:
            target = max(1, math.floor(FIRST_SCORE * self.deadline_s / left.epoch_s))
            n_new, kept = self._n_more(target, left), known
        if not target or not n_new:
            n_new, kept = self._choose(known, left) if known else (self._n_again(left), ranked[:1])
        gone = [trial for trial in ranked if trial not in kept]
        stops: list[Decision] = []
        for trial in gone:
            state.floor = min(state.floor, state.trials.pop(trial).loss)
            stops.append(Stop(trial, self._reason(left)))
        if n_new and state.seconds < end_s:
            reached = sorted(one.epochs for one in state.trials.values())
            middle = max(1, reached[len(reached) // 2] if reached else 1)
            return [*stops, *self._draw(n_new, max(target, middle))]
        if not state.trials:
            return [*stops, *self._finish("no trial is left to train")]
        return [*stops, *self._begin([trial for trial in kept if trial in state.trials], left)]

    def _reason(self, left: Remainder) -> str:
        return f"look {self.state.n_looks}: others promise more in {left.seconds:.3g} s"

    def _n_more(self, epochs: int, left: Remainder) -> int:
        """Return how many trials to draw after the first ones, to be trained for so many epochs."""
        state = self.state
        if state.exhausted:
            return 0
        n = math.floor(FIRST_SHARE * self.cost.worker_seconds / (epochs * left.epoch_s))
        return max(0, min(n, MOST_LIVE) - state.n_asked)

    def _n_again(self, left: Remainder) -> int:
        """Return how many trials to draw where there is none that is worth training."""
        state = self.state
        if state.epoch_s is None:  # the first ones failed before an epoch was over
            fits = state.n_asked < MOST_LIVE
        else:
            fits = left.epoch_s < min(left.seconds, left.worker_seconds)
        return self._n_first(left) if fits and not state.exhausted else 0

    def _choose(self, known: list[int], left: Remainder) -> tuple[int, list[int]]:
        """Return how many trials to draw first, and those of the others that go on, in order."""
        state = self.state
        found = forecast([state.trials[trial].curve for trial in known])
        floor = min(state.floor, state.best[0] if state.best else math.inf)
        max_epochs = self.max_epochs or math.inf
        stays = choose(found, left.epochs, floor=floor, max_epochs=max_epochs)
        n_new, best = 0, stays
        epochs = float(sorted(found.epochs)[len(known) // 2])
        for n in sorted({max(1, len(known) // 2), len(known), 2 * len(known)}):
            cost_s = DRAW_COST * n * max(1.0, epochs) * left.epoch_s
            took_s = max(1.0, epochs) * left.epoch_s * math.ceil(n / left.most_workers)
            is_late = cost_s >= left.worker_seconds / 2 or took_s >= left.seconds / 2
            if state.exhausted or is_late or len(known) + n > MOST_LIVE:
                continue
            rest = left.after(took_s, cost_s)
            with_new = choose(
                found, rest.epochs, floor=floor, n_new=n, most=12, max_epochs=max_epochs
            )
            if with_new.expected < best.expected:
                n_new, best = n, with_new
        # Where more are drawn, all wait for them.
        return n_new, known if n_new else [known[place] for place in stays.kept]

    def _draw(self, n_new: int, target: int) -> list[Decision]:
        """Draw trials and train them to the target; the others wait."""
        state = self.state
        state.target, state.draws, state.is_last = target, True, False
        busy = [trial for trial, one in state.trials.items() if one.gang]
        pauses: list[Decision] = [Pause(trial) for trial in busy if trial not in state.pausing]
        state.pausing |= {*busy}
        left = self._now()
        scale = self._scale(min(n_new, left.most_workers))
        state.looks_at = state.seconds + FIRST_LOOK * min(left.seconds, left.worker_seconds)
        if state.epoch_s is not None:
            turns = math.ceil(n_new / state.n_wanted)
            state.looks_at = state.seconds + 1.5 * turns * target * state.epoch_s
        self._begin_stage()
        return [*pauses, *scale, self._wake(), *state.ask(n_new)]

    def _begin(self, kept: list[int], left: Remainder) -> list[Decision]:
        """Begin a stage of those that go on."""
        state, k = self.state, len(kept)
        state.trials = {trial: state.trials[trial] for trial in kept}
        state.draws = state.is_last = False
        n_workers = left.workers(k)
        epochs = sorted(one.epochs for one in state.trials.values())[k // 2]
        rest_s = min(left.seconds, left.worker_seconds / n_workers)
        epoch_s = (
            left.epoch_s
            * max(1.0, k / n_workers)
            / left.speed(share(n_workers, k, left.best_gang)[-1])
        )
        took_s = (GROWTH - 1) * max(1, epochs) * epoch_s
        state.target = max(1, GROWTH * epochs)
        state.looks_at = state.seconds + 1.5 * took_s
        if took_s > rest_s / 2:
            state.target = sys.maxsize
            state.looks_at = state.seconds + max(epoch_s, rest_s / 2)
            least_s = max(epoch_s, 4 * LAST_PAUSE * self.deadline_s)
            state.is_last = k == 1 or rest_s / 2 < least_s
            if state.is_last:
                state.looks_at = math.inf
        self._begin_stage()
        return [*self._scale(n_workers), *self._train(), self._wake()]

    def _begin_stage(self) -> None:
        state = self.state
        state.is_crowded, state.stage_at = False, state.seconds
        state.n_timed, state.timed_s, state.n_stage = 0.0, 0.0, 0

    def _time_epoch(self) -> None:
        """Take what an epoch has cost in the stage that is over."""
        state = self.state
        if state.is_crowded and state.n_stage:
            n_workers = max(1, min(state.n_workers, state.n_wanted))
            state.epoch_s = n_workers * (state.seconds - state.stage_at) / state.n_stage
        elif state.n_timed:
            state.epoch_s = state.timed_s / state.n_timed
        if state.epoch_s is not None:
            state.epoch_s = max(state.epoch_s, 1e-6 * self.deadline_s)

    # ---- pauses of all

    def _end_stage(self) -> list[Decision]:
        """Pause all, so that the workers that are released are idle; then look ahead."""
        self.state.ends_stage = True
        return self._halt(evaluate=any(not one.is_scored for one in self.state.trials.values()))

    def _halt(self, *, evaluate: bool) -> list[Decision]:
        """Suspend all that train."""
        state = self.state
        state.halts, state.evaluates, state.paused_at = True, evaluate, state.seconds
        busy = [trial for trial, one in state.trials.items() if one.gang]
        pauses = [Pause(trial, evaluate) for trial in busy if trial not in state.pausing]
        state.pausing |= {*busy}
        return [*pauses] if state.pausing else self._resume()

    def _resume(self) -> list[Decision]:
        """Look ahead if the stage is over; end if the time is; else train on."""
        state = self.state
        state.halts = False
        if state.evaluates:
            state.pause_s = max(state.pause_s or 0.0, state.seconds - state.paused_at)
        if state.evaluates and state.seconds >= self._end_s():
            return self._finish("the time or the budget is over")
        is_over, state.ends_stage = state.ends_stage and not state.n_awaited, False
        if not state.trials and not state.n_awaited:
            return self._look()
        if is_over and any(one.is_scored for one in state.trials.values()):
            return self._look()
        if is_over:  # nothing is scored yet: they may still load
            state.looks_at = state.seconds + FIRST_LOOK * self.deadline_s
        return [*self._train(), self._wake()]

    def _finish(self, reason: str) -> list[Decision]:
        trials = self.state.trials
        scored = ((one.loss, trial) for trial, one in trials.items() if one.is_scored)
        return self.state.end(trials, scored, reason)
