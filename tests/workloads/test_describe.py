"""Descriptions: equal parts give equal text in every process, and a changed part is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dagsel.workloads import TorchWorkload
from dagsel.workloads.describe import describe, differences

SOURCE = """
from functools import partial
from types import SimpleNamespace
class Net: pass
def loss(x): return x in {"a", "b", "c", "d"} and [y + 1 for y in x]
def make(k): return SimpleNamespace(
    model=lambda c: Net(), loss=loss, net=Net, instance=Net(), batch=32, none=None,
    split=partial(loss, 3), metrics={"f1": loss, "n": sum}, sizes=(1, 2.5), closure=lambda: k)
"""


def test_it_is_the_same_in_another_process() -> None:
    here: dict[str, Any] = {"__name__": "part"}
    exec(SOURCE, here)
    code = f"{SOURCE}\nimport json\nfrom dagsel.workloads.describe import describe\n"
    code = code.replace("class Net", "__name__ = 'part'\nclass Net")
    code += "print(json.dumps(describe(make(2))))"
    texts = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in "12"
    ]  # fmt: skip
    expected = describe(here["make"](1))
    assert [json.loads(text) for text in texts] == [expected, expected]
    assert " at 0x" not in str(expected)


def loss(x: Any) -> Any:
    return x + 1


def other(x: Any) -> Any:
    return x + 2


class Callable:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (loss, other),
        (lambda x: x.mean(), lambda x: x.sum()),
        (lambda x: [y + 1 for y in x], lambda x: [y + 2 for y in x]),
        (partial(loss, 1), partial(other, 1)),
        ({"f1": loss}, {"f1": other}),
        ({"f1": loss}, {"f2": loss}),
        (32, 64),
        (1, True),
        ((1, 2), (2, 1)),
        (dict, list),
        (Callable(), loss),
        (object(), None),
    ],
)
def test_a_part_that_changed_is_named(then: Any, now: Any) -> None:
    first = describe(SimpleNamespace(part=then, same=1))
    second = describe(SimpleNamespace(part=now, same=1))
    assert differences(first, first) == []
    (text,) = differences(first, second)
    assert text == f"'part' was {first['part']} and is {second['part']}"


FILE = """
class Body:
    def forward(self, x): return x + {number}

class Net(Body):
    size = property(lambda self: 3)
    @classmethod
    def made(cls): return cls()
"""


def of_file(name: str, number: int = 1) -> dict[str, str]:
    names: dict[str, Any] = {"__name__": name}
    exec(FILE.format(number=number), names)
    net = names["Net"]
    return describe(SimpleNamespace(model=net, several={"a": [net]}, loss=torch.nn.MSELoss))


def test_a_class_of_a_script_is_the_same_in_another_file() -> None:
    begun = of_file("__main__")
    assert differences(begun, of_file("models")) == []
    assert [text.split()[0] for text in differences(begun, of_file("__main__", number=2))] == [
        "'model'", "'several'"
    ]  # fmt: skip
    assert begun["loss"] == "torch.nn.modules.loss.MSELoss"


def test_a_class_is_what_it_was_to_a_dagsel_that_knew_its_module_alone() -> None:
    now = of_file("models")
    then = {**now, "model": "__main__.Net", "several": "{'a': \"['my.models.Net']\"}"}
    assert differences(then, now) == []
    assert len(differences({**then, "model": "__main__.Other"}, now)) == 1
    assert len(differences({**now, "model": "Net (class 01234567)"}, now)) == 1


def test_a_part_that_one_lacks_is_missing() -> None:
    assert differences({"a": "1"}, {"b": "2"}) == [
        "'a' was 1 and is missing", "'b' was missing and is 2"
    ]  # fmt: skip


def test_a_workload_that_was_used_is_the_same() -> None:
    """A resume compares one that was made a moment ago with one that had been validated."""

    def model(config: Any) -> torch.nn.Module:
        return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3))

    workload = TorchWorkload(model, torch.nn.functional.mse_loss, torch.optim.SGD, batch_size=2)
    before = describe(workload)
    workload.validate({"lr": 0.1})
    assert not workload._unfilled
    assert describe(workload) == before
    assert differences({**before, "_unfilled": "False"}, before) == []  # of dagsel 0.1
