"""Hermes' experiments (Son et al. 2021, section 4) on recorded losses: its page in docs/measured.

    python tests/benchmarks/papers/hermes.py [--out FOLDER] [--orders 20] [--only figure-5]
    python tests/benchmarks/papers/hermes.py --real [--models mlp]

The page says what is stated, what is assumed, and what comes out. With ``--real`` one order of the
bin with 4 good jobs runs on a real cluster of two workers, with jobs that sleep as long as an
iteration takes and log the recorded losses; and in the simulator. An iteration takes 20 ms there, a
quantum is of 50 iterations, and the four schedulers take 11 minutes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import optuna
from distributed import Client, LocalCluster
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

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
from tests.benchmarks import grids
from tests.benchmarks.papers import pages

HERE = Path(__file__).parents[1] / "hermes_traces"
MODELS = ("cnn", "mlp")
N_JOBS, N_WORKERS, N_GOOD, N_TOP = 16, 4, (4, 12), 4
SHARE = 0.9  # of the optimum
OTHERS = ("FIFO", "RR", "SLAQ")
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Network:
    """One of the paper's networks."""

    seconds: float  # of 1,000 iterations of batch size 16 (Table 2)
    switch_s: float  # stated for the first and the third; see the page
    speed_up: float  # of Hermes on average (Section 4.2)


NETWORKS = {
    "GoogleNet": Network(30.12, 0.67, 2.08),
    "VGG16": Network(94.26, 1.54, 1.92),
    "VGG19": Network(110.49, 1.57, 4.04),
    "ResNet50": Network(66.88, 0.79, 3.39),
}


@cache
def recorded(name: str) -> Mapping[str, NDArray[Any]]:
    return grids.read(HERE / f"{name}.npz", grids.HERMES, {"test_accuracy": (192, 21)})


def _traces(name: str, values: Array, batch_s: Array) -> Traces:
    kept = recorded(name)
    return Traces(grids.points(grids.HERMES), kept["losses"].astype(np.float64), values, batch_s)


def load(name: str, iteration_s: float = 0.2) -> Traces:
    """Read accuracies, with so many seconds an iteration on average."""
    kept = recorded(name)
    seconds = kept["iteration_s"].astype(np.float64)
    accuracy = kept["test_accuracy"][:, 1:].astype(np.float64)
    return _traces(name, accuracy, iteration_s * seconds / seconds.mean())


def load_falls(name: str, network: Network) -> Traces:
    """Read how far losses have fallen since training began, with the seconds of a network."""
    kept = recorded(name)
    seconds, losses = (kept[key].astype(np.float64) for key in ("iteration_s", "test_loss"))
    of_16 = seconds[kept["batch"] == 16].mean()
    return _traces(name, losses[:, :1] - losses[:, 1:], network.seconds / 1000 * seconds / of_16)


def chosen(traces: Traces, jobs: NDArray[np.int64]) -> Traces:
    """Keep the traces of some jobs, in their order."""
    return Traces(
        [traces.configs[job] for job in jobs],
        traces.batch_losses[jobs],
        traces.values[jobs],
        traces.batch_s[jobs],
    )


def goal_of(traces: Traces, share: float = SHARE) -> float:
    """Return what a good job reaches: a share of the best that any ends with."""
    return float(share * traces.values[:, -1].max())


def draw(traces: Traces, n_good: int, order: int, share: float = SHARE) -> Traces:
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
    max_epochs: int, quantum_s: float, n_workers: int, others_s: float | None = None
) -> dict[str, Flow]:
    """Give the four schedulers; all jobs may be resident at once, as in the paper.

    With `others_s`, the quantum of the others, it is as in the paper: no job migrates.
    """
    sharing: dict[str, Any] = {
        "max_trials_per_worker": N_JOBS // n_workers,
        "migrate": others_s is None,
    }
    theirs = {"quantum": others_s or quantum_s, **sharing}
    return {
        "Hermes": Hermes(max_epochs, N_JOBS, quantum=quantum_s, **sharing),
        "FIFO": FIFO(max_epochs, N_JOBS),
        "RR": RoundRobin(max_epochs, N_JOBS, **theirs),
        "SLAQ": SLAQ(max_epochs, N_JOBS, **theirs),
    }


def reached(run: Result, goal: float) -> dict[int, float]:
    """Give when each good job reached the goal."""
    rows = run.metrics
    rows = rows[(rows["split"] == "validation") & (rows["value"] >= goal)]
    soonest = rows.groupby("trial")["seconds"].min()
    return dict(zip(soonest.index.tolist(), soonest.tolist(), strict=True))


