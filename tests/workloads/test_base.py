"""A base model is once in a process and in no state; what training must not change stays.

- States hold what trains and the buffers that changed, and losses are those of a plain loop, bit
  for bit.
- Trials of a process share the base's memory; a file is mapped; nothing that a trial does is seen
  by another.
- Another base and a file that has changed are refused.
"""

import copy
import hashlib
import pickle
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import fsspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import dagsel
from dagsel.errors import CheckpointCorruptError, WorkloadError
from dagsel.state import State
from dagsel.testing import WorkloadSuite
from dagsel.workloads import Base, TorchWorkload, Visit
from dagsel.workloads.describe import describe, differences
from dagsel.workloads.random_streams import _TURNS, own_streams
from dagsel.workloads.torch.frozen import checksums
from dagsel.workloads.torch.pretrained import _held
from tests.waiting import wait_until

CONFIG = {"lr": 0.01, "rank": 2}
N_EPOCHS = 3


class Body(nn.Module):
    """A pretrained model with dropout, running statistics and a buffer that is not stored."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.tied = self.second
        self.register_buffer("scale", torch.full((16,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(torch.relu(self.norm(self.first(x))), 0.2, self.training)
        return self.tied(hidden) * self.scale


class Adapter(nn.Module):
    """A linear layer with an addition of low rank, as LoRA has it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def body() -> Body:
    torch.manual_seed(7)
    return Body()


BODY = body()


def adapted(config: Mapping[str, Any], base: Any) -> nn.Module:
    base.first = Adapter(base.first, config["rank"])
    return nn.Sequential(base, nn.Linear(16, 3))


def whole(config: Mapping[str, Any]) -> nn.Module:
    """Build the same without a base; ranks of the suite's gangs share their random numbers."""
    return adapted(config, copy.deepcopy(BODY).requires_grad_(requires_grad=False))


def workload(model: Any = adapted, base: Any = body, **options: Any) -> TorchWorkload:
    loss, optimizer = F.cross_entropy, torch.optim.Adam
    return TorchWorkload(model, loss, optimizer, batch_size=8, base=base, **options)


