"""Gangs in one process: each rank in a thread of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from dagsel.workloads.gang.gang import Gang, join_gang, lead_gang

_T = TypeVar("_T")
_numbers = itertools.count()


def in_gang(
    size: int, body: Callable[[Gang], _T], *, timeout_s: float = 30.0, name: str | None = None
) -> list[_T]:
    """Call a function on each rank of a new gang and give what each has returned, rank 0 first.

    If a rank has raised, rank 0's error is raised, or else the first one. Ranks in one process
    share its random streams, so that what draws from them is not reproducible.

    Parameters
    ----------
    size
        How many ranks.
    body
        Called with each rank's `Gang`.
    timeout_s
        How long a rank waits for the others.
    name
        The gang's; one that no other has if left out.

    Examples
    --------
    >>> in_gang(3, lambda gang: (gang.rank, gang.agree(gang.rank == 0)))
    [(0, True), (1, True), (2, True)]
    """
    port: Future[int] = Future()
    called = name or f"thread gang {next(_numbers)}"
    options: dict[str, Any] = {"size": size, "name": called, "timeout_s": timeout_s}

    def rank(number: int) -> _T:
        if number == 0:
            with lead_gang("127.0.0.1", gather=port.set_result, **options) as gang:
                return body(gang)
        with join_gang("127.0.0.1", port.result(), rank=number, **options) as gang:
            return body(gang)

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(rank, number) for number in range(size)]
        wait(ranks)
    return [rank.result() for rank in ranks]
