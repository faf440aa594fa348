"""Hermes' experiment (Son et al. 2021, section 4) on our own traces: how soon are the good found?

    python tests/benchmarks/hermes.py [--models cnn mlp] [--orders 20] [--quantum 10] [--growth 2]
    python tests/benchmarks/hermes.py --real [--models mlp]

Sixteen jobs of the recorded grid are there at once, in random order, for four workers. The
*optimum* is the best held-out accuracy that any of the 192 configurations ends with, the *goal* is
90% of it, and a configuration is *good* if it reaches the goal within its 1,000 iterations. A bin
holds 4 or 12 good configurations, drawn from all good ones, and fills up with others. Measured is
when the good ones reach the goal: the first of them, on average, and all of them. Each order is a
draw of its own: of the configurations and of their order.

Seconds are the recorded ones, stretched so that an iteration takes 0.2 s on average, as long as
those of the paper's networks: a quantum of 10 s is 50 iterations, a job takes 200 s. Switching from
one job to another costs nothing here.

With ``--real`` one order of the bin with 4 good ones runs on a real cluster of two workers, with
jobs that sleep as long as an iteration takes and log the recorded losses; and in the simulator. An
iteration takes 20 ms there, a quantum is of 50 iterations again, and the four take 11 minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from distributed import Client, LocalCluster
from numpy.typing import NDArray
from scipy.stats import t as student

import dagsel
from dagsel.flow import Flow, Losses
from dagsel.flows import Hermes, RoundRobin
from dagsel.flows.baselines import FIFO, SLAQ
from dagsel.history.result import Result
from dagsel.simulation import SimulatedCluster
from dagsel.simulation.traces import Traces
from dagsel.state import State, Tensor
from dagsel.storage import ShardedDataset
from dagsel.workloads.base import Config, Evaluated, Trained, Visit, never

HERE = Path(__file__).parent / "hermes_traces"
MODELS = ("cnn", "mlp")
GRID = ("optimizer", "batch", "lr", "weight_decay")
N_JOBS, N_WORKERS, N_GOOD = 16, 4, (4, 12)


def load(name: str, iteration_s: float = 0.2) -> Traces:
    """Read a network's traces, stretched to so many seconds an iteration on average."""
    with np.load(HERE / f"{name}.npz") as kept:
        columns = [kept[key].tolist() for key in GRID]
        return Traces(
            [dict(zip(GRID, row, strict=True)) for row in zip(*columns, strict=True)],
            kept["losses"].astype(np.float64),
            kept["test_accuracy"][:, 1:].astype(np.float64),
            iteration_s * kept["iteration_s"] / kept["iteration_s"].mean(),
        )


def chosen(traces: Traces, jobs: NDArray[np.int64]) -> Traces:
    """Keep the traces of some jobs, in their order."""
    return Traces(
        [traces.configs[job] for job in jobs],
        traces.batch_losses[jobs],
        traces.values[jobs],
        traces.batch_s[jobs],
    )


def goal_of(traces: Traces, share: float = 0.9) -> float:
    return float(share * traces.values[:, -1].max())


def draw(traces: Traces, n_good: int, order: int, share: float = 0.9) -> Traces:
    """Draw a bin, and the order of its jobs."""
    rng = np.random.default_rng([n_good, order])
    is_good = (traces.values >= goal_of(traces, share)).any(axis=1)
    good = rng.choice(np.flatnonzero(is_good), n_good, replace=False)
    others = rng.choice(np.flatnonzero(~is_good), N_JOBS - n_good, replace=False)
    return chosen(traces, rng.permutation(np.concatenate([good, others])))


class InOrder(optuna.samplers.BaseSampler):
    """Draws for each trial its own number."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> int:
        return int(trial.number)


def space_of(jobs: Traces) -> Callable[[optuna.Trial], Config]:
    return lambda trial: jobs.configs[trial.suggest_int("job", 0, len(jobs.configs) - 1)]


def flows(
    max_epochs: int, quantum_s: float, n_workers: int, growth: float = 2.0
) -> dict[str, Flow]:
    """Give the four schedulers; all jobs may be resident at once, as in the paper."""
    sharing: dict[str, Any] = {
        "quantum": quantum_s,
        "max_trials_per_worker": N_JOBS // n_workers,
    }
    return {
        "Hermes": Hermes(max_epochs, N_JOBS, growth=growth, **sharing),
        "FIFO": FIFO(max_epochs, N_JOBS),
        "RR": RoundRobin(max_epochs, N_JOBS, **sharing),
        "SLAQ": SLAQ(max_epochs, N_JOBS, **sharing),
    }


def reached(run: Result, goal: float) -> NDArray[np.float64]:
    """Give when each good job reached the goal, soonest first."""
    rows = run.metrics
    rows = rows[(rows["split"] == "validation") & (rows["value"] >= goal)]
    return np.sort(rows.groupby("trial")["seconds"].min().to_numpy())


def simulated(
    flow: Flow, jobs: Traces, goal: float, n_workers: int = N_WORKERS
) -> NDArray[np.float64]:
    run = dagsel.simulate(
        flow, jobs, SimulatedCluster(n_workers, n_shards=1), space=space_of(jobs),
        sampler=InOrder(), direction="maximize", metric="accuracy",
    )  # fmt: skip
    return reached(run, goal)


@dataclass(frozen=True)
class Replayed:
    """A workload that sleeps as long as a recorded iteration took, and logs the recorded losses.

    Parameters
    ----------
    traces
        What was recorded.
    """

    traces: Traces

    @property
    def metrics(self) -> Mapping[str, Any]:
        return {"accuracy": "maximize"}

    def validate(self, config: Config) -> None:
        self.traces.find(config)

    def prepare(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        return len(next(iter(arrays.values())))

    def init(self, config: Config, seed: int) -> State:
        return _state(0)

    def train(
        self,
        state: State,
        shard: int,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        first = done = state.meta["done"]
        last = visit.epoch * self.traces.n_batches
        batch_s = self.traces.seconds(config, trial=visit.trial) / self.traces.n_batches
        began = time.perf_counter()
        while done < last and not (done > first and should_stop()):
            done += 1
            time.sleep(max(0.0, began + (done - first) * batch_s - time.perf_counter()))
        losses = self._losses(config, first, done, visit)
        mean = self._losses(config, last - self.traces.n_batches, done, visit)
        return Trained(
            _state(done), shard, (mean.low + mean.high) / 2, finished=done == last, losses=losses
        )

    def evaluate(self, state: State, shard: int, config: Config) -> Evaluated:
        epoch = state.meta["done"] // self.traces.n_batches
        return Evaluated(shard, {"accuracy": self.traces.value(config, epoch, trial=0)})

    def restore(self, state: State, config: Config) -> int:
        return int(state.meta["done"])

    def _losses(self, config: Config, start: int, stop: int, visit: Visit) -> Losses:
        n = self.traces.n_batches
        return self.traces.losses(config, start / n, stop / n, trial=visit.trial)


def _state(done: int) -> State:
    return State.pack({"weights": Tensor.from_numpy(np.zeros(1))}, {"done": done})


def interval(ratios: NDArray[np.float64]) -> str:
    """Mean and its 95% confidence interval, by Student's t."""
    half = student.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / np.sqrt(len(ratios))
    return f"{ratios.mean():.2f} ± {half:.2f}"


