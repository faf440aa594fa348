"""What a workload of PyTorch says of memory, and how it does with less.

Half the samples at once change a result by rounding alone. What is counted before anything trains
is what training takes, or less, and running user code for it is asked for. What the user says
counts first, then what was measured, then the count. Whatever an error says of memory that was
lacking, it is known as that; nothing else is.
"""

from __future__ import annotations

import errno
import gc
import pickle
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dagsel
from dagsel.dispatch.units import Unit
from dagsel.errors import GangBrokenError, OutOfMemoryError, TrainingError, WorkloadError
from dagsel.execution.timing import Timing
from dagsel.planning.scaling import Scaling
from dagsel.profiling import MemoryNeeds, Profile, architecture_of
from dagsel.state import State
from dagsel.storage import ShardedDataset
from dagsel.workloads import Visit
from dagsel.workloads.base import DataOutline, outline
from dagsel.workloads.describe import describe, differences
from dagsel.workloads.memory import (
    NeedsMemory,
    SavesMemory,
    asked_bytes,
    is_out_of_memory,
    said,
    text_of,
    why_it_fails,
    with_halved,
)
from dagsel.workloads.raised import RanOut
from dagsel.workloads.torch.state import capture

X = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
Y = X.sum(1, keepdims=True)
DATA = DataOutline((50,), {"x": (X.dtype, (8,)), "y": (Y.dtype, (1,))})
WEIGHTS = 4 * (8 * 16 + 16 + 16 + 1)
MSE = nn.functional.mse_loss


def mlp(config: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def workload(**options: Any) -> dagsel.TorchWorkload:
    how: dict[str, Any] = {"model": mlp, "loss": MSE, "batch_size": 16, "eval_batch_size": 12}
    how["optimizer"] = partial(make, torch.optim.Adam)
    return dagsel.TorchWorkload(**{**how, **options})


def make(kind: Any, parameters: Any, config: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(parameters, lr=0.01)
    return made


def train(work: dagsel.TorchWorkload) -> Any:
    shard = work.prepare({"x": X, "y": Y})
    return work.train(work.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0)), shard


def test_a_unit_leaves_nothing_until_garbage_is_collected() -> None:
    """Else a worker may have the weights and moments of several units in its memory."""
    made = list[Any]()

    def model(config: Any) -> torch.nn.Module:
        module = mlp(config)
        made.append(weakref.ref(next(module.parameters())))
        return module

    work = workload(model=model)
    gc.disable()
    try:
        trained, shard = train(work)
        for _ in range(2):
            work.forget()  # so that it is built from its state
            trained = work.train(trained.state, shard, {}, visit=Visit(0, 0, 1, 0))
        work.evaluate(trained.state, shard, {})
        work.forget()
        assert len(made) > 3
        assert not any(weight() is not None for weight in made)
    finally:
        gc.enable()


def test_gradients_make_room_for_the_state_that_follows() -> None:
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(3, 2)).sum().backward()
    state = capture(module, optimizer, None, {}).state
    assert module.weight.grad is None
    assert state.header["model.weight"]["shape"] == [1, 2]


def test_a_state_that_its_unit_alone_has_makes_room_for_training_and_for_scoring() -> None:
    there = list[bool]()

    def loss(output: Any, target: Any) -> torch.Tensor:
        there.append(held() is not None)
        return MSE(output, target)

    work = workload(loss=loss)
    trained, shard = train(workload())
    for is_spare in (False, True):
        for does in (partial(work.train, visit=Visit(0, 0, 1, 0)), work.evaluate):
            bytes_of_it = np.frombuffer(bytes(trained.state.buffer), np.uint8)
            held = weakref.ref(bytes_of_it)
            state = State(bytes_of_it.data, is_spare=is_spare)
            del bytes_of_it
            work.forget()
            there.clear()
            does(state, shard, {})
            assert set(there) == {not is_spare}
            assert state.meta == trained.state.meta


# ---- half the samples at once


def test_half_the_samples_at_once_is_a_max_batch_and_changes_rounding_alone() -> None:
    whole, half = workload(), workload().halved(1)
    assert isinstance(half, SavesMemory)
    assert [work.at_once({}, "train") for work in (whole, half)] == [16, 8]
    assert [work.at_once({}, "evaluate") for work in (whole, half)] == [12, 6]
    assert with_halved(whole, 0) is whole
    first, shard = train(whole)
    second, _ = train(half)
    third, _ = train(workload(max_batch=8))
    assert bytes(second.state.buffer) == bytes(third.state.buffer) != bytes(first.state.buffer)
    models = [whole.restore(trained.state, {}).state_dict() for trained in (first, second)]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-6)
    scores = [work.evaluate(first.state, shard, {}).metrics["loss"] for work in (whole, half)]
    assert scores[0] == pytest.approx(scores[1])


