"""Draw, report and tell the trials of the user's study."""

from __future__ import annotations

import copy
import logging
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from dagsel.checks import short_traceback
from dagsel.codec import plain_part
from dagsel.errors import SearchError
from dagsel.flow import Add, Ask, Direction, Sampling, Traits
from dagsel.study.checks import (
    RejectedError,
    Space,
    check_pruner,
    configure,
    directions_of,
    is_infeasible,
    probe,
)
from dagsel.study.draws import Draws, choose
from dagsel.study.enqueued import claim, end_as_rejected, fill_in, fixed_params
from dagsel.study.grid import GridWalk, point
from dagsel.study.home import guarded, has_trial
from dagsel.study.labels import ChosenTrial, DrawnTrial, labelled
from dagsel.study.resume import (
    REASON,
    TRACEBACK,
    Adopted,
    end_as_failed,
    first_step,
    match_up,
    recall,
    stand_in,
    was_never_scored,
)
from dagsel.study.sampler import RUN, SamplerStudy, is_of_run
from dagsel.study.streams import draw_seed, reseed

logger = logging.getLogger("dagsel")

Callback: TypeAlias = Callable[[optuna.Study, FrozenTrial], None]


@dataclass(slots=True)
class StudyDriver:
    """A study, the space that its trials are drawn from, and the trials of this run.

    The sampler draws in a study of its own (`SamplerStudy`); what it has drawn is written to the
    user's study in one piece. In a finite space no point is drawn twice.

    Parameters
    ----------
    study
        The user's study. Its sampler draws, from streams that are seeded for each draw.
    space
        Optuna's define-by-run function: takes a trial, returns a configuration.
    metric
        Name of the metric that is reported and told; of several the first one.
    seed
        Seed of uniform draws.
    callbacks
        Called with study and trial after each trial that ended, as by Optuna.
    run
        Name of the run, the user attribute ``dagsel:run`` of each of its trials.
    sampler_seed
        Seed of the study's sampler; None to draw one from the sampler's own stream. A resumed run
        passes the one of the run.
    traits
        What the flow declares: the length of its longest trial, and whether it uses a pruner.
    n_before
        Trials that had begun in the study before the run; None to count them.
    first_step
        The step of a trial's first epoch: 0, as in a script of Optuna's, or 1 if the steps of the
        study's trials begin there, as those of runs of before do; None to look.

    Attributes
    ----------
    stopped
        Why a callback has ended the search; empty if none has.
    error
        What a callback has raised.
    """

    study: optuna.Study
    space: Space
    metric: str
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    sampler_seed: int | None = None
    traits: Traits = field(default_factory=Traits)
    n_before: int | None = None
    first_step: int | None = None
    stopped: str = field(default="", init=False)
    error: Exception | None = field(default=None, init=False)
    _theirs: optuna.Study = field(init=False)  # the user's study, whose storage is watched
    _live: dict[int, FrozenTrial] = field(default_factory=dict, init=False)
    _told: set[int] = field(default_factory=set, init=False)  # live ones, by somebody else
    _waiting: list[int] = field(default_factory=list, init=False)  # numbers of enqueued trials
    # User attributes that trials of the run were enqueued with.
    _enqueued: dict[int, dict[str, Any]] = field(default_factory=dict, init=False)
    _view: SamplerStudy = field(init=False)
    _draws: Draws = field(init=False)

    def __post_init__(self) -> None:
        own = self.study.sampler
        if self.sampler_seed is None:
            self.sampler_seed = draw_seed(own, self.seed)
        self._theirs = guarded(self.study)
        self._view = SamplerStudy(self._theirs, self.run, self.traits.max_epochs)
        self._draws = Draws(self._view, self.space, own, self.sampler_seed, self.seed)

    @property
    def name(self) -> str:
        """Name of the study."""
        return str(self.study.study_name)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Whether smaller or larger values are better, of each metric."""
        return directions_of(self._theirs)

    # ---- Before the run.

    @short_traceback
    def validate(self, *, grid: bool, check: Callable[[Any], None]) -> None:
        """Check that space and pruner fit together; raise a `SearchError` if not.

        Parameters
        ----------
        grid
            Whether the space has to be finite.
        check
            Raises an error if a configuration cannot be trained; one of ten has to be.
        """
        # What Optuna has cached of a study says nothing of its storage.
        self._theirs._storage.get_study_user_attrs(self._theirs._study_id)
        self._count_before()
        first = self._step(1)
        if self.traits.uses_pruner and self.traits.max_epochs is not None:
            check_pruner(self._pruner, self.traits.max_epochs, first)
        uniform = RandomSampler()
        reseed(uniform, self.seed, 0, 0)  # checks the first random draw
        probe(self.space, GridWalk() if grid else uniform, check, self._theirs.user_attrs)

    # ---- Drawing.

    def draw(self, decision: Ask | Add) -> tuple[dict[int, dict[str, Any]], bool]:
        """Draw what is decided; return configurations, and whether no more can be drawn."""
        if isinstance(decision, Add):
            return self.add(decision.params), False
        return self.ask(decision.n, decision.sampling)

    def why_no_more(self) -> str:
        """Say why no further trial can be drawn."""
        return self._draws.why_no_more()

    def ask(self, n: int, sampling: Sampling) -> tuple[dict[int, dict[str, Any]], bool]:
        """Draw so many trials in a way; those that the user has enqueued come first.

        Returns
        -------
        configs
            The configurations by trial number.
        exhausted
            Whether no further trial can be drawn.
        """
        configs: dict[int, dict[str, Any]] = {}
        self._count_before()
        enqueued = self._follow()
        while len(configs) < n:
            if enqueued:
                trial = enqueued.pop(0)
                if not claim(self._theirs, trial, self.run):
                    continue
                self._enqueued[trial.number] = trial.user_attrs
                try:
                    number, config = trial.number, self._draw_rest(trial, sampling)
                except RejectedError as error:
                    end_as_rejected(self._theirs, trial, error)
                    self._view.end(trial.number, failed=True, system_attrs=trial.system_attrs)
                    continue
            else:
                found = self._draws.next(sampling)
                if found is None:
                    return configs, True
                number, config = self._add(*found)
            configs[number] = config
            self._draws.count(self.params(number))
        return configs, sampling == "grid" and self._draws.grid.ended

    def complete_params(
        self, params: Mapping[str, Any], over: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return all parameters of a trial that the user chooses, and its configuration.

        `over` has those of another trial, for what `params` leaves out. Raises a `SearchError` if
        the space cannot suggest them, or suggests more.
        """
        return choose(self._theirs, self.space, params, over, len(self._view))

    def add(self, params: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Begin a trial with all these parameters; return its configuration by its number."""
        self._count_before()
        chosen = ChosenTrial(self._theirs, dict(params), len(self._view))
        configure(self.space, chosen)
        trial = create_trial(
            state=TrialState.RUNNING,
            user_attrs={RUN: self.run},
            system_attrs={"fixed_params": labelled(chosen.params, chosen.distributions)},
        )
        storage = self._theirs._storage
        trial = storage.get_trial(storage.create_new_trial(self._theirs._study_id, trial))
        self._follow()
        config = self._draw_rest(trial, "study")
        self._draws.count(self.params(trial.number))
        return {trial.number: config}

    def _count_before(self) -> None:
        if self.n_before is None:
            before = self._theirs.get_trials(False)
            self.n_before = sum(trial.state != TrialState.WAITING for trial in before)
        self._draws.n_before = self.n_before

    def _step(self, epoch: int) -> int:
        """Return the step that an epoch is to Optuna."""
        if self.first_step is None:
            self.first_step = first_step(self._theirs.get_trials(deepcopy=False))
        return self.first_step + epoch - 1

    def _follow(self) -> list[FrozenTrial]:
        """Show the sampler what is new of others in the study; return the enqueued trials."""
        is_watched = self._waiting or self._view.watches
        if not is_watched and not has_trial(self._theirs, len(self._view)):
            return []  # a database would read all live trials, thousands of them in a long search
        trials = self._theirs.get_trials(deepcopy=False)
        self._view.extend(new := self._view.news(trials))
        for trial in new:
            drawn = point(labelled(trial.params, trial.distributions))
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                if len(self.directions) > 1 or not was_never_scored(trial):
                    self._draws.had_before.add(drawn)
            elif trial.state == TrialState.RUNNING and trial.user_attrs.get(RUN) != self.run:
                self._draws.elsewhere.add(drawn)
        seen = [*self._waiting, *(trial.number for trial in new)]  # no other can wait
        self._waiting = [n for n in seen if trials[n].state == TrialState.WAITING]
        return [trials[n] for n in self._waiting]

    def _draw_rest(self, trial: FrozenTrial, sampling: Sampling) -> dict[str, Any]:
        """Draw what an enqueued trial leaves open, and write it to the study.

        A `RejectedError` leaves it running; with any other error it has failed.
        """
        try:
            drawn, config = self._draws.rest_of(trial.number, sampling)
        except RejectedError:
            raise
        except Exception as error:
            end_as_failed(self._theirs, trial._trial_id, f"{type(error).__name__}: {error}")
            if isinstance(error, ValueError) and not isinstance(error, SearchError):
                raise SearchError(
                    f"trial {trial.number} was enqueued with {fixed_params(trial)}, which the "
                    f"space cannot suggest ({error}); enqueue what it can"
                ) from error
            raise
        self._live[trial.number] = fill_in(self._theirs, trial, self._view.drawn(drawn))
        self._view.place(trial.number, self._live[trial.number])
        return config

    def _add(self, trial: DrawnTrial, config: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Write a drawn trial to the study in one piece."""
        storage = self._theirs._storage
        frozen = self._view.drawn(trial)
        frozen.user_attrs = {**frozen.user_attrs, RUN: self.run}
        study_id = self._theirs._study_id
        frozen._trial_id = storage.create_new_trial(study_id, frozen)
        place = (study_id, trial.number)
        if storage.get_trial_id_from_study_id_trial_number(*place) == frozen._trial_id:
            self._view.keep(trial)
        else:  # someone else has added a trial meanwhile
            frozen.number = storage.get_trial_number_from_id(frozen._trial_id)
            self._view.take_back()
            self._follow()
            self._view.place(frozen.number, frozen)
        self._live[frozen.number] = frozen
        return frozen.number, config

    # ---- Reporting and telling.

    def params(self, number: int) -> dict[str, Any]:
        """Return the parameters of a live trial; what has no form in JSON by its name."""
        trial = self._live[number]
        return labelled(trial.params, trial.distributions)

    def attrs(self, number: int) -> dict[str, Any]:
        """Return what of the user attributes that a live trial was enqueued with is plain."""
        return plain_part(self._enqueued.get(number, {}))

    def is_infeasible(self, number: int) -> bool:
        """Whether a live trial breaks a constraint."""
        return is_infeasible(self._live[number], self.study.sampler)

    def report(self, number: int, epoch: int, *values: float) -> None:
        """Report a live trial's value after an epoch; a value reported before is replaced.

        Of several metrics the sampler alone hears: Optuna keeps no reports of them.
        """
        if len(values) == 1:
            trial_id, step = self._live[number]._trial_id, self._step(epoch)
            with self._told_by_others(number):
                self._theirs._storage.set_trial_intermediate_value(trial_id, step, float(values[0]))
        self._view.report(number, epoch, *values)

    def should_prune(self, number: int) -> bool:
        """Ask the pruner whether a live trial should stop after its last report."""
        if not self.traits.uses_pruner:
            return False
        trial = self._theirs._storage.get_trial(self._live[number]._trial_id)
        return bool(self._pruner.prune(self._theirs, copy.copy(trial)))

    @property
    def _pruner(self) -> BasePruner:
        return self.traits.pruner or self.study.pruner

    def complete(self, number: int, *values: float) -> None:
        """Tell a live trial's final values; with NaN, which Optuna refuses, the trial fails."""
        if any(map(math.isnan, values)):
            self.fail(number, f"{self.metric} is NaN")
        else:
            self._end(number, TrialState.COMPLETE, values)

    def prune(self, number: int) -> None:
        """Tell that a live trial was stopped early; its value is its last report."""
        self._end(number, TrialState.PRUNED)

    def fail(self, number: int, reason: str, traceback: str = "") -> None:
        """Tell that a live trial has failed, and why, in its user attributes."""
        with self._told_by_others(number):
            self._note(self._live[number], reason, traceback)
        self._end(number, TrialState.FAIL)

    @contextmanager
    def _told_by_others(self, number: int) -> Iterator[None]:
        """Go on with a trial that somebody else has told to the study; Optuna lets none be changed.

        The run's own tables have it as it was trained.
        """
        try:
            yield
        except UpdateFinishedTrialError:
            self._warn_told(number)

    def _warn_told(self, number: int) -> None:
        if number not in self._told:
            self._told.add(number)
            logger.warning(
                "trial %d was told to study %r by somebody else while this run trains it: the "
                "study keeps what was told, the run goes on; leave a run's trials to the run",
                number,
                self.name,
            )

    def _note(self, trial: FrozenTrial, reason: str, traceback: str) -> None:
        for key, text in ((REASON, reason), (TRACEBACK, traceback)):
            if text:
                self._theirs._storage.set_trial_user_attr(trial._trial_id, key, text)

    def reopen(self, number: int) -> None:
        """Let a trial of the run that has ended train on.

        A trial of Optuna's cannot, so another one with the same parameters and reports stands for
        it, with its number as the user attribute ``dagsel:trial``.
        """
        trial = stand_in(self._theirs, self.run, number)
        self._follow()
        self._view.place(number, trial)
        self._live[number] = trial

    def fail_live(self, reason: str) -> None:
        """Mark all running trials of this run as failed, without callbacks."""
        left = {trial._trial_id for trial in self._live.values()}
        left |= {
            trial._trial_id
            for trial in self._theirs.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if is_of_run(trial, self.run)
        }
        for trial_id in sorted(left):
            end_as_failed(self._theirs, trial_id, reason)
        self._live.clear()

    def _end(self, number: int, state: TrialState, values: Sequence[float] = ()) -> None:
        frozen = self._tell(self._live[number], state, values)
        del self._live[number]
        self._view.end(number, failed=state == TrialState.FAIL, system_attrs=frozen.system_attrs)
        self._call_back(frozen)

    def _call_back(self, trial: FrozenTrial) -> None:
        """Call the callbacks, which may stop the study as in `Study.optimize`."""
        loop, was_in_one = self.study._thread_local, self.study._thread_local.in_optimize_loop
        for callback in self.callbacks:
            loop.in_optimize_loop = True  # only there Optuna lets a study be stopped
            try:
                callback(self.study, trial)
            except Exception as error:  # noqa: BLE001 - it is raised when the search has ended
                self.error = self.error or error
                self.stopped = self.stopped or f"a callback raised {type(error).__name__}: {error}"
            finally:
                loop.in_optimize_loop = was_in_one
            if self.study._stop_flag:
                self.study._stop_flag = False
                self.stopped = self.stopped or "a callback has stopped the study"

    def _tell(
        self, trial: FrozenTrial, state: TrialState, values: Sequence[float] = ()
    ) -> FrozenTrial:
        try:
            return self._theirs.tell(trial.number, list(values) or None, state=state)
        except (ValueError, RuntimeError) as error:
            told = self._theirs._storage.get_trial(trial._trial_id)
            if not told.state.is_finished():
                raise
            # A RuntimeError is of GridSampler and BruteForceSampler. They stop the study after its
            # last point, which Optuna allows only in Study.optimize; the trial is told by then.
            if isinstance(error, ValueError):
                self._warn_told(trial.number)
            return copy.deepcopy(told)

    def is_live(self, number: int) -> bool:
        """Whether a trial of the run has not ended."""
        return number in self._live

    @property
    def live(self) -> tuple[int, ...]:
        """Numbers of the run's trials that have not ended."""
        return tuple(self._live)

    # ---- Going on after the driver has died.

    def adopt(self, trials: Mapping[int, Adopted]) -> dict[int, dict[str, Any]]:
        """Take over the run's trials from its journal, and make the study agree with it.

        Trials that the journal does not have are marked as failed. A study that was in memory is
        filled again. Call it before anything is drawn.

        Parameters
        ----------
        trials
            All trials of the run, by number.

        Returns
        -------
        dict
            The configurations by trial number.

        Raises
        ------
        SearchError
            If the study or the space is not the run's.
        """
        configs, templates = {}, {}
        for number, adopted in trials.items():
            about = (self.space, number, adopted, self._theirs, self.run)
            configs[number], templates[number] = recall(*about)
        held = match_up(self._theirs, self.run, trials, templates)
        self._follow()
        for number, adopted in sorted(trials.items()):
            trial = held[number]
            self._view.place(number, trial)
            for epoch, *values in adopted.reports:
                self._view.report(number, epoch, *values)
            if adopted.told == TrialState.RUNNING:
                self._live[number] = trial
            else:
                self._tell_again(number, trial, adopted)
            self._draws.count(labelled(trial.params, trial.distributions))
        return configs

    def _tell_again(self, number: int, trial: FrozenTrial, adopted: Adopted) -> None:
        state = adopted.told
        if not trial.state.is_finished():
            if state == TrialState.FAIL:
                self._note(trial, adopted.reason, adopted.traceback)
            values = adopted.values if state == TrialState.COMPLETE else ()
            trial = self._tell(trial, state, values)
        self._view.end(number, failed=state == TrialState.FAIL, system_attrs=trial.system_attrs)