def simulated(
    flow: Flow, jobs: Traces, goal: float, n_workers: int = N_WORKERS, switch_s: float = 0.0
) -> dict[int, float]:
    run = dagsel.simulate(
        flow, jobs, SimulatedCluster(n_workers, n_shards=1, switch_s=switch_s),
        space=space_of(jobs), sampler=InOrder(), direction="maximize", metric="value",
    )  # fmt: skip
    return reached(run, goal)


def times_of(
    jobs: Traces, goal: float, n_good: int, searches: Mapping[str, Flow], switch_s: float = 0.0
) -> dict[str, Array]:
    """Give for each scheduler when the good ones came to the goal: infinity for the other jobs."""
    times = {}
    for policy, flow in searches.items():
        at = simulated(flow, jobs, goal, switch_s=switch_s)
        assert len(at) == n_good, f"{policy}: {len(at)} of {n_good} reached the goal"
        times[policy] = np.array([at.get(job, np.inf) for job in range(N_JOBS)])
    return times


def top_of(jobs: Traces, times: Array) -> Array:
    """Give when the jobs of the bin that end best came to the goal."""
    good = np.flatnonzero(np.isfinite(times))
    return times[good[np.argsort(-jobs.values[good, -1], kind="stable")[:N_TOP]]]


# ---- the paper's settings

Key = tuple[str, str, int]  # network, whose losses, how many good ones


@cache
def paper_times(n_orders: int) -> dict[Key, dict[str, Array]]:
    """Give for each scheduler and order when the good ones were there on average, and the top."""
    found: dict[Key, dict[str, list[tuple[float, float]]]] = {}
    for (name, network), model in product(NETWORKS.items(), MODELS):
        traces = load_falls(model, network)
        goal = goal_of(traces)
        searches = flows(traces.n_epochs, 10.0, N_WORKERS, others_s=30.0)
        stays: dict[str, Any] = {"quantum": 10.0, "migrate": False, "growth": 1.0}
        searches["stays"] = Hermes(traces.n_epochs, N_JOBS, **stays)
        for n_good, order in product(N_GOOD, range(n_orders)):
            jobs = draw(traces, n_good, order)
            all_times = times_of(jobs, goal, n_good, searches, network.switch_s)
            by_policy = found.setdefault((name, model, n_good), {})
            for policy, times in all_times.items():
                mean = times[np.isfinite(times)].mean()
                by_policy.setdefault(policy, []).append((mean, top_of(jobs, times).mean()))
    return {
        key: {policy: np.array(times) for policy, times in by_policy.items()}
        for key, by_policy in found.items()
    }


def ratio_rows(times: Mapping[Key, Mapping[str, Array]], which: int) -> list[list[str]]:
    """Make a row for each key: Hermes' seconds, the others' in multiples of it."""
    rows = []
    for (name, model, n_good), by_policy in times.items():
        ours = by_policy["Hermes"][:, which]
        ratios = [by_policy[policy][:, which] / ours for policy in OTHERS]
        cells = [f"{pages.interval(ratio)} ({(ratio < 1).sum()})" for ratio in ratios]
        stays = np.mean([by_policy[p][:, which] / by_policy["stays"][:, which] for p in OTHERS])
        mean = f"{np.mean(ratios):.2f}"
        rows.append(
            [name, model, str(n_good), f"{ours.mean():.0f} s", *cells, mean, f"{stays:.2f}"]
        )
    return rows


HEAD = ["seconds of", "losses of", "good", "Hermes", *OTHERS, "mean", "quantum stays"]


def bars(times: Mapping[Key, Mapping[str, Array]], bins: tuple[int, ...], which: int) -> Any:
    """Draw the mean times in multiples of Hermes', over the losses of both networks."""
    figure, axes = plt.subplots(1, len(bins), figsize=(4.2 * len(bins), 2.8), squeeze=False)
    for axis, n_good in zip(axes[0], bins, strict=True):
        for place, policy in enumerate(("Hermes", *OTHERS)):
            heights = []
            for name in NETWORKS:
                keys = [(name, model, n_good) for model in MODELS]
                ratios = [times[k][policy][:, which] / times[k]["Hermes"][:, which] for k in keys]
                heights.append(float(np.mean(ratios)))
            at = np.arange(len(NETWORKS)) + 0.2 * place - 0.3
            axis.bar(at, heights, 0.2, label=policy)
        axis.set_xticks(range(len(NETWORKS)), list(NETWORKS))
        axis.set_title(f"{n_good} good of {N_JOBS}")
        axis.set_ylabel("time in multiples of Hermes'")
        axis.legend(fontsize=7)
    return figure


