"""Which workers to release: those whose loss costs least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Releasable:
    """A worker that may be released."""

    worker: str
    running: bool = False
    shards: frozenset[int] = frozenset()
    node: str | None = None  # workers of one go together; None: on its own
    price: float = 0.0  # of an hour of it


def choose(workers: Sequence[Releasable], n: int) -> tuple[str, ...]:
    """Choose at most n workers to release, the cheapest first.

    Nodes go one after the other: first those with the fewest running units, of these the ones with
    the fewest shards that no other node holds, then the dearest, then the ones with the fewest
    shards. Shards are counted anew after each node, so two workers that share a shard are not both
    free of cost. A node with more workers than are left of n stays.

    Examples
    --------
    >>> busy = Releasable("a", running=True, shards=frozenset({0}))
    >>> sole = Releasable("b", shards=frozenset({1, 2}))
    >>> spare = Releasable("c", shards=frozenset({0, 2}))
    >>> choose([busy, sole, spare], 2)
    ('c', 'b')
    """
    nodes: dict[str, list[Releasable]] = {}
    for worker in workers:
        nodes.setdefault(worker.node or worker.worker, []).append(worker)
    holders = Counter(shard for worker in workers for shard in worker.shards)

    def loss(name: str) -> tuple[int, int, float, int, str]:
        held = Counter(shard for worker in nodes[name] for shard in worker.shards)
        n_sole = sum(holders[shard] == times for shard, times in held.items())
        n_running = sum(worker.running for worker in nodes[name])
        price = sum(worker.price for worker in nodes[name])
        return n_running, n_sole, -price, sum(held.values()), name

    chosen: list[str] = []
    while fitting := [name for name in nodes if len(nodes[name]) <= n - len(chosen)]:
        for worker in nodes.pop(min(fitting, key=loss)):
            chosen.append(worker.worker)
            holders.subtract(worker.shards)
    return tuple(chosen)
