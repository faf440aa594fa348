"""What is kept of an error: the user's own lines, its place, and the cure."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from transformers.modeling_outputs import CausalLMOutput

from dagsel.workloads.raised import Raised, raised
from dagsel.workloads.torch.speed import multiplying

HERE = Path(__file__).name


def own(x: Any) -> Any:
    return torch.nn.functional.cross_entropy(x, "no")  # type: ignore[arg-type]


def deep(n: int) -> None:
    if n:
        return deep(n - 1)
    raise ValueError("at\n the  bottom")


def caught(call: Any, workload: Any = None) -> Raised:
    try:
        call()
    except Exception as error:
        return raised(error, workload)
    raise AssertionError("nothing was raised")


def test_only_the_users_frames_are_kept() -> None:
    error = caught(lambda: own(torch.zeros(2, 2)))
    assert HERE in error.place
    assert error.place.endswith("own")
    assert "functional.py" not in error.frames
    assert error.frames.rstrip().splitlines()[-1].strip().startswith("return torch.nn.functional")


def test_a_deep_recursion_is_short() -> None:
    error = caught(functools.partial(deep, 300))
    assert error.reason == "ValueError: at the bottom"
    assert len(error.frames.splitlines()) <= 20


def test_where_none_of_the_users_code_ran_its_functions_are_named() -> None:
    workload = SimpleNamespace(model=lambda config: None, loss=own, batch_size=3)
    error = caught(lambda: np.zeros(3).reshape(7), workload)
    assert "in <lambda>" in error.frames  # this test's own
    error = caught(functools.partial(json.loads, "{"), workload)  # Python's own code alone
    lines = [line for line in error.frames.splitlines() if HERE in line]
    assert lines[0].endswith("in caught")


def test_the_place_tells_errors_apart_and_not_the_message() -> None:
    first, second = (caught(functools.partial(int, text)) for text in ("a", "b"))
    assert first.signature == second.signature
    assert first.message != second.message
    assert first.signature != caught(lambda: int("a")).signature


def training_step() -> Any:
    batch: Any = list("ab")
    return batch["x"]


def mixed() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with multiplying("tf32", torch.device("cuda")):
            pass
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("fails", "cure"),
    [
        pytest.param(
            mixed, 'precision="tf32" and something', marks=pytest.mark.skipif(
                not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="a PyTorch before"
            ),
        ),
        (lambda: torch.nn.Linear(3, 2)(torch.zeros(4, 3).double()), 'x.astype("float32")'),
        (lambda: torch.nn.Conv2d(3, 2, 1)(torch.zeros(4, 3, 2, 2).double()), 'x.astype("float32")'),
        (lambda: torch.nn.LSTM(3, 2)(torch.zeros(4, 3).double()), 'x.astype("float32")'),
        (lambda: torch.nn.Linear(3, 2)(torch.zeros(4, 3).long()), "integers"),
        (lambda: torch.nn.Linear(3, 2)(torch.zeros(4, 5)), "does not fit"),
        (lambda: torch.nn.Conv2d(3, 2, 1)(torch.zeros(4, 1, 5, 5)), "does not fit"),
        (lambda: torch.ones(3, requires_grad=True).exp().backward(), ".mean()"),
        (lambda: torch.ones(1).sum().backward(), "does not depend"),
        (lambda: torch.autograd.grad(torch.ones(1).sum(), torch.ones(1)), "torch.enable_grad()"),
        (
            lambda: exec("raise RuntimeError('CUDA error: device-side assert triggered')"),
            "often a class for which the model has no output",
        ),
        (lambda: (0.5).backward(), "one tensor"),  # type: ignore[attr-defined]
        (lambda: {"loss": 0.5}.backward(), "one tensor"),  # type: ignore[attr-defined]
        (
            lambda: torch.nn.functional.cross_entropy(
                torch.zeros(4, 3), torch.full((4,), 3)
            ),
            "an output for each class",
        ),
        (lambda: torch.nn.Embedding(3, 2)(torch.tensor([3])), "as many as len(tokenizer)"),
        (lambda: torch.nn.Embedding(3, 2)(torch.tensor([1.0])), 'x.astype("int64")'),
        (training_step, "batch_fn=lambda batch, config: batch"),
        (lambda: (torch.ones(1) > 0).mean(), "write .float().mean()"),
        (
            lambda: torch.nn.functional.cross_entropy(CausalLMOutput(), torch.ones(1)),
            "output.logits",
        ),
        (lambda: LightningModule().logger.experiment, "write self.log(name, value)"),  # type: ignore[union-attr]
        (
            lambda: torch.nn.functional.cross_entropy(torch.zeros(4, 3), torch.zeros(4).int()),
            'y.astype("int64")',
        ),
        (
            lambda: torch.nn.functional.cross_entropy(torch.zeros(4, 3), torch.zeros(5).long()),
            "reshape",
        ),
        (
            lambda: torch.nn.functional.binary_cross_entropy_with_logits(
                torch.zeros(4, 1), torch.zeros(4)
            ),
            "squeeze",
        ),
        (
            lambda: torch.nn.functional.huber_loss(
                torch.zeros(2, 1, requires_grad=True), torch.zeros(2, 1).double()
            ).backward(),
            'y.astype("float32")',
        ),
        (lambda: np.zeros(1).astype(np.dtype("<U3")).astype(float) + float("x"), "np.unique"),
    ],
)  # fmt: skip
def test_the_cure_of_what_is_known(fails: Any, cure: str) -> None:
    error = caught(fails)
    assert cure in error.cure, error.reason
    assert pickle.loads(pickle.dumps(error)) == error


def test_what_is_not_known_has_none() -> None:
    assert caught(lambda: dict[str, int]()["x"]).cure == ""
    assert caught(lambda: list("ab")["x"]).cure == ""  # type: ignore[call-overload]
