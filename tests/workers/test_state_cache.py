"""What a worker finds of a unit that was begun before: its result, a later one, a part, or nothing.

No cluster is here: a `StateCache` needs a store alone.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagsel.dispatch.units import Unit
from dagsel.errors import CheckpointCorruptError
from dagsel.execution import state_cache
from dagsel.execution.raising import StoreFailedError
from dagsel.execution.run_spec import StoredResult
from dagsel.execution.state_cache import Found, StateCache
from dagsel.messages import Assignment, StoredState
from dagsel.state import State, Tensor
from dagsel.storage import CheckpointStore

N_SHARDS = 3
PLACES = [(epoch, position) for epoch in (1, 2, 3) for position in range(N_SHARDS)]
AGAIN = Assignment(shard=2, attempt=2)


def state(number: int) -> State:
    return State.pack({}, {"number": number})


def stored_at(
    place: tuple[int, int], visits: tuple[int, ...], losses: tuple[tuple[int, float], ...] = ()
) -> StoredState:
    n_bytes = state(10 * place[0] + place[1]).nbytes
    return StoredState(*place, visits[-1], visits, 4, 0.5, n_bytes, losses=losses)


def save(
    store: CheckpointStore, place: tuple[int, int], shard: int | None = None, **how: Any
) -> State:
    """Store a state; each visit but its last one went to the shard of its position."""
    saved, last = state(10 * place[0] + place[1]), place[1] if shard is None else shard
    stored = stored_at(place, (*range(place[1]), last))
    store.save(0, *place, saved.buffer, stored.meta, **how)
    return saved


def damage(store: CheckpointStore, place: tuple[int, int]) -> None:
    """Replace a state's file by another one of its length."""
    file_system, folder = fsspec.core.url_to_fs(store.url)
    name = f"epoch-{place[0]:06d}-position-{place[1]:06d}"
    (blob,) = file_system.glob(f"{folder}/trial-000000/{name}.*.safetensors")
    file_system.pipe_file(blob, bytes(file_system.size(blob)))


def cache(store: CheckpointStore) -> StateCache:
    return StateCache(store, N_SHARDS, lambda _: False)


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
    later, again = [at for at in there if at > place], replace(AGAIN, visits=(*range(place[1]),))
    if place in there & damaged and later and place[1] == N_SHARDS - 1:
        with pytest.raises(CheckpointCorruptError):  # it may still have to be scored
            here.recover(unit, again)
        return
    found = here.recover(unit, again)
    if place in there - damaged:
        assert isinstance(found, Found)
        assert found.state == saved[place]
        assert found.stored is not None
        assert (found.stored.epoch, found.stored.position) == place
    elif later and max(later)[0] > place[0]:  # it is done, and its own state was removed since
        assert found == Found(StoredResult(0, *max(later)), None)
    elif later and max(later) not in damaged:  # likewise, and its visit is known
        visits = (*range(place[1] + 1),)
        assert found == Found(StoredResult(0, *max(later)), StoredState(*place, place[1], visits))
    else:
        assert found is None


def test_what_a_unit_begins_with_is_spare_if_the_store_has_it_and_its_result_is_not(
    tmp_path: Path,
) -> None:
    """A unit that fails begins again with it, and so it may let go of it meanwhile."""
    store, unit = CheckpointStore(tmp_path), Unit("train", 0, 2, 0)
    begin, half = save(store, (1, N_SHARDS - 1)), save(store, (2, 0), AGAIN.shard, partial=True)
    here = cache(store)
    found = here.recover(unit, AGAIN), here.input(unit, StoredResult(0, 1, N_SHARDS - 1))
    assert found == (half, begin)
    assert [getattr(it, "is_spare", None) for it in found] == [True, True]
    of_dask = here.input(unit, begin)
    assert of_dask is begin
    assert not begin.is_spare
    save(store, (2, 0), AGAIN.shard)
    result = here.recover(unit, AGAIN)
    assert isinstance(result, Found)
    assert isinstance(result.state, State)
    assert not result.state.is_spare


@pytest.mark.parametrize("shard", [1, 2])
def test_a_unit_goes_on_from_a_part_of_the_shard_that_it_is_bound_to(
    tmp_path: Path, shard: int
) -> None:
    store = CheckpointStore(tmp_path)
    half = save(store, (2, 0), shard, partial=True)
    found = cache(store).recover(Unit("train", 0, 2, 0), AGAIN)
    assert found == (half if shard == AGAIN.shard else None)


def test_what_a_task_has_stored_tells_of_each_of_its_units(tmp_path: Path) -> None:
    store, binding = CheckpointStore(tmp_path), Assignment(shard=1, visits=(2,))
    mine = stored_at((1, 2), (2, 1, 0), losses=((8, 0.25),))
    kept, _ = cache(store).save(Unit("train", 0, 1, 2), state(12), mine, binding)
    assert kept.losses
    found = cache(store).recover(Unit("train", 0, 1, 1), replace(binding, shard=0, attempt=2))
    assert isinstance(found, Found)
    assert found.state == StoredResult(0, 1, 2)
    known = StoredState(1, 1, shard=1, visits=(2, 1), n_samples=8, loss=0.25)
    assert found.stored == known, "it was to visit shard 0 this time, and has visited shard 1"


