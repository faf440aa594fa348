"""Event files of TensorBoard: a folder for each trial."""

from __future__ import annotations

import os
import socket
import time
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from dagsel.errors import SearchError
from dagsel.observers.base import ChangedParams, Observer
from dagsel.observers.events import EpochEnded, SearchBegan, TrialBegan, TrialEnded

#: What a file of events begins with.
_VERSION = "brain.Event:2"
_TRAIN_LOSS = "loss/train"


class TensorBoard(Observer):
    """Writes the metrics of each trial for TensorBoard, and its parameters for the HPARAMS tab.

    A trial has the folder ``RUN/trial-0007``; steps are epochs, from 1. Validation metrics have
    their names under ``validation/``, the training loss is ``loss/train``. The HPARAMS tab has the
    parameters that were drawn; numbers that the search changes later are under ``params/``. Where a
    search goes on, epochs that are there are not written again.

    Needs ``pip install "dagsel[tensorboard]"``; look with ``tensorboard --logdir FOLDER``.

    Parameters
    ----------
    folder
        Where to write, on this machine.

    Examples
    --------
    Give it to `dagsel.optimize` as ``observers=[TensorBoard("tb")]``. By hand:

    >>> from dagsel.observers import EpochEnded, SearchBegan, TrialBegan
    >>> observer = TensorBoard("tb")
    >>> observer.search_began(SearchBegan("3f9a", "digits", "accuracy", "maximize", "runs/1"))
    >>> observer.trial_began(TrialBegan(0, {"lr": 0.1}))
    >>> observer.epoch_ended(EpochEnded(0, 1, 0.5, {"accuracy": 0.5}, 2.25, 1.5, 1.7e9))
    >>> [path.name for path in Path("tb/3f9a").iterdir()]
    ['trial-0000']
    """

    _is_of_one_search = True

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._folder = Path(fspath(folder))
        self._run = self._folder
        # Of each trial the epochs that are there, and 0 for its parameters.
        self._there: dict[int, set[int]] = {}
        self._files: dict[int, Path] = {}
        self._changed = ChangedParams()
        self._session = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.dagsel"

    def check(self) -> None:
        """Raise an error if TensorBoard is not installed, or the folder cannot be made."""
        try:
            import tensorboard.summary.writer.record_writer  # noqa: F401
        except ImportError as error:
            raise SearchError(
                f'TensorBoard is not installed: pip install "dagsel[tensorboard]" ({error})'
            ) from None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SearchError(f"TensorBoard cannot write to {self._folder}: {error}") from None

    def search_began(self, search: SearchBegan) -> None:
        """Find out what is there of the run."""
        self._run, self._files = self._folder / search.run, {}
        self._there, self._changed = {}, ChangedParams()
        for folder in self._run.glob("trial-*"):
            self._there[int(folder.name.partition("-")[2])] = _steps(folder)

    def trial_began(self, trial: TrialBegan) -> None:
        """Write its parameters."""
        self._changed.began(trial)
        there = self._there.setdefault(trial.trial, set())
        if 0 not in there:
            from tensorboard.plugins.hparams import metadata, plugin_data_pb2

            about = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
            for name, value in trial.params.items():
                held = about.hparams[name]
                if isinstance(value, bool):
                    held.bool_value = value
                elif isinstance(value, int | float):
                    held.number_value = value
                else:
                    held.string_value = str(value)
            data = plugin_data_pb2.HParamsPluginData(session_start_info=about)
            self._write(trial.trial, _told(metadata.SESSION_START_INFO_TAG, data), 0, time.time())
            there.add(0)

    def epoch_ended(self, epoch: EpochEnded) -> None:
        """Write its metrics, unless they are there."""
        changed = self._changed.numbers(epoch)
        there = self._there.setdefault(epoch.trial, set())
        if epoch.epoch in there:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = {_TRAIN_LOSS: epoch.train_loss, **changed}
        values |= {f"validation/{name}": value for name, value in epoch.metrics.items()}
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(epoch.trial, Summary(value=scalars), epoch.epoch, epoch.at)
        there.add(epoch.epoch)

    def trial_ended(self, trial: TrialEnded) -> None:
        """Write how it has ended."""
        if not trial.is_past:
            from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

            is_good, now = trial.state != "failed", time.time()
            status = api_pb2.STATUS_SUCCESS if is_good else api_pb2.STATUS_FAILURE
            about = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=now)
            data = plugin_data_pb2.HParamsPluginData(session_end_info=about)
            self._write(trial.trial, _told(metadata.SESSION_END_INFO_TAG, data), trial.epochs, now)

    def _write(self, trial: int, summary: Any, step: int, at: float) -> None:
        """Append to the file of a trial; a kill leaves it whole, or without its last event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        path = self._files.get(trial)
        events = [Event(wall_time=at, step=step, summary=summary)]
        if path is None:
            folder = self._run / f"trial-{trial:04}"
            folder.mkdir(parents=True, exist_ok=True)
            path = self._files[trial] = folder / f"events.out.tfevents.{self._session}"
            events.insert(0, Event(wall_time=at, file_version=_VERSION))
        with path.open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())


def _told(tag: str, data: Any) -> Any:
    """Return a summary for the HPARAMS tab."""
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import metadata

    data.version = metadata.PLUGIN_DATA_VERSION
    plugin = summary_pb2.SummaryMetadata.PluginData(
        plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString()
    )
    about = summary_pb2.SummaryMetadata(plugin_data=plugin)
    value = summary_pb2.Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
    return summary_pb2.Summary(value=[value])


def _steps(folder: Path) -> set[int]:
    """Return the epochs that a trial's folder has, and 0 if it has its parameters."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams import metadata

    tags = {_TRAIN_LOSS, metadata.SESSION_START_INFO_TAG}
    return {
        event.step
        for path in folder.glob("events.out.tfevents.*")
        for event in EventFileLoader(str(path)).Load()
        if any(value.tag in tags for value in event.summary.value)
    }
