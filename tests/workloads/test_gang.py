"""A gang gives what one worker gives at the same global batch, whatever its size."""

from __future__ import annotations

import math
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

from dagsel.errors import GangBrokenError, TrainingError, WorkloadError
from dagsel.flow import Losses
from dagsel.state import State
from dagsel.testing import WorkloadSuite
from dagsel.testing.synthetic import SyntheticWorkload, seen
from dagsel.testing.workloads import in_gang
from dagsel.workloads import SklearnWorkload, TorchWorkload, Trained, Visit
from dagsel.workloads.gang import process_group
from dagsel.workloads.gang.gang import Gang, GangWorkload
from tests.waiting import wait_until

SIZES = (23, 17, 21, 16)  # the last batch of 8 has 7, 1, 5 and 8 samples
ORDERS = ((2, 0, 3, 1), (1, 3, 0, 2), (0, 1, 2, 3))


def data(shard: int) -> dict[str, Any]:
    rng = np.random.default_rng(shard)
    x = rng.normal(size=(SIZES[shard], 6)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)}


class FrozenNorm(nn.BatchNorm1d):
    """Batch normalisation that uses its running statistics, in training too."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = FrozenNorm) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), norm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.relu(self.norm(self.first(x))))


def sgd(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adam(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def own_loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    assert model.first.in_features == 6  # what the model has can be read
    for number, (inputs, targets) in enumerate(batches):
        loss = F.cross_entropy(model(inputs), targets)
        (loss / 2).backward()
        batches.log(loss)
        if number % 2 or number == len(batches) - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def no_sync_loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for number, (inputs, targets) in enumerate(batches):
        waits = number == 0 and len(batches) > 1 and hasattr(model, "no_sync")
        with model.no_sync() if waits else nullcontext():
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
        batches.log(loss)
        if number or len(batches) == 1:
            optimizer.step()
            optimizer.zero_grad()


def late_loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    """Go back through each batch when the next one is there."""
    loss = None
    for inputs, targets in batches:
        if loss is not None:
            step(optimizer, loss)
        loss = F.cross_entropy(model(inputs), targets)
        batches.log(loss)
    step(optimizer, loss)


def step(optimizer: Any, loss: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Counting(Net):
    """Has buffers of numbers that gloo cannot send."""

    n: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.int16, torch.bool, torch.complex64, torch.float64):
            self.register_buffer(str(dtype)[6:], torch.ones(3).to(dtype))
        self.register_buffer("n", torch.tensor(0, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> Any:
        self.n += 1
        return super().forward(x)


def workload(**options: Any) -> TorchWorkload:
    defaults: dict[str, Any] = {
        "model": lambda config: Net(),
        "loss": F.cross_entropy,
        "optimizer": sgd,
        "batch_size": 8,
    }
    return TorchWorkload(**{**defaults, **options})


def train(
    work: Any, state: State, shard: Any, visit: Visit, size: int | None, stop_after: int | None
) -> Trained:
    n_polls = 0

    def should_stop() -> bool:
        nonlocal n_polls
        n_polls += 1
        return n_polls == stop_after

    if size is None:
        return work.train(state, shard, {}, visit=visit, should_stop=should_stop)

    def rank(gang: Gang) -> Trained:
        mine = state if gang.rank == 0 else None
        stop = should_stop if gang.rank == 0 else never_asked
        return work.train_gang(mine, shard, {}, visit=visit, should_stop=stop, gang=gang)

    ranks = in_gang(size, rank)
    told = {(t.n_samples, t.finished, t.losses, t.diverged) for t in ranks}
    assert len(told) == 1 or ranks[0].diverged
    return ranks[0]


def never_asked() -> bool:
    raise AssertionError("only rank 0 is asked whether to stop")


def curve(work: TorchWorkload, sizes: list[int | None], stop_after: int | None = None) -> Any:
    """Train three epochs over four shards, each unit by a gang of the next size."""
    state = work.init({}, seed=5)
    losses, n_units = [], 0
    shards = [work.prepare(data(shard)) for shard in range(len(SIZES))]
    for epoch, order in enumerate(ORDERS, 1):
        for position, shard in enumerate(order):
            visit = Visit(3, 2, epoch, shard, ends_epoch=position == len(order) - 1)
            trained = None
            while trained is None or not trained.finished:
                size = sizes[n_units % len(sizes)]
                trained = train(work, state, shards[shard], visit, size, stop_after)
                state, n_units = trained.state, n_units + 1
            losses.append((trained.n_samples, trained.loss))
    return state, losses


def assert_equal(one: Any, other: Any) -> None:
    (state, losses), (other_state, other_losses) = one, other
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
    assert state.meta.get("cursor") == other_state.meta.get("cursor")
    tensors, other_tensors = state.tensors, other_state.tensors
    assert tensors.keys() == other_tensors.keys()
    for name, tensor in tensors.items():
        if name.startswith("random."):
            continue  # threads share them; `test_traps` looks at ranks in processes of their own
        np.testing.assert_allclose(
            tensor.numpy(), other_tensors[name].numpy(), rtol=1e-3, atol=1e-6, err_msg=name
        )


CASES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "adam": {"optimizer": adam},
    "schedule by epoch": {"lr_scheduler": lambda o, c: schedules.StepLR(o, 1, 0.3)},
    "schedule by batch": {
        "lr_scheduler": lambda o, c: schedules.LinearLR(o, 0.1, total_iters=20),
        "lr_scheduler_interval": "step",
    },
    "drop last": {"drop_last": True},
    "odd batch": {"batch_size": 7},
    "less than two samples for each": {"batch_size": 3},
    "own loop": {"train_fn": own_loop},
    "own no_sync": {"train_fn": no_sync_loop},
    "own loop that is one batch behind": {"train_fn": late_loop},
    "short integers": {"model": lambda config: Counting()},
    "pieces": {"max_batch": 3},
    "one by one": {"max_batch": 1, "optimizer": adam},
}


def n_connections() -> int:
    """Count the threads of PyTorch's gloo."""
    names = list[str]()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            names.append((thread / "comm").read_text())
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc only")
@pytest.mark.parametrize("loop", [None, own_loop])
def test_nothing_of_a_gang_is_left(loop: Any) -> None:
    work = workload(train_fn=loop)
    state, shard, before = work.init({}, seed=5), work.prepare(data(0)), n_connections()
    for _ in range(4):
        train(work, state, shard, Visit(3, 2, 1, 0, ends_epoch=False), 2, None)
    # PyTorch remembers one model of two that are in one process: two of the 16 threads.
    wait_until(lambda: n_connections() <= before + 2, "the connections' threads end")


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_two_ranks_give_the_curve_of_one(options: dict[str, Any]) -> None:
    alone = workload(**{**options, "max_batch": None})
    assert_equal(curve(workload(**options), [2]), curve(alone, [None]))


