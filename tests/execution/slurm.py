"""A real Slurm on this machine: munge, one controller and a few nodes, as small as they can be.

``python -m tests.execution.slurm COMMAND`` runs a command where it answers, if Slurm is installed.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from tests.waiting import wait_until

from .gateway import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "sinfo", "scontrol")
#: Where Debian has them, if a user's own path does not.
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
#: Slurm kills a job's processes so long after it has sent them SIGTERM.
KILL_WAIT_S = 10

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/controller.log
LogTimeFormat=iso8601_ms
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# More CPUs than there are: the units of these tests sleep.
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=50000,batch_sched_delay=0,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
KillWait={kill_wait}
ReturnToService=2
NodeName=DEFAULT CPUs={n_cpus} RealMemory=64000 State=UNKNOWN
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_LINE = re.compile(r"\[([^]]+)\] (.*)")
_EVENTS = {
    "submitted": re.compile(r"_slurm_rpc_submit_batch_job: JobId=(\d+)"),
    "started": re.compile(r"sched(?:/backfill)?: (?:_start_job: Started|Allocate) JobId=(\d+)"),
    "ended": re.compile(
        r"_slurm_rpc_kill_job: REQUEST_KILL_JOB JobId=(\d+)"
        r"|_job_complete: JobId=(\d+) done"
        r"|(?:Killing|Batch) JobId=(\d+) on (?:failed|missing) node"
        r"|Time limit exhausted for JobId=(\d+)"
    ),
}


def why_not() -> str:
    """Say why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    cure = "as root `make slurm` installs Debian's packages slurm-wlm and munge"
    return f"needs Slurm, and {', '.join(missing)} cannot be found: {cure}" if missing else ""


@dataclass
class Job:
    """A job by the controller's own log; seconds since the epoch."""

    submitted: float
    started: float | None = None  # None: it has always been pending
    ended: float | None = None  # None: it is still there


@dataclass(frozen=True)
class Slurm:
    """A running Slurm; with `SLURM_CONF` in the environment its commands are for it."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "slurm.conf"

    def __call__(self, *command: str) -> str:
        """Run a command and return what it says."""
        environment = {**os.environ, "SLURM_CONF": str(self.config), "PATH": PATH}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    def queue(self) -> dict[str, str]:
        """Return the state of each job that is there, by its number."""
        return dict(line.split() for line in self("squeue", "-h", "-o", "%i %T").splitlines())

    def count(self, state: str) -> int:
        return list(self.queue().values()).count(state)

    def jobs(self) -> dict[str, Job]:
        """Return what the controller has noted of each job so far."""
        jobs: dict[str, Job] = {}
        for line in (self.folder / "controller.log").read_text().splitlines():
            if (noted := _LINE.fullmatch(line)) is None:
                continue
            for what, pattern in _EVENTS.items():
                if (event := pattern.search(noted[2])) is None:
                    continue
                at = datetime.fromisoformat(noted[1]).timestamp()
                number = next(filter(None, event.groups()))
                # It may note that one starts a moment before it notes that it was submitted.
                job = jobs.setdefault(number, Job(at))
                if getattr(job, what) is None:
                    setattr(job, what, at)
        return jobs

    def wait(self, holds: Callable[[], object], *, timeout_s: float = 180.0) -> None:
        """Ask again until something holds; raise an error with what is there if it does not."""
        wait_until(holds, lambda: f"{self.queue()}\n{self.logs()}", timeout_s=timeout_s)

    def logs(self) -> str:
        """Return the ends of all logs."""
        texts = {
            path.name: path.read_text()[-1000:] for path in sorted(self.folder.glob("[cs]*.log"))
        }
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())

    def stray(self) -> list[psutil.Process]:
        """List the processes of jobs."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended
                known = process.environ()
                if known.get("SLURM_CONF") == str(self.config) and "SLURM_JOB_ID" in known:
                    found.append(process)
        return found


@contextmanager
def slurm(folder: Path, *, nodes: str = "a,b", n_cpus: int = 4) -> Iterator[Slurm]:
    """Give a Slurm of these nodes; its daemons and all jobs have ended after the block."""
    here = Slurm(folder)
    first, *ports = free_ports(1 + nodes.count(",") + 1)
    with ExitStack() as stack:
        for name in ("state", *(f"spool-{node}" for node in nodes.split(","))):
            (folder / name).mkdir(parents=True)
        here.config.write_text(
            CONFIG.format(
                folder=folder, host=socket.gethostname(), user=getpass.getuser(), port=first,
                nodes=nodes, ports=f"[{','.join(map(str, ports))}]", n_cpus=n_cpus,
                kill_wait=KILL_WAIT_S,
            )
        )  # fmt: skip
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        _start(
            stack, folder, "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
            f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge-more.log",
        )  # fmt: skip
        wait_until((folder / "munge.socket").exists, here.logs)
        _start(stack, folder, "slurmctld", "-D", "-c", "-f", str(here.config))
        for node in nodes.split(","):
            _start(stack, folder, "slurmd", "-D", "-N", node, "-f", str(here.config), log=node)
        n_nodes = len(ports)
        wait_until(lambda: _idle(here) == n_nodes, here.logs)
        try:
            yield here
        finally:
            for job in here.queue():
                here("scancel", job)
            here.wait(lambda: not here.queue())
            psutil.wait_procs(here.stray(), timeout=KILL_WAIT_S)
            left = here.stray()
            for process in left:
                process.kill()
            assert not left, left


def _idle(here: Slurm) -> int:
    try:
        return here("sinfo", "-h", "-N", "-t", "idle").count("main")
    except AssertionError:  # the controller does not listen yet
        return 0


def _start(stack: ExitStack, folder: Path, name: str, *options: str, log: str = "") -> None:
    """Start a daemon in the foreground; it ends with the stack."""
    program = shutil.which(name, path=PATH)
    assert program is not None
    path = folder / f"{name}{log and f'-{log}'}.log"
    out = stack.enter_context(path.open("wb"))
    environment = {**os.environ, "PATH": PATH}
    process = subprocess.Popen(
        [program, *options], env=environment, cwd=folder, stdout=out, stderr=subprocess.STDOUT
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    stack.callback(end)


if __name__ == "__main__":
    with ExitStack() as stack:
        if not why_not():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            os.environ["SLURM_CONF"] = str(stack.enter_context(slurm(folder)).config)
        done = subprocess.run(sys.argv[1:], check=False)
    sys.exit(done.returncode)
