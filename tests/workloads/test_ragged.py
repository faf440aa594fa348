"""Ragged arrays, several inputs and augmentation train as a plain loop does, bit for bit."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.linear_model import SGDClassifier
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

import dagsel
from dagsel.collate import pad
from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.storage import RaggedArray, ShardedDataset
from dagsel.testing import WorkloadSuite
from dagsel.workloads import SklearnWorkload, TorchWorkload, Visit
from dagsel.workloads.base import checks
from dagsel.workloads.batches import Cursor
from dagsel.workloads.torch import device as torch_device
from dagsel.workloads.torch import passes as torch_passes
from dagsel.workloads.torch import workload as torch_workload
from dagsel.workloads.torch.batches import evaluation_batches, training_batches
from dagsel.workloads.torch.ragged import SORTED_BATCHES, by_size
from tests.fused import fused
from tests.workloads.test_device import HostDevice
from tests.workloads.test_device import device as device

N, BATCH = 23, 5


def arrays(seed: int = 0, n: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, 9, size=k) for k in rng.integers(0, 7, size=n)]
    x = rng.normal(size=(n, 2)).astype("f4")
    y = np.array([int(row.sum() % 3) for row in ids])
    return {"ids": RaggedArray.of(ids), "x": x, "y": y}


class Bag(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen = (self.table(ids) * mask[..., None]).sum(1)
        return self.out(torch.cat([self.drop(seen), x], 1))


def named(batch: dict[str, Any], config: Any) -> Any:
    return {"ids": batch["ids"], "mask": batch["ids_mask"], "x": batch["x"]}, batch["y"]


def in_order(batch: dict[str, Any], config: Any) -> Any:
    return (batch["ids"], batch["ids_mask"], batch["x"]), batch["y"]


def noise(sample: dict[str, Any], config: Any) -> Mapping[str, Any]:
    """Draws from all three streams, and changes a ragged array's length."""
    shift = torch.randn(2) + float(np.random.normal()) + random.random()
    return {**sample, "x": sample["x"] + shift, "ids": sample["ids"][: random.randrange(1, 5)]}


def make(**options: Any) -> TorchWorkload:
    given: dict[str, Any] = {
        "model": Bag, "loss": F.cross_entropy, "batch_size": BATCH, "input_fn": named,
        "optimizer": torch.optim.Adam, "collate": pad(ids=0), "metrics": ["accuracy"],
    }  # fmt: skip
    return TorchWorkload(**{**given, **options})


def stops(asked: Iterator[int], every: int | None) -> bool:
    return next(asked) == every


def run(workload: TorchWorkload, stop_every: int | None = None, epochs: int = 2) -> State:
    state = workload.init({}, 3)
    for epoch, shard in itertools.product(range(1, epochs + 1), (0, 1)):
        prepared, finished = workload.prepare(arrays(shard)), False
        while not finished:
            stop = partial(stops, itertools.count(1), stop_every)
            trained = workload.train(
                State(bytes(state.buffer)), prepared, {}, visit=Visit(7, 2, epoch, shard),
                should_stop=stop,
            )  # fmt: skip
            state, finished = trained.state, trained.finished
    return state


class TestRagged(WorkloadSuite):
    gang_tolerance = None  # dropout

    def make_workload(self) -> TorchWorkload:
        return make(augment=noise, bucket_by="ids")

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return arrays(seed)


def no_dropout(config: Any) -> Bag:
    model = Bag(config)
    model.drop.p = 0.0
    return model


class TestRaggedGang(WorkloadSuite):
    def make_workload(self) -> TorchWorkload:
        return make(model=no_dropout, bucket_by="ids", input_fn=in_order)

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return arrays(seed)


