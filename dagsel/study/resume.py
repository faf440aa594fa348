"""Make a study agree with what the run's journal says of its trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from dagsel.errors import SearchError
from dagsel.study.checks import Space, configure
from dagsel.study.labels import RecalledTrial, as_kept
from dagsel.study.sampler import RUN, is_of_run

#: User attribute of a trial that replaces another one, which was told too early, or has ended and
#: trains on: its number.
STANDS_FOR = "dagsel:trial"
REASON = "dagsel:reason"
TRACEBACK = "dagsel:traceback"
_UNKNOWN = "the driver died before it was recorded"


@dataclass(frozen=True, slots=True)
class Adopted:
    """What a run's journal says of one of its trials.

    Parameters
    ----------
    params
        What it was drawn with.
    reports
        Of each epoch its number and the value of each metric, in order.
    values
        What it is worth: of each metric; empty if it was never scored.
    state
        Whether it has ended, and how.
    reason, traceback
        Why it failed.
    first_step
        The step that its first epoch is to Optuna.
    attrs
        The user attributes that it was enqueued with.
    """

    params: Mapping[str, Any]
    reports: tuple[tuple[Any, ...], ...] = ()
    values: tuple[float, ...] = ()
    state: Literal["running", "complete", "pruned", "failed"] = "running"
    reason: str = ""
    traceback: str = ""
    first_step: int = 0
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> dict[int, float]:
        """What the study is to hold of its reports."""
        return {self.first_step + epoch - 1: v[0] for epoch, *v in self.reports if len(v) == 1}

    @property
    def told(self) -> TrialState:
        """The trial's state in the study."""
        states = {
            "running": TrialState.RUNNING,
            "complete": TrialState.COMPLETE if self.values else TrialState.PRUNED,
            "pruned": TrialState.PRUNED,
            "failed": TrialState.FAIL,
        }
        return states[self.state]


def first_step(trials: Iterable[FrozenTrial]) -> int:
    """Return the step at which a study's trials begin: 1 if they do, and else 0."""
    return int(min((s for trial in trials for s in trial.intermediate_values), default=0) == 1)


def was_never_scored(trial: FrozenTrial) -> bool:
    """Whether a trial of a run was drawn, and pruned without a report as the search ended."""
    is_pruned = trial.state == TrialState.PRUNED and RUN in trial.user_attrs
    return is_pruned and not trial.intermediate_values


def recall(
    space: Space, number: int, adopted: Adopted, study: optuna.Study, run: str
) -> tuple[dict[str, Any], FrozenTrial]:
    """Return an adopted trial's configuration, and a trial to add if the study lacks it.

    Raises a `SearchError` if the space is not the one that the trial was drawn from.
    """
    fixed = RecalledTrial(study, dict(adopted.params), number)
    for name, value in adopted.attrs.items():
        fixed.set_user_attr(name, value)
    try:
        config = configure(space, fixed)
    except ValueError as error:
        raise _other_space(number, str(error)) from error
    unknown = adopted.params.keys() - fixed.params.keys()
    if unknown:
        raise _other_space(number, f"it does not suggest {', '.join(sorted(unknown))}")
    trial = create_trial(
        state=TrialState.RUNNING,
        params=fixed.params,
        distributions=fixed.distributions,
        user_attrs={**fixed.user_attrs, RUN: run},
        system_attrs=fixed.system_attrs,
        intermediate_values=adopted.steps,
    )
    return config, trial


def _other_space(number: int, why: str) -> SearchError:
    return SearchError(
        f"the space is not the one that trial {number} was drawn from ({why}); resume with the "
        "space that the run began with"
    )


