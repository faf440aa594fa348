"""One search put through the faults of a seed, and whether it came to what it should have.

``python tests/chaos/chaos.py 50 docs/measured/chaos.md`` runs seeds 0 to 49 and writes their table;
``python tests/chaos/chaos.py 5 docs/measured/chaos.md keras`` adds lines of another library.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import dask
import optuna
import torch
from chaos_jobs import N_SHARDS, POISONED, Job
from chaos_libraries import IMPORTS, Library, alone
from chaos_roles import CONTEXT, LOST_AFTER, drive, repeat, schedule_tasks, start, work
from chaos_roles import IMPORTS as PRELOADED
from chaos_torch import plain_pytorch
from distributed import Client
from faults import (
    Add,
    Corrupt,
    Delay,
    Drain,
    Fault,
    FillDisk,
    Freeze,
    Injector,
    Kill,
    KillDriver,
    KillScheduler,
    Moment,
    schedule,
)
from faulty import read_starts

from dagsel.history.record import Record
from dagsel.messages import ENTRIES
from dagsel.state import State
from dagsel.storage import RunDir
from dagsel.study.resume import STANDS_FOR
from dagsel.testing.synthetic import seen

N_WORKERS = 3
#: A search takes 20 s here; this only ends one that hangs, on a machine that is busy as well.
PATIENCE_S = 240.0
#: A worker that is silent for so long is given up (Dask's least with few workers).
TTL_S = 5.0
DISK_MB = 4
#: Faults end after so long, so that a search on a slow machine ends too.
FAULTS_S = 20.0
#: Longer than a heartbeat, which comes twice a second.
USUAL: tuple[Fault, ...] = (Add(), Drain(), Freeze(1.2), Delay(0.7))
SPECIAL: tuple[tuple[Fault, ...], ...] = (
    (KillDriver(),),
    (KillScheduler(), Corrupt()),
    (FillDisk(1.5),),
    (KillDriver(), KillScheduler()),
    (),
)


@dataclass(frozen=True)
class Scenario:
    """What a seed means."""

    seed: int
    library: Library | None = None

    @property
    def special(self) -> tuple[Fault, ...]:
        special = SPECIAL[self.seed % len(SPECIAL)]
        # Long enough to be given up, and its unit with it.
        return (*special, Freeze(TTL_S + 3)) if self.seed % 10 == 9 else special

    @property
    def poison(self) -> bool:
        return self.seed % 5 == 4

    @property
    def nanny(self) -> bool:
        return self.seed % 10 == 8

    @property
    def schedule(self) -> tuple[Moment, ...]:
        kills = schedule(self.seed, [Kill()], duration_s=FAULTS_S)
        early = schedule(self.seed, USUAL, duration_s=3.5, once=self.special)
        late = schedule(self.seed + 1_000_000, USUAL, duration_s=FAULTS_S)
        later = ((early[-1][0] + at_s, fault) for at_s, fault in late)
        return tuple(sorted((*kills, *early, *later), key=lambda moment: moment[0]))

    def job(self, folder: str, run_dir: str) -> Job:
        return Job(
            self.seed,
            self.library or ("torch" if self.seed % 2 else "counting"),
            "robin" if self.seed % 7 == 3 else "asha" if self.seed // 2 % 2 else "random",
            self.poison,
            folder,
            run_dir,
        )


class Cluster:
    """A scheduler and workers; lost workers are replaced."""

    def __init__(self, folder: str, n_workers: int, *, nanny: bool = False) -> None:
        self.folder, self.n_workers, self.nanny = Path(folder), n_workers, nanny
        self.workers: list[BaseProcess] = []
        self.n_started = 0
        ours, theirs = CONTEXT.Pipe(duplex=False)
        self.scheduler = start(schedule_tasks, self.folder / "scheduler.log", theirs, TTL_S)
        if not ours.poll(60):
            raise TimeoutError(f"no scheduler: see {self.folder}/scheduler.log")
        self.address: str = ours.recv()
        self.replace_lost()

    def add(self) -> str:
        self.n_started += 1
        name = f"worker-{time.time_ns()}"
        log = self.folder / "workers.log"
        self.workers.append(start(work, log, self.address, name, str(self.folder), self.nanny))
        return name

    def replace_lost(self) -> None:
        self.workers = [worker for worker in self.workers if worker.is_alive()]
        while len(self.workers) < self.n_workers:
            self.add()

    def close(self) -> None:
        end([*self.workers, self.scheduler])


def end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


@dataclass
class Outcome:
    """What a search under faults came to."""

    scenario: Scenario
    done: Counter[str] = field(default_factory=Counter)
    inflicted: set[Fault] = field(default_factory=set)
    n_sessions: int = 1
    n_started: int = 0
    n_needed: int = 0
    n_excused: int = 0  # tasks
    n_epochs: int = 0
    n_checked: int = 0
    seconds: float = 0.0
    skipped: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def n_again(self) -> int:
        return self.n_started - self.n_needed


def run_seed(seed: int, folder: str, library: Library | None = None) -> Outcome:
    """Search under faults, repeat the search without any, and compare."""
    scenario = Scenario(seed, library)
    outcome = Outcome(scenario)
    began = time.monotonic()
    with small_disk(folder, scenario, outcome) as run_dir:
        job = scenario.job(folder, run_dir)
        job.make_data()
        error = disturbed(job, scenario, outcome)
        outcome.seconds = time.monotonic() - began
        if error:
            outcome.wrong.append(error)
        else:
            judge(job, outcome)
    return outcome


@contextlib.contextmanager
def small_disk(folder: str, scenario: Scenario, outcome: Outcome) -> Iterator[str]:
    """Yield a run_dir, on a file system of its own if a fault fills it."""
    if not any(isinstance(fault, FillDisk) for fault in scenario.special):
        yield f"{folder}/run"
        return
    disk = Path(folder) / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        outcome.skipped = "no full disk: a tmpfs cannot be mounted here"
        yield f"{folder}/run"
        return
    try:
        yield f"{disk}/run"
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def disturbed(job: Job, scenario: Scenario, outcome: Outcome) -> str:
    """Drive the search through its faults to its end; give what went wrong."""
    how, faults = "optimize", deque(scenario.schedule)
    if outcome.skipped:
        faults = deque(moment for moment in faults if not isinstance(moment[1], FillDisk))
    ends_at = time.monotonic() + PATIENCE_S
    while True:
        cluster = Cluster(job.folder, N_WORKERS, nanny=scenario.nanny)
        try:
            how, error = sessions(job, cluster, how, faults, ends_at, outcome)
        finally:
            cluster.close()
        if how == "over":
            return error


def sessions(
    job: Job, cluster: Cluster, how: str, faults: deque[Moment], ends_at: float, outcome: Outcome
) -> tuple[str, str]:
    """Drive the search on a cluster until it is over or the cluster is."""
    path = Path(job.folder) / "ended.json"
    with dask.config.set(LOST_AFTER), Client(cluster.address, set_as_default=False) as client:
        injector = Injector(client, job.seed, job.run_dir, cluster.add)
        injector.scheduler = cluster.scheduler.pid
        while True:
            path.unlink(missing_ok=True)
            driver = start(
                drive, Path(job.folder) / "driver.log", job, cluster.address, how, str(path)
            )
            injector.driver = driver.pid
            try:
                disturb(job, cluster, driver, injector, faults, ends_at)
                driver.join(timeout=max(0.0, ends_at - time.monotonic()))
            finally:
                end([driver])
                injector.release()
                outcome.done.update(type(done.fault).__name__ for done in injector.done)
                outcome.inflicted |= {done.fault for done in injector.done}
                outcome.n_excused += sum(excused(done.fault) for done in injector.done)
                killed = {type(done.fault) for done in injector.done}
                injector.done.clear()
            if path.exists() and not (error := json.loads(path.read_text())["error"]):
                return "over", ""
            if time.monotonic() >= ends_at:
                return "over", f"it did not end within {PATIENCE_S:g} s"
            how = "resume"
            outcome.n_sessions += 1
            if KillScheduler in killed:
                return how, ""
            if KillDriver not in killed:
                return "over", f"the driver ended: {error if path.exists() else 'it is gone'}"


def disturb(
    job: Job,
    cluster: Cluster,
    driver: BaseProcess,
    injector: Injector,
    faults: deque[Moment],
    ends_at: float,
) -> None:
    """Do the faults that are due, from the first unit on until the driver has ended.

    One that finds nobody, as all workers are on their way, is tried again.
    """
    last_s, n_before = 0.0, len(read_starts(job.starts))
    if n_before and faults:
        last_s = faults[0][0] - 1.0  # the time between two sessions does not count
    began: float | None = None
    while driver.is_alive() and time.monotonic() < ends_at:
        time.sleep(0.02)
        cluster.replace_lost()
        if began is None:
            began = time.monotonic() if len(read_starts(job.starts)) > n_before else None
        elif faults and time.monotonic() - began >= faults[0][0] - last_s:
            _, fault = faults[0]
            if injector.inject(fault) is None:
                continue
            faults.popleft()
            if isinstance(fault, KillScheduler):
                return


def excused(fault: Fault) -> int:
    """How many tasks a fault may cost."""
    match fault:
        case Kill() | Corrupt():
            return 1
        case Freeze(seconds):
            return int(seconds > TTL_S)
        case KillDriver() | KillScheduler():
            return N_WORKERS + 2  # all in flight, and workers may have been added
        case _:
            return 0


# ---- the laws


def judge(job: Job, outcome: Outcome) -> None:
    """Hold a search that has ended against the laws."""
    record = read_record(job)
    outcome.n_epochs = record.n_epochs
    poisoned = {POISONED} if job.poison else set()
    starts = [start for start in read_starts(job.starts) if start.trial not in poisoned]
    last = {start[:3]: start for start in starts}  # of each unit
    again = [start for start in starts if start is not last[start[:3]]]
    outcome.n_started, outcome.n_needed = len(starts), len(last)
    # A unit that a time slice has ended begins once more.
    n_pieces = len(record.pieces) if job.flow == "robin" else 0
    allowed = outcome.n_excused + n_pieces
    # The units of a task are of one epoch of a trial.
    n_tasks = len({(start.process, start.trial, start.epoch) for start in again})
    if n_tasks > allowed:
        outcome.wrong.append(f"units of {n_tasks} tasks again, {allowed} were excused")
    outcome.wrong += [
        f"trial {trial.number} failed: {trial.reason}"
        for trial in record.failures
        if trial.number not in poisoned
    ]
    if not poisoned & record.trials.keys() <= {trial.number for trial in record.failures}:
        outcome.wrong.append(f"trials {poisoned} were poisoned and have not failed")
    outcome.wrong += [
        f"trial {trial.number}, epoch {epoch.epoch}: {epoch.metrics['miscounted']:g} miscounted"
        for trial in record.trials.values()
        for epoch in trial.epochs
        if epoch.metrics.get("miscounted", 0.0)
    ]
    check_study(job, record, outcome)
    check_states(job, record, outcome)
    outcome.wrong += repeated(job)


def read_record(job: Job) -> Record:
    folder = RunDir(job.run_dir)
    record = Record(folder.about()["run"], N_SHARDS, "maximize")
    for entry in folder.journal.read():
        record.add(ENTRIES.decode(entry))
    return record


def check_study(job: Job, record: Record, outcome: Outcome) -> None:
    states = {"running": "RUNNING", "complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    found: dict[int, str] = {}
    for trial in optuna.load_study(study_name="chaos", storage=job.study_url).trials:
        if STANDS_FOR in trial.user_attrs:
            outcome.wrong.append(f"trial {trial.number} of the study stands for another one")
        found[trial.number] = trial.state.name
    for number, known in record.trials.items():
        if found.get(number) != states[known.state] or known.is_live:
            outcome.wrong.append(
                f"trial {number} is {known.state} in the journal, {found.get(number)} in the study"
            )
    if "RUNNING" in found.values():
        outcome.wrong.append(f"trials of the study are left RUNNING: {found}")


def check_states(job: Job, record: Record, outcome: Outcome) -> None:
    """Hold the last states of trials against what a single process computes."""
    visits = record.visits()
    workload = job.make_workload()
    # A driver that was killed as it ended a trial has not kept its state.
    kept = {int(path.name): path.read_bytes() for path in job.kept.iterdir() if path.suffix == ""}
    best = record.best
    if best is None:
        outcome.wrong.append("there is no best trial")
        return
    kept[best.trial], _ = RunDir(job.run_dir).states.load(best.trial, best.epoch, best.position)
    outcome.n_checked = len(kept)
    for number, blob in kept.items():
        trial = record.trials[number]
        if trial.state == "failed" or not trial.epochs:
            continue
        state = State(blob)
        epochs = [epoch.epoch for epoch in trial.epochs]
        if number == best.trial:
            epochs = epochs[: best.epoch]  # its best state
        orders = [visits[number, epoch] for epoch in epochs]
        if job.workload == "counting":
            found = list(dict.fromkeys(batch[:2] for batch in seen(state)))
            wanted = [(epoch, shard) for epoch, order in enumerate(orders, 1) for shard in order]
            if found != wanted:
                outcome.wrong.append(f"trial {number} visited {found}, the journal says {wanted}")
            continue
        lr, values = {"lr": trial.params["lr"]}, [done.value for done in trial.epochs]
        if job.workload == "torch":
            model = workload.restore(state, lr).state_dict()
            for name, tensor in plain_pytorch(job, number, lr, orders, values).items():
                if not torch.equal(model[name], tensor):
                    outcome.wrong.append(f"trial {number}: {name} is not what one process computes")
        elif alone(job, workload.workload, number, trial.params, orders, values) != state:
            outcome.wrong.append(f"trial {number}: its state is not what one process computes")


def repeated(job: Job) -> list[str]:
    """Replay a search on a cluster that nothing happens to; say what differs."""
    path = Path(job.folder) / "replayed.json"
    cluster = Cluster(job.folder, 2)
    try:
        driver = start(repeat, Path(job.folder) / "replay.log", job, cluster.address, str(path))
        driver.join(timeout=PATIENCE_S)
        end([driver])
    finally:
        cluster.close()
    if not path.exists():
        return [f"the replay did not end: see {job.folder}/replay.log"]
    return [f"replay: {note}" for note in json.loads(path.read_text())]


# ---- the table

HEAD = """\
# Chaos

