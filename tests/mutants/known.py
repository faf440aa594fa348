"""Small faults that no test saw once, put in one by one: each must be seen now.

::

    python tests/mutants/known.py              # all of them
    python tests/mutants/known.py asha pbt     # those whose name contains one of the words

Each fault is put into a copy of the code, and its tests run there. A fault that they do not see, or
that cannot be put in any more because the code has changed, is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 120  # a fault may make the code go round for ever


@dataclass(frozen=True, slots=True)
class Fault:
    """One text in place of another in a file of dagsel, and the tests that see it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str  # what pytest is called with

    def put_in(self, copy: Path) -> None:
        """Put the fault into a copy of the code."""
        path = copy / "dagsel" / self.file
        code = path.read_text()
        if code.count(self.right) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.right!r} not exactly once")
        path.write_text(code.replace(self.right, self.wrong))


FAULTS = (
    Fault(
        "asha: a failed paused trial stays promotable",
        "flows/asha.py",
        "record.paused = [result for result in record.paused if result[1] != trial]",
        "record.paused = list(record.paused)",
        "flows/test_asha.py",
    ),
    Fault(
        "hyperband: rounding is ignored in the sizes of rungs",
        "flows/hyperband.py",
        "self.min_epochs, self.max_epochs, self.reduction_factor, self.rounding\n",
        "self.min_epochs, self.max_epochs, self.reduction_factor\n",
        "flows/test_hyperband.py",
    ),
    Fault(
        "hyperband: rounding is ignored when a rung is halved",
        "flows/hyperband.py",
        "SynchronousBrackets(self.reduction_factor, self.rounding, self.n_concurrent)",
        'SynchronousBrackets(self.reduction_factor, "floor", self.n_concurrent)',
        "flows/test_hyperband.py",
    ),
    Fault(
        "successive halving: a failed trial stays in the results of its rung",
        "flows/successive_halving.py",
        "bracket.results = [result for result in bracket.results if result[1] != trial]",
        "bracket.results = list(bracket.results)",
        "flows/test_successive_halving.py",
    ),
    Fault(
        "pbt: of equal members the one with the higher number is the better one",
        "flows/pbt.py",
        "key=lambda trial: (state.losses[trial], trial)",
        "key=lambda trial: (state.losses[trial], -trial)",
        "flows/test_pbt.py",
    ),
    Fault(
        "pbt: factors are ignored",
        "flows/pbt.py",
        "factor = self.factors[int(rng.integers(len(self.factors)))]",
        "factor = (1.2, 0.8)[int(rng.integers(2))]",
        "flows/test_pbt.py",
    ),
    Fault(
        "seer: parallelism_factor is ignored",
        "flows/seer.py",
        "            reduction_factor=self.reduction_factor,\n"
        "            parallelism_factor=self.parallelism_factor,\n"
        "            min_workers_per_trial=self.min_workers_per_trial,\n"
        "            max_workers_per_trial=self.max_workers_per_trial,\n            min_stage",
        "            reduction_factor=self.reduction_factor,\n"
        "            parallelism_factor=2,\n"
        "            min_workers_per_trial=self.min_workers_per_trial,\n"
        "            max_workers_per_trial=self.max_workers_per_trial,\n            min_stage",
        "flows/test_seer.py",
    ),
    Fault(
        "brackets: a bound on the workers is ignored",
        "planning/brackets.py",
        "if self.most_workers is not None and needed > self.most_workers:",
        "if self.most_workers is not None and needed < 0:",
        "planning/test_brackets.py",
    ),
    Fault(
        "capacity: a worker is asked for that comes too late",
        "planning/capacity.py",
        "paid = 0 if is_late else int(",
        "paid = int(",
        "planning/test_capacity.py",
    ),
    Fault(
        "stages: what the start has taken is forgotten",
        "flows/stages.py",
        "left_s = self.deadline_s - context.seconds",
        "left_s = self.deadline_s",
        "flows/test_seer.py",
    ),
    Fault(
        "stages: the warming up counts as training",
        "flows/stages.py",
        "(state.paused_at - since[1]) / (trained - since[0])",
        "state.paused_at / trained",
        "flows/test_seer.py",
    ),
    Fault(
        "first epoch: nothing is too late",
        "driver/first_epoch.py",
        "self._cold_least_s) <= clock.left_s:",
        "self._cold_least_s) <= math.inf:",
        "driver/test_first_epoch.py",
    ),
    Fault(
        "marble: a job is promoted at equal cost",
        "flows/marble.py",
        "job.won_s(gang, more) > cost_s",
        "job.won_s(gang, more) >= cost_s",
        "flows/test_marble.py",
    ),
    Fault(
        "marble: an architecture's first switches count for ever",
        "flows/allocation.py",
        "known[-N_SWITCHES:]",
        "known[:N_SWITCHES]",
        "flows/test_allocation.py flows/test_marble.py",
    ),
    Fault(
        "rule: no bonus for a state that is here",
        "dispatch/list_scheduler.py",
        "self._key[first][1] * (1.0 - self.stay)",
        "self._key[first][1]",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: no bonus for a state that is here, where shards have several holders",
        "dispatch/list_scheduler.py",
        "score += self.stay",
        "score += 0.0",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: a state that is here counts before a priority",
        "dispatch/list_scheduler.py",
        "if first is None or self._key[first][0] < best[0]:",
        "if first is None:",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: what it costs to wait is not counted",
        "dispatch/list_scheduler.py",
        "if limit > slack or self.target - self.rem[first] < limit:",
        "if False:",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: a worker that is late itself waits",
        "dispatch/list_scheduler.py",
        "if limit > slack or self.target - self.rem[first] < limit:",
        "if self.target - self.rem[first] < limit:",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: no priority where shards have several holders",
        "dispatch/list_scheduler.py",
        "ranked.append((-rank, -score - part, trial, shard))",
        "ranked.append((0.0, -score - part, trial, shard))",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: waits for trials of less priority",
        "dispatch/list_scheduler.py",
        "or self.priority.get(trial, 0.0) < priority:",
        "or False:",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "brackets: a budget that just pays for one more full bracket does not",
        "planning/brackets.py",
        "while (q + 1) * nu**q <= B / B_0:",
        "while (q + 1) * nu**q < B / B_0:",
        "planning/test_brackets.py",
    ),
    Fault(
        "runner: a metric that is NaN is reported",
        "driver/runner.py",
        '        if math.isnan(value):\n            self._fail(trial.number, f"DivergedError',
        '        if False:\n            self._fail(trial.number, f"DivergedError',
        "driver/test_runner.py",
    ),
    Fault(
        "runner: a second Train of a turn replaces the first one's epochs",
        "driver/runner.py",
        "epochs += trains[trial].epochs if trial in trains else 0",
        "epochs += 0",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: an Ask is answered after the search finished",
        "driver/runner.py",
        "case Ask() if not self.record.finished:",
        "case Ask():",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: ends of epochs are never dropped",
        "driver/runner.py",
        "            if epoch:\n                self._stored.drop_end(trial, epoch)",
        "            if epoch:\n                pass",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: the flow hears of 0 workers",
        "driver/runner.py",
        "not in (0, self.record.n_workers)",
        "not in (self.record.n_workers,)",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: no snapshots of the flow",
        "driver/runner.py",
        "if self._n_turns % TURNS_PER_SNAPSHOT == 0:",
        "if False:",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: the budget of earlier sessions is forgotten",
        "driver/clock.py",
        "self._cost_before = record.worker_seconds",
        "self._cost_before = 0.0",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: what was decided is not written before it is done",
        "driver/runner.py",
        "        self.journal.append(self._entries)\n        self._entries = []\n        trains",
        "        self._entries = []\n        trains",
        "driver/test_runner.py",
    ),
    Fault(
        "session: a driver that has lost its lock writes on",
        "session.py",
        "self.lock.check()",
        "pass",
        "driver/test_runner.py",
    ),
    Fault(
        "trial: a unit keeps the share of a piece",
        "history/trial.py",
        "work.share if isinstance(work, PieceRecord) else 0.0",
        "work.share if isinstance(work, PieceRecord) else self.share",
        "history/test_trial.py",
    ),
    Fault(
        "trial: a clone keeps the check of the state that it lost",
        "history/trial.py",
        "self.last_check, self.is_scored = None, False",
        "self.is_scored = False",
        "history/test_trial.py",
    ),
    Fault(
        "trial: recovered units count as timed",
        "history/trial.py",
        " and not work.recovered:",
        ":",
        "history/test_trial.py",
    ),
)


def is_seen(fault: Fault) -> bool:
    """Whether the fault's tests fail with the fault, and do not run for ever."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("dagsel", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        fault.put_in(copy)
        tests = [f"tests/{test}" for test in fault.tests.split()]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": folder, "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=LIMIT_S, text=True
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{fault.name}: the tests could not run:\n{done.stdout}")
        return done.returncode == 1


def main(words: list[str]) -> int:
    """Try the faults whose name contains one of the words; return how many are not seen."""
    n_unseen = 0
    for fault in FAULTS:
        if words and not any(word in fault.name for word in words):
            continue
        start = time.monotonic()
        seen = is_seen(fault)
        n_unseen += not seen
        seconds = time.monotonic() - start
        print(f"{'seen' if seen else 'NOT SEEN':8} {seconds:5.1f} s  {fault.name}", flush=True)
    return n_unseen


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
