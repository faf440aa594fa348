"""LightningWorkload against Lightning's own Trainer, bit for bit.

A module trained unit by unit, each stopped now and then and sent over the wire, has the weights,
moments, schedules and random streams of the same module that its Trainer has trained on the same
batches, and the Trainer's metrics of validation: for modules of fifteen habits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dagsel.state import State
from dagsel.workloads import Visit
from dagsel.workloads.torch.state import StateReader, read_optimizer

pytestmark = [
    pytest.mark.skipif(not find_spec("lightning"), reason="needs the extra lightning"),
    # Its Trainer says so where Slurm is installed.
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]

SEED, TRIAL, N_EPOCHS, BATCH = 3, 2, 3, 5
SIZES, SCORED = (22, 13, 17), (11, 9)
HABITS = (
    "plain", "by epochs", "by steps", "plateau", "plateau of training", "clips", "ema", "named",
    "accumulates", "closure", "hooks", "draws", "rivals", "remembers", "bf16",
)  # fmt: skip
ORDERS = ([2, 0, 1], [1, 0, 2], [0, 2, 1])


def arrays(seed: int, n: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)}


def habit(name: str) -> Any:
    from tests.workloads import lightning_modules

    assert set(lightning_modules.HABITS) == set(HABITS)
    return lightning_modules.HABITS[name]


class Samples(torch.utils.data.Dataset[Any]):
    """All shards one after the other."""

    def __init__(self, shards: list[dict[str, Any]], *, named: bool) -> None:
        self.named = named
        self.held = {name: np.concatenate([shard[name] for shard in shards]) for name in ("x", "y")}

    def __getitem__(self, at: int) -> Any:
        x, y = torch.from_numpy(self.held["x"])[at], torch.from_numpy(self.held["y"])[at]
        return {"x": x, "y": y} if self.named else (x, y)


class Batches:
    """The batches of dagsel's visits: another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return sum(-(-n // BATCH) for n in SIZES)

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        for shard in ORDERS[self.epoch - 1]:
            order = Visit(SEED, TRIAL, self.epoch, shard).order(SIZES[shard]) + sum(SIZES[:shard])
            yield from np.split(order, range(BATCH, SIZES[shard], BATCH))  # type: ignore[misc]


def by_trainer(it: Any) -> tuple[Any, Any, list[dict[str, float]]]:
    """Train as Lightning's users do: no dagsel in here, but for the order of the samples."""
    from lightning.pytorch import Callback, Trainer

    scores: list[dict[str, float]] = []

    class Scores(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            scores.append({name: float(trainer.callback_metrics[name]) for name in it.scores})

    named = it.batch_fn is not None
    train = Samples([arrays(at, n) for at, n in enumerate(SIZES)], named=named)
    score = Samples([arrays(10 + at, n) for at, n in enumerate(SCORED)], named=named)
    # A DataLoader draws a number for its workers in each epoch: from a stream of its own.
    of_its_own: dict[str, Any] = {"generator": torch.Generator()}
    ends = np.cumsum(SCORED)
    parts = [list(part) for end, n in zip(ends, SCORED, strict=True)
             for part in np.split(np.arange(end - n, end), range(4, n, 4))]  # fmt: skip
    options = {**it.options}
    if options.get("precision") == "bf16":
        options["precision"] = "bf16-mixed"
    trainer = Trainer(
        max_epochs=N_EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[Scores()], **options,
    )  # fmt: skip
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    module = it.module({"lr": 0.1})
    trainer.fit(
        module,
        torch.utils.data.DataLoader(train, batch_sampler=Batches(), **of_its_own),
        torch.utils.data.DataLoader(score, batch_sampler=parts, **of_its_own),
    )
    return module, trainer, scores


def workload_of(it: Any, **more: Any) -> Any:
    from dagsel.workloads import LightningWorkload

    return LightningWorkload(
        it.module, metrics=list(it.scores), batch_size=BATCH, eval_batch_size=4,
        batch_fn=it.batch_fn,        max_epochs=N_EPOCHS, shard_sizes=SIZES, **it.options, **more,
    )  # fmt: skip


def by_units(it: Any, stop_every: int) -> tuple[Any, State, list[dict[str, float]]]:
    """The same by units, each with a state that came over the wire, and stopped now and then."""
    work, config = workload_of(it), {"lr": 0.1}
    state, scores = work.init(config, 7), list[dict[str, float]]()
    shards = [work.prepare(arrays(at, n)) for at, n in enumerate(SIZES)]
    scored = [work.prepare(arrays(10 + at, n)) for at, n in enumerate(SCORED)]
    told = None
    for epoch, order in enumerate(ORDERS, 1):
        for shard in order:
            visit = Visit(SEED, TRIAL, epoch, shard, shard == order[-1], told)
            told, finished = None, False
            while not finished:
                polls = itertools.count(1)
                stop = (lambda p=polls: next(p) == stop_every) if stop_every else (lambda: False)
                came = State(bytes(state.buffer)) if stop_every else state
                done = work.train(came, shards[shard], config, visit=visit, should_stop=stop)
                state, finished = done.state, done.finished
        kept = [work.evaluate(state, shard, config).kept for shard in scored]
        scores.append(work.pool(kept))
        told = scores[-1][it.scores[0]] if it.follows else None
    return work, state, scores


def leaves(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: leaves(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [leaves(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.detach().contiguous().view(-1).view(torch.uint8).tolist()
    return tree


@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec",
    "ignore:.*does not have many workers",
    "ignore:.*training_step. returned .None",
    "ignore:Found 1 module.s. in eval mode",
    "ignore:.*reduced. Converting it to",
)
@pytest.mark.parametrize("name", HABITS)
def test_units_equal_lightnings_trainer(name: str) -> None:
    it = habit(name)
    module, trainer, expected = by_trainer(it)
    streams = torch.get_rng_state().numpy().tobytes(), random.getstate()[1]
    for stop_every in (0, 2):
        work, state, scores = by_units(it, stop_every)
        if name in ("plain", "by steps", "clips", "hooks") and not stop_every:
            assert work._live.n_used > len(ORDERS)  # trials that are here are not built anew
        assert leaves(dict(work.restore(state, {"lr": 0.1}).state_dict())) == leaves(
            dict(module.state_dict())
        )
        reader = StateReader(state)
        held = read_optimizer(reader, module)
        parts = held.get("_optimizers", [held])
        wanted = [optimizer.state_dict() for optimizer in trainer.optimizers]
        if it.follows:  # of the last epoch, the Trainer has stepped the schedule already
            assert wanted[0]["param_groups"][0]["lr"] < 0.2
            parts, wanted = [held["state"]], [wanted[0]["state"]]
        assert leaves(parts) == leaves(wanted)
        assert reader.tree["loop"]["progress"]["n_steps"] == trainer.global_step
        assert state.tensors["random.torch"].data.tobytes() == streams[0]
        assert tuple(state.tensors["random.python.words"].numpy().tolist()) == streams[1]
        if not it.follows:
            held = reader.decode("schedule", reader.view)
            wanted = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
            found = held["_schedulers"] if len(wanted) > 1 else [held][: len(wanted)]
            assert leaves(found) == leaves(wanted)
        assert scores == expected