def arrays(seed: int = 0, n: int = 27) -> dict[str, NDArray[Any]]:
    x = np.random.default_rng(seed).normal(size=(n, 6)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64")}


def visit(epoch: int) -> Visit:
    return Visit(seed=0, trial=0, epoch=epoch, shard=0, ends_epoch=True)


def trained(it: TorchWorkload, state: State, n: int = N_EPOCHS) -> State:
    shard = it.prepare(arrays())
    for epoch in range(1, n + 1):
        state = it.train(state, shard, CONFIG, visit=visit(epoch)).state
    return state


def entries(state: State) -> set[str]:
    return {name.removeprefix("model.") for name in state.tensors if name.startswith("model.")}


class TestBaseOfAFunction(WorkloadSuite):
    config = CONFIG
    gang_tolerance = None  # with dropout and batch normalization

    def make_workload(self) -> TorchWorkload:
        return workload()

    def make_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        return arrays(seed)


class TestTrainableWithoutABase(TestBaseOfAFunction):
    def make_workload(self) -> TorchWorkload:
        return workload(whole, None, state="trainable")


def test_losses_and_weights_are_those_of_a_plain_loop() -> None:
    it = workload()
    shard, x, y = it.prepare(arrays()), *map(torch.from_numpy, arrays().values())
    state = it.init(CONFIG, 0)
    torch.manual_seed(0)
    model = whole(CONFIG)
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trains, lr=0.01, fused=True)  # as the workload steps it
    for epoch in range(1, N_EPOCHS + 1):
        done = it.train(state, shard, CONFIG, visit=visit(epoch))
        state, total = done.state, 0.0
        for part in torch.from_numpy(visit(epoch).order(27)).split(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(model.train()(x[part]), y[part])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(part)
        assert done.loss == total / 27
    mine, theirs = it.restore(state, CONFIG).state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_state_holds_what_trains_and_the_buffers_that_changed() -> None:
    it = workload()
    own = {"0.first.down.weight", "0.first.up.weight", "1.weight", "1.bias"}
    norm = {f"0.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    state = it.init(CONFIG, 0)
    assert entries(state) == own
    (group,) = state.meta["tree"]["optimizer"]["param_groups"]
    assert len(group["params"]) == len(own), "the optimizer gets what trains"
    assert entries(trained(it, state)) == own | norm
    assert entries(workload(whole, None, state="trainable").init(CONFIG, 0)) == own | norm
    assert entries(workload(whole, None).init(CONFIG, 0)) > own | norm | {"0.second.weight"}


def test_trials_share_the_weights_of_the_base_and_nothing_else() -> None:
    base = Base(body)
    its: list[Any] = [adapted({"rank": rank}, base.module()) for rank in (2, 3)]
    first, second = its
    assert first[0].second.weight.data_ptr() == second[0].second.weight.data_ptr()
    assert first[0].second is first[0].tied
    assert not any(p.requires_grad for p in first[0].second.parameters())
    first[0].norm.running_mean += 1
    first[0].second.bias.requires_grad_()
    assert not second[0].norm.running_mean.any()
    assert not second[0].second.bias.requires_grad
    assert base.is_intact()


def test_what_is_unfrozen_is_a_copy_and_in_the_state() -> None:
    def unfrozen(config: Any, base: Any) -> nn.Module:
        base.second.requires_grad_()
        return nn.Sequential(base, nn.Linear(16, 3))

    it = workload(unfrozen)
    state = it.init(CONFIG, 0)
    after = trained(it, state)
    # The layer has two names, and one memory.
    assert {"0.second.weight", "0.tied.weight"} < entries(after) | {"0.tied.weight"}
    assert it.base is not None
    assert it.base.is_intact()
    its: list[Any] = [it.restore(of, CONFIG) for of in (state, after)]
    assert checksums([its[0][0].second.weight]) != checksums([its[1][0].second.weight])


def test_a_process_loads_it_once_also_for_several_workloads() -> None:
    calls: list[int] = []

    def counted() -> Body:
        calls.append(1)
        torch.manual_seed(8)  # weights of this test alone: others may have left theirs behind
        return Body()

    it = workload(base=counted)
    assert it.base is not None
    digest = it.base.digest
    sent = cloudpickle.dumps(it)
    trained(it, it.init(CONFIG, 0))
    it.evaluate(it.init(CONFIG, 1), it.prepare(arrays(1)), CONFIG)
    assert len(calls) == 1
    here: TorchWorkload = pickle.loads(sent)  # as a worker gets it
    trained(here, here.init(CONFIG, 0))
    assert len(calls) == 1
    del it, here
    assert all(key[0] != digest for key in _held), "weights stay though nothing uses them"


def saved(folder: Path, module: nn.Module | None = None) -> tuple[str, str]:
    path, held = folder / "body.safetensors", dict((module or body()).state_dict())
    for name in [name for name in held if name.startswith("tied")]:
        del held[name]  # a file has each memory once
    save_file(held, path)
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("where", ["a path", "a URL"])
def test_weights_of_a_file_are_mapped_and_equal_those_of_a_function(
    tmp_path: Path, where: str
) -> None:
    path, digest = saved(tmp_path)
    url = path
    if where == "a URL":
        url = "memory://bases/body.safetensors"
        fsspec.filesystem("memory").pipe(url, Path(path).read_bytes())
    from_file, from_function = workload(base=Base(Body, url, sha256=digest)), workload()
    assert from_file.base is not None
    assert from_file.base.digest == digest
    if where == "a path":
        mapped: Any = from_file.base.module()
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0] for line in maps if line.endswith(path)]
        within = [[int(end, 16) for end in span.split("-")] for span in spans]
        assert any(low <= mapped.first.weight.data_ptr() < high for low, high in within)
    ends = [trained(it, it.init(CONFIG, 0)) for it in (from_file, from_function)]
    assert all(
        ends[0].tensors[name].data.tobytes() == ends[1].tensors[name].data.tobytes()
        for name in ends[0].tensors
    )