def test_an_optimizer_that_asks_for_the_loss_is_told_that_of_the_whole_batch() -> None:
    work = workload(optimizer=lambda p, c: torch.optim.LBFGS(p, lr=0.05, max_iter=2))
    (state, losses), (other, other_losses) = curve(work, [2]), curve(work, [None])
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
    for name in ("model.first.weight", "model.second.bias"):
        ours, theirs = state.tensors[name].numpy(), other.tensors[name].numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)


class Suite(WorkloadSuite):
    def make_workload(self) -> TorchWorkload:
        return workload(optimizer=adam)

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return data(seed)


def test_the_suite_finds_a_gang_whose_ranks_train_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Suite().test_a_gang_goes_through_the_same_samples()
    monkeypatch.setattr("dagsel.workloads.torch.passes.distribute", lambda module, batches: module)
    with pytest.raises(AssertionError, match="gang_tolerance"):
        Suite().test_a_gang_goes_through_the_same_samples()


def test_each_rank_trains_on_its_share_in_pieces_that_fit() -> None:
    sizes: list[tuple[int, int]] = []

    class Seeing(Net):
        def forward(self, x: torch.Tensor) -> Any:
            sizes.append((threading.get_ident(), len(x)))
            return super().forward(x)

    work = workload(model=lambda config: Seeing(), max_batch=3)
    train(work, work.init({}, 0), work.prepare(data(1)), Visit(0, 0, 1, 1), 2, None)
    ranks = {rank: [n for other, n in sizes if other == rank] for rank, _ in sizes}
    # 17 samples: shares of 4 in two batches of 8, and the last sample on both.
    assert [*ranks.values()] == [[2, 2, 2, 2, 1]] * 2


