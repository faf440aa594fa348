"""MARBLE's job sets (Han et al., CCGRID 2020, Tables II to IV), and who runs them in the simulator.

What the paper states comes first; what is assumed is in `Assumed`, and docs/measured/papers says
why. The page is written by ``marble.py`` beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import optuna

from dagsel.flow import Flow
from dagsel.flows import JobQueue, Marble
from dagsel.flows.baselines import LSF, MarginalGain, Optimus
from dagsel.flows.baselines.optimus import over_nodes
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, simulate

Job = Mapping[str, Any]

# ---- stated in the paper

N_GPUS = 6
N_WORKER_NODES = 8
BEST = {"ResNet-50": 3, "Inception-v3": 4, "ResNet-101": 3, "VGG-16": 5}
MOST_ALPHA = 0.0291
R50, INCEPTION, R101, VGG = BEST
#: Tables II, III and IV.
SETS: dict[int, tuple[tuple[str, int], ...]] = {
    1: ((R50, 800), (R50, 3600), (INCEPTION, 1400)),
    2: ((INCEPTION, 2400), (R50, 600), (R101, 1000)),
    3: ((R50, 900), (INCEPTION, 2000), (VGG, 800)),
    4: ((R50, 9000), (INCEPTION, 1200), (INCEPTION, 4200), (R50, 6000), (R101, 2000)),
    5: ((INCEPTION, 4800), (INCEPTION, 9000), (VGG, 9600), (R50, 3000), (INCEPTION, 3000)),
    6: ((R50, 8400), (VGG, 4800), (INCEPTION, 9300), (R50, 2000), (R101, 3000)),
    7: ((R101, 39936), (INCEPTION, 39936), (INCEPTION, 39936), (VGG, 39936)),
    8: ((INCEPTION, 39936), (R50, 39936), (VGG, 39936), (R50, 39936)),
    9: ((INCEPTION, 39936), (R50, 39936), (R50, 39936), (R101, 39936)),
}
LSF_S = {1: 958.0, 2: 940.0, 3: 707.0}
MARBLE_S = {1: 496.0, 2: 608.0, 3: 501.0}
#: How much less time than with LSF, in percent; how much more of the GPUs is used.
SAVED = {1: 48.3, 2: 35.3, 3: 29.1, 4: 21.1, 5: 30.5, 6: 30.5}
USED_MORE = {1: 86, 2: 51, 3: 37}
BAR = 0.10


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the paper does not state; docs/measured/papers/marble.md gives the reasons.

    Parameters
    ----------
    ratio
        Time of a step of Inception-v3 on six GPUs, as a multiple of that of ResNet-50.
    alpha
        α of all networks but VGG-16, as a share of the most that the paper has seen.
    vgg_loss
        By how much the efficiency of VGG-16 falls with each GPU up to the fifth.
    loss
        The same for the others, as a share of that of the curve whose top is at the best number.
    switch_s
        Seconds to suspend and resume a job.
    nodes
        How many times as fast as one node the eight worker nodes are.
    """

    ratio: float = 1.48
    alpha: float = 0.5
    vgg_loss: float = 0.08
    loss: float = 1.0
    switch_s: float = 66.0
    nodes: float = float(N_WORKER_NODES)

    def scaling(self) -> dict[str, Scaling]:
        """Return λ of each network over the GPUs of a node."""
        curves = {}
        for network, best in BEST.items():
            is_vgg = network == VGG
            loss = self.vgg_loss if is_vgg else self.loss / (2 * best - 1)
            curves[network] = curve(best, loss, MOST_ALPHA * (1.0 if is_vgg else self.alpha))
        return curves

    def step_s(self) -> dict[str, float]:
        """Solve the time of a step on six GPUs from LSF's seconds."""
        rows = [steps_of(number) for number in LSF_S]
        rows.append({INCEPTION: 1.0, R50: -self.ratio})
        left = np.array([[row.get(network, 0.0) for network in BEST] for row in rows])
        # The last bits differ from one kind of processor to another, and with them the order of
        # jobs that end at one moment on paper.
        found = np.linalg.solve(left, [*LSF_S.values(), 0.0]).round(12)
        return dict(zip(BEST, found.tolist(), strict=True))


def curve(best: int, loss: float, alpha: float) -> Scaling:
    """Return a λ with its top at `best`, whose time there is less by `alpha` than on six GPUs."""
    speeds = {n: n * (1 - loss * (n - 1)) for n in range(1, best + 1)}
    top, last = speeds[best], (1 - alpha) * speeds[best]
    for n in range(best + 1, N_GPUS + 1):
        speeds[n] = top + (last - top) * (n - best) / (N_GPUS - best)
    return Scaling(speeds)


def steps_of(number: int) -> dict[str, float]:
    """Return the steps of a set by network."""
    total: dict[str, float] = {}
    for network, steps in SETS[number]:
        total[network] = total.get(network, 0.0) + steps
    return total


def chunk(steps: int) -> int:
    """Return how many steps the simulator takes for an epoch: a divisor of a job's."""
    return 1024 if steps == 39936 else 100