def plain(change: bool, order_of: Any) -> dict[str, torch.Tensor]:
    """Train as a script does: the samples changed and padded by hand."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = Bag({})
    optimizer = fused(torch.optim.Adam(model.parameters()))
    for epoch, shard in itertools.product((1, 2), (0, 1)):
        data, key = arrays(shard), [7, 2, epoch, shard]
        seeds = np.random.default_rng([*key, 2]).integers(2**63, size=N)
        order = order_of(data, key)
        for start in range(0, N, BATCH):
            samples = []
            for k in order[start : start + BATCH]:
                sample = {name: torch.as_tensor(data[name][k]) for name in data}
                if change:
                    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
                    torch.manual_seed(int(seeds[k]))
                    np.random.seed(int(seeds[k]) % 2**32)
                    random.seed(int(seeds[k]))
                    sample = dict(noise(sample, {}))
                    torch.set_rng_state(kept[0])
                    np.random.set_state(kept[1])
                    random.setstate(kept[2])
                samples.append(sample)
            ids = nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True)
            lengths = torch.tensor([len(s["ids"]) for s in samples])
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            optimizer.zero_grad()
            output = model(ids, mask, torch.stack([s["x"] for s in samples]))
            F.cross_entropy(output, torch.stack([s["y"] for s in samples])).backward()
            optimizer.step()
    return model.state_dict()


def shuffled(data: Any, key: list[int]) -> Any:
    return np.random.default_rng(key).permutation(N)


def bucketed(data: Any, key: list[int]) -> Any:
    """Whole batches sorted by length, the rest last; the batches change places."""
    order, whole = shuffled(data, key), N - N % BATCH
    by_length = sorted(order[:whole], key=lambda k: len(data["ids"][k]))
    batches = [by_length[k : k + BATCH] for k in range(0, whole, BATCH)]
    places = np.random.default_rng([*key, 1]).permutation(len(batches))
    return [*itertools.chain(*(batches[k] for k in places)), *order[whole:]]


@pytest.mark.parametrize("stop_every", [None, 1, 2])
@pytest.mark.parametrize("input_fn", [named, in_order])
@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("buckets", [False, True])
def test_units_equal_a_padded_plain_loop(
    buckets: bool, change: bool, input_fn: Any, stop_every: int | None
) -> None:
    options: dict[str, Any] = {"bucket_by": "ids"} if buckets else {}
    options |= {"augment": noise} if change else {}
    workload = make(input_fn=input_fn, **options)
    model = workload.restore(run(workload, stop_every), {}).state_dict()
    wanted = plain(change, bucketed if buckets else shuffled)
    assert all(torch.equal(model[name], tensor) for name, tensor in wanted.items())


def test_what_a_sample_becomes_does_not_depend_on_its_batch() -> None:
    seen: dict[int, list[tuple[float, ...]]] = {}

    def watching(batch: dict[str, Any], config: Any) -> Any:
        for y, x in zip(batch["y"].tolist(), batch["x"].tolist(), strict=True):
            seen.setdefault(y, []).append(tuple(x))
        return named(batch, config)

    def numbered(seed: int = 0) -> dict[str, Any]:
        return {**arrays(seed), "y": np.arange(N)}

    found = []
    for batch_size, trial, epoch in ((5, 1, 1), (4, 1, 1), (5, 2, 1), (5, 1, 2)):
        seen.clear()
        workload = make(
            input_fn=watching, augment=noise, batch_size=batch_size,
            loss=lambda output, target: output.mean(),
        )  # fmt: skip
        shard = workload.prepare(numbered())
        workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, trial, epoch, 0))
        found.append({y: x[0] for y, x in seen.items()})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == N
    for other in found[2:]:
        assert not set(found[0].values()) & set(other.values())


def test_augmentation_is_for_training_alone_and_leaves_the_trials_streams_alone() -> None:
    def draws(sample: dict[str, Any], config: Any) -> dict[str, Any]:
        random.random()
        np.random.normal()
        torch.randn(3)
        return sample

    assert run(make(augment=draws)) == run(make())
    workload = make(augment=noise)
    state, shard = workload.init({}, 0), workload.prepare(arrays())
    assert workload.evaluate(state, shard, {}) == make().evaluate(state, shard, {})


def test_scores_are_those_of_the_padded_batches() -> None:
    workload = make(eval_batch_size=4)
    state = run(workload)
    scored = workload.evaluate(state, workload.prepare(arrays(5)), {})
    model: Any = workload.restore(state, {})
    data = arrays(5)
    with torch.no_grad():
        outputs = [
            model(
                torch.tensor(row)[None], torch.ones(1, len(row), dtype=torch.bool),
                torch.tensor(x)[None],
            )
            for row, x in zip(data["ids"], data["x"], strict=True)
        ]  # fmt: skip
    output, target = torch.cat(outputs), torch.tensor(data["y"])
    assert scored.n_samples == N
    assert scored.metrics["accuracy"] == pytest.approx(
        (output.argmax(1) == target).double().mean().item()
    )
    assert scored.metrics["loss"] == pytest.approx(F.cross_entropy(output, target).item(), 1e-6)


@pytest.mark.parametrize("options", [{}, {"augment": noise}, {"bucket_by": "ids"}])
def test_what_is_sent_to_a_device_trains_as_what_is_there(
    device: HostDevice, options: dict[str, Any]
) -> None:
    resident = run(make(**options))
    n_before = device.n_received
    assert n_before == (4 * 5 if "augment" in options else 0)  # samples are changed on the host
    assert run(make(device_memory=0, **options)) == resident
    assert device.n_received == n_before + 4 * 5


class Elsewhere(HostDevice):
    """A device whose tensors do not mix with those of the host, as a GPU's do not."""

    device = torch.device("meta")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Elsewhere()
    for module in (torch_device, torch_passes, torch_workload):
        monkeypatch.setattr(module, "accelerator", lambda: device)


