"""Hermes' Figure 5 on a real cluster, with jobs that really train: its page in docs/measured.

    python tests/benchmarks/papers/hermes_cluster.py [--out FOLDER] [--orders 1]

Two worker processes train 16 CNNs of the recorded grid, with each scheduler. The page says what is
assumed. ``--quick`` is a test of the script. It takes 5 minutes of a quiet machine with two cores.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optuna
import torch
from distributed import Client
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import dagsel
from dagsel.flow import Flow
from dagsel.history.result import Result
from dagsel.simulation.traces import Traces
from dagsel.state import State
from dagsel.storage import ShardedDataset
from dagsel.workloads.base import Trained, Visit, never
from tests.benchmarks.hermes_traces import record
from tests.benchmarks.papers import hermes, mnist, pages

NAMES = pages.SCRIPTS["hermes"]["hermes_cluster"]
N_WORKERS, N_HELD_OUT = 2, 1000
#: The scale is that of GoogleNet, whose 1,000 iterations of batch size 16 take three quanta.
GOOGLENET = hermes.NETWORKS["GoogleNet"]
QUANTUM_S, OTHERS_S = 10.0, 30.0


@dataclass(frozen=True, slots=True)
class Scale:
    """What 1,000 iterations of batch size 16 took when the losses were recorded."""

    seconds: float

    @property
    def factor(self) -> float:
        """How many times faster than GoogleNet it is."""
        return GOOGLENET.seconds / self.seconds

    @property
    def network(self) -> hermes.Network:
        return hermes.Network(self.seconds, 0.0, GOOGLENET.speed_up)


def recorded_scale() -> Scale:
    kept = hermes.recorded("cnn")
    return Scale(1000 * float(kept["iteration_s"][kept["batch"] == 16].mean()))


class Iterations(dagsel.TorchWorkload):
    """Trains 50 batches an epoch, whatever their size: the next ones of one order after another."""

    def train(
        self,
        state: State,
        shard: Any,
        config: Mapping[str, Any],
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        """Train on the epoch's share of the shard."""
        chosen = torch.from_numpy(samples_of(visit, len(shard["y"]), config["batch"]))
        part = {name: tensor[chosen] for name, tensor in shard.items()}
        return super().train(state, part, config, visit=visit, should_stop=should_stop)