def figure_5(folder: Path, n_orders: int) -> str:
    times = paper_times(n_orders)
    rows = []
    for name, network in NETWORKS.items():
        means = [
            np.mean([
                times[name, model, n_good][policy][:, 0] / times[name, model, n_good][ours][:, 0]
                for policy in OTHERS
                for n_good in N_GOOD
            ])
            for ours in ("Hermes", "stays")
            for model in MODELS
        ]  # fmt: skip
        rows.append([name, network.speed_up, *(f"{mean:.2f}" for mean in means)])
    head = ["network", "paper", "ours, CNN", "ours, MLP", "CNN, quantum stays", "MLP, stays"]
    alt = "Figure 5: mean time until the good jobs reach the goal, in multiples of Hermes' time"
    shown = pages.picture(bars(times, N_GOOD, 0), folder / "hermes-figure-5.svg", alt)
    return (
        "### Figure 5: how much sooner the good ones are found\n\n"
        "Speed-up on average: the time of the others divided by Hermes', over FIFO, RR and SLAQ "
        f"and both bins.\n\n{pages.table(head, rows)}\n\n{shown}\n\n"
        "A cell is the other scheduler's mean time until the good ones reach the goal, divided by "
        f"Hermes' (above 1 Hermes is sooner): mean of {n_orders} orders ± 95% interval, in "
        "brackets in how many orders Hermes is later.\n\n"
        f"{pages.table(HEAD, ratio_rows(times, 0))}"
    )


def figure_6(folder: Path, n_orders: int) -> str:
    times = {key: found for key, found in paper_times(n_orders).items() if key[2] == N_GOOD[1]}
    mean = np.mean([
        found[policy][:, 1] / found["Hermes"][:, 1] for found in times.values() for policy in OTHERS
    ])  # fmt: skip
    alt = "Figure 6: mean time until the best four of the bin with 12 good jobs reach the goal"
    shown = pages.picture(bars(times, N_GOOD[1:], 1), folder / "hermes-figure-6.svg", alt)
    return (
        "### Figure 6: the best four of a bin of type 2\n\n"
        f"Speed-up on average: **paper 2.68, ours {mean:.2f}**. Cells as above, of the four good "
        f"jobs that end with the lowest loss.\n\n{pages.table(HEAD, ratio_rows(times, 1))}\n\n"
        f"{shown}"
    )


def figure_2(folder: Path) -> str:
    figure, axis = plt.subplots(figsize=(4.8, 2.8))
    rows = []
    for model in MODELS:
        losses = recorded(model)["test_loss"].astype(np.float64)
        falls = losses[:, :1] - losses
        is_there = {
            "half of the fall": falls >= 0.5 * falls[:, -1].max(),
            "twice the best loss": losses <= losses[:, -1].min() / 0.5,
        }
        iterations = 50 * np.arange(losses.shape[1])
        for reading, there in is_there.items():
            cdf = np.maximum.accumulate(there, axis=1).mean(axis=0)
            axis.step(iterations, cdf, where="post", label=f"{model}, {reading}")
            rows.append([model, reading, f"{cdf[-1]:.0%}", f"{cdf[10] / cdf[-1]:.0%}"])
    axis.set_xlabel("iterations")
    axis.set_ylabel("configurations")
    axis.legend(fontsize=7)
    alt = "Figure 2a: share of the 192 configurations that have reached the 50% goal"
    shown = pages.picture(figure, folder / "hermes-figure-2.svg", alt)
    head = ["losses of", "goal", "reach it in 1,000 iterations", "of these in 500"]
    return (
        "### Figure 2a: how many reach the goal of 50%, and when\n\n"
        "Paper: 25% within 3,000 iterations (its caption says about 20%); of these 85% within "
        f"1,000 and 60% within 500.\n\n{pages.table(head, rows)}\n\n{shown}"
    )


# ---- our own settings


