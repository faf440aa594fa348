"""A deadline and a budget are named and nothing else: does SEER keep both, and find a model?

What was set before any run, and is not changed after one:

- The task: scikit-learn's ``make_classification``, 16 features of which 8 are informative and 4
  redundant, 4 classes of 2 clusters, ``class_sep=2``, 1% of the labels at random, seed 0. A search
  gets the first 20,000 samples. 5,000 more, which it has never seen, score its best model anew:
  that is the held-out value. In plain PyTorch, before any search, one hidden layer of 16 to 256
  units with Adam reached 0.97 to 0.98 on them after 4 epochs of 0.2 s to 0.3 s.
- The call: ``dagsel.optimize(study, workload, data=(x, y), space, metric="accuracy",
  flow=SEER(deadline=, budget=))`` with one hidden layer of 8 to 128 units, Adam with a learning
  rate of 1e-5 to 0.1, both on logarithmic scales, and batches of 64. Nothing else is named but the
  seed: ``--seed``, ``--seed`` + 1 and so on. Only the table names ``max_cluster_workers``.
- Each run is a script in a process of its own, as a user starts it, and one runs at a time. What
  else runs on the machine is not known here.
- The wall time is that from the call to its return, with the start and the end of the cluster.
- The bill is `Run.worker_seconds`. The outer bill is how long the worker processes have lived, as
  the operating system tells it from outside: from the creation of each to its end. A worker is
  billed from its request to its release, so the outer bill should lie below the bill, by what a
  request takes to become a process: a copy of a server that imports first. (Corrected on
  2026-11-22: Linux dates creations from a boot whose time it knows in whole seconds, so each
  process had lived up to a second too long.)
- ``--believed-cores 16``: ``dask.system.CPU_COUNT`` is set before dagsel is imported, in the script
  and so in its workers. ``--startup 5``: a preload lets each worker wait so long before it joins.

Bounds of a run (exit status 1 if one is broken): held-out value 0.94 or more, bill and outer bill
of 126 worker-seconds or less, back within 75 s. Of a row of the table: a model, or a refusal with
the numbers that would do, before anything is started or as soon as a first unit shows that no epoch
can end in time; back within the deadline and 5 s; bill and outer bill within the budget and 5 s of
each worker.

python tests/benchmarks/deadlines.py [--runs 10] [--seed 0] [--believed-cores 16] [--startup 5]
python tests/benchmarks/deadlines.py --table [--rows 3] [--out deadlines.jsonl]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil

DEADLINE, DEADLINE_S = "60 s", 60.0
BUDGET = "2 worker-minutes"
LEAST_VALUE, MOST_BILL, MOST_WALL_S = 0.94, 126.0, 75.0
#: Of the table: seconds, worker-seconds, workers of this machine.
DEADLINES, BUDGETS, WORKERS = (15, 60, 600), (15, 120, 1200), (1, 2, 4)
RETURN_S, RELEASE_S = 5.0, 5.0
#: How often the processes are looked at from outside.
LOOK_S = 0.02
#: A run that has not come back so long after its deadline is ended.
PATIENCE_S = 120.0

PREAMBLE = """\
import dask.system
dask.system.CPU_COUNT = {cores}
"""
SCRIPT = """\
import json, sys, time
from pathlib import Path
import optuna, torch
from sklearn.datasets import make_classification
import dagsel
from dagsel.flows import SEER