def compare(name: str, n_orders: int, quantum_s: float, growth: float, share: float) -> None:
    """Print how much sooner Hermes finds the good ones of a network's bins."""
    traces = load(name)
    goal = goal_of(traces, share)
    over_bins: dict[str, list[NDArray[np.float64]]] = {}
    for n_good in N_GOOD:
        times: dict[str, list[tuple[float, ...]]] = {}
        for order in range(n_orders):
            jobs = draw(traces, n_good, order, share)
            policies = flows(traces.n_epochs, quantum_s, N_WORKERS, growth)
            for policy, flow in policies.items():
                at = simulated(flow, jobs, goal)
                assert len(at) == n_good, f"{policy}: {len(at)} of {n_good} reached the goal"
                times.setdefault(policy, []).append((at[0], at.mean(), at[-1]))
        ours = np.array(times.pop("Hermes"))
        for place, kind in enumerate(("first", "on average", "all")):
            ratios = [np.array(theirs)[:, place] / ours[:, place] for theirs in times.values()]
            cells = [f"{interval(ratio)} ({(ratio < 1).sum()})" for ratio in ratios]
            print(f"| {name} | {n_good} | {kind} | {ours[:, place].mean():.0f} s | "
                  + " | ".join(cells) + " |", flush=True)  # fmt: skip
            over_bins.setdefault(kind, []).append(np.mean(ratios, axis=0))
    for kind, means in over_bins.items():
        mean = interval(np.concatenate(means))
        print(f"| {name} | 4 and 12 | {kind} | | {mean}, the three together | | |")


def real(name: str, order: int, iteration_s: float) -> None:
    """Print when the good ones of a bin are found on a real cluster, and in the simulator."""
    traces = load(name, iteration_s)
    goal, jobs = goal_of(traces), draw(traces, N_GOOD[0], order)
    workload = Replayed(jobs)
    print("| scheduler | found, real (s) | simulated (s) | real / simulated |\n| " + "--- | " * 4)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        data = ShardedDataset.write(f"{folder}/data.zarr", {"x": np.zeros((50, 1))}, n_shards=1)
        for policy, flow in flows(traces.n_epochs, 50 * iteration_s, n_workers=2).items():
            study = optuna.create_study(direction="maximize", sampler=InOrder())
            run = dagsel.optimize(
                study, workload, data, space=space_of(jobs), flow=flow, metric="accuracy",
                client=client, replicas=2, run_dir=f"{folder}/{policy}",
            )  # fmt: skip
            here, there = reached(run, goal), simulated(flow, jobs, goal, n_workers=2)
            assert len(here) == len(there) == N_GOOD[0]
            share = here.mean() / there.mean()
            print(f"| {policy} | {here.round(1).tolist()} | {there.round(1).tolist()} | "
                  f"{share:.3f} |", flush=True)  # fmt: skip
            if abs(share - 1) > 0.15:
                sys.exit(f"{policy}: the simulator is off by more than 15%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--orders", type=int, default=20)
    parser.add_argument("--quantum", type=float, default=10.0, help="seconds")
    parser.add_argument("--growth", type=float, default=2.0, help="of the quantum, by a milestone")
    parser.add_argument("--goal", type=float, default=0.9, help="share of the optimum")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--iteration", type=float, default=0.02, help="seconds, with --real")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if args.real:
        for name in args.models:
            real(name, 0, args.iteration)
        return
    print("How many times sooner Hermes finds them (orders of which it loses)\n\n"
          "| network | good | found | Hermes | FIFO | RR | SLAQ |\n|" + " --- |" * 7)  # fmt: skip
    for name in args.models:
        compare(name, args.orders, args.quantum, args.growth, args.goal)


if __name__ == "__main__":
    main()