def test_a_trial_goes_on_with_any_other_number_at_the_very_sample() -> None:
    work = workload(optimizer=adam)
    assert_equal(curve(work, [2, None, 3, 1, 4], stop_after=1), curve(work, [None]))


def test_pieces_of_a_batch_are_the_batch() -> None:
    work = workload(max_batch=3)
    assert_equal(curve(work, [None]), curve(workload(), [None]))
    assert_equal(curve(work, [None], stop_after=1), curve(workload(), [None]))


@pytest.mark.parametrize("batch_size", [3, 5, 7])
def test_batch_normalisation_in_training_sees_no_share_of_one_sample(batch_size: int) -> None:
    # 23 samples: the last batch has two or three, less than two for each of three ranks.
    work = workload(model=lambda config: Net(nn.BatchNorm1d), batch_size=batch_size)
    state, shard = work.init({}, seed=0), work.prepare(data(0))
    trained = train(work, state, shard, Visit(0, 0, 1, 0), 3, None)
    assert trained.finished
    assert trained.loss is not None
    assert np.isfinite(trained.loss)


def test_the_losses_of_a_piece_are_told() -> None:
    work = workload(batch_size=8)
    state, shard, visit = work.init({}, seed=0), work.prepare(data(0)), Visit(0, 0, 1, 0)
    for size in (None, 2):
        first = train(work, state, shard, visit, size, 2)
        rest = train(work, first.state, shard, visit, size, None)
        assert (first.losses.n, rest.losses.n) == (2, 1)
        assert first.losses.low < first.losses.high
        assert rest.losses.low == rest.losses.high
        assert first.loss is not None
        sums = 16 * first.loss + 7 * rest.losses.low
        assert rest.loss == pytest.approx(sums / 23)
    silent = workload(train_fn=lambda model, optimizer, batches, config: [*batches])
    assert str(train(silent, state, shard, visit, None, None).losses) == str(Losses(3))


def test_a_nan_on_one_rank_is_told_by_all() -> None:
    work = workload(loss=lambda output, target: F.cross_entropy(output, target) * math.nan)
    trained = train(work, work.init({}, 0), work.prepare(data(0)), Visit(0, 0, 1, 0), 2, None)
    assert trained.diverged
    assert trained.losses.n == 3
    assert math.isnan(trained.losses.low)


def test_a_batch_smaller_than_the_gang_is_refused() -> None:
    with pytest.raises(WorkloadError, match="batch of 8 cannot be shared by a gang of 9"):
        workload().validate_gang({}, 9)
    workload().validate_gang({}, 8)


def leaving_loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for number, (inputs, targets) in enumerate(batches):
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == len(batches) - 1:
            break