def jobs_of(
    number: int, assumed: Assumed, *, faster: float = 1.0, n_epochs: int | None = None
) -> list[Job]:
    """Return the jobs of a set; an epoch's seconds are those on one GPU (of each node).

    With `n_epochs` each job is cut into so many, whatever its steps.
    """
    scaling = assumed.scaling()
    one_s = {net: s * scaling[net].speedup(N_GPUS) for net, s in assumed.step_s().items()}
    nodes = assumed.nodes if number > 3 else 1.0
    return [
        {
            "architecture": network,
            "epochs": n,
            "epoch_s": steps / n * one_s[network] / nodes / faster,
        }
        for network, steps in SETS[number]
        for n in [n_epochs or steps // chunk(steps)]
    ]


def play(
    jobs: Sequence[Job],
    flow: Flow,
    scaling: Mapping[str, Scaling],
    switch_s: float,
    n_workers: int = N_GPUS,
) -> SimulatedRun:
    """Run a queue in the simulator."""
    return simulate(
        flow,
        PowerLaw(
            epoch_s=lambda config: float(config["epoch_s"]),
            scaling=lambda config: scaling[config["architecture"]],
            n_batches=100_000_000,  # so short that a job stops at once
        ),
        SimulatedCluster(n_workers, n_shards=1, switch_s=switch_s),
        space=lambda trial: choose(trial, jobs),
    )


def choose(trial: optuna.Trial, jobs: Sequence[Job]) -> dict[str, Any]:
    """Draw the next job."""
    return dict(jobs[trial.suggest_int("job", 0, len(jobs) - 1)])


# ---- the schedulers


@cache
def lsf(number: int, assumed: Assumed) -> SimulatedRun:
    """Run a set under LSF."""
    jobs = jobs_of(number, assumed)
    return play(jobs, LSF(JobQueue()), assumed.scaling(), assumed.switch_s)


@cache
def marble(number: int, assumed: Assumed, cost_s: float | None = 0.0) -> SimulatedRun:
    """Run a set under MARBLE; with `cost_s` None only promotions that pay are made."""
    scaling = assumed.scaling()
    flow = Marble(JobQueue(), scaling, switch_s=cost_s)
    return play(jobs_of(number, assumed), flow, scaling, assumed.switch_s)


@cache
def gains(number: int, assumed: Assumed, interval_s: float = 600.0) -> SimulatedRun:
    """Run a set under the rule of Optimus on single GPUs."""
    scaling = assumed.scaling()
    flow = MarginalGain(JobQueue(), scaling, interval_s=interval_s)
    return play(jobs_of(number, assumed), flow, scaling, assumed.switch_s)


@cache
def optimus(
    number: int, assumed: Assumed, *, traffic: float = 0.0, has_own_nodes: bool = True
) -> SimulatedRun:
    """Run a set under Optimus, on nine nodes of six GPUs."""
    n_nodes, step_s = N_WORKER_NODES + 1, assumed.step_s()
    speeds = over_nodes(n_nodes, traffic=traffic)
    if not has_own_nodes:  # a parameter server runs beside a worker
        speeds = Scaling({n_nodes: float(n_nodes)})
    scaling = dict.fromkeys(BEST, speeds)
    jobs: list[Job] = [
        {
            "architecture": network,
            "epochs": steps // chunk(steps),
            "epoch_s": chunk(steps) * step_s[network] * N_WORKER_NODES / assumed.nodes,
        }
        for network, steps in SETS[number]
    ]
    kind = Optimus if has_own_nodes else MarginalGain
    return play(jobs, kind(JobQueue(), scaling), scaling, assumed.switch_s, n_nodes)


# ---- what becomes of it


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time in which a job has a number of GPUs."""

    job: int
    begin_s: float
    end_s: float
    gang: int


def stretches(run: SimulatedRun) -> list[Stretch]:
    """Read off a run's journal which job had how many GPUs when."""
    found: list[Stretch] = []
    open_: dict[int, tuple[float, int]] = {}
    for entry in run.journal:
        for decision in entry["decisions"] if entry["is"] == "turn" else ():
            if decision["is"] not in ("Train", "Stop"):
                continue
            job, now_s = decision["trial"], entry["seconds"]
            if job in open_:
                begin_s, gang = open_.pop(job)
                found.append(Stretch(job, begin_s, now_s, gang))
            if decision["is"] == "Train":
                open_[job] = now_s, decision["gang"]
    return [stretch for stretch in found if stretch.end_s > stretch.begin_s]


def n_switches(run: SimulatedRun) -> int:
    """Return how often a job was suspended and resumed with another number of GPUs."""
    parts = stretches(run)
    return len(parts) - len({part.job for part in parts})


def saved(ours_s: float, than_s: float) -> float:
    """Return how much less a time is, in percent."""
    return 100 * (1 - ours_s / than_s)


def is_within(ours: float, paper: float) -> bool:
    """Return whether a number keeps to the bar."""
    return abs(ours / paper - 1) <= BAR


def is_told(run: SimulatedRun, number: int) -> bool:
    """Return whether one of sets 1 to 3 takes the course that the paper tells, whenever."""
    parts = sorted(stretches(run), key=lambda part: part.begin_s)
    gangs = {job: [part.gang for part in parts if part.job == job] for job in range(3)}
    if number == 1:  # VII-D1: somebody is suspended
        return n_switches(run) > 0
    if number == 2:  # VII-B1
        return gangs == {0: [4], 1: [2], 2: [2, 3]}
    return gangs[0] == [3] and gangs[1] == [3, 4] and gangs[2][0] == 2  # V-C and Figure 5


def grid(switch_s: float = 66.0) -> list[Assumed]:
    """Return the inputs of the second step."""
    return [
        Assumed(ratio=ratio / 10, alpha=alpha, loss=loss, switch_s=switch_s)
        for ratio in range(12, 21)
        for alpha in (0.0, 0.5, 1.0)
        for loss in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]


def agreeing(switch_s: float) -> dict[Assumed, dict[int, SimulatedRun]]:
    """Return the inputs of the grid under which sets 1 to 3 go as told, with MARBLE's runs."""
    found = {}
    for assumed in grid(switch_s):
        runs: dict[int, SimulatedRun] = {}
        for number in (2, 1, 3):  # the one that fails most often first
            runs[number] = marble(number, assumed)
            if not is_told(runs[number], number):
                break
        else:
            found[assumed] = runs
    return found