@pytest.mark.parametrize(("theirs", "is_kept"), [((2, 0, 1), True), ((0, 2, 1), False)])
def test_the_state_of_another_attempt_counts_if_the_trial_may_have_gone_on_from_there(
    tmp_path: Path, theirs: tuple[int, ...], is_kept: bool
) -> None:
    """Its worker was believed lost, and has stored the end of its task after all."""
    store, place, mine = CheckpointStore(tmp_path), (1, 2), stored_at((1, 2), (2, 1, 0))
    store.save(0, *place, state(7).buffer, stored_at(place, theirs).meta)
    unit, binding = Unit("train", 0, *place), Assignment(shard=1, attempt=2, visits=(2,))
    found = cache(store).recover(unit, replace(binding, visits=theirs[:2] if is_kept else (2, 1)))
    assert (found is not None) == is_kept
    kept, is_own = cache(store).save(unit, state(12), mine, binding)
    assert kept.visits == (theirs if is_kept else mine.visits)
    assert is_own != is_kept
    assert (store.load(0, *place)[0] == state(7).buffer) == is_kept


@pytest.mark.parametrize("theirs", [12, 7])
def test_a_state_is_the_one_kept_if_its_bits_are(tmp_path: Path, theirs: int) -> None:
    """On a GPU the same visits may give other bits."""
    store, place, mine = CheckpointStore(tmp_path), (1, 2), stored_at((1, 2), (2, 1, 0))
    store.save(0, *place, state(theirs).buffer, mine.meta)
    binding = Assignment(shard=0, attempt=2, visits=(2, 1))
    kept, is_own = cache(store).save(Unit("train", 0, *place), state(12), mine, binding)
    assert is_own == (theirs == 12)
    assert kept.digest == store.load(0, *place)[1]["digest"]


def test_a_later_state_of_an_attempt_that_was_left_behind_is_no_result(tmp_path: Path) -> None:
    store, unit = CheckpointStore(tmp_path), Unit("train", 0, 1, 1)
    save(store, (1, 2))
    assert cache(store).recover(unit, Assignment(shard=2, attempt=2, visits=(0,))) is not None
    assert cache(store).recover(unit, Assignment(shard=2, attempt=2, visits=(1,))) is None


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


def test_a_store_that_fails_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pauses = CheckpointStore(str(tmp_path)), list[float]()
    saved, save_first = save(store, (1, 0)), CheckpointStore.save_first

    def fails_at_first(*given: Any) -> Any:
        if len(pauses) < 3:
            raise PermissionError(errno.EACCES, "The provided token has expired.")
        return save_first(*given)

    monkeypatch.setattr(CheckpointStore, "save_first", fails_at_first)
    kept = StateCache(store, N_SHARDS, lambda _: False, sleep=pauses.append)
    unit, stored = Unit("train", 0, 1, 0), stored_at((1, 0), (0,))
    assert kept.save(unit, saved, stored, Assignment(shard=0))[1]
    assert pauses == [0.1, 0.2, 0.4]


@pytest.mark.parametrize(("n_left", "kind"), [(3, State), (2, StoredResult)])
def test_a_state_waits_in_the_store_where_the_next_unit_would_have_no_room_beside_it(
    tmp_path: Path, n_left: int, kind: type
) -> None:
    """A unit takes about three times its state: parameters, gradients, moments, the next one."""
    large = State.pack({"w": Tensor.from_numpy(np.zeros(250_000))}, {})
    room = n_left * large.nbytes
    kept = StateCache(CheckpointStore(str(tmp_path)), N_SHARDS, lambda n_bytes: n_bytes > room)
    assert isinstance(kept.keep(Unit("train", 0, 1, 0), large), kind)
    assert kept.has_room_beside(large) is (kind is State)


@pytest.mark.parametrize("what", ["ask", "load", "recover"])
def test_a_store_that_cannot_be_read_fails_the_worker_and_no_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store, pauses = CheckpointStore(str(tmp_path)), list[float]()
    unit = Unit("train", 0, 1, 0)

    def fail(*given: Any, **how: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(CheckpointStore, "load", fail)
    kept = StateCache(store, N_SHARDS, lambda _: False, sleep=pauses.append)
    calls = {
        "ask": lambda: kept.input(Unit("train", 0, 1, 1), None),
        "load": lambda: kept.load(StoredResult(0, 1, 0)),
        "recover": lambda: kept.recover(unit, Assignment(shard=0, attempt=2)),
    }
    with pytest.raises(StoreFailedError, match="Stale file handle"):
        calls[what]()
    assert sum(pauses) >= state_cache.PATIENCE_S