@pytest.mark.parametrize("train_fn", [None, own_loop, leaving_loop])
@pytest.mark.parametrize("idle_in", [{0, 1, 2}, {1}, {2}], ids=str)
def test_a_parameter_without_a_gradient_is_named(idle_in: set[int], train_fn: Any) -> None:
    class Idle(Net):
        def forward(self, x: torch.Tensor) -> Any:
            self.n_seen = getattr(self, "n_seen", -1) + 1
            return self.first(x)[:, :3] if self.n_seen in idle_in else super().forward(x)

    work = workload(model=lambda config: Idle(), train_fn=train_fn)
    with pytest.raises(WorkloadError, match=r"does not depend on 'norm.weight'"):
        train(work, work.init({}, 0), work.prepare(data(0)), Visit(0, 0, 1, 0), 2, None)


def test_a_loop_that_goes_round_the_gang_is_refused() -> None:
    def loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        for inputs, targets in batches:
            F.cross_entropy(model.forward_alone(inputs), targets).backward()
            optimizer.step()

    class Odd(Net):
        def forward_alone(self, x: torch.Tensor) -> Any:
            return self.forward(x)

    work = workload(model=lambda config: Odd(), train_fn=loop)
    with pytest.raises(WorkloadError, match="must call the model itself"):
        train(work, work.init({}, 0), work.prepare(data(0)), Visit(0, 0, 1, 0), 2, None)


