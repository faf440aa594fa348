"""Observers of real searches: no epoch is missing or doubled after SIGKILL of the driver."""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import dagsel
from dagsel.errors import SearchError
from dagsel.flows import RandomSearch
from dagsel.observers import CSV, EpochEnded, Observer, SearchBegan, TensorBoard
from dagsel.observers.base import check_observers
from tests.execution import observed_driver
from tests.observers import wandb_files


def driven(folder: Path, *stages: object) -> list[str]:
    """Run drivers, one after the other; return what they say, see `observed_driver`."""
    command = [sys.executable, str(Path(observed_driver.__file__)), folder, *stages]
    # Each driver starts W&B's process of its own, as a user's does.
    env = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
    print(done.stderr)  # what a tracker has said, if a test fails
    assert done.returncode == 0, done.stderr
    given_up = [line for line in done.stderr.splitlines() if "is told no more" in line]
    assert not given_up
    return done.stdout.splitlines()


def test_each_tracker_has_every_epoch_once_though_the_driver_was_killed_twice(
    tmp_path: Path,
) -> None:
    chance = random.Random(18)
    kills = ("optimize", chance.randint(1, 6), "resume", chance.randint(1, 4), "resume", 0)
    said = driven(tmp_path, *kills)
    assert [line.split()[0] for line in said[:3]] == ["reported", "reported", "ended"]
    assert [line.split()[-1] for line in said[:3]] == ["-9", "-9", "0"]
    run = dagsel.load(tmp_path / "run")
    whole = {
        (trial.number, epoch.epoch): epoch.value
        for trial in run.record.trials.values()
        for epoch in trial.epochs
    }
    assert len(whole) > 8
    with (tmp_path / "epochs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(whole)
    assert {(int(r["trial"]), int(r["epoch"])): float(r["value"]) for r in rows} == whole
    assert in_tensorboard(tmp_path / "tb" / run.record.run) == Counter(whole.keys())
    in_mlflow = [line.split()[1:] for line in said[3:]]
    assert Counter((int(trial), int(step)) for trial, step in in_mlflow) == Counter(whole.keys())
    steps = wandb_files.epochs(tmp_path / "wb", run.record.run)
    assert Counter((trial, step) for trial, step, _ in steps) == Counter(whole.keys())


def in_tensorboard(folder: Path) -> Counter[tuple[int, int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Counter[tuple[int, int]] = Counter()
    for place in folder.glob("trial-*"):
        read = EventAccumulator(str(place))
        read.Reload()
        for event in read.Scalars("validation/value"):
            found[int(place.name[-4:]), event.step] += 1
    return found


class Broken(Observer):
    def epoch_ended(self, epoch: EpochEnded) -> None:
        raise ZeroDivisionError("mine")


class Heard(Observer):
    def __init__(self) -> None:
        self.began: list[SearchBegan] = []
        self.epochs: list[EpochEnded] = []

    def search_began(self, search: SearchBegan) -> None:
        self.began.append(search)

    def epoch_ended(self, epoch: EpochEnded) -> None:
        self.epochs.append(epoch)


def test_one_that_raises_costs_no_trial_and_an_extended_search_is_told_whole(
    client: Client, optimize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = Heard(), Heard()
    flow = RandomSearch(max_epochs=2, n_trials=2)
    run = optimize(flow, client=client, observers=[Broken(), before])
    assert not run.failures
    assert caplog.text.count("the observer Broken is told no more: ZeroDivisionError: mine") == 1
    assert sorted((e.trial, e.epoch) for e in before.epochs) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert not before.began[0].goes_on
    more = run.extend(client, n_trials=1, observers=[after])
    assert len(more.record.trials) == 3
    assert [epoch.is_past for epoch in after.epochs].count(True) == 4
    assert len(after.epochs) == 6
    assert after.began[0].goes_on


class Tries(Observer):
    """Gives a tracker to another search, at each epoch."""

    def __init__(self, tracker: Observer) -> None:
        self.tracker, self.said = tracker, list[str]()

    def epoch_ended(self, epoch: EpochEnded) -> None:
        with contextlib.suppress(SearchError):
            check_observers([self.tracker])
            self.said.append(f"taken at epoch {epoch}")


def test_a_tracker_is_that_of_one_search_while_it_runs(
    client: Client, optimize: Any, tmp_path: Path
) -> None:
    tracker = CSV(tmp_path / "epochs.csv")
    tries, heard = Tries(tracker), Heard()
    observers = [tracker, tries, heard]
    run = optimize(RandomSearch(max_epochs=1, n_trials=2), client=client, observers=observers)
    run = run.extend(client, n_trials=1, observers=observers)
    dagsel.resume(
        run.run_dir.url, workload=run.given_workload, space=run.space, observers=observers
    )
    assert len(heard.epochs) == 2 + 3 + 3
    assert tries.said == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB, which root alone can mount."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "dagsel-test", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_full_disk_under_a_tracker_costs_no_trial(
    kind: str, small_disk: Path, client: Client, optimize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tracker: Observer = (
        CSV(small_disk / "epochs.csv") if kind == "csv" else TensorBoard(small_disk / "tb")
    )
    with contextlib.suppress(OSError), (small_disk / "taken").open("wb", buffering=0) as taken:
        for _ in range(15):
            taken.write(bytes(4096))
    heard = Heard()
    run = optimize(
        RandomSearch(max_epochs=10, n_trials=8), client=client, observers=[tracker, heard]
    )
    assert {trial.state for trial in run.record.trials.values()} == {"complete"}
    assert len(heard.epochs) == 80
    name = type(tracker).__name__
    assert caplog.text.count(f"the observer {name} is told no more") == 1


def test_what_is_no_observer_is_refused_before_anything_begins(optimize: Any, run_dir: str) -> None:
    with pytest.raises(SearchError, match="observers has the class CSV"):
        optimize(observers=[CSV])
    assert not Path(run_dir).exists()


def test_what_is_logged_is_chosen(
    client: Client, optimize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dagsel"):
        dagsel.set_verbosity(level="info")
        caplog.handler.setLevel(logging.INFO)
        optimize(RandomSearch(max_epochs=1, n_trials=2), client=client)
    said = [r.getMessage() for r in caplog.records if r.name == "dagsel.driver"]
    assert said[0] == "the search begins"
    assert sum(text.startswith("trial ") for text in said) == 2
    with pytest.raises(SearchError, match="level must be"):
        dagsel.set_verbosity("loud")  # type: ignore[arg-type]
