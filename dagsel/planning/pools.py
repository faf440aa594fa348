"""Pools: workers of one cluster that differ in their price, such as on-demand and spot machines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagsel.checks import flag, short_traceback, shown, whole
from dagsel.errors import SearchError
from dagsel.planning.prices import Price, read_price

# A number at the end would be read as that of a worker.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(-[A-Za-z][A-Za-z0-9_]*)*")


@dataclass(frozen=True, slots=True)
class Workers:
    """A pool of workers of a cluster: what one costs, and how it is started.

    Parameters
    ----------
    name
        Names of its workers begin with it: ``"spot"`` has ``spot-0``, ``spot-1`` and so on.
    price
        What an hour of a worker costs, such as ``"1.20 USD"``.
    spot
        Whether the provider may take its workers back.
    most
        Workers that it may have at a time; None for no limit.
    options
        Replace options of the cluster's own workers (``cluster.new_spec["options"]``), such as
        ``{"queue": "preemptible"}`` of a `SLURMCluster`, ``{"spot": True}`` of an `EC2Cluster`.

    Raises
    ------
    SearchError
        If a value cannot be used.

    Examples
    --------
    >>> Workers("spot", "0.40 USD", spot=True, most=8).cost
    Price(per_hour=0.4, currency='USD')
    >>> Workers("spot", 0.4)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: price of the workers 'spot'=0.4 has no currency: write "0.4 USD"
    """

    name: str
    price: str
    spot: bool = False
    most: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @short_traceback
    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SearchError(
                "the name of workers must be of letters, digits, '_' and '-', with a letter at the "
                f"beginning and after each '-', got {shown(name)}"
            )
        if read_price(self.price, name=f"price of the workers {self.name!r}") is None:
            raise SearchError(f'the workers {self.name!r} have no price: write price="1.20 USD"')
        flag("spot", self.spot)
        if self.most is not None:
            whole(f"most of the workers {self.name!r}", self.most)
        options: Any = self.options
        if not isinstance(options, Mapping):
            raise SearchError(
                f"options of the workers {self.name!r} must be a dict, got {shown(options)}"
            )

    @property
    def cost(self) -> Price:
        """The price as a number."""
        price = read_price(self.price)
        assert price is not None
        return price

    def nodes(self, node_size: int) -> float:
        """Return how many nodes this pool may have; infinity for no limit.

        Parameters
        ----------
        node_size
            Workers of a node.

        Examples
        --------
        >>> Workers("spot", "0.40 USD", most=8).nodes(4)
        2
        """
        return math.inf if self.most is None else self.most // node_size


@short_traceback
def check_workers(workers: Any) -> tuple[Workers, ...]:
    """Return the pools of a cluster.

    Raises
    ------
    SearchError
        If they are none, two have one name, or their prices are in different currencies.
    """
    if isinstance(workers, Workers):
        raise SearchError(f"workers must be a list of pools; write workers=[{workers!r}]")
    found = tuple(workers) if isinstance(workers, Iterable) else ()
    if not found or not all(isinstance(pool, Workers) for pool in found):
        raise SearchError(
            f"workers must be a list of pools, got {shown(workers)}; write "
            'workers=[dagsel.Workers("spot", price="0.40 USD", spot=True)]'
        )
    names = [pool.name for pool in found]
    for name in names:
        if names.count(name) > 1:
            raise SearchError(
                f"{names.count(name)} pools of workers are called {name!r}; give each a name of "
                "its own"
            )
    first = found[0]
    for pool in found:
        if pool.cost.currency != first.cost.currency:
            raise SearchError(
                f"the workers {first.name!r} cost {first.cost} and the workers {pool.name!r} "
                f"{pool.cost}: give all prices in one currency"
            )
    return found


def dearest(workers: Sequence[Workers]) -> Price:
    """Return the highest price of a pool."""
    return max((pool.cost for pool in workers), key=lambda price: price.per_hour)


def most_of(workers: Sequence[Workers]) -> int | None:
    """Return the workers that all pools may have together; None for no limit."""
    most = [pool.most for pool in workers]
    return None if None in most else sum(n for n in most if n is not None)


def check_room(workers: Sequence[Workers], n_workers: int) -> None:
    """Raise a `SearchError` if pools may not have so many workers."""
    most = most_of(workers)
    if most is not None and most < n_workers:
        each = ", ".join(f"{pool.name} {pool.most}" for pool in workers)
        raise SearchError(
            f"the pools may have {most} workers ({each}), and {n_workers} are to be there: raise "
            "most"
        )
