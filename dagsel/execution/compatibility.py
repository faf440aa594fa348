"""Checks that the cluster runs what the driver runs, and packs what is sent to it."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import cloudpickle
from distributed import Client

from dagsel.errors import (
    ClusterError,
    VersionMismatchError,
    WorkloadTransportError,
)
from dagsel.execution.answers import silent_workers, within

#: Python's name among the packages whose versions are compared.
PYTHON = "Python"
#: Behind a version of which each build will do, as no worker has told one.
_ANY_BUILD = "+*"


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Sends modules of classes of their own by name, as others are.

    A function that names ``torch`` and an attribute ``ops`` may mean ``torch.ops``, so that it is
    sent with the function; and that is such a module.
    """

    def reducer_override(self, obj: Any) -> Any:
        name = getattr(obj, "__name__", "") if isinstance(obj, ModuleType) else ""
        if type(obj) is not ModuleType and name and sys.modules.get(name) is obj:
            return importlib.import_module, (name,)
        return super().reducer_override(obj)


def _pickled(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def pack_workload(workload: Any) -> bytes:
    """Pickle a workload once for all workers.

    Raises
    ------
    WorkloadTransportError
        If a part of it cannot be pickled; names the part.
    """
    try:
        return _pickled(workload)
    except Exception as error:
        for name, part in vars(workload).items():
            try:
                _pickled(part)
            except Exception as reason:
                raise WorkloadTransportError(
                    f"{name!r} of the {type(workload).__name__} cannot be sent to a worker: "
                    f"{part!r} "
                    f"({reason}); make what it needs inside the function instead of outside it"
                ) from reason
        raise WorkloadTransportError(f"the workload cannot be sent to a worker: {error}") from error


def versions_here() -> dict[str, str]:
    """Return the versions that must be the same everywhere, by package."""
    return {name: importlib.metadata.version(name) for name in ("dagsel", "torch", "distributed")}


def is_same(package: str, one: str, other: str) -> bool:
    """Whether two versions are the same; those of PyTorch may be of other builds.

    Examples
    --------
    >>> is_same("torch", "2.13.0+cpu", "2.13.0+cu130"), is_same("dagsel", "0.3", "0.3+local")
    (True, False)
    """
    return one == other or (package == "torch" and _public(one) == _public(other))


def _public(version: str) -> str:
    return version.partition("+")[0]


def check_versions(
    client: Client, workers: Sequence[str] = (), *, within_s: float = math.inf
) -> dict[str, str]:
    """Check that client, scheduler and workers agree in what matters.

    Returns the versions that a worker must have which comes later, as `check_here` takes them.

    Parameters
    ----------
    client
        Client of the cluster.
    workers
        Addresses of those that are there.
    within_s
        How long to wait for their answers, in seconds.

    Raises
    ------
    VersionMismatchError
        If dagsel, torch or Python differ, or are missing where they are needed, or workers have
        other builds of torch than each other.
    ClusterError
        If a worker does not answer.
    """
    try:
        return within(within_s, partial(_compare_versions, client))
    except TimeoutError as error:
        silent = ", ".join(silent_workers(client, workers)) or "one"
        raise ClusterError(
            f"of {len(workers)} workers {silent} does not answer within {within_s:g} s, as a "
            "process that is frozen; stop it, and begin again"
        ) from error


def check_here(versions: Mapping[str, str]) -> None:
    """Raise a `VersionMismatchError` if this process has another version of something.

    Builds of torch are compared unless no worker was there before.
    """
    for name, needed in versions.items():
        found = _python() if name == PYTHON else importlib.metadata.version(name)
        version = needed.removesuffix(_ANY_BUILD)
        if version != (found if needed == version else _public(found)):
            raise VersionMismatchError(
                f"{name} is {found} there, and the search runs with {version}; install {version} "
                "there"
            )


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _compare_versions(client: Client) -> dict[str, str]:
    # Functions of the standard library: they can be called where dagsel is missing.
    def ask(package: str) -> dict[str, Any]:
        """Return a package's version on each worker and the scheduler, or the error there."""
        version = importlib.metadata.version
        answers = dict(client.run(version, package, on_error="return"))
        if package != "torch":
            try:
                answers["scheduler"] = client.run_on_scheduler(version, package)
            except Exception as error:  # noqa: BLE001 - the text below says what it means
                answers["scheduler"] = error
        return answers

    ours = versions_here()
    versions = ours | {PYTHON: _python()}
    for package, version in ours.items():
        builds = dict[str, str]()  # of the package's version, with the first place that has it
        for place, answer in ask(package).items():
            if isinstance(answer, importlib.metadata.PackageNotFoundError):
                raise VersionMismatchError(
                    f"{package} is not installed on {place}; install {package}=={version} there"
                )
            if isinstance(answer, OSError) and place != "scheduler":
                continue  # the worker has gone since it was asked
            if isinstance(answer, Exception):
                raise ClusterError(f"{place} does not run what dagsel asks of it: {answer}")
            if not is_same(package, answer, version):
                raise VersionMismatchError(
                    f"{package} is {version} here and {answer} on {place}; install "
                    f"{_public(version)} there"
                )
            builds.setdefault(answer, place)
        if len(builds) > 1:  # workers train, and a build has its own last bits
            one, other, *_ = (f"{build} on {place}" for build, place in builds.items())
            raise VersionMismatchError(
                f"{package} is {one} and {other}; install one of these builds on all workers"
            )
        if package == "torch":
            versions[package] = next(iter(builds), _public(version) + _ANY_BUILD)
    python = versions[PYTHON]
    for place, answer in client.run(platform.python_version_tuple, on_error="ignore").items():
        if ".".join(answer[:2]) != python:
            raise VersionMismatchError(
                f"Python is {python} here and {'.'.join(answer[:2])} on {place}; use the same one"
            )
    return versions
