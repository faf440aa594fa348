"""In which pool workers are started: in the cheapest that has room."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from dagsel.planning.pools import Workers

_NUMBERS = re.compile(r"(-\d+)+$")


def pool_of(name: str, workers: Sequence[Workers]) -> str:
    """Return the pool of a worker, or of a job, of this name; the first one if no name says so.

    Examples
    --------
    >>> pools = [Workers("demand", "1.20 USD"), Workers("spot", "0.40 USD", spot=True)]
    >>> pool_of("spot-12", pools), pool_of("spot-12-0", pools), pool_of("7", pools)
    ('spot', 'spot', 'demand')
    """
    stem = _NUMBERS.sub("", name)
    return stem if stem in {pool.name for pool in workers} else workers[0].name


def share_out(
    workers: Sequence[Workers],
    n_nodes: int,
    *,
    there: Mapping[str, int],
    node_size: int = 1,
    short: Collection[str] = (),
) -> dict[str, int]:
    """Return how many nodes to start in which pool: in the cheapest that has room.

    Of equally cheap ones those that nobody takes back come first.

    Parameters
    ----------
    workers
        The pools.
    n_nodes
        Nodes to start, each of `node_size` workers.
    there
        Nodes that each pool has.
    short
        Pools that do not deliver at present: they are asked where no other has room.

    Examples
    --------
    >>> pools = [Workers("demand", "1.20 USD"), Workers("spot", "0.40 USD", spot=True, most=3)]
    >>> share_out(pools, 4, there={"spot": 1})
    {'spot': 2, 'demand': 2}
    """
    starts: dict[str, int] = {}
    for pool in sorted(workers, key=lambda p: (p.name in short, p.cost.per_hour, p.spot)):
        room = max(0, pool.nodes(node_size) - there.get(pool.name, 0))
        n = int(min(n_nodes - sum(starts.values()), room))
        if n:
            starts[pool.name] = n
    return starts
