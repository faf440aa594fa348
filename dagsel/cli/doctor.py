"""The command that says whether dagsel can work here, and what is in its way."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.requirements import Requirement

from dagsel.cli.answer import NOT_WELL, WELL, Answer, answered
from dagsel.console import readable_size, span
from dagsel.errors import DagselError

if TYPE_CHECKING:
    from dagsel.execution.cluster import Client

#: Less free space than this is told of.
_LITTLE = 2_000_000_000
#: Dask asks for more open files than this on a cluster of some dozens of workers.
_FEW_FILES = 4096
_DASHBOARD = 8787
#: Extras that a user may want; the others are for those who work on dagsel.
_EXTRAS = ("s3", "sklearn", "torchmetrics", "parquet", "images", "transformers", "lightning", "jax",
           "keras", "gateway", "jobqueue", "dashboard", "plot", "jupyter", "tensorboard", "mlflow",
           "wandb")  # fmt: skip
_ALLOCATORS = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "PYTORCH_ALLOC_CONF",
               "PYTORCH_CUDA_ALLOC_CONF")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one thing.

    Parameters
    ----------
    about
        What it is about.
    is_well
        True, or False if dagsel cannot work so; None if it can, and something is worth knowing.
    text
        What was found, with the cure.
    """

    about: str
    is_well: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "well", False: "BAD ", None: "note"}[self.is_well]
        return f"{mark}  {self.about:<14}{self.text}"


@click.command()
@click.option("--scheduler", metavar="ADDRESS", help="Look at this Dask cluster, too.")
@answered
def doctor(scheduler: str | None) -> Answer:
    """Say what keeps dagsel from working here, if something does."""
    checks: list[Callable[[], Iterator[Finding]]] = [_versions, _machine, _gpus, _disk, _ports]
    checks.append(lambda: _dask(scheduler))
    found = [finding for check in checks for finding in check()]
    is_well = all(finding.is_well is not False for finding in found)
    return Answer("\n".join(map(str, found)), [*map(asdict, found)], WELL if is_well else NOT_WELL)


def _versions() -> Iterator[Finding]:
    yield Finding("Python", True, f"{platform.python_version()} on {platform.platform()}")
    yield Finding("dagsel", True, metadata.version("dagsel"))
    extras: dict[str, list[str]] = {}
    for line in metadata.requires("dagsel") or []:
        wanted = Requirement(line)
        marker = wanted.marker
        if marker is None or marker.evaluate({"extra": ""}):
            yield _version(wanted)
        elif wanted.name != "dagsel":
            for extra in _EXTRAS:
                if marker.evaluate({"extra": extra}) and _version(wanted).is_well is False:
                    extras.setdefault(extra, []).append(_version(wanted).text)
    for extra, texts in extras.items():
        yield Finding(extra, None, f"{'; '.join(texts)}: pip install 'dagsel[{extra}]'")


def _version(wanted: Requirement) -> Finding:
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Finding(wanted.name, False, f"{wanted.name} is not installed")
    if wanted.specifier.contains(found, prereleases=True):
        return Finding(wanted.name, True, found)
    cure = f"pip install '{wanted.name}{wanted.specifier}'"
    text = f"{wanted.name} is {found}, and should be {wanted.specifier}: {cure}"
    return Finding(wanted.name, False, text)


def _machine() -> Iterator[Finding]:
    from dagsel.execution.cluster import capacity_here

    n_workers = capacity_here(None).most_workers
    yield Finding("cores", True, f"{os.cpu_count()}, for {n_workers} workers")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = files < min(_FEW_FILES, most)
    cure = f"; for a large cluster raise it: ulimit -n {min(most, 1 << 16)}" if is_few else ""
    yield Finding("open files", None if is_few else True, f"at most {files}{cure}")
    told = [f"{name}={os.environ[name]}" for name in _ALLOCATORS if name in os.environ]
    yield Finding("allocator", True, ", ".join(told) or f"that of {_libc()}")


def _libc() -> str:
    return " ".join(filter(None, platform.libc_ver())) or "the system"


def _gpus() -> Iterator[Finding]:
    from dagsel.execution.process import gpus_seen

    n = gpus_seen()
    if not n:
        yield Finding("GPUs", True, "none; training is on the CPU")
        return
    import torch

    if not torch.cuda.is_available():
        text = f"the driver shows {n}, and this PyTorch ({torch.__version__}) uses none"
        yield Finding("GPUs", False, f"{text}: install a build for CUDA, or a newer driver")
        return
    for k in range(n):
        about = torch.cuda.get_device_properties(k)
        yield Finding("GPU", True, f"{about.name}, {readable_size(about.total_memory)}")
    try:
        yield Finding("dask-cuda", True, metadata.version("dask-cuda"))
    except metadata.PackageNotFoundError:
        text = 'is not installed; cluster="cuda" needs it: pip install dagsel[cuda]'
        yield Finding("dask-cuda", None, text)


def _disk() -> Iterator[Finding]:
    for about, folder in (("runs", Path.cwd()), ("scratch", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        is_writable = os.access(folder, os.W_OK)
        text = f"{readable_size(free)} free in {folder}"
        if not is_writable:
            cure = "give another run_dir=" if about == "runs" else "set TMPDIR to another folder"
            yield Finding(about, False, f"{folder} cannot be written: {cure}")
        elif free < _LITTLE:
            yield Finding(about, None, f"only {text}: states of trials and data sets may need more")
        else:
            yield Finding(about, True, text)


def _ports() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Finding("ports", True, "processes of this machine can listen and be reached")
    except OSError as error:
        yield Finding("ports", False, f"no process can listen on 127.0.0.1: {error}; a firewall or "
                      "a sandbox forbids it, and Dask cannot work so")  # fmt: skip
    with socket.socket() as probe:
        is_taken = probe.connect_ex(("127.0.0.1", _DASHBOARD)) == 0
    if is_taken:
        yield Finding("dashboard", None, f"port {_DASHBOARD} is taken: Dask's dashboard of a "
                      "cluster that you start gets another port")  # fmt: skip


def _dask(scheduler: str | None) -> Iterator[Finding]:
    from dagsel.execution.cluster import connect
    from dagsel.execution.compatibility import check_versions

    began = time.monotonic()
    try:
        with connect(scheduler, n_workers=1, within_s=60.0) as client:
            check_versions(client)
            client.submit(sum, [1, 2]).result(timeout=60)
            took = span(time.monotonic() - began)
            if scheduler is None:
                text = f"a worker process started here, worked, and was reached within {took}"
                yield Finding("Dask", True, text)
            else:
                yield _cluster(scheduler, client)
    except (DagselError, OSError) as error:
        yield Finding("Dask", False, str(error))


def _cluster(scheduler: str, client: Client) -> Finding:
    from dagsel.execution.cluster import dashboard_of, workers_of

    workers = workers_of(client)
    if not workers:
        return Finding("Dask", None, f"{scheduler} has no workers now")
    memory = sum(about["memory_limit"] or 0 for about in workers.values())
    link = dashboard_of(client)
    text = f"{len(workers)} workers at {scheduler} with {readable_size(memory)} of memory"
    return Finding("Dask", True, f"{text}; dashboard {link}" if link else text)
