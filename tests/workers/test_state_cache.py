"""What a worker finds of a unit that was begun before: its result, a later one, a part, or nothing.

No cluster is here: a `StateCache` needs a store alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagsel.dispatch.units import Unit
from dagsel.errors import CheckpointCorruptError
from dagsel.execution.run_spec import StoredResult
from dagsel.execution.state_cache import Found, StateCache
from dagsel.messages import Assignment, StoredState
from dagsel.state import State
from dagsel.storage import CheckpointStore

N_SHARDS = 3
PLACES = [(epoch, position) for epoch in (1, 2, 3) for position in range(N_SHARDS)]
AGAIN = Assignment(shard=2, attempt=2)


def state(number: int) -> State:
    return State.pack({}, {"number": number})


def save(store: CheckpointStore, place: tuple[int, int], shard: int = 0, **how: Any) -> State:
    saved = state(10 * place[0] + place[1])
    stored = StoredState(*place, shard, (shard,), 4, 0.5, saved.nbytes)
    store.save(0, *place, saved.buffer, stored.meta, **how)
    return saved


def damage(store: CheckpointStore, place: tuple[int, int]) -> None:
    """Replace a state's file by another one of its length."""
    file_system, folder = fsspec.core.url_to_fs(store.url)
    name = f"epoch-{place[0]:06d}-position-{place[1]:06d}"
    (blob,) = file_system.glob(f"{folder}/trial-000000/{name}.*.safetensors")
    file_system.pipe_file(blob, bytes(file_system.size(blob)))


def cache(store: CheckpointStore) -> StateCache:
    return StateCache(store, N_SHARDS, lambda: False)


@given(
    there=st.sets(st.sampled_from(PLACES)),
    damaged=st.sets(st.sampled_from(PLACES)),
    place=st.sampled_from(PLACES),
)
@example(there={(2, 2), (3, 0)}, damaged={(2, 2)}, place=(2, 2))
@example(there={(2, 1), (3, 0)}, damaged={(2, 1)}, place=(2, 1))
def test_a_unit_that_was_begun_before_has_its_own_result_or_the_latest_later_one(
    there: set[tuple[int, int]], damaged: set[tuple[int, int]], place: tuple[int, int]
) -> None:
    store = CheckpointStore("memory://found")
    store.drop(0)
    saved = {at: save(store, at) for at in there}
    for at in there & damaged:
        damage(store, at)
    here, unit = cache(store), Unit("train", 0, *place)
    later = [at for at in there if at > place]
    if place in there & damaged and later and place[1] == N_SHARDS - 1:
        with pytest.raises(CheckpointCorruptError):  # it may still have to be scored
            here.recover(unit, AGAIN)
        return
    found = here.recover(unit, AGAIN)
    if place in there - damaged:
        assert isinstance(found, Found)
        assert found.state == saved[place]
        assert found.stored is not None
        assert (found.stored.epoch, found.stored.position) == place
    elif later:  # it is done, and its own state was removed when it was not needed any more
        assert found == Found(StoredResult(0, *max(later)), None)
    else:
        assert found is None


@pytest.mark.parametrize("shard", [1, 2])
def test_a_unit_goes_on_from_a_part_of_the_shard_that_it_is_bound_to(
    tmp_path: Path, shard: int
) -> None:
    store = CheckpointStore(tmp_path)
    half = save(store, (2, 0), shard, partial=True)
    found = cache(store).recover(Unit("train", 0, 2, 0), AGAIN)
    assert found == (half if shard == AGAIN.shard else None)


@pytest.mark.parametrize("n_pieces", [1, 2])
def test_a_state_in_memory_counts_if_it_is_of_the_newest_piece(
    tmp_path: Path, n_pieces: int
) -> None:
    unit, bound = Unit("train", 0, 2, 0), Assignment(shard=2, attempt=2)
    store, half = CheckpointStore(tmp_path), state(7)
    here = cache(store)
    here.suspend(unit, half, bound, StoredState(2, 0, 2, (2,), 4, 0.5, half.nbytes))
    newer = save(store, (2, 0), 2, partial=True)  # by another worker
    found = here.recover(unit, Assignment(shard=2, attempt=3, n_pieces=n_pieces))
    assert found == (half if n_pieces == 1 else newer)
