"""What is sent to the workers arrives as it was."""

from __future__ import annotations

import pickle
import re
import sys
import threading
from itertools import product
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from distributed import Client

from dagsel.errors import VersionMismatchError, WorkloadTransportError
from dagsel.execution.compatibility import check_here, check_versions, pack_workload, versions_here


class Holds:
    """Stands for a workload, whose parts are its attributes."""

    def __init__(self, part: Any) -> None:
        self.part = part


def by_value(source: str) -> Any:
    """Make a function as a notebook does: no process can import it."""
    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec(source, names)
    return names["function"]


@pytest.mark.parametrize("name", ["ops", "classes", "backends"])
def test_a_function_that_names_torch_and_an_attribute_is_sent(name: str) -> None:
    """The attribute may have the name of a module of torch that is no plain one."""
    assert type(sys.modules[f"torch.{name}"]) is not ModuleType
    function = by_value(f"def function(self):\n    return torch.add(self.{name}, 1)")
    sent = pickle.loads(pack_workload(Holds(function)))
    assert sent.part(type("Layer", (), {name: torch.ones(1)})).tolist() == [2.0]


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(WorkloadTransportError, match="'part' of the Holds cannot be sent"):
        pack_workload(Holds(threading.Lock()))


class Builds:
    """Answers as a client of workers with other builds of PyTorch, which cannot be had here."""

    loop = None

    def __init__(self, *torches: str) -> None:
        self.torches = torches

    def run(self, function: Any, *arguments: str, on_error: str) -> dict[str, Any]:
        there = self.torches if arguments == ("torch",) else [function(*arguments)]
        return {f"tcp://10.0.0.{n}:40000": answer for n, answer in enumerate(there, 1)}

    def run_on_scheduler(self, function: Any, *arguments: str) -> Any:
        return function(*arguments)


def test_a_driver_may_have_another_build_than_all_workers() -> None:
    version = versions_here()["torch"].partition("+")[0]
    gpu, other = f"{version}+cu130", f"{version}+cu128"
    needed = check_versions(cast(Client, Builds(gpu, gpu)))
    assert needed["torch"] == gpu
    told = rf"torch is {version}\+cu130 on tcp.* and {version}\+cu128 on tcp"
    with pytest.raises(VersionMismatchError, match=told):
        check_versions(cast(Client, Builds(gpu, other)))
    with pytest.raises(
        VersionMismatchError, match=f"here and 2.0.0.+ on .*install {version} there"
    ):
        check_versions(cast(Client, Builds("2.0.0+cu117")))


@pytest.mark.parametrize("package", [*versions_here(), "Python"])
def test_a_worker_that_comes_later_has_the_same_versions(package: str) -> None:
    needed = check_versions(cast(Client, Builds()))
    check_here(needed)
    with pytest.raises(VersionMismatchError, match=f"^{package} is .* there, and the search runs"):
        check_here(needed | {package: "0.1"})


def test_a_worker_that_comes_later_has_the_build_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one of PyPI has no name, and is a build of its own."""
    version = versions_here()["torch"].partition("+")[0]
    builds = (version, f"{version}+cpu", f"{version}+cu128")
    needed = {build: check_versions(cast(Client, Builds(build))) for build in builds}
    of_any = check_versions(cast(Client, Builds()))
    for there, late in product(builds, builds):
        with monkeypatch.context() as patch:
            patch.setattr("importlib.metadata.version", lambda _, late=late: late)
            check_here({"torch": of_any["torch"]})
            if late == there:
                check_here({"torch": needed[there]["torch"]})
                continue
            with pytest.raises(VersionMismatchError, match=re.escape(f"{late} there, and the")):
                check_here({"torch": needed[there]["torch"]})
