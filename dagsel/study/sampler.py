"""The study that the sampler sees: one value of each trial, all after the same number of epochs.

Optuna's samplers learn from ended trials only, and take the value of each as final. They would
learn nothing from a paused trial, and something wrong from one that was stopped early. So they draw
in a study of their own, in memory, in which a trial is complete once it has reached the epoch at
which trials are compared.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from dagsel.study.labels import DrawnTrial, as_kept, as_labelled
from dagsel.study.streams import forget_spaces, samplers

#: User attribute of every trial that dagsel has drawn: the run that drew it.
RUN = "dagsel:run"
#: System attribute of an enqueued trial that a run is about to take; its name follows.
CLAIM = "dagsel:claim:"


def is_of_run(trial: FrozenTrial, run: str) -> bool:
    """Whether a run has drawn a trial, or was interrupted while it took it."""
    if RUN in trial.user_attrs:
        return bool(trial.user_attrs[RUN] == run)
    return trial.state == TrialState.RUNNING and bool(trial.system_attrs.get(CLAIM + run))


@contextmanager
def quiet(level: int = optuna.logging.WARNING) -> Iterator[None]:
    """Keep Optuna from logging what is below a level, such as that a study was created."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(level, verbosity))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


class _Storage(InMemoryStorage):
    """A storage in which trials can be replaced and removed, unlike in Optuna's own.

    What samplers and spaces note on the study is kept in the user's study, which outlives this one.
    """

    def __init__(self, theirs: optuna.Study) -> None:
        super().__init__()
        self.theirs = theirs
        # The user's sampler remembers the id of the first study that it drew for.
        self._max_study_id = theirs._study_id - 1

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return what samplers have noted on the study."""
        return self.theirs._storage.get_study_system_attrs(study_id)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Note something on the study."""
        if ":parent:" in key:
            return  # evolutionary samplers note parents, which may be hidden at the next draw
        self.theirs._storage.set_study_system_attr(study_id, key, value)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the user attributes of the user's study."""
        return self.theirs._storage.get_study_user_attrs(self.theirs._study_id)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Set a user attribute of the user's study."""
        self.theirs._storage.set_study_user_attr(self.theirs._study_id, key, value)

    def put(self, trial: FrozenTrial) -> None:
        """Replace the trial with this number."""
        self._set_trial(trial._trial_id, trial)

    def take_back(self, study_id: int) -> None:
        """Remove the last trial, as if it had never been drawn."""
        trial = self._studies[study_id].trials.pop()
        del self._trial_id_to_study_id_and_number[trial._trial_id]
        self._max_trial_id -= 1

    def expect(self, study_id: int, trial: FrozenTrial) -> None:
        """Require the same choices of later trials' parameters, as Optuna does."""
        for name, distribution in trial.distributions.items():
            self._studies[study_id].param_distribution.setdefault(name, distribution)

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the best trial of now; the base class would return the best one ever."""
        if len(self.get_study_directions(study_id)) > 1:
            return super().get_best_trial(study_id)  # which says that there is none
        complete = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        if not complete:
            raise ValueError("No trials are completed yet.")
        sign = 1 if self.get_study_directions(study_id)[0] == StudyDirection.MINIMIZE else -1
        return min(complete, key=lambda trial: sign * (trial.value or 0.0))


def _epochs(trial: FrozenTrial) -> list[tuple[int, float]]:
    """List epochs and values of a trial of another run, which may count its steps from 1."""
    first = min(trial.intermediate_values, default=0)
    return [(step - first + 1, value) for step, value in trial.intermediate_values.items()]


def _stage(trial: FrozenTrial) -> tuple[TrialState, int]:
    """Return what changes of a trial of another search until it has ended."""
    return trial.state, len(trial.params)


class SamplerStudy:
    """A study in memory with as many trials as the user's, for the sampler to draw in.

    Trials are compared after the most epochs that enough of them have reached, as in BOHB (Falkner,
    Klein and Hutter, ICML 2018, Algorithm 2, line 3: |D_b| ≥ N_min + 2 with N_min = d + 1, for d
    parameters), and no fewer than the sampler starts with. If no epoch has so many, they are
    compared after the epoch that most have reached. A trial that has reached this epoch is shown as
    complete with its value of then, whatever its state is. One that has not is shown as running if
    it is live, and else hidden. A failed trial is hidden. A trial that others completed before the
    run, without epochs, is always shown with its value. Values after more than `max_epochs` epochs,
    at which a trial of this run ends, are not compared. In a study with several directions all this
    is meant of lists of values. An infinite value is shown as the worst of its metric, as
    procedures rank it: a sampler would take -inf for the best loss there is.
    """

    def __init__(self, study: optuna.Study, run: str, max_epochs: int | None = None) -> None:
        self._run = run
        self._max_epochs = math.inf if max_epochs is None else max_epochs
        self._own = study.sampler
        self._storage = _Storage(study)
        with quiet():
            self._id = self._storage.create_new_study(study.directions, study.study_name)
        self._study = optuna.Study(study.study_name, self._storage, study.sampler, NopPruner())
        self._is_several = len(study.directions) > 1  # of such runs a study has no reports
        is_least = [direction == StudyDirection.MINIMIZE for direction in study.directions]
        self._worst = [math.inf if least else -math.inf for least in is_least]
        self._bases: list[FrozenTrial] = []
        self._running: set[int] = set()
        self._open: dict[int, tuple[TrialState, int]] = {}  # others' that had not ended: _stage
        self._finals: dict[int, list[float]] = {}
        self._reports: dict[int, dict[int, list[float]]] = {}
        self._n_at: Counter[int] = Counter()
        self._n_params = 0
        self._rung: int | None = -1  # no rung, so the first draw shows all trials
        self._changed: set[int] = set()

    def __len__(self) -> int:
        return len(self._bases)

    # ---- What has happened.

    @property
    def watches(self) -> bool:
        """Whether others have trials there that have not ended."""
        return bool(self._open)

    def news(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return of all trials of the user's study those for `extend`.

        These are the others' that had not ended and have changed, and the ones not there yet.
        """
        changed = [
            trials[number]
            for number, stage in self._open.items()
            if _stage(trials[number]) != stage and trials[number].user_attrs.get(RUN) != self._run
        ]
        return [*changed, *trials[len(self) :]]

    def extend(self, trials: Sequence[FrozenTrial]) -> None:
        """Add trials of the user's study in their order, or replace those of others.

        Those of this run are hidden until `place` is called.
        """
        for trial in trials:
            number = trial.number
            if number < len(self):
                self.place(number, trial)
                self._running.discard(number)
                forget_spaces(self._own)
            else:
                self._storage.create_new_trial(self._id, as_labelled(trial))
                self._append(self._storage.get_trial(self._trial_id(number)))
                self._storage.put(self._as_seen(number))  # none waits there for Optuna to begin it
            if trial.user_attrs.get(RUN) == self._run:
                continue
            if not trial.state.is_finished():
                self._open[number] = _stage(trial)
            if trial.state == TrialState.RUNNING:
                self._running.add(number)
            elif self._has_reports(trial):
                for epoch, value in _epochs(trial):
                    self.report(number, epoch, value)
            elif trial.state == TrialState.COMPLETE and trial.values is not None:
                self._finals[number] = self._ranked(trial.values)

    def _has_reports(self, trial: FrozenTrial) -> bool:
        is_dagsels = RUN in trial.user_attrs and trial.state != TrialState.FAIL
        return is_dagsels and not self._is_several

    def place(self, number: int, trial: FrozenTrial) -> None:
        """Set what a live trial of this run was drawn with."""
        self._open.pop(number, None)
        base = copy.copy(as_labelled(trial))
        base.number, base._trial_id = number, self._trial_id(number)
        self._storage.expect(self._id, base)
        self._bases[number] = base
        self._running.add(number)
        self._changed.add(number)
        self._n_params = max(self._n_params, len(base.params))

    def report(self, number: int, epoch: int, *values: float) -> None:
        """Set a trial's value of each metric after an epoch."""
        if any(map(math.isnan, values)) or epoch > self._max_epochs:
            return
        reports = self._reports.setdefault(number, {})
        self._n_at[epoch] += epoch not in reports
        reports[epoch] = self._ranked(values)
        self._changed.add(number)

    def _ranked(self, values: Sequence[float]) -> list[float]:
        pairs = zip(values, self._worst, strict=True)
        return [value if math.isfinite(value) else worst for value, worst in pairs]

    def end(self, number: int, *, failed: bool, system_attrs: Mapping[str, Any]) -> None:
        """Note that a trial has ended, and what the sampler has noted on it since."""
        self._running.discard(number)
        self._changed.add(number)
        self._bases[number].system_attrs = dict(system_attrs)
        if failed:
            self._n_at.subtract(self._reports.pop(number, {}).keys())

    # ---- What the sampler sees of it.

    def draw(self, sampler: BaseSampler) -> DrawnTrial:
        """Draw a trial, to `keep` or to `take_back`."""
        self._show(sampler)
        return self._begin(self._storage.create_new_trial(self._id))

    def _begin(self, trial_id: int) -> DrawnTrial:
        self._study._thread_local.cached_all_trials = None  # as Study.ask does
        return DrawnTrial(self._study, trial_id)

    def draw_rest(self, number: int, sampler: BaseSampler) -> DrawnTrial:
        """Draw the parameters that a trial enqueued by the user leaves open."""
        self._show(sampler)
        trial = copy.copy(self._bases[number])
        trial.state = TrialState.RUNNING
        self._storage.put(trial)
        return self._begin(trial._trial_id)

    def drawn(self, trial: DrawnTrial) -> FrozenTrial:
        """Return what has been drawn, with what space and sampler have noted on it.

        It is as the user's study can keep it.
        """
        frozen = trial.with_choices(self._storage.get_trial(trial._trial_id))
        return as_kept(self._storage.theirs, frozen)

    def keep(self, trial: DrawnTrial) -> None:
        """Keep the trial that was drawn last, as a live one."""
        self._append(copy.copy(self._storage.get_trial(trial._trial_id)))
        self._running.add(trial.number)

    def take_back(self) -> None:
        """Remove the trial that was drawn last."""
        self._storage.take_back(self._id)

    def _append(self, base: FrozenTrial) -> None:
        self._bases.append(base)
        self._storage.expect(self._id, base)
        self._changed.add(base.number)
        self._n_params = max(self._n_params, len(base.params))

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _show(self, sampler: BaseSampler) -> None:
        self._study.sampler = sampler
        if type(sampler) is RandomSampler:
            return  # it looks at no trial
        rung = self._find_rung()
        if rung != self._rung:
            self._rung = rung
            self._changed.update(range(len(self)))
            forget_spaces(self._own)
        for number in self._changed:
            self._storage.put(self._as_seen(number))
        self._changed.clear()

    def _find_rung(self) -> int | None:
        enough = max(
            self._n_params + 3,
            # With fewer trials a sampler of Optuna draws at random.
            *(getattr(part, "_n_startup_trials", 0) for part in samplers(self._own)),
        )
        n_finals = len(self._finals)
        reached = [(min(n + n_finals, enough), epoch) for epoch, n in self._n_at.items() if n]
        return max(reached)[1] if reached else None

    def _as_seen(self, number: int) -> FrozenTrial:
        base = self._bases[number]
        reports = self._reports.get(number, {})
        shown = None if self._rung is None else reports.get(self._rung)
        trial = copy.copy(base)
        trial.intermediate_values = {}
        trial.values = values = self._finals.get(number, shown)
        if values is not None:
            trial.state = TrialState.COMPLETE
            trial.datetime_complete = base.datetime_complete or base.datetime_start
        else:
            running = number in self._running
            trial.state = TrialState.RUNNING if running else TrialState.FAIL
            trial.datetime_complete = None if running else base.datetime_start
        return trial
