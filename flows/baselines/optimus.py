"""Optimus: nodes become workers or parameter servers of the job that gains most by them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dagsel.checks import number, whole
from dagsel.flows.baselines.marginal_gain import MarginalGain
from dagsel.planning.scaling import Scaling


def over_nodes(n_nodes: int, *, traffic: float = 0.0) -> Scaling:
    """Return the speed of a job by its number of nodes, as workers and parameter servers.

    A job begins with one worker and one server, and each further node becomes what makes the job
    faster: see `split`. The speed is that of one worker which waits for no server. λ(1) is 1, as
    it is for any `Scaling`; Optimus gives no job a single node where there are two.

    Parameters
    ----------
    n_nodes
        The most nodes that a job may have.
    traffic
        Time that a worker waits for the server in a step, as a share of the step, if each server
        has one worker. With 0 the network is no bottleneck.

    Examples
    --------
    >>> over_nodes(5).speedups
    {1: 1.0, 2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0}
    >>> {n: round(speed, 2) for n, speed in over_nodes(4, traffic=0.5).speedups.items()}
    {1: 1.0, 2: 0.67, 3: 1.0, 4: 1.33}
    """
    whole("n_nodes", n_nodes)
    splits = [split(n, traffic=traffic) for n in range(2, n_nodes + 1)]
    return Scaling({n: _speed(*nodes, traffic) for n, nodes in enumerate(splits, 2)})


def split(n_nodes: int, *, traffic: float = 0.0) -> tuple[int, int]:
    """Return how many of a job's nodes are workers, and how many parameter servers.

    Of equal gains a worker is chosen.

    Examples
    --------
    >>> split(9), split(9, traffic=0.5)
    ((8, 1), (5, 4))
    """
    whole("n_nodes", n_nodes, least=2)
    number("traffic", traffic, "0 or more", lambda share: 0 <= share < math.inf)
    workers, servers = 1, 1
    for _ in range(n_nodes - 2):
        if _speed(workers + 1, servers, traffic) >= _speed(workers, servers + 1, traffic):
            workers += 1
        else:
            servers += 1
    return workers, servers


def _speed(workers: int, servers: int, traffic: float) -> float:
    return workers / (1 + traffic * workers / servers)


@dataclass
class Optimus(MarginalGain):
    """Give nodes, at fixed intervals, to the jobs whose time they shorten most.

    A worker of the cluster is a node here. Each job begins with two nodes, a worker and a parameter
    server. Each further node goes to the job that gains most by it, as a worker or as a server. All
    GPUs of a node belong to one job. What a job has left is known from its own epochs; Optimus
    predicts it from the job's progress.

    dagsel has no parameter servers. This is a partner for the simulator, where `over_nodes` is the
    speed of a job on its nodes. On a real cluster all workers of a gang train, and `MarginalGain`
    is the rule to use.

    Peng et al., Optimus: An Efficient Dynamic Resource Scheduler for Deep Learning Clusters,
    EuroSys 2018, as MARBLE's paper describes it (Han et al., CCGRID 2020, Sections III and VII-C):
    it adjusts the numbers of workers and parameter servers, in slots of ten minutes.

    Parameters
    ----------
    flow, scaling, by
        The search inside, the speed on nodes by architecture (`over_nodes`), and the architecture's
        key; see `Marble`.
    interval_s
        Seconds from one division to the next; the paper's is ten minutes.

    Raises
    ------
    SearchError
        If the search, the speeds or `interval_s` are wrong; or, when a trial is drawn, if its
        configuration names no architecture or one without a speed.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context
    >>> from dagsel.flows import RandomSearch
    >>> search = RandomSearch(max_epochs=5, n_trials=2)
    >>> flow = Optimus(search, {"resnet": over_nodes(9)})
    >>> flow.start(Context(n_workers=9))
    [Ask(n=2, sampling='random'), Wake(seconds=600.0)]
    >>> flow.handle(Asked((0, 1), configs=2 * ({"architecture": "resnet"},)))
    [Train(trial=0, epochs=5, gang=5), Train(trial=1, epochs=5, gang=4)]
    """

    first: ClassVar[int] = 2