def cleared_at_once(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for inputs, targets in batches:
        F.cross_entropy(model.module(inputs) if hasattr(model, "module") else model(inputs),
                        targets).backward()  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()


def twice_backward(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for inputs, targets in batches:
        output = model(inputs)
        optimizer.zero_grad()
        F.cross_entropy(output, targets).backward(retain_graph=True)
        (0.5 * output.square().mean()).backward()
        optimizer.step()


def by_hand(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for inputs, targets in batches:
        loss, parameters = F.cross_entropy(model(inputs), targets), [*model.parameters()]
        with torch.no_grad():
            for parameter, slope in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter -= 0.1 * slope


def unfreezing(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    model.requires_grad_(True)
    for inputs, targets in batches:
        step(optimizer, F.cross_entropy(model(inputs), targets))


class HalfFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


@pytest.mark.parametrize("loop", [cleared_at_once, twice_backward, by_hand, unfreezing])
def test_a_loop_that_trains_each_rank_on_its_own_share_alone_is_refused(loop: Any) -> None:
    work = workload(
        train_fn=loop,
        model=lambda config: HalfFrozen() if loop is unfreezing else Net(),
        optimizer=lambda parameters, config: torch.optim.SGD(parameters, lr=0.1),
    )
    state, shard, visit = work.init({}, 0), work.prepare(data(0)), Visit(0, 0, 1, 0)
    assert train(work, state, shard, visit, None, None).finished
    with pytest.raises(WorkloadError, match=r"different numbers.* backward\(\) once for each call"):
        train(work, state, shard, visit, 2, None)


@pytest.mark.parametrize(("factor", "is_rounding"), [(1 + 2**-22, True), (1 + 2**-14, False)])
def test_ranks_that_round_differently_are_no_error(factor: float, is_rounding: bool) -> None:
    def loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        for inputs, targets in batches:
            step(optimizer, F.cross_entropy(model(inputs), targets))
            if model.gang.rank == 1:
                with torch.no_grad():
                    model.first.weight *= factor

    work = workload(train_fn=loop)
    state, shard = work.init({}, 0), work.prepare(data(1))
    with nullcontext() if is_rounding else pytest.raises(WorkloadError, match=r"'first.weight'"):
        train(work, state, shard, Visit(0, 0, 1, 1), 2, None)


def test_a_gang_has_samples_if_any_of_its_ranks_has_one() -> None:
    visit, arrays = Visit(3, 2, 1, 0, ends_epoch=True), data(3)
    order = visit.order(8)
    for kept in (order[4:6], order[:2]):
        few = {"x": arrays["x"][:8], "y": np.isin(np.arange(8), kept).astype("int64")}

        def some(batch: Any, config: Any) -> Any:
            return batch["x"][batch["y"] == 1], batch["y"][batch["y"] == 1]

        def mean(output: Any, targets: Any) -> Any:
            return F.cross_entropy(output, targets, reduction="sum") / max(1, len(targets))

        work = workload(input_fn=some, loss=mean)
        assert train(work, work.init({}, 0), work.prepare(few), visit, 2, None).finished


def test_max_batch_is_checked() -> None:
    with pytest.raises(WorkloadError, match="max_batch must be .*, got 0"):
        workload(max_batch=0)
    with pytest.raises(WorkloadError, match="accumulate gradients in your train_fn"):
        workload(max_batch=2, train_fn=own_loop)


def test_who_can_train_in_a_gang() -> None:
    from sklearn.linear_model import SGDClassifier

    assert isinstance(workload(), GangWorkload)
    assert isinstance(SyntheticWorkload(), GangWorkload)
    assert not isinstance(SklearnWorkload(SGDClassifier()), GangWorkload)


def test_a_synthetic_gang_sees_what_one_worker_sees() -> None:
    work = SyntheticWorkload(n_batches=4)
    state, visit = work.init({}, 0), Visit(0, 0, 1, 2)
    first = train(work, state, 8, visit, 3, 2)
    assert not first.finished
    second = train(work, first.state, 8, visit, 2, None)
    assert seen(second.state) == [(1, 2, batch) for batch in range(4)]
    assert second.state == work.train(state, 8, {}, visit=visit).state
    with pytest.raises(WorkloadError, match="speedup"):
        SyntheticWorkload(speedup=lambda config, gang: 0.0).validate_gang({}, 2)


def test_a_state_of_any_size_arrives_as_it_was() -> None:
    state = SyntheticWorkload(state_bytes=3_000_001).init({}, 0)
    odd = State(b"".join([b"x", bytes(state.buffer)])[1:])
    for sent in (state, odd):

        def body(gang: Gang, sent: State = sent) -> State:
            return gang.broadcast(sent if gang.rank == 0 else None)

        got = in_gang(3, body)
        assert all(other == state for other in got)


def test_a_rank_draws_other_numbers_than_rank_0() -> None:
    from dagsel.workloads.batches import Cursor
    from dagsel.workloads.random_streams import preserved_streams
    from dagsel.workloads.torch.ddp import seed_rank

    def draw(rank: int, n_batches: int) -> float:
        with preserved_streams(torch=True):
            seed_rank(7, Cursor(0, 1, 2, n_batches), rank)
            return float(torch.rand(()))

    drawn = [draw(rank, place) for rank in (1, 2) for place in (0, 3)]
    assert len(set(drawn)) == 4
    assert drawn == [draw(rank, place) for rank in (1, 2) for place in (0, 3)]


def test_a_rank_that_fails_before_all_are_connected_is_told_by_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = process_group.Group.__init__

    def late(self: Any, rendezvous: Any, *, rank: int, **options: Any) -> None:
        connect(self, rendezvous, rank=rank, **options)
        if rank == 0:  # the others are connected, and one of them leaves at once
            assert rendezvous.get("error", 30.0) is not None
            raise RuntimeError("Connection closed by peer")

    def body(gang: Gang) -> None:
        if gang.rank == 1:
            raise KeyError("x")
        gang.agree(False)

    monkeypatch.setattr(process_group.Group, "__init__", late)
    with pytest.raises(KeyError, match="x"):
        in_gang(3, body)


def test_errors_that_ranks_raise_are_what_they_were() -> None:
    class OwnError(Exception):
        pass

    for error, kind in ((KeyError("x"), KeyError), (OwnError("y"), TrainingError)):

        def body(gang: Gang, error: Exception = error) -> None:
            if gang.rank == 1:
                raise error
            gang.agree(False)

        with pytest.raises(kind, match="x|y") as caught:
            in_gang(3, body)
        assert "On rank 1" in caught.value.__notes__[0]
        assert not isinstance(caught.value, GangBrokenError)
