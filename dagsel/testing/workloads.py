"""`WorkloadSuite`: the laws of a workload, as tests to inherit."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import random
import re
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar
from unittest import SkipTest

import numpy as np
from numpy.typing import NDArray

from dagsel.state import State
from dagsel.testing.flows import global_streams
from dagsel.workloads.base import (
    PoolsScores,
    Reconfigurable,
    Trained,
    Visit,
    Workload,
    never,
)
from dagsel.workloads.describe import describe, differences
from dagsel.workloads.gang.gang import Gang, GangWorkload, join_gang, lead_gang
from dagsel.workloads.memory import SavesMemory

_T = TypeVar("_T")
_numbers = itertools.count()
#: A protocol, and a frame's length.
_PICKLE = re.compile(rb"\x80[\x04\x05]\x95(.{8})", re.DOTALL)


class WorkloadSuite:
    """Tests of a `Workload`. Inherit the class under a name that begins with ``Test``.

    Define `make_workload` and `make_arrays`, and `config` if your workload reads one. The arrays
    should hold several batches, so that stopping between batches is tested.

    Attributes
    ----------
    gang_tolerance
        How far, relatively and absolutely, the numbers of a state trained by a gang may be from
        those of one worker. None if they are not compared: with dropout, with batch normalization
        in training mode, or with samples that are changed by chance, since the ranks are threads
        here and share their random numbers.

    Examples
    --------
    >>> import torch
    >>> from dagsel.workloads import TorchWorkload
    >>> class TestMine(WorkloadSuite):
    ...     def make_workload(self):
    ...         return TorchWorkload(
    ...             model=lambda config: torch.nn.Linear(3, 1),
    ...             loss=torch.nn.functional.mse_loss,
    ...             optimizer=lambda parameters, config: torch.optim.Adam(parameters),
    ...             batch_size=4,
    ...         )
    ...
    ...     def make_arrays(self, seed):
    ...         x = np.random.default_rng(seed).normal(size=(18, 3)).astype("float32")
    ...         return {"x": x, "y": x[:, :1]}
    >>> TestMine().test_cut_into_pieces_equals_uncut()
    >>> tests = TestMine()
    >>> tests.make_workload().metrics, tests.make_arrays(seed=0)["x"].shape
    ({'loss': 'minimize'}, (18, 3))
    """

    config: Mapping[str, Any] = {}
    gang_tolerance: float | None = 1e-4

    def make_workload(self) -> Workload:
        """Return the workload under test."""
        raise NotImplementedError

    def make_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of a shard, different ones for different seeds.

        Parameters
        ----------
        seed
            Seed of the random numbers.
        """
        raise NotImplementedError

    def test_is_a_workload_and_accepts_its_config(self) -> None:
        """The workload has the protocol's members, and the configuration is valid."""
        workload = self.make_workload()
        assert isinstance(workload, Workload)
        workload.validate(self.config)

    def test_survives_the_way_to_a_worker(self) -> None:
        """A workload that was pickled initializes and trains as the original does."""
        import cloudpickle

        workload = self.make_workload()
        twin = pickle.loads(cloudpickle.dumps(workload))  # noqa: S301
        state = twin.init(self.config, 3)
        assert state == workload.init(self.config, 3)
        assert self._train(twin, state).state == self._train(workload, state).state

    def test_init_is_deterministic(self) -> None:
        """The same arguments give the same bytes, whatever random numbers were drawn before."""
        workload = self.make_workload()
        first = workload.init(self.config, 5)
        random.random()  # noqa: S311
        np.random.standard_normal()
        assert workload.init(self.config, 5) == first

    def test_training_is_deterministic_and_trains(self) -> None:
        """A unit that is run again gives the same bytes, and they differ from the initial ones."""
        workload = self.make_workload()
        state = workload.init(self.config, 0)
        after = self._train(workload, state)
        again = self._train(workload, state)
        assert after.state == again.state
        assert _same(after.loss, again.loss)
        assert after.finished
        assert _content(after.state) != _content(state)

    def test_a_unit_trains_on_its_shard(self) -> None:
        """A unit that has ended has consumed samples of its shard, and no more than there are."""
        workload = self.make_workload()
        n_there = len(next(iter(self.make_arrays(0).values())))
        trained = self._train(workload, workload.init(self.config, 0))
        assert 0 < trained.n_samples <= n_there

    def test_nothing_that_goes_in_is_changed(self) -> None:
        """No method changes the states and arrays that it gets."""
        workload = self.make_workload()
        arrays = self.make_arrays(0)
        copies = copy.deepcopy(arrays)
        shard = workload.prepare(arrays)
        state = self._train(workload, workload.init(self.config, 0)).state
        before = bytes(state.buffer)
        workload.train(state, shard, self.config, visit=_visit(2))
        workload.train(state, shard, self.config, visit=_visit(2), should_stop=lambda: True)
        workload.evaluate(state, shard, self.config)
        workload.restore(state, self.config)
        assert bytes(state.buffer) == before
        assert all(all(map(np.array_equal, arrays[name], copies[name])) for name in arrays), (
            "training or evaluation has changed the arrays"
        )

    def test_cut_into_pieces_equals_uncut(self) -> None:
        """A unit stopped at any batch boundary, or at all of them, ends with the same bytes."""
        workload = self.make_workload()
        state = self._train(workload, workload.init(self.config, 1)).state
        n_polls = 0

        def count() -> bool:
            nonlocal n_polls
            n_polls += 1
            return False

        whole = self._train(workload, state, 2, count)
        for stops in [{stop} for stop in range(1, n_polls)] + [set(range(n_polls))]:
            pieces = self._train_in_pieces(workload, state, stops)
            assert pieces.state == whole.state
            assert pieces.n_samples == whole.n_samples
            assert _same(pieces.loss, whole.loss)

    def test_a_gang_goes_through_the_same_samples(self) -> None:
        """Two workers that train one batch, and one that goes on, end as one worker alone does."""
        workload = self.make_workload()
        if not isinstance(workload, GangWorkload):
            raise SkipTest("the workload does not train in gangs")
        state = workload.init(self.config, 1)
        shard, visit = workload.prepare(self.make_arrays(0)), _visit(1)
        workload.validate_gang(self.config, 2)

        def rank(gang: Gang) -> Trained:
            mine = state if gang.rank == 0 else None
            stop = (lambda: True) if gang.rank == 0 else never
            return workload.train_gang(
                mine, shard, self.config, visit=visit, should_stop=stop, gang=gang
            )

        first, second = in_gang(2, rank)
        assert (first.n_samples, first.finished) == (second.n_samples, second.finished)
        whole, n_batches = self._train(workload, state), first.losses.n
        if not first.finished:
            first = self._train(workload, first.state)
            n_batches += first.losses.n
        assert (first.n_samples, n_batches) == (whole.n_samples, whole.losses.n)
        if self.gang_tolerance is not None:
            _assert_near(first.state, whole.state, self.gang_tolerance)

    def test_half_the_samples_at_once_are_the_same_samples(self) -> None:
        """A workload that can do with less memory trains and scores the same samples with it."""
        workload = self.make_workload()
        if not isinstance(workload, SavesMemory):
            raise SkipTest("the workload cannot do with less memory")
        state, shard = workload.init(self.config, 1), workload.prepare(self.make_arrays(0))
        whole, score = self._train(workload, state), workload.evaluate(state, shard, self.config)
        # At last one at a time, of which batch normalization makes nothing.
        for times in (1,) if self.gang_tolerance is None else (1, 30):
            half = workload.halved(times)
            assert half.evaluate(state, shard, self.config).n_samples == score.n_samples
            trained = self._train(half, state)
            assert (trained.n_samples, trained.losses.n) == (whole.n_samples, whole.losses.n)
            assert trained.state == self._train(half, state).state
        workload.forget()
        assert self._train(workload, state).state == whole.state

    def test_a_state_hops_and_is_stored(self) -> None:
        """A state that was pickled, in band or out of band, trains on as the original does."""
        workload = self.make_workload()
        state = self._train(workload, workload.init(self.config, 1)).state
        frames: list[pickle.PickleBuffer] = []
        head = pickle.dumps(state, protocol=5, buffer_callback=frames.append)
        assert len(head) < 1000
        hopped = pickle.loads(head, buffers=[bytes(frame.raw()) for frame in frames])  # noqa: S301
        stored = pickle.loads(pickle.dumps(state))  # noqa: S301
        after = self._train(workload, state, 2).state
        assert self._train(workload, hopped, 2).state == after
        assert self._train(workload, stored, 2).state == after

    def test_a_spare_state_trains_and_is_scored_as_any_other(self) -> None:
        """A state that its unit alone has, and may let go of, gives the same bytes and scores."""
        workload, shard = self.make_workload(), self.make_workload().prepare(self.make_arrays(7))
        state = self._train(workload, workload.init(self.config, 1)).state
        after = self._train(workload, State(bytes(state.buffer), is_spare=True), 2)
        assert after.state == self._train(workload, state, 2).state
        scored = workload.evaluate(State(bytes(state.buffer), is_spare=True), shard, self.config)
        assert scored == workload.evaluate(state, shard, self.config)

    def test_a_state_goes_on_with_its_own_configuration(self) -> None:
        """Reconfiguring a state for the configuration that it has changes no byte."""
        workload = self.make_workload()
        if not isinstance(workload, Reconfigurable):
            raise SkipTest("the workload reads its configuration anew in each unit")
        state = self._train(workload, workload.init(self.config, 0)).state
        before = bytes(state.buffer)
        same = workload.reconfigure(state, self.config, dict(self.config))
        assert _content(same) == _content(state)
        assert self._train(workload, same, 2).state == self._train(workload, state, 2).state
        assert bytes(state.buffer) == before

    def test_evaluation_gives_the_metrics_and_changes_nothing(self) -> None:
        """Evaluation returns the declared metrics, the same twice, and does not affect training."""
        workload = self.make_workload()
        state = self._train(workload, workload.init(self.config, 0)).state
        expected = self._train(workload, state, 2).state
        arrays = self.make_arrays(7)
        shard = workload.prepare(arrays)
        first = workload.evaluate(state, shard, self.config)
        assert workload.evaluate(state, shard, self.config) == first
        pooled = workload.pooled_metrics if isinstance(workload, PoolsScores) else ()
        assert list(first.metrics) == [name for name in workload.metrics if name not in pooled]
        values = dict(first.metrics)
        if isinstance(workload, PoolsScores) and pooled:
            assert first.kept is not None
            values |= workload.pool([State(bytes(first.kept.buffer))])
            assert all(any(name.startswith(known) for name in values) for known in pooled)
        assert all(type(value) is float for value in values.values())
        assert first.n_samples == len(next(iter(arrays.values())))
        assert self._train(workload, state, 2).state == expected

    def test_what_is_kept_of_a_trial_changes_nothing(self) -> None:
        """Trials that were trained or scored here before go on as in a process that is new."""
        import cloudpickle

        workload, shard = self.make_workload(), self.make_arrays(7)
        packed = cloudpickle.dumps(workload)
        states = {seed: workload.init(self.config, seed) for seed in (0, 1)}
        for epoch, (seed, state) in itertools.product(range(1, 6), states.items()):
            came = State(bytes(state.buffer)) if epoch == 3 else state  # from another worker
            trained = self._train(workload, came, epoch)
            fresh: Workload = pickle.loads(packed)  # noqa: S301
            expected = self._train(fresh, state, epoch)
            assert trained.state == expected.state
            assert _same(trained.loss, expected.loss)
            if epoch % 2:
                fresh = pickle.loads(packed)  # noqa: S301
                scored = fresh.evaluate(expected.state, fresh.prepare(shard), self.config)
                found = workload.evaluate(trained.state, workload.prepare(shard), self.config)
                assert found == scored
            if epoch == 4:  # a unit that is run again
                assert self._train(workload, state, epoch).state == expected.state
            states[seed] = trained.state

    def test_a_workload_that_was_used_is_the_same(self) -> None:
        """A resume knows it by its description, which stays that of a new one."""
        workload = self.make_workload()
        before = describe(workload)
        state = self._train(workload, workload.init(self.config, 0)).state
        workload.evaluate(state, workload.prepare(self.make_arrays(7)), self.config)
        assert differences(before, describe(workload)) == []

    def test_a_state_is_safetensors_and_json(self) -> None:
        """The safetensors library opens a state; nothing in it is pickled."""
        from safetensors import safe_open

        workload = self.make_workload()
        state = self._train(workload, workload.init(self.config, 0)).state
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            path.write_bytes(state.buffer)
            with safe_open(path, framework="numpy") as file:
                assert set(file.keys()) == set(state.tensors)
                assert isinstance(json.loads(file.metadata()["dagsel"]), dict)
        assert not _holds_a_pickle(bytes(state.buffer)), "a state holds a pickle"

    def test_the_random_streams_of_the_process_are_left_alone(self) -> None:
        """No method draws from the global random streams."""
        workload = self.make_workload()
        shard = workload.prepare(self.make_arrays(0))
        before = global_streams()
        workload.validate(self.config)
        state = workload.init(self.config, 0)
        state = workload.train(state, shard, self.config, visit=_visit(1)).state
        workload.evaluate(state, shard, self.config)
        workload.restore(state, self.config)
        assert global_streams() == before

    def _train(
        self,
        workload: Workload,
        state: State,
        epoch: int = 1,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        shard = workload.prepare(self.make_arrays(0))
        visit = _visit(epoch)
        return workload.train(state, shard, self.config, visit=visit, should_stop=should_stop)

    def _train_in_pieces(self, workload: Workload, state: State, stops: set[int]) -> Trained:
        polls = 0

        def should_stop() -> bool:
            nonlocal polls
            polls += 1
            return polls in stops

        trained = self._train(workload, state, 2, should_stop)
        n_samples = 0
        while not trained.finished:
            assert trained.n_samples > n_samples, "a piece makes no progress"
            n_samples = trained.n_samples
            trained = self._train(workload, trained.state, 2, should_stop)
        return trained


def in_gang(
    size: int, body: Callable[[Gang], _T], *, timeout_s: float = 30.0, name: str | None = None
) -> list[_T]:
    """Form a gang of threads, call a function on each rank and return the results by rank.

    If ranks raise, the error of the lowest rank is raised. The threads share the process's random
    streams, so draws from these are not reproducible.

    Examples
    --------
    >>> in_gang(3, lambda gang: (gang.rank, gang.agree(gang.rank == 0)))
    [(0, True), (1, True), (2, True)]
    """
    ports = [Future[int]() for _ in range(size)]
    called = name or f"thread gang {next(_numbers)}"
    options: dict[str, Any] = {"size": size, "name": called, "timeout_s": timeout_s}

    def call(number: int, port: int) -> None:
        ports[number].set_result(port)

    def rank(number: int) -> _T:
        if number == 0:
            with lead_gang("127.0.0.1", call=call, come_within_s=timeout_s, **options) as gang:
                return body(gang)
        with join_gang(
            "127.0.0.1", ports[number].result(timeout_s), rank=number, **options
        ) as gang:
            return body(gang)

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(rank, number) for number in range(size)]
        wait(ranks)
    return [rank.result() for rank in ranks]


def _holds_a_pickle(data: bytes) -> bool:
    """Whether there is the beginning of a pickle whose first frame has room in the data."""
    return any(
        int.from_bytes(begin[1], "little") <= len(data) - begin.end()
        for begin in _PICKLE.finditer(data)
    )


def _visit(epoch: int) -> Visit:
    value = 0.5 if epoch > 1 else None
    return Visit(seed=0, trial=2, epoch=epoch, shard=1, ends_epoch=True, last_value=value)


def _content(state: State) -> tuple[dict[str, bytes], dict[str, Any]]:
    return {name: t.data.tobytes() for name, t in state.tensors.items()}, state.meta


def _assert_near(first: State, second: State, tolerance: float) -> None:
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        if tensor.dtype in ("F64", "F32", "F16"):
            other, about = second.tensors[name].numpy(), f"{name}, by gang_tolerance"
            np.testing.assert_allclose(tensor.numpy(), other, tolerance, tolerance, err_msg=about)


def _same(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return first == second or (math.isnan(first) and math.isnan(second))