def test_samples_are_changed_on_the_host(elsewhere: None) -> None:
    """With the numbers of the host's stream, whether the device has room for a shard or not."""
    for options, place in (({}, "meta"), ({"augment": noise}, "cpu")):
        shard = make(**options).prepare(arrays())
        assert {rows.device.type for rows in shard.values()} == {place}


def test_what_a_collate_makes_on_the_host_is_moved_to_the_shard(elsewhere: None) -> None:
    def counted(batch: Mapping[str, Any]) -> dict[str, Any]:
        sizes = torch.tensor([len(row) for row in batch["ids"]])
        return {"sizes": sizes, "x": batch["x"], "y": batch["y"]}

    workload = make(collate=counted, input_fn=lambda b, c: ((b["sizes"], b["x"]), b["y"]))
    shard, visit = workload.prepare(arrays()), Visit(7, 2, 1, 0)
    trained = training_batches(
        shard, {}, visit, making=workload._making, gang=None, batch_size=BATCH, drop_last=False,
        cursor=Cursor.begin(None, visit), should_stop=lambda: False,
    )  # fmt: skip
    scored = evaluation_batches(shard, {}, BATCH, workload._making)
    made = [*trained, *(batch for _, *batch in scored)]
    assert len(made) == 2 * 5
    assert {leaf.device.type for leaf in pytree.tree_leaves(made)} == {"meta"}


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=400),
    batch_size=st.integers(1, 7),
    epoch=st.integers(1, 3),
)
def test_batches_of_similar_size_hold_each_sample_once(
    sizes: list[int], batch_size: int, epoch: int
) -> None:
    visit, lengths = Visit(0, 1, epoch, 2), np.array(sizes)
    before = visit.order(len(sizes))
    order = by_size(before, lengths, batch_size, visit)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert np.array_equal(order, by_size(before, lengths, batch_size, visit))
    whole = len(sizes) - len(sizes) % batch_size
    assert np.array_equal(order[whole:], before[whole:])
    window = SORTED_BATCHES * batch_size
    for start in range(0, whole, window):
        group = before[start : min(start + window, whole)]
        wanted = lengths[group][np.argsort(lengths[group], kind="stable")].reshape(-1, batch_size)
        inside = {int(k) for k in group}
        found = [
            lengths[order[k : k + batch_size]]
            for k in range(0, whole, batch_size)
            if int(order[k]) in inside
        ]
        assert sorted(map(tuple, found)) == sorted(map(tuple, wanted))


def test_batches_of_similar_size_come_in_another_order_each_epoch() -> None:
    sizes = np.arange(60)
    firsts = {
        int(by_size(v.order(60), sizes, 5, v)[0]) // 5
        for v in (Visit(0, 0, e, 0) for e in range(9))
    }
    assert len(firsts) > 3


def test_a_packed_sequence_is_one_input(device: HostDevice) -> None:
    class Recurrent(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.cell, self.out = nn.GRU(1, 3), nn.Linear(3, 3)

        def forward(self, packed: Any) -> torch.Tensor:
            return self.out(self.cell(packed)[1][0])

    def packed(batch: dict[str, Any], config: Any) -> Any:
        rows = [row[:, None].float() if len(row) else torch.zeros(1, 1) for row in batch["ids"]]
        return pack_sequence(rows, enforce_sorted=False), batch["y"]

    options: dict[str, Any] = {"model": Recurrent, "input_fn": packed, "collate": None}
    resident = run(make(**options))
    assert run(make(**options), 2) == resident
    assert run(make(**options, device_memory=0)) == resident
    assert device.n_received == 4 * 5


def test_a_function_of_a_list_of_samples_collates() -> None:
    def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
        ids = nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True)
        lengths = torch.tensor([len(s["ids"]) for s in samples])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        rest = {name: torch.stack([s[name] for s in samples]) for name in ("x", "y")}
        return {"ids": ids, "ids_mask": mask, **rest}

    assert run(make(collate=dagsel.collate.samples(padded))) == run(make())