def samples_of(visit: Visit, n: int, batch: int) -> NDArray[np.int64]:
    """Give the samples of an epoch's 50 batches: a part of one order of all n after another."""
    at = np.arange((visit.epoch - 1) * record.EVERY * batch, visit.epoch * record.EVERY * batch)
    orders = {
        number: np.random.default_rng([visit.seed, visit.trial, number]).permutation(n)
        for number in set((at // n).tolist())
    }
    return np.array([orders[place // n][place % n] for place in at.tolist()])


def workload() -> Iterations:
    return Iterations(
        model=lambda config: record.cnn(),
        loss=torch.nn.functional.cross_entropy,
        optimizer=record.optimizer,
        batch_size=lambda config: config["batch"],
    )


def goal_of(share: float = hermes.SHARE) -> float:
    """Return the held-out loss at which a job has made so much of the best one's fall."""
    losses = hermes.recorded("cnn")["test_loss"].astype(float)
    return float(losses[:, 0].mean() - share * (losses[:, 0] - losses[:, -1]).max())


def reached(run: Result, goal: float) -> dict[int, float]:
    """Give when each good job had come to the goal."""
    rows = run.metrics
    is_there = (rows.split == "validation") & (rows.name == "loss") & (rows.value <= goal)
    soonest = rows[is_there].groupby("trial").seconds.min()
    return dict(zip(soonest.index.tolist(), soonest.tolist(), strict=True))


@dataclass(frozen=True)
class Outcome:
    """What a scheduler came to with the jobs of a bin."""

    at: Mapping[int, float]  # when the good ones were there
    simulated: Mapping[int, float]
    seconds: float  # of the whole search
    n_pieces: int  # how often a job was stopped within an epoch
    digests: Mapping[int, str]  # of the jobs' last states

    @property
    def mean(self) -> float:
        return _mean(self.at)

    @property
    def first(self) -> float:
        return min(self.at.values())


def search(
    client: Client, data: ShardedDataset, flow: Flow, jobs: Traces, goal: float
) -> tuple[dagsel.Run, Mapping[int, float]]:
    study = optuna.create_study(direction="minimize", sampler=hermes.InOrder())
    with tempfile.TemporaryDirectory() as folder:
        run = dagsel.optimize(
            study, workload(), data, space=hermes.space_of(jobs), flow=flow, metric="loss",
            client=client, replicas=N_WORKERS, run_dir=f"{folder}/run", progress=False,
        )  # fmt: skip
        return run, reached(run, goal)


def last_digests(run: dagsel.Run) -> dict[int, str]:
    """Return the checksum of each job's last state."""
    units = [unit for unit in run.record.units if unit.unit.kind == "train"]
    ordered = sorted(units, key=lambda unit: unit.unit.epoch)
    return {unit.unit.trial: unit.digest for unit in ordered}


def outcomes(
    client: Client, data: ShardedDataset, n_good: int, order: int, scale: Scale, n_epochs: int
) -> dict[str, Outcome]:
    """Let each scheduler train the jobs of a bin."""
    traces = hermes.load_falls("cnn", scale.network)
    jobs, goal = hermes.draw(traces, n_good, order), hermes.goal_of(traces)
    quanta = {"quantum_s": QUANTUM_S / scale.factor, "others_s": OTHERS_S / scale.factor}
    found = {}
    for policy, flow in hermes.flows(n_epochs, n_workers=N_WORKERS, **quanta).items():
        run, at = search(client, data, flow, jobs, goal_of())
        found[policy] = Outcome(
            at, hermes.simulated(flow, jobs, goal, N_WORKERS), run.record.seconds,
            sum(piece.unit.kind == "train" for piece in run.record.pieces), last_digests(run),
        )  # fmt: skip
        told = f"{len(at)} good ones after {found[policy].mean:.1f} s on average" if at else "none"
        print(f"{n_good} good, order {order}, {policy}: {told}, {run.record.seconds:.1f} s in all",
              file=sys.stderr, flush=True)  # fmt: skip
    return found


def are_alike(found: Mapping[str, Outcome]) -> bool:
    """Whether all schedulers have trained the same weights, and found the same good ones."""
    one, *rest = found.values()
    return all(o.digests == one.digests and o.at.keys() == one.at.keys() for o in rest)


def figure_5(folder: Path, images: mnist.Images, n_orders: int, n_epochs: int = 20) -> str:
    scale, rows, same = recorded_scale(), list[list[object]](), list[bool]()
    ratios = list[float]()
    with (
        tempfile.TemporaryDirectory() as place,
        mnist.cluster_of(N_WORKERS) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        sizes = {"n_shards": 1, "n_images": len(images[1]), "n_held_out": N_HELD_OUT}
        data = mnist.write(f"{place}/data", images, **sizes)
        for n_good in hermes.N_GOOD:
            for order in range(n_orders):
                found = outcomes(client, data, n_good, order, scale, n_epochs)
                same.append(are_alike(found))
                rows += rows_of(n_good, order, found)
                ours = found["Hermes"]
                others = [found[policy] for policy in hermes.OTHERS]
                ratios += [one.mean / ours.mean for one in others if one.at and ours.at]
    head = ["drawn good", "order", "scheduler", "good", "first (s)", "on average (s)",
            "over Hermes'", "simulated", "all jobs (s)", "stops"]  # fmt: skip
    mean = f"{np.mean(ratios):.2f}" if ratios else "none: no job came to the goal"
    return (
        "### Figure 5 on a real cluster: how much sooner the good ones are found\n\n"
        f"Speed-up on average, over FIFO, RR and SLAQ and both bins: **{mean}** (the paper's for "
        f"GoogleNet: {GOOGLENET.speed_up}). Hermes has a quantum of {QUANTUM_S / scale.factor:.2f} "
        f"s, that of the others {OTHERS_S / scale.factor:.2f} s, {scale.factor:.1f} times shorter "
        f"than the paper's. The goal is a held-out loss of {goal_of():.3f}. *Over Hermes'*: the "
        "average divided by that of Hermes; *simulated*: the same in the simulator, on the "
        "recorded losses and seconds and with switches that cost nothing; *stops*: how often a job "
        f"was stopped within an epoch.\n\n{pages.table(head, rows)}\n\n"
        f"Of {len(same)} bins {sum(same)} were trained to the same weights, bit for bit, by all "
        "four schedulers."
    )


def _mean(at: Mapping[int, float]) -> float:
    return float(np.mean([*at.values()]))


def rows_of(n_good: int, order: int, found: Mapping[str, Outcome]) -> list[list[object]]:
    rows = []
    ours = found["Hermes"]
    for policy, one in found.items():
        there = f"{_mean(one.simulated) / _mean(ours.simulated):.2f}" if one.simulated else ""
        times = ["", "", ""]
        if one.at:
            times = [f"{one.first:.2f}", f"{one.mean:.2f}", f"{one.mean / ours.mean:.2f}"]
        rest = [there, f"{one.seconds:.1f}", one.n_pieces]
        rows.append([n_good, order, policy, len(one.at), *times, *rest])
    return rows


def main() -> None:
    parser = pages.parser_of(__doc__ or "", NAMES)
    mnist.add_data(parser)
    parser.add_argument("--orders", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="3 of 20 epochs")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    images, n_epochs = mnist.images(args.data), 3 if args.quick else 20
    makers: dict[str, pages.Part] = {
        NAMES[0]: lambda folder: figure_5(folder, images, args.orders, n_epochs)
    }
    options = " --quick" * args.quick
    pages.write("hermes", makers, args.out, args.only, script="hermes_cluster", options=options)


# Workers of another folder have no modules of these names.
for name in (__name__, record.__name__):
    cloudpickle.register_pickle_by_value(sys.modules[name])

if __name__ == "__main__":
    main()