def test_a_module_will_do_and_is_left_as_it_is() -> None:
    module = body()
    before = copy.deepcopy(module.state_dict())
    it = workload(base=module)
    assert (
        trained(it, it.init(CONFIG, 0)).tensors.keys()
        == trained(workload(), workload().init(CONFIG, 0)).tensors.keys()
    )
    assert all(torch.equal(held, before[name]) for name, held in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_large_model_is_built_without_its_random_numbers_and_trains_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = [trained(it, it.init(CONFIG, 0)) for it in (workload(), workload(whole, None))]
    monkeypatch.setattr("dagsel.workloads.torch.trials.LARGE", 0)
    monkeypatch.setattr("dagsel.workloads.torch.live.MOST", 0)  # build it for each unit
    its = workload(), workload(whole, None)
    assert [trained(it, it.init(CONFIG, 0)) for it in its] == usual


def test_frozen_weights_of_a_large_model_are_not_left_out_when_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def features(config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32).requires_grad_(requires_grad=False), nn.Linear(32, 3))

    it = workload(features, None, state="trainable")
    usual = trained(it, it.init(CONFIG, 0))
    monkeypatch.setattr("dagsel.workloads.torch.trials.LARGE", 0)
    monkeypatch.setattr("dagsel.workloads.torch.live.MOST", 0)
    assert trained(it, it.init(CONFIG, 0)) == usual
    frozen = workload(whole, None, state="trainable")
    assert (
        trained(frozen, frozen.init(CONFIG, 0)).meta["frozen"]
        == frozen.init(CONFIG, 0).meta["frozen"]
    )


def test_a_state_that_lacks_what_trains_is_none_of_the_workload() -> None:
    few = workload(lambda config, base: nn.Sequential(base, nn.Linear(16, 3)))
    it = workload()
    with pytest.raises(CheckpointCorruptError, match="of another workload"):
        it.train(few.init(CONFIG, 0), it.prepare(arrays()), CONFIG, visit=visit(1))


def test_another_base_is_refused_on_resume_and_by_a_state(tmp_path: Path) -> None:
    def other() -> Body:
        torch.manual_seed(8)
        return Body()

    first, second = workload(), workload(base=other)
    (found,) = differences(describe(first), describe(second))
    assert found.startswith("'base' was a base of sha256 ")
    assert not differences(describe(first), describe(workload(base=Base(body))))
    state = first.init(CONFIG, 0)
    with pytest.raises(WorkloadError, match=r"of another base: its sha256 is .* there and .* here"):
        second.train(state, second.prepare(arrays()), CONFIG, visit=visit(1))


def test_a_function_that_draws_without_a_seed_gives_the_same_base_each_time() -> None:
    torch.manual_seed(1)
    first = Base(Body).digest
    torch.manual_seed(2)
    assert Base(lambda: Body()).digest == first


def test_a_base_that_differs_in_another_process_is_refused() -> None:
    def drifting() -> Body:
        seeds.append(len(seeds))
        torch.manual_seed(len(seeds))
        return Body()

    seeds: list[int] = []
    it = workload(base=drifting)
    assert it.base is not None
    digest = it.base.digest
    there = pickle.loads(cloudpickle.dumps(it))
    _held.clear()  # as in another process
    with pytest.raises(WorkloadError, match=f"the search began with {digest}; let base give"):
        there.init(CONFIG, 0)
    it.base.forget()
    with pytest.raises(WorkloadError, match=f"the search began with {digest}; let base give"):
        it.init(CONFIG, 0)


def test_a_file_that_has_changed_is_refused_before_anything_trains(tmp_path: Path) -> None:
    path, digest = saved(tmp_path)
    it = workload(base=Base(Body, path, sha256=digest))
    saved(tmp_path, Body())
    with pytest.raises(WorkloadError, match=f"{path} has changed: its sha256 is .* should be"):
        it.validate(CONFIG)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: Base(Body, path + ".gone"), "cannot be read here"),
        (lambda path: Base(Body, __file__), "is no safetensors file"),
        (lambda path: Base(lambda: nn.Linear(6, 16), path), "has 'weight', and its files"),
        (lambda path: Base(lambda: nn.Sequential(), path), "and its module has not"),
        (lambda path: Base(lambda: Wide(), path), r"is \(17, 6\) in its module and \(16, 6\)"),
        (lambda path: Base(three), "base gave 3, not a torch.nn.Module"),
    ],
)
def test_a_base_that_cannot_be_had(
    tmp_path: Path, make: Callable[[str], Base], message: str
) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(WorkloadError, match=message):
        workload(base=make(path)).validate(CONFIG)


