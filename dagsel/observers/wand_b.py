"""Runs of Weights & Biases: one for each trial, in one group."""

from __future__ import annotations

import errno
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

from dagsel.checks import choice, shown
from dagsel.errors import SearchError
from dagsel.observers.base import ChangedParams, Observer, metrics_beside
from dagsel.observers.events import EpochEnded, SearchBegan, SearchEnded, TrialBegan, TrialEnded

T = TypeVar("T")

#: W&B's own process outlives a killed one for some seconds, and has its runs as long.
_RELEASED_S, _LOOK_S = 60.0, 0.5
#: What W&B does not take in the name of a project, and how long one may be.
_UNWANTED, _LONGEST = re.compile(r"[/\\#?%:]+"), 128


def _named(project: str) -> str:
    """Return the name of a project as W&B takes it.

    Examples
    --------
    >>> _named("cifar/resnet"), _named("2026-11-30 10:00"), len(_named(200 * "x"))
    ('cifar_resnet', '2026-11-30 10_00', 128)
    """
    return _UNWANTED.sub("_", project)[:_LONGEST]


def _once_released(do: Callable[[], T]) -> T:
    """Do something in whose way W&B's own process for a driver that was killed may still stand.

    It has its runs, and writes into their folders.

    Examples
    --------
    >>> _once_released(lambda: 1)
    1
    """
    ends_at = time.monotonic() + _RELEASED_S
    while True:
        try:
            return do()
        except Exception as error:
            writes = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.ENOENT)
            if not (writes or "is in use" in str(error)) or time.monotonic() > ends_at:
                raise
            time.sleep(_LOOK_S)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


class WandB(Observer):
    """Writes a run of Weights & Biases for each trial; those of a search are a group.

    A run has the trial's parameters, and by epoch the validation metrics and ``train_loss``; a
    validation metric of that name is ``validation_train_loss``. Numbers among the parameters that
    the search changes later are metrics, such as ``params/lr``. The summary says how the trial has
    ended.

    W&B keeps in memory for a while what it gets, and loses it if the process is killed. Where the
    search goes on, all is sent once more: offline, into new folders in place of the old ones;
    online, from the first step on that the server lacks.

    Needs ``pip install "dagsel[wandb]"``.

    Parameters
    ----------
    project
        Name of the project; None for the study's, with ``_`` for what W&B does not take in one.
    mode
        ``"offline"`` writes into ``folder/wandb``, to be sent later by ``wandb sync``; ``"online"``
        sends to the server that ``wandb login`` has named.
    folder
        Where W&B writes.
    entity
        User or team that owns the project; None for W&B's default.

    Examples
    --------
    Give it to `dagsel.optimize`:

    >>> observers = [WandB("digits", mode="offline", folder="logs")]
    """

    _is_of_one_search = True

    def __init__(
        self,
        project: str | None = None,
        *,
        mode: Literal["offline", "online"] = "offline",
        folder: str | PathLike[str] = ".",
        entity: str | None = None,
    ) -> None:
        self._project, self._entity, self._folder = project, entity, Path(folder)
        choice("mode", mode, ("offline", "online"))
        self._mode = mode
        self._search: SearchBegan | None = None
        self._runs: dict[int, Any] = {}  # by trial
        self._changed = ChangedParams()

    def check(self) -> None:
        """Raise an error if W&B is not installed, not logged in, or cannot write as it is told."""
        if self._project and self._project != _named(self._project):
            raise SearchError(
                f"W&B takes no project {shown(self._project)}: its name has one of / \\ # ? % : or "
                f"more than {_LONGEST} characters; write {_named(self._project)!r}"
            )
        try:
            import wandb
        except ImportError as error:
            raise SearchError(
                f'Weights & Biases is not installed: pip install "dagsel[wandb]" ({error})'
            ) from None
        if self._mode == "online" and not wandb.api.api_key:
            raise SearchError('W&B is not logged in: run wandb login, or give mode="offline"')
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SearchError(f"WandB cannot write to {self._folder}: {error}") from None

    def search_began(self, search: SearchBegan) -> None:
        """Make way for what is told again."""
        self._search, self._runs, self._changed = search, {}, ChangedParams()
        if search.goes_on and self._mode == "offline":
            for old in self._folder.glob(f"wandb/offline-run-*-{search.run}-*"):
                _once_released(partial(_remove, old))

    def trial_began(self, trial: TrialBegan) -> None:
        """Begin a run, or go on with the one that the server has."""
        self._changed.began(trial)
        self._runs[trial.trial] = _once_released(partial(self._begun, trial))

    def _begun(self, trial: TrialBegan) -> Any:
        import wandb

        assert self._search is not None
        name = f"{self._search.run}-{trial.trial:04d}"
        return wandb.init(
            project=self._project or _named(self._search.study),
            entity=self._entity,
            group=self._search.run,
            id=name,
            name=f"trial {trial.trial}",
            config=dict(trial.params),
            dir=str(self._folder),
            mode=self._mode,
            resume="allow",
            reinit="create_new",  # the user's own run, if there is one, stays as it is
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
            ),
        )

    def epoch_ended(self, epoch: EpochEnded) -> None:
        """Write its metrics, unless the server has them."""
        run = self._runs[epoch.trial]
        own = {"train_loss": epoch.train_loss, **self._changed.numbers(epoch)}
        if epoch.epoch >= run.starting_step:
            run.log({**metrics_beside(epoch, own), **own}, step=epoch.epoch)

    def trial_ended(self, trial: TrialEnded) -> None:
        """End its run; one of before stays open, as the trial may go on."""
        run = self._runs[trial.trial]
        run.summary["dagsel.state"], run.summary["dagsel.reason"] = trial.state, trial.reason
        if not trial.is_past:
            self._runs.pop(trial.trial).finish(exit_code=int(trial.state == "failed"))

    def search_ended(self, search: SearchEnded) -> None:
        """End all runs."""
        for run in self._runs.values():
            run.finish(exit_code=int(bool(search.error)))
        self._runs = {}
