"""What of a round is sent to Dask at once, and what waits until the trials have come nearer.

Dask's scheduler looks at every task of a graph before the first one runs, and the graph of a search
of a thousand epochs a trial has tens of thousands. The dispatcher knows all of a round from its
beginning. Of each chain Dask gets some epochs, and the next ones long before these are over. What
the workers can begin with is a graph of its own, before the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dagsel.dispatch.units import Chain

#: Tasks of a round that are sent at once, about.
_TASKS = 2_000
#: Epochs of a chain that are sent at once, at least and at most.
_LEAST, _MOST = 8, 64
#: So many tasks are one graph: Dask takes some 15 ms for them, and 2 ms for a graph of its own.
_FEW = 200


@dataclass(slots=True)
class _Rest:
    """What waits of a trial's chains."""

    chains: list[Chain]
    n_epochs: int  # that are sent at once
    at: int  # the epoch whose end lets the next ones go


@dataclass(slots=True)
class Slices:
    """Divides chains into what is sent now and what is sent later."""

    _rests: dict[int, _Rest] = field(default_factory=dict)  # by trial

    def first(self, chains: Iterable[Chain]) -> list[Chain]:
        """Return what is sent at once of a round's chains.

        Examples
        --------
        >>> slices = Slices()
        >>> [part.epochs for part in slices.first([Chain(0, range(1, 151), n_shards=2)])]
        [range(1, 65)]
        >>> [[part.epochs for part in slices.trained(0, epoch)] for epoch in (31, 32, 96)]
        [[], [range(65, 129)], [range(129, 151)]]
        """
        chains = list(chains)
        n_tasks = sum(map(_n_tasks, chains))
        n_epochs = min(_MOST, max(_LEAST, _TASKS // max(1, n_tasks)))
        return [part for chain in chains if (part := self._begin(chain, n_epochs)) is not None]

    def trained(self, trial: int, epoch: int) -> list[Chain]:
        """Return what is sent now that a trial trains an epoch: a part of its chain, or nothing."""
        rest = self._rests.get(trial)
        return [] if rest is None or epoch < rest.at else [self._next(trial, rest)]

    def forget(self, trial: int) -> None:
        """Send no more of a trial."""
        self._rests.pop(trial, None)

    def _begin(self, chain: Chain, n_epochs: int) -> Chain | None:
        rest = self._rests.get(chain.trial)
        if rest is not None:  # an earlier chain of it is not sent whole
            rest.chains.append(chain)
            return None
        if len(chain.epochs) <= n_epochs:
            return chain
        rest = self._rests[chain.trial] = _Rest([chain], n_epochs, 0)
        return self._next(chain.trial, rest)

    def _next(self, trial: int, rest: _Rest) -> Chain:
        chain = rest.chains.pop(0)
        sent = _part(chain, 0, rest.n_epochs)
        if len(chain.epochs) > rest.n_epochs:
            rest.chains.insert(0, _part(chain, rest.n_epochs, len(chain.epochs)))
        if not rest.chains:
            del self._rests[trial]
        rest.at = sent.epochs[-1] - rest.n_epochs // 2
        return sent


def begun_first(chains: Sequence[Chain], n_workers: int) -> list[Sequence[Chain]]:
    """Divide chains into those with which so many workers can begin, and the others.

    Few tasks stay together.

    Examples
    --------
    >>> chains = [Chain(trial, range(1, 6), n_shards=4) for trial in range(16)]
    >>> [len(part) for part in begun_first(chains, 2)], [len(p) for p in begun_first(chains[:4], 2)]
    ([2, 14], [4])
    """
    n_tasks = sum(_n_tasks(chain) * len(chain.epochs) for chain in chains)
    n_first = n_workers if n_tasks > _FEW else 0
    return [part for part in (chains[:n_first], chains[n_first:]) if part]


def _n_tasks(chain: Chain) -> int:
    """How many tasks an epoch of a chain is."""
    return chain.n_shards * (1 + chain.evaluate)


def _part(chain: Chain, start: int, stop: int) -> Chain:
    part = slice(start, stop)
    return replace(
        chain,
        epochs=chain.epochs[part],
        order=None if chain.order is None else chain.order[part],
        begun=chain.begun[part],
        values=chain.values[part],
    )