def space(trial):
    return {{"lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            "width": trial.suggest_int("width", 8, 128, log=True)}}

def model(config):
    return torch.nn.Sequential(torch.nn.Linear(16, config["width"]), torch.nn.ReLU(),
                               torch.nn.Linear(config["width"], 4))

def optimizer(parameters, config):
    return torch.optim.Adam(parameters, lr=config["lr"])

if __name__ == "__main__":
    x, y = make_classification(25_000, 16, n_informative=8, n_redundant=4, n_classes=4,
                               n_clusters_per_class=2, class_sep=2.0, flip_y=0.01, random_state=0)
    x = x.astype("float32")
    workload = dagsel.TorchWorkload(model=model, optimizer=optimizer, batch_size=64,
                                    loss=torch.nn.functional.cross_entropy, metrics=["accuracy"])
    study = optuna.create_study(direction="maximize")
    told = {{}}
    began = time.monotonic()
    try:
        run = dagsel.optimize(study, workload, data=(x[:20_000], y[:20_000]), space=space,
                              metric="accuracy", seed={seed}, run_dir="run",
                              flow=SEER(deadline={deadline!r}, budget={budget!r}){more})
    except dagsel.errors.DagselError as error:
        told["wall_s"] = time.monotonic() - began
        told["refused"] = f"{{type(error).__name__}}: {{error}}"
        journals = [*Path("run").glob("journal*")] if Path("run").exists() else []
        text = "".join(path.read_text() for path in journals if path.is_file())
        told |= {{"units": text.count('"unit"'), "epochs": text.count('"Reported"')}}
    else:
        told["wall_s"] = time.monotonic() - began
        told["bill"] = run.worker_seconds
        told["trials"] = len(run.record.trials)
        told["epochs"] = run.record.n_epochs
        told["workers"] = max([m.n_workers for m in run.record.course], default=0)
        told["plan"] = repr(run.plan)
        if run.record.best is not None:
            with torch.no_grad():
                guessed = run.best_model()(torch.from_numpy(x[20_000:])).argmax(1).numpy()
            told["held_out"] = float((guessed == y[20_000:]).mean())
            told["value"] = run.best_value
    Path("told.json").write_text(json.dumps(told))
"""
PRELOAD = """\
import asyncio

async def dask_setup(worker):
    await asyncio.sleep({startup_s})
"""


class Processes:
    """The worker processes of a script, seen from outside."""

    def __init__(self) -> None:
        self.lives: dict[tuple[int, float], float] = {}  # process and its creation: seen last at
        self.early_s = 0.0  # by how much creations are dated too early

    def look(self, script: psutil.Process) -> None:
        """Note which of them live now."""
        try:
            for child in script.children(recursive=True):
                key = (child.pid, child.create_time())
                is_known = key in self.lives
                if child.status() != psutil.STATUS_ZOMBIE and (
                    is_known or is_worker(child, script)
                ):
                    self.lives[key] = time.time()
        except psutil.NoSuchProcess:  # between two questions
            pass

    @property
    def seconds(self) -> float:
        """How long they have lived, all together."""
        return sum(seen - created - self.early_s for (_, created), seen in self.lives.items())


def is_worker(process: psutil.Process, script: psutil.Process) -> bool:
    """Whether a process was spawned, or is a copy of a fork server."""
    command = " ".join(process.cmdline())
    return "spawn_main" in command or ("forkserver" in command and process.ppid() != script.pid)


def search(
    folder: Path,
    *,
    deadline: str,
    budget: str,
    seed: int = 0,
    cores: int | None = None,
    startup_s: float = 0.0,
    more: str = "",
    patience_s: float = DEADLINE_S + PATIENCE_S,
) -> dict[str, Any]:
    """Run the script in a process of its own; return what it and the operating system tell."""
    preamble = "" if cores is None else PREAMBLE.format(cores=cores)
    program = SCRIPT.format(seed=seed, deadline=deadline, budget=budget, more=more)
    (folder / "search.py").write_text(preamble + program)
    environment = dict(os.environ)
    if startup_s:
        (folder / "late.py").write_text(PRELOAD.format(startup_s=startup_s))
        environment["DASK_DISTRIBUTED__WORKER__PRELOAD"] = repr([str(folder / "late.py")])
    processes, ends_at = Processes(), time.monotonic() + patience_s
    starts_at = time.time()
    with (folder / "output.txt").open("w") as output:
        script = psutil.Popen(
            [sys.executable, "search.py"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        processes.early_s = starts_at - script.create_time()
        try:
            while script.poll() is None and time.monotonic() < ends_at:
                processes.look(script)
                time.sleep(LOOK_S)
        finally:
            hung = script.poll() is None
            if hung:
                for process in [*script.children(recursive=True), script]:
                    process.kill()
            script.wait()
    told: dict[str, Any] = {"outer_bill": processes.seconds, "processes": len(processes.lives)}
    if (folder / "told.json").exists():
        return told | json.loads((folder / "told.json").read_text())
    why = f"did not come back within {patience_s:g} s" if hung else "ended with an error"
    lines = (folder / "output.txt").read_text().strip().splitlines()[-3:]
    return told | {"broken": f"the script {why}: {' / '.join(lines)}"}


def in_a_folder(**options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="deadlines-") as folder:
        return search(Path(folder), **options)


# ---- one call, many times


def troubles_of_run(told: dict[str, Any]) -> list[str]:
    """Say which bounds a run has broken."""
    if "held_out" not in told:
        return [told.get("broken") or told.get("refused") or "there is no model"]
    found = []
    if told["held_out"] < LEAST_VALUE:
        found.append(f"held-out value {told['held_out']:.3f} below {LEAST_VALUE}")
    found += _bills(told, MOST_BILL)
    if told["wall_s"] > MOST_WALL_S:
        found.append(f"back after {told['wall_s']:.1f} s, not within {MOST_WALL_S:g} s")
    return found


def _bills(told: dict[str, Any], most: float) -> list[str]:
    return [
        f"{name} {told[name]:.1f} above {most:g} worker-seconds"
        for name in ("bill", "outer_bill")
        if told[name] > most
    ]


def runs(arguments: argparse.Namespace) -> bool:
    print("| seed | held out | value | wall | bill | outer bill | trials | epochs | workers |")
    print("| ---: " * 9 + "|")
    held = True
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        told = in_a_folder(
            deadline=DEADLINE,
            budget=BUDGET,
            seed=seed,
            cores=arguments.believed_cores,
            startup_s=arguments.startup,
        )
        cells = [
            f"{told[name]:{form}}" if name in told else ""
            for name, form in (
                ("held_out", ".3f"), ("value", ".3f"), ("wall_s", ".1f"), ("bill", ".1f"),
                ("outer_bill", ".1f"), ("trials", "d"), ("epochs", "d"), ("workers", "d"),
            )
        ]  # fmt: skip
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)
        if arguments.plans:
            print(told.get("plan", ""))
        for trouble in troubles_of_run(told):
            held = False
            print(f"NOT HELD, seed {seed}: {trouble}", flush=True)
    return held


# ---- the table


def troubles_of_row(row: dict[str, Any]) -> list[str]:
    """Say which bounds a row of the table has broken."""
    if "broken" in row:
        return [row["broken"]]
    found = []
    if row["wall_s"] > row["deadline_s"] + RETURN_S:
        found.append(f"back after {row['wall_s']:.1f} s")
    if "refused" in row:
        if row["epochs"]:
            found.append("refused after it had trained an epoch")
        if not re.search(r"(deadline|budget).*\d", row["refused"], re.DOTALL):
            found.append("the refusal names no number for deadline or budget")
        return found
    if "held_out" not in row:
        found.append("there is no model")
    most = row["budget_s"] + row["n_workers"] * RELEASE_S
    return found + _bills(row, most)


def table(arguments: argparse.Namespace) -> bool:
    """Make the rows that are missing in the file, at most so many, and print what is there."""
    path = Path(arguments.out)
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {tuple(row["key"]): row for row in map(json.loads, lines)}
    left = [key for key in product(DEADLINES, BUDGETS, WORKERS) if key not in rows]
    for deadline_s, budget_s, n_workers in left[: arguments.rows]:
        told = in_a_folder(
            deadline=f"{deadline_s} s",
            budget=f"{budget_s} worker-seconds",
            seed=arguments.seed,
            more=f", max_cluster_workers={n_workers}",
            patience_s=deadline_s + PATIENCE_S,
        )
        key = (deadline_s, budget_s, n_workers)
        asked = {"deadline_s": deadline_s, "budget_s": budget_s, "n_workers": n_workers}
        rows[key] = {"key": key} | asked | told
        with path.open("a") as file:
            file.write(json.dumps(rows[key]) + "\n")
    print("| deadline | budget | workers | held out | wall | bill | outer bill | trials |")
    print("| ---: " * 8 + "|")
    held = True
    for key in product(DEADLINES, BUDGETS, WORKERS):
        row = rows.get(key)
        if row is None:
            continue
        troubles = troubles_of_row(row)
        held &= not troubles
        print(f"| {key[0]} s | {key[1]} | {key[2]} | {_outcome(row)} |")
        for trouble in troubles:
            print(f"NOT HELD, {key}: {trouble}")
    return held


def _outcome(row: dict[str, Any]) -> str:
    if "refused" in row:
        said = row["refused"].replace("|", "/").splitlines()[0]
        when = "after its first unit" if row["units"] else "at once"
        return f"refused {when}: {said} | {row['wall_s']:.1f} s | | {row['outer_bill']:.1f} | "
    if "held_out" not in row:
        return "no model | | | | "
    return (
        f"{row['held_out']:.3f} | {row['wall_s']:.1f} s | {row['bill']:.1f} | "
        f"{row['outer_bill']:.1f} | {row['trials']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--believed-cores", type=int, help="what Dask and dagsel believe")
    parser.add_argument("--startup", type=float, default=0.0, help="seconds each worker is late")
    parser.add_argument("--plans", action="store_true", help="print run.plan of each run")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rows", type=int, help="of the table, to be made now; all by default")
    parser.add_argument("--out", default="deadlines.jsonl", help="where rows are kept")
    arguments = parser.parse_args()
    held = table(arguments) if arguments.table else runs(arguments)
    print("held" if held else "NOT HELD")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
