"""Which worker should hold which shards: in proportion to speed, within memory, with few moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagsel.dispatch.events import Worker


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker can hold."""

    worker: Worker
    speed: float = 1.0  # relative to the others'
    max_shards: int | None = None  # in its memory; None: no limit
    held: frozenset[int] = frozenset()  # or loading
    refused: frozenset[int] = frozenset()  # could not load


def quotas(n_shards: int, hosts: Sequence[Capacity], *, replicas: int = 1) -> list[int]:
    """Return how many shards each worker should hold: proportional to its speed.

    There are ``min(replicas, workers)`` copies of each shard. If that leaves workers without a
    shard there are more copies, and if memory does not suffice there are fewer.
    """
    room = [
        n_shards if host.max_shards is None else max(0, min(n_shards, host.max_shards))
        for host in hosts
    ]
    total = sum(room)
    copies = min(total, max(n_shards * min(replicas, len(hosts)), len(hosts)))
    not_full = [k for k, limit in enumerate(room) if limit]
    while True:
        n_left = copies - total + sum(room[k] for k in not_full)
        speed = sum(hosts[k].speed for k in not_full)
        share = {k: n_left * hosts[k].speed / speed for k in not_full}
        within = [k for k in not_full if share[k] < room[k]]
        if within == not_full:
            break
        not_full = within
    counts = [int(share.get(k, limit)) for k, limit in enumerate(room)]
    # Rounding up by the largest remainder makes slow workers late: 2 shards for a share of 1.6 are
    # 25% more, 7 for 6.5 only 8%. Rounding up where it ends soonest shortens rounds by 1 to 3%.
    by_end = sorted(not_full, key=lambda k: ((counts[k] + 1) / hosts[k].speed, k))
    for k in by_end[: copies - sum(counts)]:
        counts[k] += 1
    return counts


def place(
    n_shards: int, hosts: Sequence[Capacity], *, replicas: int = 1
) -> dict[Worker, frozenset[int]]:
    """Place shards on workers: as many on each as `quotas` says.

    A worker keeps what it holds as far as possible: with one copy of each shard no placement of
    these quotas moves fewer. A shard for which memory, or refusals, leave no place is in no
    worker's set.

    Examples
    --------
    >>> placed = place(8, [Capacity("a", speed=3.0), Capacity("b", speed=1.0)])
    >>> sorted(len(shards) for shards in placed.values())
    [2, 6]
    >>> place(2, [Capacity("a", held=frozenset({0, 1})), Capacity("b")])["b"]
    frozenset({1})
    """
    if not hosts:
        return {}
    left = quotas(n_shards, hosts, replicas=replicas)
    least, n_extra = divmod(sum(left), n_shards)
    chosen: list[set[int]] = [set() for _ in hosts]
    copies = [0] * n_shards
    _keep(hosts, left, chosen, copies, least, limit=sum(left))
    n_extra -= _keep(hosts, left, chosen, copies, least + 1, limit=n_extra)
    # Each shard gets its first copy before any gets its last.
    for level in range(1, least + 1):
        for shard in range(n_shards):
            if copies[shard] < level and _add(shard, hosts, left, chosen):
                copies[shard] += 1
    for shard in range(n_shards):
        if least and not copies[shard]:
            _add_beyond_quota(shard, hosts, chosen)
    for shard in sorted(range(n_shards), key=copies.__getitem__):
        if n_extra > 0 and copies[shard] <= least and _add(shard, hosts, left, chosen):
            n_extra -= 1
    return {host.worker: frozenset(shards) for host, shards in zip(hosts, chosen, strict=True)}


def _keep(
    hosts: Sequence[Capacity],
    left: list[int],
    chosen: list[set[int]],
    copies: list[int],
    most: int,
    *,
    limit: int,
) -> int:
    """Keep what is held, shards with few holders first, up to the quotas and `most` copies.

    Return how many were kept, at most `limit`.
    """
    holders = [sum(shard in host.held for host in hosts) for shard in range(len(copies))]
    kept = 0
    held = [(holders[s], s, at) for at, host in enumerate(hosts) for s in host.held - host.refused]
    for _, shard, k in sorted(held):
        if kept < limit and left[k] and copies[shard] < most and shard not in chosen[k]:
            chosen[k].add(shard)
            copies[shard] += 1
            left[k] -= 1
            kept += 1
    return kept


def _add(shard: int, hosts: Sequence[Capacity], left: list[int], chosen: list[set[int]]) -> bool:
    """Add the shard to the worker with the most room, or make room by moving another shard."""

    def may_hold(k: int, s: int) -> bool:
        return s not in chosen[k] and s not in hosts[k].refused

    with_room = sorted(
        (k for k in range(len(hosts)) if left[k]), key=left.__getitem__, reverse=True
    )
    for k in with_room:
        if may_hold(k, shard):
            chosen[k].add(shard)
            left[k] -= 1
            return True
    for k in with_room:
        for other in range(len(hosts)):
            if left[other] == 0 and may_hold(other, shard):
                for moved in sorted(chosen[other] - hosts[other].held) + sorted(chosen[other]):
                    if may_hold(k, moved):
                        chosen[other].symmetric_difference_update({shard, moved})
                        chosen[k].add(moved)
                        left[k] -= 1
                        return True
    return False


def _add_beyond_quota(shard: int, hosts: Sequence[Capacity], chosen: list[set[int]]) -> None:
    """Add a shard that refusals leave without a copy to a worker that has memory for one more."""
    able = [
        (len(chosen[k]) / host.speed, k)
        for k, host in enumerate(hosts)
        if shard not in host.refused
        and (host.max_shards is None or len(chosen[k]) < host.max_shards)
    ]
    if able:
        chosen[min(able)[1]].add(shard)
