"""Scheduler, workers and driver, each a process of its own that can be killed alone.

They are forked from a server that has imported everything, so that a killed worker is back within a
tenth of a second: a search of seconds can lose one every second. All die with that server, and it
dies with the process that uses this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from chaos_jobs import METRIC, N_SHARDS, Job, suggest

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTS = [
    "distributed", "optuna", "sqlalchemy", "dagsel.run", "dagsel.flows",
    "dagsel.workloads.torch.workload", "dagsel.execution.engine", "dagsel.testing.synthetic",
]  # fmt: skip
CONTEXT.set_forkserver_preload(IMPORTS)
#: A client that has lost its scheduler looks for it no longer than this.
LOST_AFTER = {"distributed.comm.timeouts.connect": "2s"}
#: A nanny's worker imports everything itself: on a busy machine that takes long, and no nanny that
#: gives it up any sooner ever has a worker.
STARTUP_S = 60.0
WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def start(role: Callable[..., None], log: Path, *args: Any) -> BaseProcess:
    process = CONTEXT.Process(target=_run, args=(role, str(log), args))
    process.start()
    return process


def _run(role: Callable[..., None], log: str, args: tuple[Any, ...]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(WITH_PARENT, signal.SIGKILL)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    role(*args)


def schedule_tasks(pipe: Connection, ttl_s: float) -> None:
    """The role of the scheduler; sends its address."""

    async def run() -> None:
        from distributed import Scheduler

        async with Scheduler(
            host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0", worker_ttl=ttl_s
        ) as scheduler:
            pipe.send(scheduler.address)
            await scheduler.finished()

    asyncio.run(run())


def work(address: str, name: str, folder: str, nanny: bool) -> None:
    """The role of a worker, or of a nanny and its worker."""
    import dask

    if not nanny:
        import torch

        # A nanny does the same by its environment; with more threads sums are rounded otherwise.
        torch.set_num_threads(1)

    async def run() -> None:
        from distributed import Nanny, Worker

        kind = Nanny if nanny else Worker
        async with kind(
            address,
            name=name,
            nthreads=2,
            host="127.0.0.1",
            memory_limit="2GB",
            local_directory=folder,
            death_timeout=STARTUP_S,
        ) as server:
            await server.finished()

    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    asyncio.run(run())


def drive(job: Job, address: str, how: Literal["optimize", "resume"], outcome: str) -> None:
    """The role of the driver; writes how it ended."""
    import dask
    import optuna

    import dagsel
    from dagsel.errors import CheckpointError
    from dagsel.storage import RunDir

    dask.config.set(LOST_AFTER)
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def keep(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        number = trial.number
        # A paused trial's state that was corrupted is not read, or made anew, before it goes on.
        with contextlib.suppress(CheckpointError):
            epoch = 0 if trial.last_step is None else trial.last_step + 1
            blob, _ = RunDir(job.run_dir).states.load(number, epoch, N_SHARDS - 1)
            aside = job.kept / f"{number}.{os.getpid()}.tmp"
            aside.write_bytes(blob)
            aside.rename(job.kept / f"{number}")

    job.kept.mkdir(exist_ok=True)
    try:
        if how == "optimize":
            study = optuna.create_study(
                study_name="chaos", direction="maximize", storage=job.study_url
            )
            dagsel.optimize(
                study,
                job.make_workload(),
                f"{job.folder}/data.zarr",
                space=suggest,
                flow=job.make_flow(),
                metric=METRIC[job.workload],
                client=address,
                run_dir=job.run_dir,
                seed=job.seed,
                callbacks=[keep],
                worker_timeout=2 * STARTUP_S,
            )
        else:
            dagsel.resume(
                job.run_dir,
                address,
                workload=job.make_workload(),
                space=suggest,
                callbacks=[keep],
                worker_timeout=2 * STARTUP_S,
            )
        end = {"error": ""}
    except Exception as error:
        traceback.print_exc()
        end = {"error": f"{type(error).__name__}: {error}"}
    Path(outcome).write_text(json.dumps(end))


def repeat(job: Job, address: str, outcome: str) -> None:
    """The role of a driver that repeats the run; writes what differed."""
    import dagsel

    run = dagsel.replay(
        job.run_dir,
        address,
        workload=job.make_workload(pace=0.0),
        space=suggest,
        into=f"{job.folder}/replay",
    )
    Path(outcome).write_text(json.dumps(run.record.notes))
