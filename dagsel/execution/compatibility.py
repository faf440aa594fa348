"""Checks that the cluster runs what the driver runs, and packs what is sent to it."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import cloudpickle
from distributed import Client

from dagsel.errors import (
    ClusterError,
    VersionMismatchError,
    WorkloadTransportError,
)


def pack_workload(workload: Any) -> bytes:
    """Pickle a workload once for all workers.

    Raises
    ------
    WorkloadTransportError
        If a part of it cannot be pickled; names the part.
    """
    try:
        return bytes(cloudpickle.dumps(workload))
    except Exception as error:
        for name, part in vars(workload).items():
            try:
                cloudpickle.dumps(part)
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


def check_versions(client: Client) -> None:
    """Check that client, scheduler and workers agree in what matters.

    Raises
    ------
    VersionMismatchError
        If dagsel, torch or Python differ, or are missing where they are needed.
    """

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

    for package, version in versions_here().items():
        for place, answer in ask(package).items():
            if isinstance(answer, importlib.metadata.PackageNotFoundError):
                raise VersionMismatchError(
                    f"{package} is not installed on {place}; install {package}=={version} there"
                )
            if isinstance(answer, OSError) and place != "scheduler":
                continue  # the worker has gone since it was asked
            if isinstance(answer, Exception):
                raise ClusterError(f"{place} does not run what dagsel asks of it: {answer}")
            if answer != version:
                raise VersionMismatchError(
                    f"{package} is {version} here and {answer} on {place}; install {version} there"
                )
    python = ".".join(platform.python_version_tuple()[:2])
    for place, answer in client.run(platform.python_version_tuple, on_error="ignore").items():
        if ".".join(answer[:2]) != python:
            raise VersionMismatchError(
                f"Python is {python} here and {'.'.join(answer[:2])} on {place}; use the same one"
            )
