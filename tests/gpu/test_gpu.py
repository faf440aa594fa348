"""On a real GPU: as on the CPU but for rounding, however shards and states get there.

    make test-gpu

Where there is none, each is skipped and says so.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import LocalCluster
from torch import nn
from torch.nn import functional as F

import dagsel
import dagsel.metrics
from dagsel.flow import Context, Decision, Event, Train
from dagsel.flows import Grid, RandomSearch
from dagsel.state import State
from dagsel.storage import ShardedDataset
from dagsel.workloads import TorchWorkload, Visit
from dagsel.workloads.torch import device as torch_device
from dagsel.workloads.torch import passes as torch_passes
from dagsel.workloads.torch import workload as torch_workload
from dagsel.workloads.torch.pretrained import Base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.device_count(), reason="PyTorch sees no GPU here"),
]


@pytest.fixture(autouse=True)
def _whole_float32() -> Iterator[None]:
    # cuDNN multiplies in TF32 unless it is told otherwise.
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def arrays(seed: int = 0, n: int = 200) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2, 8, 8)).astype("float32")
    return {"x": x, "y": (x.mean((1, 2, 3)) > 0).astype("int64")}


def mlp(config: Any) -> nn.Sequential:
    layers = [nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)]
    return nn.Sequential(*layers)


def cnn(config: Any) -> nn.Module:
    convolution = nn.Conv2d(2, 8, 3, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))


def adam(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.003)


def sgd(parameters: Any, config: Any) -> torch.optim.Optimizer:
    # Adam makes whole steps of the rounding of gradients that are next to nothing.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make(model: Any = mlp, optimizer: Any = adam, **options: Any) -> TorchWorkload:
    metrics = {"accuracy": dagsel.metrics.accuracy}
    return TorchWorkload(
        model,
        F.cross_entropy,
        optimizer,
        batch_size=16,
        metrics=metrics,
        eval_batch_size=64,
        **options,
    )


def run(workload: TorchWorkload, *, pieces: bool = False, hop: bool = False) -> Any:
    """Train for two epochs and score: the last state, the losses, the metrics."""
    shard, state, losses = workload.prepare(arrays()), workload.init({}, 3), []
    for epoch in (1, 2):
        finished = False
        while not finished:
            if hop:
                state = pickle.loads(pickle.dumps(state, protocol=5))
            visit = Visit(3, 2, epoch, 0, ends_epoch=True)
            trained = workload.train(state, shard, {}, visit=visit, should_stop=lambda: pieces)
            state, finished = trained.state, trained.finished
        losses.append(trained.loss)
    return state, losses, workload.evaluate(state, workload.prepare(arrays(1)), {}).metrics


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for name, tensor in expected[0].tensors.items():
        if name.startswith("model."):
            other = found[0].tensors[name]
            assert other.dtype == tensor.dtype
            np.testing.assert_allclose(
                other.numpy(), tensor.numpy(), atol=tolerance, rtol=tolerance
            )
    np.testing.assert_allclose(found[1], expected[1], rtol=tolerance)
    assert found[2]["loss"] == pytest.approx(expected[2]["loss"], rel=tolerance)


@pytest.mark.parametrize(
    "model", [cnn, lambda c: nn.Sequential(*list(mlp(c))[:3], nn.Linear(32, 2))]
)
def test_it_trains_as_the_cpu_does(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = run(make(model, sgd))
    for module in (torch_device, torch_passes, torch_workload):
        monkeypatch.setattr(module, "accelerator", lambda: None)
    on_cpu = run(make(model, sgd))
    assert any(name.startswith("random.cuda") for name in on_gpu[0].tensors)
    assert not any(name.startswith("random.cuda") for name in on_cpu[0].tensors)
    assert_close(on_gpu, on_cpu, 1e-3)


def test_shards_lie_where_their_budget_says() -> None:
    resident, pinned = make().prepare(arrays()), make(device_memory=0).prepare(arrays())
    assert all(array.is_cuda for array in resident.values())
    assert all(array.is_pinned() for array in pinned.values())
    device = torch_device.accelerator()
    assert device is not None
    taken = device.memory_use.taken
    del resident
    assert device.memory_use.taken == taken - sum(array.nbytes for array in pinned.values())


@pytest.mark.parametrize("pieces", [False, True])
def test_what_is_sent_trains_as_what_is_resident(pieces: bool) -> None:
    resident = run(make(), pieces=pieces)
    assert run(make(device_memory=0), pieces=pieces) == resident


def test_samples_are_augmented_on_the_host() -> None:
    def noise(sample: dict[str, Any], config: Any) -> dict[str, Any]:
        return {**sample, "x": sample["x"] + 0.1 * torch.randn(sample["x"].shape)}

    assert run(make(augment=noise)) == run(make(augment=noise, device_memory=0))


def test_the_devices_random_stream_travels_with_a_state() -> None:
    whole = run(make())
    torch.cuda.manual_seed(99)
    torch.rand(7, device="cuda")
    before = torch.cuda.get_rng_state()
    assert run(make(), pieces=True, hop=True)[0] == whole[0]
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_state_is_restored_without_a_gpu() -> None:
    workload = make()
    state, _, _ = run(workload)
    module = workload.restore(State(bytes(state.buffer)), {})
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"channels_last": True}, 2e-2),
        ({"fused": True}, 2e-2),
        ({"cuda_graphs": True}, 2e-2),
        ({"cuda_graphs": True, "fused": True, "device_memory": 0}, 2e-2),
        ({"precision": "tf32"}, 5e-2),
        ({"precision": "bf16"}, 0.2),
        ({"compile": True}, 2e-2),
        ({"compile": True, "precision": "bf16", "cuda_graphs": True}, 0.2),
    ],
    ids=str,
)
def test_an_option_changes_no_more_than_rounding(options: dict[str, Any], tolerance: float) -> None:
    torch._dynamo.reset()
    options = {"fused": False, **options}
    assert_close(run(make(cnn, **options)), run(make(cnn, fused=False)), tolerance)


def test_gradients_that_a_loop_lays_out_otherwise_are_stepped_without_the_fused_kernel() -> None:
    """Other kernels count steps on the host, and the fused one on the GPU: both in one unit."""

    def loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            if number % 3 == 0:
                weight = model[1].weight
                weight.grad = weight.grad.t().contiguous().t()
            optimizer.step()

    whole, ordinary = run(make(train_fn=loop))[0], run(make(fused=False))[0]
    for name, tensor in ordinary.tensors.items():
        if name.startswith("model."):
            torch.testing.assert_close(whole.tensors[name], tensor, rtol=2e-2, atol=2e-2)
    assert run(make(train_fn=loop), pieces=True)[0] == whole


def test_a_base_that_lies_on_the_host_is_not_read_again_for_the_gpu() -> None:
    calls: list[int] = []

    def body() -> nn.Module:
        calls.append(1)
        return nn.Linear(6, 3)

    base = Base(body)
    on_host, on_gpu = base.module(), base.module(torch.device("cuda"))
    assert calls == [1]
    for one, other in zip(on_host.parameters(), on_gpu.parameters(), strict=True):
        assert (one.is_cuda, other.is_cuda) == (False, True)
        assert torch.equal(one, other.cpu())
    assert base.is_intact()


CHECK = """\
import torch
from dagsel.execution import copied_server
torch.cuda.device_count()
assert not copied_server._cuda_has_begun()
torch.zeros(1, device="cuda")
assert copied_server._cuda_has_begun()
assert not copied_server.is_possible()
"""


def test_a_process_that_uses_the_gpu_is_not_copied() -> None:
    """A copy could not use it. Who counts GPUs does not use them yet."""
    subprocess.run([sys.executable, "-c", CHECK], check=True)


SPOIL = """\
import torch
from dagsel.execution.raising import gpu_error
scores, classes = torch.zeros(2, 3, device="cuda"), torch.tensor([0, 7], device="cuda")
assert gpu_error() is None
try:
    torch.nn.functional.cross_entropy(scores, classes).item()