def test_masks_stand_between_the_input_and_the_target() -> None:
    batch = {"a": [torch.ones(2)], "b": [torch.ones(1, 3)], "c": torch.ones(1)}
    padded = pad(b=-1, a=0)(batch)
    assert list(padded) == ["a", "b_mask", "a_mask", "b", "c"]
    assert padded["b_mask"].shape == (1, 1, 3)


def fails(message: str, **options: Any) -> None:
    workload = make(**options)
    with pytest.raises(WorkloadError, match=message):
        workload.train(
            workload.init({}, 0), workload.prepare(arrays()), {}, visit=Visit(0, 0, 1, 0)
        )


def test_a_batch_that_cannot_be_made_says_what_to_write() -> None:
    fails(r"leaves 'ids' out.*write pad\(ids=0\)", collate=pad())
    fails(r"names 'words', and of the arrays ids, x, y.*pad\(ids=0\)", collate=pad(words=0))
    fails("collate returns a list: return a mapping", collate=lambda batch: [1])
    listed: Any = list
    fails("of dagsel.collate.samples returns a list", collate=dagsel.collate.samples(listed))
    fails("augment returns x for a sample with ids, x, y", augment=lambda s, c: {"x": s["x"]})
    fails("augment returns NoneType for a sample", augment=lambda s, c: None)
    fails(
        r"augment gives 'x' the shapes \(1,\), \(2,\) in one batch",
        augment=lambda s, c: {**s, "x": s["x"][: 1 + int(s["y"]) % 2]},
    )


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        (make(collate=None, input_fn=None), r"'ids' differ in shape.*collate.pad\(ids=0\)"),
        (make(bucket_by="x"), "bucket_by is 'x', samples of one shape; .* shape: ids"),
        (make(bucket_by="z"), "bucket_by is 'z', no array of the data set"),
        (SklearnWorkload(SGDClassifier), "'ids' differ in shape, and estimators take arrays"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_anything_trains(workload: Any, says: str) -> None:
    data = ShardedDataset.write("memory://fit.zarr", arrays(), n_shards=1, overwrite=True)
    with pytest.raises(WorkloadError, match=says):
        checks(workload, data.manifest)({})


def test_float64_values_of_a_ragged_array_are_cast() -> None:
    rows = RaggedArray.of([np.ones(k % 3) for k in range(8)])
    workload = TorchWorkload(
        lambda config: nn.Linear(2, 1), lambda output, target: output.mean(),
        torch.optim.SGD, batch_size=4, collate=pad(x=0.0),
    )  # fmt: skip
    workload.validate({})
    shard = workload.prepare({"x": rows, "y": np.ones(8, "f4")})
    assert shard["x"].values.dtype is torch.float32


def test_images_that_are_stored_as_files_are_changed_as_decoded_ones_are() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (N, 4, 5, 3), "u1")
    files = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        files.append(np.frombuffer(file.getvalue(), np.uint8))
    y = np.arange(N) % 3

    def flipped(sample: dict[str, Any], config: Any) -> dict[str, Any]:
        image = sample["x"].flip(1) if random.random() < 0.5 else sample["x"]
        return {**sample, "x": image.float() / 255 + 0.1 * torch.randn(image.shape)}

    def bits(x: Any, **options: Any) -> bytes:
        workload = TorchWorkload(
            lambda config: nn.Sequential(nn.Flatten(), nn.Linear(60, 3)), F.cross_entropy,
            torch.optim.SGD, batch_size=BATCH, augment=flipped, **options,
        )  # fmt: skip
        state, shard = workload.init({}, 0), workload.prepare({"x": x, "y": y})
        return bytes(workload.train(state, shard, {}, visit=Visit(0, 1, 1, 0)).state.buffer)

    stored = RaggedArray.of(files)
    assert bits(stored, collate=dagsel.collate.images()) == bits(pixels)