Each line is one search of a few seconds on a cluster of three worker processes, while the faults of
its seed were done to it: `make chaos` makes this table. "Again" are training units that began more
than once: a killed worker may cost those of one task, which begins none later than half a second
after its first one; a killed driver or scheduler the tasks in flight.

"As undisturbed" means that a replay on a quiet cluster came to the same metrics and the same states
bit for bit in every epoch of every trial; that the last states that were kept ("states checked")
are what one process computes with the same orders of visits, or hold each batch once; that no trial
of the study is left running; and that no trial failed but a poisoned one.

| seed | workload | flow | epochs | killed | paused | delayed | drained | added | other faults \
| sessions | units | again | states checked | seconds | result |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""
OTHERS = ("KillDriver", "KillScheduler", "Corrupt", "FillDisk")


def row(outcome: Outcome) -> str:
    """Write a search's line of the table."""
    job, done = outcome.scenario.job("", ""), outcome.done
    others = [f"{name} × {done[name]}" if done[name] > 1 else name for name in OTHERS if done[name]]
    others += ["poison"] * job.poison + [outcome.skipped] * bool(outcome.skipped)
    counts = (done[name] for name in ("Kill", "Freeze", "Delay", "Drain", "Add"))
    cells = [
        outcome.scenario.seed,
        job.workload,
        job.flow,
        outcome.n_epochs,
        *counts,
        ", ".join(others),
        outcome.n_sessions,
        outcome.n_needed,
        outcome.n_again,
        outcome.n_checked,
        f"{outcome.seconds:.1f}",
        "; ".join(outcome.wrong) or "as undisturbed",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main(seeds: Sequence[int], table: Path | None, library: Library | None) -> int:
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # it loses schedulers
    rows, n_wrong = [], 0
    if library is not None:
        CONTEXT.set_forkserver_preload([*PRELOADED, *IMPORTS[library]])
    for seed in seeds:
        folder = tempfile.mkdtemp(prefix=f"chaos-{seed}-")
        outcome = run_seed(seed, folder, library)
        rows.append(row(outcome))
        print(rows[-1], flush=True)
        n_wrong += bool(outcome.wrong)
        if outcome.wrong:
            print(f"    its logs are in {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    if table is not None:
        table.write_text((HEAD if library is None else table.read_text()) + "\n".join(rows) + "\n")
    return n_wrong


if __name__ == "__main__":
    first, _, last = sys.argv[1].rpartition(":")
    numbers = range(int(first or 0), int(last))
    rest: list[Any] = [*sys.argv[2:], "", ""]
    sys.exit(main(numbers, Path(rest[0]) if rest[0] else None, rest[1] or None))