def test_batches_are_halved_again_down_to_one_sample() -> None:
    at_once = [workload(max_batch=10).halved(n).at_once({}, "train") for n in range(6)]
    assert at_once == [10, 5, 3, 2, 1, 1]


def test_a_batch_that_cannot_be_cut_stays_whole() -> None:
    own_loop = workload(train_fn=lambda model, optimizer, batches, config: None)
    sums = workload(loss=partial(MSE, reduction="sum")), workload(loss=nn.MSELoss(reduction="sum"))
    for work in (own_loop, *sums):
        assert work.halved(1).at_once({}, "train") is None
    first, second = train(sums[0]), train(sums[0].halved(1))
    assert bytes(first[0].state.buffer) == bytes(second[0].state.buffer)


def test_what_is_kept_of_earlier_units_is_dropped_when_memory_is_short() -> None:
    work = workload()
    trained, shard = train(work)
    work.forget()
    work.evaluate(trained.state, shard, {})
    assert work._live.n_used == 0
    trained, _ = train(work)
    work.halved(1).evaluate(trained.state, shard, {})  # it is of the same trials
    assert work._live.n_used == 1


# ---- what a unit takes


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        (torch.optim.SGD, 0),
        (partial(torch.optim.SGD, momentum=0.9), 1),
        (torch.optim.Adam, 2),
        (partial(torch.optim.AdamW, amsgrad=True), 3),
        (torch.optim.Adagrad, 1),
        (torch.optim.Adafactor, 0),  # of rows and columns
        (torch.optim.LBFGS, 0),  # not known
    ],
)
def test_parameters_gradients_and_moments_are_counted(kind: Any, moments: int) -> None:
    work = workload(optimizer=partial(make, kind))
    counted = work.memory_bytes({}, DATA)
    assert counted is not None
    few = 4 * 4 + 4 * 50  # numbers of each parameter, and of rows and columns
    assert (2 + moments) * WEIGHTS <= counted <= (2 + moments) * WEIGHTS + few


def test_frozen_parameters_have_no_gradients() -> None:
    def frozen(config: Any) -> nn.Module:
        model = mlp(config).requires_grad_(requires_grad=False)
        return nn.Sequential(model, nn.Linear(1, 1))

    only = partial(make, torch.optim.SGD)
    assert workload(model=frozen, optimizer=only).memory_bytes({}, DATA) == WEIGHTS + 8 + 8