def match_up(
    study: optuna.Study,
    run: str,
    trials: Mapping[int, Adopted],
    templates: Mapping[int, FrozenTrial],
) -> dict[int, FrozenTrial]:
    """Find each adopted trial in the study, or add it.

    A trial cannot be told twice. If it has ended in the study and not in the journal, as after
    Ctrl-C, a new trial replaces it. Returns the study's trials by number, with all reports, and
    running unless the journal says that they have ended. Raises a `SearchError` if the study has
    other trials under their numbers.
    """
    theirs = study.get_trials(deepcopy=False)
    held = {
        trial.user_attrs.get(STANDS_FOR, trial.number): trial
        for trial in theirs
        if is_of_run(trial, run)
    }
    n_trials = len(theirs)
    for number in sorted(trials.keys() - held.keys()):
        if number < n_trials:
            raise SearchError(
                f"trial {number} of study {study.study_name!r} is not of run {run}; resume with "
                "the study that the run began with, or, if that was in memory, with an empty one"
            )
        for _ in range(n_trials, number):
            lost = {REASON: "a trial of before the run, lost with the study in memory"}
            study.add_trial(create_trial(state=TrialState.FAIL, user_attrs=lost))
        held[number] = _add(study, as_kept(study, templates[number]))
        n_trials = number + 1
    for number, adopted in trials.items():
        if held[number].state.is_finished() and held[number].state != adopted.told:
            again = templates[number]
            again.user_attrs = {**again.user_attrs, STANDS_FOR: number}
            again.system_attrs = held[number].system_attrs
            held[number] = _add(study, as_kept(study, again))
    for number, trial in held.items():
        if number not in trials:
            end_as_failed(study, trial._trial_id, _UNKNOWN)
    return {number: _with_reports(study, held[number], trials[number]) for number in trials}


def stand_in(study: optuna.Study, run: str, number: int) -> FrozenTrial:
    """Add a trial in place of one of the run that has ended and trains on."""
    (*_, ended) = (
        trial
        for trial in study.get_trials(deepcopy=False)
        if is_of_run(trial, run) and trial.user_attrs.get(STANDS_FOR, trial.number) == number
    )
    again = create_trial(
        state=TrialState.RUNNING,
        params=ended.params,
        distributions=ended.distributions,
        user_attrs={**ended.user_attrs, STANDS_FOR: number},
        system_attrs=ended.system_attrs,
        intermediate_values=ended.intermediate_values,
    )
    return _add(study, again)


def give_up(study: optuna.Study, run: str, trials: Mapping[int, Adopted]) -> None:
    """Tell how the running trials of a run that goes on no more have ended; asks no sampler.

    Those that the journal does not know have failed.
    """
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if not is_of_run(trial, run):
            continue
        adopted = trials.get(trial.user_attrs.get(STANDS_FOR, trial.number))
        if adopted is None:
            end_as_failed(study, trial._trial_id, _UNKNOWN)
        elif adopted.told == TrialState.FAIL:
            end_as_failed(study, trial._trial_id, adopted.reason)
        else:  # its driver died before it told the study
            _with_reports(study, trial, adopted)
            values = list(adopted.values)
            if adopted.told == TrialState.PRUNED:  # as Optuna's `tell` does
                values = list(adopted.steps.values())[-1:]
            study._storage.set_trial_state_values(trial._trial_id, adopted.told, values or None)


def end_as_failed(study: optuna.Study, trial_id: int, reason: str) -> None:
    """Mark a trial as failed without asking the sampler, unless it has ended."""
    try:
        study._storage.set_trial_user_attr(trial_id, REASON, reason)
        study._storage.set_trial_state_values(trial_id, TrialState.FAIL)
    except UpdateFinishedTrialError:
        pass


def _add(study: optuna.Study, trial: FrozenTrial) -> FrozenTrial:
    trial_id = study._storage.create_new_trial(study._study_id, trial)
    return study._storage.get_trial(trial_id)


def _with_reports(study: optuna.Study, trial: FrozenTrial, adopted: Adopted) -> FrozenTrial:
    if not trial.state.is_finished():
        for step, value in adopted.steps.items():
            if step not in trial.intermediate_values:
                study._storage.set_trial_intermediate_value(trial._trial_id, step, value)
    return study._storage.get_trial(trial._trial_id)
