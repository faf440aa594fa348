"""What searches in stages share: train, pause, rank and go on, each at its time by the clock."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dagsel.errors import TooLittleTimeError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Pause,
    Paused,
    Reported,
    Sampling,
    Scale,
    Stop,
    Tick,
    Train,
    Traits,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.flows.budgeted import (
    EPOCHS_AHEAD,
    LAST_PAUSE,
    BudgetedFlow,
    end_all,
    n_billed,
    note_workers,
)
from dagsel.flows.staged_state import StagedState, StagedTrial
from dagsel.planning.brackets import StagePlan
from dagsel.planning.capacity import Limits, Plan, PlannedStage, dated
from dagsel.planning.nodes import nodes_for

#: Share of the time after which a search first pauses if it is to measure what an epoch takes. So
#: its first scores come well within a quarter of the deadline.
FIRST_PAUSE = 1 / 16


@dataclass
class StagedSearch(BudgetedFlow):
    """A search whose trials are ranked at fixed times.

    A subclass makes the plan: for any cluster when the search is made, and again for the cluster
    and for what is left of deadline and budget when it starts. Where trials take turns it begins
    with one for each worker, pauses soon to measure what an epoch takes, and makes the plan once
    more before it draws the others.

    The ends of the stages are counted from the beginning of the run, and a pause begins earlier by
    the time that the longest one took so far (longer if there are more trials on a worker now): if
    something is slower than planned, the stage is shorter, but its end does not move. Where jobs
    wait in a queue, which costs nothing, a stage ends sooner if later ones could not be paid else,
    and the last one when all is spent. A search of one stage pauses halfway to see how long a pause
    takes. A trial that has reached `max_epochs` is complete, and leaves its place; if the search
    `refills`, another one is drawn in it. So is one in the place of one that fails in the first
    stage, as often as that has trials.
    """

    #: Whether others are drawn for places that are free, such as those of complete trials.
    refills: ClassVar[bool] = False
    state: StagedState = field(default_factory=StagedState, init=False, repr=False, compare=False)
    #: What is done if nothing fails and every worker comes at once, however many they are.
    plan: StagePlan = field(init=False, repr=False, compare=False)
    sampling: Sampling = field(default="study", init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan = self.make_plan(Limits(self.deadline_s, self.cost.worker_seconds))

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return replace(super().traits, sampling=self.sampling, plan=self.plan)

    @abstractmethod
    def make_plan(self, limits: Limits) -> StagePlan:
        """Return the stages; raise if there is no room for one."""

    @property
    def measures(self) -> bool:
        """Whether the plan depends on what an epoch takes."""
        return False

    def workers_to_begin(self, context: Context) -> int | None:
        """Return the workers of the first stage; raise if there is no room for one."""
        return max(1, self.plan_for(context).stages[0].n_workers)

    def plan_for(self, context: Context) -> Plan:
        """Return the stages on a cluster; the starts of workers take time and money."""
        capacity, n_there = context.capacity, context.n_workers
        left_s = self.deadline_s - context.seconds
        left = self.cost.worker_seconds - context.worker_seconds
        capacity.check(left_s, left, n_there)
        if min(left_s, left) <= 0:
            raise TooLittleTimeError(
                f"the first workers came after {context.seconds:.3g} s and have cost "
                f"{context.worker_seconds:.3g} worker-seconds, so nothing is left of deadline="
                f"{self.deadline_s:g} and budget={self.cost.worker_seconds:g}: give more, or start "
                "workers beforehand"
            )
        most = capacity.affordable(left_s, left, n_there)

        def planned(seconds: float, worker_seconds: float) -> StagePlan:
            # The start of the first node may have left less than it costs until the deadline.
            seconds = min(seconds, worker_seconds / capacity.node_size)
            return self.make_plan(Limits(seconds, worker_seconds, most, capacity.node_size))

        plan, startup_s = planned(left_s, left), 0.0
        # The others of a node are on their way.
        n_new = plan.stages[0].n_workers - nodes_for(n_there, capacity.node_size)
        if n_new > 0 and capacity.startup_s:
            startup_s = capacity.startup_s
            plan = planned(left_s - startup_s, left - n_new * capacity.start_cost_s)
        return dated(plan, context.seconds + startup_s, startup_s, "the search begins")

    def is_ranked(self, bracket: int) -> bool:
        """Whether the trials of a bracket are ranked after this stage; if not, they train on."""
        later = self.next_stage
        return later is None or later.n_trials[bracket] < self.stage.n_trials[bracket]

    def n_kept(self, bracket: int, later: PlannedStage) -> int:
        """Return how many trials of a bracket go on to the next stage."""
        return later.n_trials[bracket]

    def ranked_in(self, bracket: int, later: PlannedStage) -> int:
        """Return the bracket among whose trials those of this one are ranked."""
        return bracket

    def assign(self, survivors: list[int]) -> dict[int, int]:
        """Return in which bracket each survivor goes on; the best comes first."""
        return {trial: self.state.trials[trial].bracket for trial in survivors}

    @property
    def now(self) -> Plan:
        """The plan that is followed."""
        assert self.state.plan is not None, "the search has begun"
        return self.state.plan

    @property
    def stage(self) -> PlannedStage:
        """The present stage."""
        return self.now.stages[self.state.stage]

    @property
    def next_stage(self) -> PlannedStage | None:
        """The stage after it, if it is not the last one."""
        return next(iter(self.now.stages[self.state.stage + 1 :]), None)

    def places(self) -> list[int]:
        """Return the bracket of each place of the stage, those with the most workers first.

        A bracket that ends sooner than others, as it has few trials, comes after these: the best
        trials shall be there at the end.
        """
        workers, n_trials, stages = self.now.workers, self.stage.n_trials, self.now.stages
        n_stages = [
            sum(it.n_trials[bracket] > 0 for it in stages) for bracket in range(len(workers))
        ]
        order = sorted(range(len(workers)), key=lambda it: (-n_stages[it], -workers[it]))
        return [bracket for bracket in order for _ in range(n_trials[bracket])]

    def _free_places(self) -> list[int]:
        taken = Counter(one.bracket for one in self.state.trials.values())
        free = list[int]()
        for bracket in self.places():
            taken[bracket] -= 1
            if taken[bracket] < 0:
                free.append(bracket)
        return free

    def start(self, context: Context) -> list[Decision]:
        """Ask for the workers and the trials of the first stage."""
        state = self.state
        state.context, state.n_workers = context, context.n_workers
        state.seconds, state.spent = context.seconds, context.worker_seconds
        plan = state.plan = self.plan_for(context)
        stage = self.stage
        first_s = FIRST_PAUSE * (self.deadline_s - context.seconds)
        if self.measures and stage.seconds > 2 * first_s:
            state.measures_at = stage.begins_s + first_s
        asks = self._ask(self._n_places())
        return [plan, *self._scale(stage.n_workers), Wake(self._end()), *asks]

    def _n_places(self) -> int:
        n_trials, measures = sum(self.stage.n_trials), self.state.measures_at is not None
        return min(n_trials, max(1, self.stage.n_workers)) if measures else n_trials

    def _ask(self, n_trials: int) -> list[Decision]:
        if n_trials <= 0 or self.state.exhausted:
            return []
        self.state.awaited.append(n_trials)
        return [Ask(n_trials, self.sampling)]

    def handle(self, event: Event) -> list[Decision]:
        """Train until the stage is over, then rank and give the best their new workers."""
        state = self.state
        if state.finished:
            return []
        if not isinstance(event, Reported | Paused | Tick | DeadlineReached):
            return self._answer(event)
        state.spent += state.n_billed * (event.seconds - state.seconds)
        state.seconds = event.seconds
        decisions = self._answer(event)
        state.n_billed = n_billed(state)
        return decisions

    def _answer(self, event: Event) -> list[Decision]:
        state = self.state
        match event:
            case Asked(trials, exhausted):
                state.exhausted |= exhausted
                if state.awaited:
                    state.awaited.pop(0)
                drawn = [*zip(trials, self._free_places(), strict=False)]
                state.trials |= {trial: StagedTrial(bracket) for trial, bracket in drawn}
                late = list[Decision](Stop(it, "its stage is over") for it in trials[len(drawn) :])
                if not (state.trials or state.awaited):
                    told = "no trial is left to train" if state.best else "no trial can be drawn"
                    return [*late, *self._finish(told)]
                if state.pausing:  # they begin when it is over
                    return late
                begun = [*late, *self._release(), *self._train()]
                # Where a pause was timed before: with more trials the next one takes longer.
                return [*begun, Wake(self._end())] if state.trial_s else begun
            case Reported(trial) if trial in state.trials:
                return self._note_epoch(event)
            case Paused(trial) if trial in state.pausing:
                return self._note_pause(event)
            case TrialFailed(trial) if trial in state.trials:
                state.trained += state.trials.pop(trial).trained
                return self._draw_for_failed() or self._go_on_without(trial)
            case WorkersChanged(n_workers):
                # Lost workers are asked for again: they cost nothing since, so the plan can pay.
                is_lost = n_workers < min(state.n_workers, state.n_wanted)
                note_workers(state, event)
                again: list[Decision] = [Scale(state.n_wanted)] if is_lost else []
                if state.pausing:
                    return again
                is_paid = state.context.capacity.bills_requests
                wake = [] if is_paid else [Wake(self._end())]  # the budget lasts until another time
                return [*again, *self._train(), *wake]
            case Tick() if not state.pausing:
                return self._pause()
            case DeadlineReached():
                return self._finish("the time or the budget is over")
            case _:
                return []

    # ---- a stage

    def _end(self) -> float:
        """Return when the trials of this stage have to pause."""
        state = self.state
        if state.measures_at is not None:
            return state.measures_at
        end, n_trials = self.now.ends[state.stage], len(state.trials)
        pause_s = max(state.pause_s, state.trial_s * n_trials / max(1, state.n_wanted))
        is_last, is_paid = self.next_stage is None, state.context.capacity.bills_requests
        if is_last and not is_paid:  # jobs that came late have left some of the budget
            end = self.deadline_s
        if is_last or not is_paid:  # the last stage pays for what the others cost too much
            later = self.now.stages[state.stage + 1 :]
            left = self.cost.worker_seconds - state.spent
            left -= sum(stage.seconds * stage.n_workers for stage in later)
            end = min(end, state.seconds + left / max(1, n_billed(state)))
        if is_last:
            if state.paused_at is None:  # how long a pause takes is not known yet
                return (state.seconds + end) / 2
            pause_s = max(pause_s, LAST_PAUSE * self.deadline_s)
        return max(state.seconds, end - pause_s)

    def _scale(self, n_workers: int) -> list[Decision]:
        state, n_workers = self.state, max(1, n_workers)
        if n_workers == state.n_wanted:
            return []
        state.n_wanted = n_workers
        state.n_billed = max(state.n_billed, n_billed(state))
        return [Scale(n_workers)]

    def _release(self) -> list[Decision]:
        places = [one.bracket for one in self.state.trials.values()]
        places += self._free_places()[: sum(self.state.awaited)]
        wanted = sum(map(self.now.workers.__getitem__, places))
        return self._scale(min(self.stage.n_workers, wanted))

    def _train(self) -> list[Decision]:
        """Divide the workers that are there among all that train, the first ones first."""
        training = self.state.trials
        n_workers = max(1, self.state.n_workers)
        least = min(self.now.workers[0], n_workers)
        free = max(0, n_workers - least * (len(training) + sum(self.state.awaited)))
        decisions: list[Decision] = []
        for trial, one in training.items():
            more = min(free, self.now.workers[one.bracket] - least)
            free -= more
            decisions += self._train_on(trial, least + more)
        return decisions

    def _train_on(self, trial: int, gang: int) -> list[Decision]:
        one = self.state.trials[trial]
        until = min(one.epochs + EPOCHS_AHEAD, self.max_epochs or sys.maxsize)
        n = until - one.n_given
        if not (n or one.is_paused or gang != one.gang):
            return []
        one.n_given, one.gang, one.is_paused = until, gang, False
        takes_turns = len(self.state.trials) * self.now.workers[0] > self.state.n_workers
        n_trained = one.epochs - one.epochs_before if takes_turns else 0
        return [Train(trial, n, -float(n_trained), gang)]

    def _note_epoch(self, event: Reported) -> list[Decision]:
        one = self.state.trials[event.trial]
        one.epochs, one.has_value = event.epoch, True
        one.loss = self.state.context.loss(event.value)
        if event.trial in self.state.pausing:
            return []
        if event.epoch == self.max_epochs:
            end = self._complete(event.trial)
            return [end, *(self._draw_another() or self._go_on_without(event.trial))]
        return self._train_on(event.trial, one.gang)

    def _complete(self, trial: int) -> Stop:
        state, one = self.state, self.state.trials.pop(trial)
        state.best = min((one.loss, trial), state.best or (one.loss, trial))
        state.trained += one.epochs
        return Stop(trial, f"trained to the end, {one.epochs} epochs", "complete")

    def _go_on_without(self, trial: int) -> list[Decision]:
        """Go on after a trial has paused or ended."""
        state = self.state
        if trial in state.pausing:
            state.pausing.discard(trial)
            return [] if state.pausing else self._rank()
        if state.pausing:
            return []
        if not state.trials:
            return [] if state.awaited else self._finish("no trial is left to train")
        return [*self._release(), *self._train()]

    def _draw_another(self) -> list[Decision]:
        """Draw a trial in the place of a complete one."""
        ask = self._ask(1) if self.refills else []
        return [*self._train(), *ask] if ask else []

    def _draw_for_failed(self) -> list[Decision]:
        """Draw a trial in place of one that has failed before it is known how many there are.

        Also where no other is left. Else its workers are released.
        """
        state = self.state
        is_first = state.measures_at is not None or not (state.trials or state.awaited)
        may_be = not state.stage and not state.pausing and is_first
        if not may_be or state.n_replaced >= sum(self.stage.n_trials):
            return []
        state.n_replaced += 1
        ask = self._ask(1)
        return [*self._train(), *ask] if ask else []

    # ---- its end

    def _pause(self) -> list[Decision]:
        """Evaluate the trials of the brackets that are to be ranked."""
        state, training = self.state, self.state.trials
        is_first = state.paused_at is None and state.measures_at is None
        state.is_halfway = self.next_stage is None and is_first
        state.paused_at = state.seconds
        measures = state.measures_at is not None
        ranked = {trial for trial, one in training.items() if self.is_ranked(one.bracket)}
        rests = {trial for trial, one in training.items() if one.is_paused}  # since it was scored
        state.pausing = (set(training) if measures else ranked) - rests
        state.n_pausing = len(state.pausing)
        pauses: list[Decision] = [Pause(trial, evaluate=True) for trial in sorted(state.pausing)]
        return pauses or self._rank()

    def _note_pause(self, event: Paused) -> list[Decision]:
        one = self.state.trials[event.trial]
        one.is_paused, one.trained = True, event.epochs
        if event.value is not None:
            one.loss, one.has_value = self.state.context.loss(event.value), True
        is_complete = one.epochs == self.max_epochs
        stops: list[Decision] = [self._complete(event.trial)] if is_complete else []
        return [*stops, *self._go_on_without(event.trial)]

    def _rank(self) -> list[Decision]:
        """End a stage; begin the next one with the best of each bracket."""
        state, later = self.state, self.next_stage
        self._time_pause()
        if state.measures_at is not None:
            return self._plan_again()
        if state.is_halfway and self._end() > state.seconds:
            return self._rest_of_stage()
        if later is None:
            return self._finish("the last stage is over")
        ranked = sorted(state.trials, key=lambda trial: (state.trials[trial].loss, trial))
        decisions: list[Decision] = []
        survivors = set[int]()
        ranked_in = {trial: self.ranked_in(state.trials[trial].bracket, later) for trial in ranked}
        for bracket in range(len(later.n_trials)):
            n = self.n_kept(bracket, later)
            members = [trial for trial in ranked if ranked_in[trial] == bracket]
            survivors |= {*members[:n]}
            place = f"is not among the best {min(n, len(members))} of {len(members)}"
            for trial in members[n:]:
                value = state.context.loss(state.trials[trial].loss)
                told = f"{value:.6g}" if math.isfinite(value) else "no finite, feasible value"
                told = told if state.trials[trial].has_value else "not scored in time, it"
                decisions.append(Stop(trial, f"stage {state.stage + 1}: {told} {place}"))
        state.stage += 1
        order = [trial for trial in ranked if trial in survivors]
        state.trials = {trial: state.trials[trial] for trial in order}
        for trial, bracket in self.assign(order).items():
            one = state.trials[trial]
            one.bracket, one.epochs_before = bracket, one.epochs
        return [*decisions, *self._rest_of_stage()]

    def _plan_again(self) -> list[Decision]:
        """Plan with what an epoch takes, and draw the trials that there is time for."""
        state = self.state
        assert state.paused_at is not None, "it has paused to measure"
        trials, since = state.trials, state.since
        trained = state.trained + sum(one.trained for one in trials.values())
        left_s, left = self.deadline_s - state.seconds, self.cost.worker_seconds - state.spent
        if since is None or trained <= since[0]:
            if trained:
                state.since = (trained, state.seconds)
            waits_s = max(FIRST_PAUSE * left_s, state.paused_at - state.context.seconds)
            if waits_s < left_s / 4:  # until then they may still load
                state.measures_at = state.seconds + waits_s
                return self._rest_of_stage()
        state.measures_at = None
        if since is None or trained <= since[0] or min(left_s, left) <= 0:
            return self._rest_of_stage()
        n_busy = max(1, min(state.n_pausing, state.n_workers))
        epoch_s = n_busy * (state.paused_at - since[1]) / (trained - since[0])
        told = f"an epoch takes about {epoch_s:.3g} worker-seconds"
        if 4 * state.trial_s > epoch_s:  # a score shall not cost more than a part of the training
            told, epoch_s = f"{told}, a score {state.trial_s:.3g}", 4 * state.trial_s
        capacity = state.context.capacity
        most = capacity.affordable(left_s, left, state.n_workers)
        plan = self.make_plan(Limits(left_s, left, most, capacity.node_size, epoch_s))
        state.plan, state.stage = dated(plan, state.seconds, 0.0, told), 0
        ranked = sorted(trials, key=lambda trial: (trials[trial].loss, trial))
        places = dict(zip(ranked, self.places(), strict=False))
        stops = [
            Stop(trial, "the plan has no place for it, now that an epoch is timed")
            for trial in ranked[len(places) :]
        ]
        state.trials = {trial: trials[trial] for trial in places}
        for trial, bracket in places.items():
            trials[trial].bracket = bracket
        return [state.plan, *stops, *self._rest_of_stage()]

    def _rest_of_stage(self) -> list[Decision]:
        """Train those that are there, and draw others for the free places of the stage."""
        state = self.state
        n_more = self._n_places() - len(state.trials) - sum(state.awaited)
        more = self._ask(n_more) if self.refills else []
        if not (state.trials or state.awaited):
            return self._finish("no trial is left to train")
        return [*self._release(), *self._train(), Wake(self._end()), *more]

    def _time_pause(self) -> None:
        state = self.state
        took_s = 0.0 if state.paused_at is None else state.seconds - state.paused_at
        n_workers = max(1, min(state.n_workers, state.n_wanted))
        if state.measures_at is not None:  # what was first took longer, and is not counted
            state.pause_s = state.trial_s = 0.0
        state.pause_s = max(state.pause_s, took_s)
        state.trial_s = max(state.trial_s, took_s * n_workers / max(1, state.n_pausing))

    def _finish(self, reason: str) -> list[Decision]:
        self.state.finished = True
        trials = self.state.trials
        scored = [(one.loss, trial) for trial, one in trials.items() if one.has_value]
        scored += [self.state.best] if self.state.best else []
        _, best = min(scored, default=(math.inf, None))
        return end_all(trials, best, reason)
