"""The families of instances on which dispatch quality is measured (see the scheduling notes)."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np

RATES = (12.1, 5.6, 11.3, 18.7)  # TFLOP/s
MEAN, DEVIATION, LEAST, MOST = 5939.0, 5671.0, 360.0, 21000.0  # MFLOP


def trial_costs(draw, n_trials):
    """Log-normal costs with the stated mean and standard deviation, clipped; 1 is the mean."""
    variance = math.log1p((DEVIATION / MEAN) ** 2)
    draws = [
        draw.lognormvariate(math.log(MEAN) - variance / 2, variance**0.5) for _ in range(n_trials)
    ]
    return np.clip(draws, LEAST, MOST) / MEAN


def het(n_trials, n_workers, seed):
    """Costs of the trials and rates of the workers, both with mean 1."""
    draw = random.Random(seed)
    rates = np.array([draw.choice(RATES) for _ in range(n_workers)])
    return trial_costs(draw, n_trials), rates / np.mean(RATES)


def times_of(family, n_trials, n_workers, seed):
    """Unit times of the family, shape ``(n_trials, n_workers)``."""
    draw = random.Random(seed)
    match family:
        case "equal":
            return np.ones((n_trials, n_workers))
        case "het":
            costs, rates = het(n_trials, n_workers, seed)
            return costs[:, None] / rates[None, :]
        case "hetC":
            return np.repeat(trial_costs(draw, n_trials)[:, None], n_workers, axis=1)
        case "eq":
            costs = np.array([draw.uniform(0.95, 1.05) for _ in range(n_trials)])
            return np.repeat(costs[:, None], n_workers, axis=1)
    raise ValueError(family)


# Taillard 1993, Benchmarks for basic scheduling problems, section 5: time seed, machine seed and
# the optimum (proved since) of his ten open-shop instances of each size.
TAILLARD = {
    4: [
        (1166510396, 164000672, 193), (1624514147, 1076870026, 236), (1116611914, 1729673136, 271),
        (410579806, 1453014524, 250), (1036100146, 375655500, 295), (597897640, 322140729, 189),
        (1268670769, 556009645, 201), (307928077, 421384574, 217), (667545295, 485515899, 261),
        (35780816, 492238933, 217),
    ],
    5: [
        (527556884, 1343124817, 300), (1046824493, 1973406531, 262), (1165033492, 86711717, 323),
        (476292817, 24463110, 310), (1181363416, 606981348, 326), (897739730, 513119113, 312),
        (577107303, 2046387124, 303), (1714191910, 1928475945, 300), (1813128617, 2091141708, 353),
        (808919936, 183753764, 326),
    ],
    7: [
        (1840686215, 1827454623, 435), (1026771938, 1312166461, 443), (609471574, 670843185, 468),
        (1022295947, 398226875, 463), (1513073047, 1250759651, 416), (1612211197, 95606345, 451),
        (435024109, 1118234860, 422), (1760865440, 1099909092, 424), (122574075, 10979313, 458),
        (248031774, 1685251301, 398),
    ],
    10: [
        (1344106948, 1868311537, 637), (425990073, 1111853152, 588), (666128954, 1750328066, 598),
        (442723456, 1369177184, 577), (2033800800, 1344077538, 640), (964467313, 1735817385, 538),
        (1004528509, 967002400, 616), (1667495107, 818777384, 595), (1806968543, 1561913259, 595),
        (938376228, 344628625, 596),
    ],
}  # fmt: skip


class TaillardRandom:
    """His linear congruential generator (Bratley, Fox and Schrage 1983)."""

    def __init__(self, seed):
        self.seed = seed

    def integer(self, low, high):
        high_part, low_part = divmod(self.seed, 127773)
        self.seed = 16807 * low_part - 2836 * high_part
        if self.seed < 0:
            self.seed += 2**31 - 1
        return int(low + self.seed / (2**31 - 1) * (high - low + 1))


def taillard(size, index):
    """Times of an open-shop instance, shape ``(size, size)``, and its optimum."""
    time_seed, machine_seed, optimum = TAILLARD[size][index]
    draw = TaillardRandom(time_seed)
    durations = [[draw.integer(1, 99) for _ in range(size)] for _ in range(size)]
    draw = TaillardRandom(machine_seed)
    times = np.zeros((size, size))
    for job in range(size):
        machines = list(range(size))
        for k in range(size):
            other = draw.integer(k + 1, size) - 1
            machines[k], machines[other] = machines[other], machines[k]
        for k, machine in enumerate(machines):
            times[job, machine] = durations[job][k]
    return times, optimum


# An instance with the property of Cerebro's Figure 5, found by search: on three workers whole
# trials take 9, trials in their given order hop in 9 too, and the best order of hops takes 7.
FIGURE_5 = np.repeat(np.array([[2.0], [1.0], [2.0], [2.0]]), 3, axis=1)


def whole_trials(times):
    """Best makespan when each trial stays on one worker for all its shards (task parallelism)."""
    n_trials, n_workers = times.shape
    rows = times.sum(axis=1)
    return min(
        max(sum(rows[i] for i in range(n_trials) if at[i] == j) for j in range(n_workers))
        for at in itertools.product(range(n_workers), repeat=n_trials)
    )


def careless(times):
    """Makespan when a free worker takes the first idle trial, in the given order."""
    n_trials, n_workers = times.shape
    todo = [list(range(n_trials)) for _ in range(n_workers)]
    free, idle, running, now = set(range(n_workers)), set(range(n_trials)), [], 0.0
    while True:
        for worker in sorted(free):
            trial = next((i for i in todo[worker] if i in idle), None)
            if trial is not None:
                todo[worker].remove(trial)
                idle.discard(trial)
                free.discard(worker)
                running.append((now + times[trial, worker], trial, worker))
        if not running:
            return now
        now = min(running)[0]
        for entry in [entry for entry in running if entry[0] <= now]:
            running.remove(entry)
            idle.add(entry[1])
            free.add(entry[2])


UNIT_S = 60.0  # so long a unit of mean cost takes on a worker of speed 1


def dispatch(costs, speeds, n_shards, *, sigma=0.0, seed=0, holders=None, cluster=None, **config):
    """Run the dispatcher on a model cluster; one epoch, units of about a minute.

    Returns the outcome and the true unit times, shape ``(n_trials, n_shards)``, on a worker of
    speed 1. Where `holders` names each worker's shards, these stay where they are.
    """
    from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
    from dagsel.dispatch.units import Chain, Round
    from dagsel.simulation.virtual_cluster import VirtualCluster

    noise = np.exp(sigma * np.random.default_rng(seed).standard_normal((len(costs), n_shards)))
    work = (UNIT_S * np.asarray(costs)[:, None] * noise).tolist()
    names = [f"w{k}" for k in range(len(speeds))]
    pace = {name: 1.0 / speed for name, speed in zip(names, speeds, strict=True)}
    dispatcher = Dispatcher(DispatchConfig(n_shards, rebalance=holders is None, **config))
    model = VirtualCluster(
        dispatcher,
        lambda unit, worker, shard: work[unit.trial][shard] * pace[worker],
        **cluster or {},
    )
    shards = None if holders is None else dict(zip(names, holders, strict=True))
    model.add_workers(dict(zip(names, map(float, speeds), strict=True)), shards=shards)
    for trial, cost in enumerate(costs):
        dispatcher.times.add_trial(trial, cost=float(cost))
    chains = [Chain(trial, range(1, 2), n_shards, evaluate=False) for trial in range(len(costs))]
    model.add_round(Round(0, tuple(chains)))
    outcome = model.run()
    assert len(outcome.timeline) == len(costs) * n_shards, "the round did not end"
    return outcome, np.array(work)
