"""Laws of the workers that a gang trains on: soonest, those of last time, and few nodes."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.gangs import choose
from dagsel.dispatch.workers import KnownWorker

BUSY = settings(deadline=None, max_examples=200)
N_SHARDS = 2
#: Node, process, shards and the time at which it is free.
About: TypeAlias = tuple[str, str, int, int]


def workers(*, processes: str) -> st.SearchStrategy[list[About]]:
    about = st.tuples(
        st.sampled_from("xyz"),
        st.sampled_from(["", *processes]),
        st.sampled_from([0b00, 0b01, 0b10, 0b11, 0b11, 0b11]),
        st.sampled_from([0, 0, 0, 1, 2]),
    )
    return st.lists(about, max_size=8)


def hosts_of(drawn: list[About]) -> tuple[list[KnownWorker], dict[str, float]]:
    hosts = [
        KnownWorker(f"w{i}", None, held=held, node=node, process=process)
        for i, (node, process, held, _) in enumerate(drawn)
    ]
    return hosts, {f"w{i}": float(at) for i, (*_, at) in enumerate(drawn)}


names = st.sampled_from([f"w{i}" for i in range(7)])


@BUSY
@given(
    workers(processes="pq"),
    st.integers(1, 2**N_SHARDS - 1),
    st.integers(1, 4),
    st.integers(0, 3),
    st.none() | names,
    st.sets(names, max_size=3),
)
def test_a_gang_starts_as_soon_as_enough_processes_with_a_shard_are_free(
    drawn: list[About], need: int, size: int, now_s: int, home: str | None, last: set[str]
):
    hosts, free_at = hosts_of(drawn)
    starts = []
    for shard in range(N_SHARDS):
        soonest: dict[str, float] = {}
        for host in hosts:
            if need >> shard & 1 and host.holds(shard):
                process, at = host.process or host.worker, max(now_s, free_at[host.worker])
                soonest[process] = min(at, soonest.get(process, at))
        starts += sorted(soonest.values())[size - 1 : size]
    choice = choose(need, size, hosts, free_at, now_s, home=home, last=last)
    if not starts:
        assert choice is None
        return
    assert choice is not None
    assert choice.start_s == min(starts)
    chosen = [host for host in hosts if host.worker in choice.workers]
    assert len(chosen) == len(choice.workers) == size
    assert len({host.process or host.worker for host in chosen}) == size
    assert all(host.holds(choice.shard) and need >> choice.shard & 1 for host in chosen)
    assert all(free_at[host.worker] <= choice.start_s for host in chosen)
    of_process = {host.worker: host.process or host.worker for host in chosen}
    assert list(choice.workers) == sorted(choice.workers, key=lambda w: (of_process[w], w))


@BUSY
@given(
    workers(processes=""),
    st.integers(1, 2**N_SHARDS - 1),
    st.integers(1, 5),
    st.tuples(st.none() | names, st.just(set()))
    | st.tuples(st.none() | names, st.sets(names, max_size=4)),
)
def test_a_gang_has_few_new_workers_or_if_all_are_new_few_nodes(
    drawn: list[About], need: int, size: int, before: tuple[str | None, set[str]]
):
    home, last = before
    hosts, free_at = hosts_of(drawn)
    choice = choose(need, size, hosts, free_at, 0.0, home=home, last=last)
    if choice is None:
        return
    fewest_new, fewest_nodes, smallest = size, size, len(hosts)
    for shard in range(N_SHARDS):
        there = [h for h in hosts if h.holds(shard) and free_at[h.worker] <= choice.start_s]
        if need >> shard & 1 and len(there) >= size:
            leads = [host for host in there if host.worker == home]
            kept = [host for host in there if host.worker in last and host not in leads]
            is_new = [host for host in leads if host.worker not in last]
            n_new = len(is_new) + max(0, size - len(leads) - len(kept))
            fewest_new = min(fewest_new, n_new)
            nodes = Counter(host.node for host in there)
            first = [nodes.pop(host.node) for host in leads]  # whoever has the state leads
            on_node = [*first, *sorted(nodes.values(), reverse=True)]
            n_nodes = next(n for n in range(1, 4) if sum(on_node[:n]) >= size)
            fewest_nodes = min(fewest_nodes, n_nodes)
            if shard == choice.shard:
                smallest = min((n for n in on_node if n >= size), default=0)
                of_choice, has_home = Counter(host.node for host in there), bool(leads)
    assert sum(worker not in last for worker in choice.workers) == fewest_new
    if not last:
        chosen = {host.node for host in hosts if host.worker in choice.workers}
        assert len(chosen) == fewest_nodes
        if len(chosen) == 1 and not has_home:
            assert of_choice[chosen.pop()] == smallest
