"""Searches that share a cluster, with each other and with work that is none of dagsel's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from distributed import Client

from dagsel.storage import ShardedDataset

from .helpers import endless, threads_of_this_process

#: Seconds of a unit that are long for Dask, and short enough for the next one to wait behind it.
UNIT_S = 0.2


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a worker that has one thread."""
    with threads_of_this_process(1) as client:
        yield client


def test_a_third_search_trains_while_two_go_on(
    client: Client, digits: ShardedDataset, tmp_path: Path
) -> None:
    with ExitStack() as ending:
        for number in range(3):
            run_dir = str(tmp_path / f"{number}")
            search = endless(client.scheduler.address, digits, run_dir, seconds=UNIT_S)
            ending.callback(search.wait)
            ending.callback(search.finish)


def test_other_work_is_done_while_a_search_trains(
    client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    search = endless(client.scheduler.address, digits, run_dir, seconds=UNIT_S)
    try:
        tasks = client.map(time.sleep, [0.001] * 20, pure=False)
        for task in tasks:
            task.result(timeout=60)
    finally:
        search.finish()
        search.wait()