def ours(folder: Path, n_orders: int) -> str:
    """Compare with one quantum for all, free switches, migration, and accuracy as the goal."""
    rows: list[list[str]] = []
    means: dict[tuple[str, str], list[float]] = {}
    for model, n_good in product(MODELS, N_GOOD):
        traces = load(model)
        goal = goal_of(traces)
        found: dict[str, list[tuple[float, ...]]] = {}
        for order in range(n_orders):
            searches = flows(traces.n_epochs, 10.0, N_WORKERS)
            options: dict[str, Any] = {"quantum": 10.0, "first_quantum": 2.5}
            searches["first 2.5 s"] = Hermes(traces.n_epochs, N_JOBS, **options)
            jobs = draw(traces, n_good, order)
            for policy, times in times_of(jobs, goal, n_good, searches).items():
                at = times[np.isfinite(times)]
                found.setdefault(policy, []).append((at.min(), at.mean(), at.max()))
        ends = {policy: np.array(all_at) for policy, all_at in found.items()}
        for place, kind in enumerate(("first", "on average", "all")):
            for variant in ("Hermes", "first 2.5 s"):
                own = ends[variant][:, place]
                ratios = [ends[policy][:, place] / own for policy in OTHERS]
                cells = [f"{pages.interval(ratio)} ({(ratio < 1).sum()})" for ratio in ratios]
                rows.append([model, str(n_good), kind, variant, f"{own.mean():.0f} s", *cells])
                if kind == "on average":
                    means.setdefault((model, variant), []).append(float(np.mean(ratios)))
    head = ["losses of", "good", "found", "Hermes", "takes", *OTHERS]
    told = [
        [model, variant, f"{np.mean(both):.2f}"] for (model, variant), both in sorted(means.items())
    ]
    return (
        f"On average, over the three schedulers and both bins:\n\n"
        f"{pages.table(['losses of', 'Hermes', 'speed-up'], told)}\n\n"
        "A row says when the good ones come to the goal: the first of them, on average, and all. "
        f"Cells as above, {n_orders} orders.\n\n{pages.table(head, rows)}"
    )


# ---- on a real cluster


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
        return {"value": "maximize"}

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
        return Evaluated(shard, {"value": self.traces.value(config, epoch, trial=0)})

    def restore(self, state: State, config: Config) -> int:
        return int(state.meta["done"])

    def _losses(self, config: Config, start: int, stop: int, visit: Visit) -> Losses:
        n = self.traces.n_batches
        return self.traces.losses(config, start / n, stop / n, trial=visit.trial)


def _state(done: int) -> State:
    return State.pack({"weights": Tensor.from_numpy(np.zeros(1))}, {"done": done})


def real(name: str, order: int, iteration_s: float) -> None:
    """Print when the good ones of a bin are found on a real cluster, and in the simulator."""
    traces = load(name, iteration_s)
    goal, jobs = goal_of(traces), draw(traces, N_GOOD[0], order)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        data = ShardedDataset.write(f"{folder}/data.zarr", {"x": np.zeros((50, 1))}, n_shards=1)
        for policy, flow in flows(traces.n_epochs, 50 * iteration_s, n_workers=2).items():
            study = optuna.create_study(direction="maximize", sampler=InOrder())
            run = dagsel.optimize(
                study, Replayed(jobs), data, space=space_of(jobs), flow=flow, metric="value",
                client=client, replicas=2, run_dir=f"{folder}/{policy}",
            )  # fmt: skip
            ends = reached(run, goal), simulated(flow, jobs, goal, n_workers=2)
            here, there = (np.sort([*at.values()]) for at in ends)
            assert len(here) == len(there) == N_GOOD[0]
            share = here.mean() / there.mean()
            rows.append([policy, here.round(1).tolist(), there.round(1).tolist(), f"{share:.3f}"])
            if abs(share - 1) > 0.15:
                sys.exit(f"{policy}: the simulator is off by more than 15%")
    head = ["scheduler", "found, real (s)", "simulated (s)", "real / simulated"]
    print(pages.table(head, rows))


def main() -> None:
    names = ("figure-5", "figure-6", "figure-2", "ours")
    parser = pages.parser_of(__doc__ or "", names)
    parser.add_argument("--orders", type=int, default=20)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--iteration", type=float, default=0.02, help="seconds, with --real")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if args.real:
        for name in args.models:
            real(name, 0, args.iteration)
        return
    n = args.orders
    makers: tuple[pages.Part, ...] = (
        lambda folder: figure_5(folder, n),
        lambda folder: figure_6(folder, n),
        figure_2,
        lambda folder: ours(folder, n),
    )
    pages.write("hermes", dict(zip(names, makers, strict=True)), args.out, args.only)


if __name__ == "__main__":
    main()