def three() -> Any:
    return 3


class Wide(Body):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 17)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 3}, "base must be a function without arguments"),
        ({"base": lambda config: Body()}, "base must be a function without arguments"),
        ({"state": "adapters"}, "state is 'adapters', not 'all' or 'trainable'"),
        ({"state": "all"}, "state='all' would store the base"),
        ({"model": lambda config: Body()}, r"called as model\(config, base\)"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        workload(**options)
    with pytest.raises(WorkloadError, match="has 1 sha256: give one for each file"):
        Base(Body, ["a", "b"], sha256="0")


def test_nothing_that_trains_is_said_before_anything_trains() -> None:
    with pytest.raises(WorkloadError, match="nothing trains: every parameter that model.config, b"):
        workload(lambda config, base: base).validate(CONFIG)


def test_a_model_of_a_run_that_was_changed_does_not_change_the_next() -> None:
    it = workload()
    state = trained(it, it.init(CONFIG, 0))
    model: Any = it.restore(state, CONFIG)
    expected = model[0].second.weight.clone()
    model[0].second.weight.data.zero_()
    again: Any = it.restore(state, CONFIG)
    assert torch.equal(again[0].second.weight, expected)
    assert isinstance(dagsel.Base(body), Base)


def test_a_trial_goes_on_with_another_rate() -> None:
    it = workload()
    state = trained(it, it.init(CONFIG, 0))
    after = it.reconfigure(state, CONFIG, {**CONFIG, "lr": 0.5})
    assert entries(after) == entries(state)
    assert it.train(after, it.prepare(arrays()), CONFIG, visit=visit(4)).state != state
    with pytest.raises(WorkloadError, match="another 'rank': .*; leave 'rank' out of"):
        it.reconfigure(state, CONFIG, {**CONFIG, "rank": 3})


def test_what_is_written_into_the_base_is_refused_and_the_next_trial_has_it_whole() -> None:
    def anew(config: Any, base: Any) -> nn.Module:
        if config["anew"]:
            base.second.requires_grad_()
            base.second.reset_parameters()
        return nn.Sequential(base, nn.Linear(16, 3))

    it = workload(anew)

    def scored() -> Mapping[str, float]:
        config = {**CONFIG, "anew": False}
        return it.evaluate(it.init(config, 0), it.prepare(arrays(1)), config).metrics

    expected = scored()
    with pytest.raises(WorkloadError, match="has written into weights of the base"):
        it.init({**CONFIG, "anew": True}, 0)
    assert scored() == expected


def test_bases_of_equal_weights_and_another_form_are_two() -> None:
    def attention(heads: int) -> nn.Module:
        torch.manual_seed(5)
        return nn.MultiheadAttention(8, heads)

    bases = [Base(partial(attention, heads)) for heads in (1, 2, 4)]
    assert len({base.digest for base in bases}) == 1
    sent = pickle.loads(cloudpickle.dumps(bases))
    for held in (bases, sent):
        modules: list[Any] = [base.module() for base in held]
        assert [module.num_heads for module in modules] == [1, 2, 4]
    assert bases[0].load() is sent[0].load()


def test_a_base_that_another_thread_loads_does_not_stop_a_unit() -> None:
    base, loads = Base(body), threading.Event()

    def load() -> None:
        loads.set()
        base.load()

    thread = threading.Thread(target=load, daemon=True)
    with own_streams():  # as in a unit
        thread.start()
        loads.wait()
        wait_until(lambda: len(_TURNS._waiting) > 0, "the other thread waits for the streams")
        base.load()
    thread.join(60)
    assert not thread.is_alive()


def test_a_base_with_parameters_at_one_place_is_intact() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.same = nn.Parameter(self.layer.weight.data)  # another parameter, one memory
            self.empty, self.nothing = (nn.Parameter(torch.empty(0)) for _ in range(2))

    base = Base(Odd)
    base.load()
    assert base.is_intact()