@pytest.mark.parametrize("large", [False, True])
def test_an_estimate_counts_what_a_batch_keeps(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # a whole batch without numbers
        monkeypatch.setattr("dagsel.workloads.torch.memory.LARGE", 0)
    counts = [workload(memory=how).memory_bytes({}, DATA) or 0 for how in (None, "estimate")]
    a_sample = 4 * (8 + 16 + 1 + 1) + 4 * (8 + 1)  # into each layer and the loss, and the arrays
    assert counts[1] == counts[0] + 16 * a_sample
    half = workload(memory="estimate").halved(1).memory_bytes({}, DATA)
    assert half == counts[0] + 8 * a_sample
    cast = DataOutline((50,), {"x": (np.dtype("f8"), (8,)), "y": DATA.arrays["y"]})
    work = workload(memory="estimate")
    work.validate({})
    assert work.memory_bytes({}, cast) == counts[1]


def test_code_of_the_user_runs_for_an_estimate_alone_and_may_fail() -> None:
    called = []

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            called.append(len(x))
            raise ValueError("no zeros, please")

    def own(config: Any) -> nn.Module:
        return Own(8, 1)

    counted = workload(model=own).memory_bytes({}, DATA)
    assert not called
    assert workload(model=own, memory="estimate").memory_bytes({}, DATA) == counted
    assert called == [2]


def test_what_was_built_to_be_checked_is_counted_there_and_not_built_again() -> None:
    built: list[Any] = []

    def model(config: Any) -> nn.Module:
        built.append(config)
        return nn.Sequential(nn.Linear(8, config["width"]), nn.Linear(config["width"], 1))

    def make(**options: Any) -> Any:
        made = workload(model=model, **options)
        made.validate({"width": 1})  # the first one is built twice
        built.clear()
        return made

    counting, config, equal = make(), {"width": 5}, {"width": 5}
    counting.validate(config)
    n_bytes = counting.memory_bytes(config, DATA)
    assert len(built) == 1
    assert n_bytes == counting.memory_bytes(equal, DATA)  # which may be of another trial
    assert len(built) == 2
    assert pickle.loads(pickle.dumps(counting._counts)).of(config) is None
    estimates = make(memory="estimate")
    estimates.validate(config)
    assert (estimates.memory_bytes(config, DATA) or 0) > (n_bytes or 0)


def test_streams_of_the_process_are_where_they_were() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    dropping = workload(
        model=lambda config: nn.Sequential(nn.Dropout(0.5), mlp(config)), memory="estimate"
    )
    dropping.memory_bytes({}, DATA)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("memory", [0, 1.5, True, "much"])
def test_memory_is_a_number_of_bytes(memory: Any) -> None:
    with pytest.raises(WorkloadError, match="memory must be a whole number of 1 or more"):
        workload(memory=memory)
    with pytest.raises(WorkloadError, match="memory must be a whole number of 1 or more"):
        workload(memory=lambda config: memory).validate({"lr": 0.1})


def test_what_the_user_says_counts_then_what_was_measured_then_the_count(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "data.zarr", {"x": X, "y": Y}, n_shards=1)
    counted = workload().memory_bytes({}, outline(data.manifest))
    assert MemoryNeeds(workload(), data)({}, 0) == counted
    timing = Timing(1, 0.1, 160.0, memory_bytes=123_456)
    name = architecture_of(workload(), {})
    Profile(name, Scaling({1: 1.0}), timings=(timing,)).save(data)
    assert MemoryNeeds(workload(), data)({}, 0) == 123_456
    assert MemoryNeeds(workload(), data)({}, 1) == counted  # it was measured with whole batches
    assert MemoryNeeds(workload(batch_size=4), data)({}, 0) == counted  # another architecture
    said_so = workload(memory=lambda config: 77)
    assert isinstance(said_so, NeedsMemory)
    assert MemoryNeeds(said_so, data)({}, 0) == MemoryNeeds(said_so, data)({}, 1) == 77


def test_a_run_may_go_on_with_another_memory_as_it_changes_no_result() -> None:
    assert differences(describe(workload()), describe(workload(memory=5))) == []


# ---- errors


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (TrainingError("OutOfMemoryError: CUDA out of memory."), True),  # of a rank of a gang
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (GangBrokenError("a rank is lost"), False),
    ],
)
def test_errors_of_memory_are_known(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it
    wrapped = ValueError("while it trained")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) == is_it
    hidden = ValueError("of something else")
    hidden.__context__, hidden.__suppress_context__ = error, True
    assert not is_out_of_memory(hidden)


def test_an_allocation_of_pytorch_that_fails_is_known_by_its_bytes() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert asked_bytes(said(raised.value)) == 1 << 60
    with pytest.raises(MemoryError) as refused:
        np.empty(1 << 60, np.uint8)
    assert asked_bytes(said(refused.value)) == 1 << 60


def test_the_sentence_has_the_numbers_of_both_attempts() -> None:
    error = "RuntimeError: you tried to allocate 4000000000 bytes"
    first = RanOut(Unit("train", 3, 2, 1), "w1", error, 2 * 10**9, 10**9, at_once=64)
    second = RanOut(Unit("train", 3, 2, 1), "w2", "MemoryError", at_once=32)
    assert why_it_fails(first, second) == (
        "4.0 GB were asked for in unit 2 of epoch 2 (64 samples at once), on worker w1, which has "
        "2.0 GB and had taken 1.0 GB at most; the second time, alone in its worker: memory ran out "
        "in unit 2 of epoch 2 (32 samples at once), on worker w2; take a smaller batch_size or "
        "model, or give the workers more memory; the error was MemoryError"
    )
    scoring = RanOut(Unit("evaluate", 3, 2, 1), "w1", "MemoryError")
    assert (
        text_of(scoring) == "memory ran out in the evaluation of epoch 2 on shard 1, on worker w1"
    )
    assert isinstance(OutOfMemoryError("x"), MemoryError)
