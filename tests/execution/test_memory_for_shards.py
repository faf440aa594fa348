"""Shards in a worker's memory leave room for its process, so that Dask does not pause it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from distributed import Client
from distributed.system import MEMORY_LIMIT
from hypothesis import given
from hypothesis import strategies as st

from dagsel.execution.cluster import local_cluster, workers_of
from dagsel.execution.held_shards import PROCESS_BYTES, shards_that_fit
from dagsel.execution.run_spec import RunSpec

#: What a run does by itself.
DEFAULT: dict[str, Any] = {field.name: field.default for field in fields(RunSpec)}
#: From this share of its limit on Dask pauses a worker; training needs some of it, too.
PAUSES_AT, TRAINING = 0.8, 0.1
LIMITS, SIZES = st.integers(1, 10**12), st.integers(1, 10**10)


@given(LIMITS, SIZES)
def test_shards_and_a_process_take_less_than_pauses_a_worker(limit: int, largest: int) -> None:
    n = shards_that_fit(limit, largest, share=DEFAULT["shard_share"])
    assert n is not None
    taken = n * largest
    assert taken <= limit / 2
    assert taken <= 0.1 * limit or taken + PROCESS_BYTES <= (PAUSES_AT - TRAINING) * limit


@given(LIMITS, SIZES)
def test_no_more_copies_are_held_than_shards_may_be(limit: int, largest: int) -> None:
    copies = shards_that_fit(limit, largest, share=DEFAULT["copy_share"])
    shards = shards_that_fit(limit, largest, share=DEFAULT["shard_share"])
    assert copies is not None
    assert shards is not None
    assert copies <= shards


def test_workers_of_our_own_share_the_memory_of_the_machine() -> None:
    with local_cluster(1, most_workers=3) as cluster, Client(cluster) as client:
        (worker,) = workers_of(client).values()
    assert worker["memory_limit"] == MEMORY_LIMIT // 3