except RuntimeError:
    assert "CUDA error" in gpu_error()
else:
    raise AssertionError("a class beyond the scores")
"""


def test_it_is_known_that_cuda_is_of_no_use_any_more() -> None:
    subprocess.run([sys.executable, "-c", SPOIL], check=True)


def test_the_settings_of_the_process_come_back() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    run(make(precision="tf32"))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@dataclass
class InGangs(RandomSearch):
    """Random search, each trial on so many workers together."""

    gang: int = 1

    def start(self, context: Context) -> list[Decision]:
        return self._widen(super().start(context))

    def handle(self, event: Event) -> list[Decision]:
        return self._widen(super().handle(event))

    def _widen(self, decisions: list[Decision]) -> list[Decision]:
        return [replace(d, gang=self.gang) if isinstance(d, Train) else d for d in decisions]


def search(study: optuna.Study, digits: ShardedDataset, run_dir: str, flow: Any, **how: Any) -> Any:
    def model(config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert output.is_cuda
        return F.cross_entropy(output, targets)

    return dagsel.optimize(
        study,
        TorchWorkload(
            model,
            loss,
            lambda parameters, config: torch.optim.SGD(parameters, config["lr"], momentum=0.9),
            batch_size=64,
            metrics={"accuracy": dagsel.metrics.accuracy},
        ),
        digits,
        space=lambda trial: {"lr": trial.suggest_float("lr", 0.05, 0.2, log=True)},
        flow=flow,
        metric="accuracy",
        run_dir=run_dir,
        **how,
    )


def test_a_search_runs_on_a_cluster_of_gpus(
    digits: ShardedDataset, study: optuna.Study, run_dir: str
) -> None:
    pytest.importorskip("dask_cuda", reason="needs the extra cuda")
    flow = RandomSearch(max_epochs=4, n_trials=4)
    result = search(study, digits, run_dir, flow, cluster="cuda")
    assert result.best_value > 0.8
    assert not result.failures
    assert result.timeline().worker.nunique() <= torch.cuda.device_count()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gang_of_two_trains_as_one_worker(digits: ShardedDataset, run_dir: str) -> None:
    pytest.importorskip("dask_cuda", reason="needs the extra cuda")
    models = []
    for gang in (1, 2):
        result = search(
            optuna.create_study(direction="maximize"),
            digits,
            f"{run_dir}-{gang}",
            InGangs(max_epochs=3, n_trials=1, gang=gang),
            cluster="cuda",
            deterministic=True,
        )
        models.append(result.best_model().state_dict())
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-3, atol=1e-4)


def test_a_batch_too_large_for_the_gpu_is_cut_and_then_fails_with_the_numbers(
    tmp_path: Any,
) -> None:
    """A fraction of the GPU's memory, with an allocation for each sample beyond it."""
    total = torch.cuda.mem_get_info()[1]
    room = min(total // 4, 4 * 10**9)  # bytes
    torch.cuda.set_per_process_memory_fraction(room / total)

    class Hungry(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.layer, self.n_bytes = nn.Linear(4, 1), int(share * room / 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                torch.empty(len(x) * self.n_bytes, dtype=torch.uint8, device=x.device)
            out: torch.Tensor = self.layer(x)
            return out

    x = np.random.default_rng(0).normal(size=(128, 4)).astype(np.float32)
    data = ShardedDataset.write(tmp_path / "data.zarr", {"x": x, "y": x[:, :1]}, n_shards=1)
    workload = TorchWorkload(
        lambda config: Hungry(config["share"]),
        F.mse_loss,
        lambda parameters, config: torch.optim.Adam(parameters),
        batch_size=32,
    )

    def space(trial: optuna.Trial) -> dict[str, float]:
        return {"share": trial.suggest_categorical("share", [0.1, 1.2, 4.0])}

    try:
        with LocalCluster(n_workers=1, processes=False, resources={"GPU": 1}) as cluster:
            run = dagsel.optimize(
                optuna.create_study(), workload, data, space=space, flow=Grid(max_epochs=1),
                metric="loss", cluster=cluster, run_dir=str(tmp_path / "run"),
            )  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    trials = {trial.config["share"]: trial for trial in run.record.trials.values()}
    assert [trials[s].state for s in (0.1, 1.2, 4.0)] == ["complete", "complete", "failed"]
    assert [told.at_once for told in trials[1.2].ran_out] == [32]
    assert "were asked for in unit 1 of epoch 1 (16 samples at once)" in trials[4.0].reason
