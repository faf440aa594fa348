"""Workers that come and go together, as those of a batch system's job: a node."""

from __future__ import annotations


def nodes_for(n_workers: int, node_size: int) -> int:
    """Return the workers of as many whole nodes as these need.

    Examples
    --------
    >>> nodes_for(9, 4), nodes_for(8, 4), nodes_for(0, 4)
    (12, 8, 0)
    """
    return -(-n_workers // node_size) * node_size


def nodes_within(n_workers: int, node_size: int) -> int:
    """Return the workers of as many whole nodes as these make; all of them if they make none.

    Examples
    --------
    >>> nodes_within(9, 4), nodes_within(3, 4)
    (8, 3)
    """
    return n_workers // node_size * node_size or n_workers
