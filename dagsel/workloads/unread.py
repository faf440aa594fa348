"""Parameters of a space that make no difference, as nothing of the workload reads them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dagsel.flow import Goal
from dagsel.workloads.base import Config, Workload, checks

if TYPE_CHECKING:
    from dagsel.storage.datasets.manifest import Manifest

logger = logging.getLogger("dagsel")

#: A model may read a parameter for some configurations alone: so many are looked at.
N_LOOKED_AT = 10
_NOWHERE = "read it in a function of the workload, or leave it out of the space"
_LENGTH = "leave it out of the space: the flow decides how long a trial trains, up to max_epochs"
#: Parameters that nobody reads for some configurations alone, and what to write.
_INSTEAD = {
    "batch_size": "give the workload batch_size=lambda config: config['batch_size']",
    **dict.fromkeys(("epochs", "n_epochs", "num_epochs", "max_epochs"), _LENGTH),
}


@runtime_checkable
class KnowsUnread(Protocol):
    """A workload that knows which parameters it does not read.

    Examples
    --------
    >>> class Fixed:
    ...     def unread(self, config):
    ...         return frozenset(config) - {"lr"}
    >>> isinstance(Fixed(), KnowsUnread)
    True
    """

    def unread(self, config: Config) -> frozenset[str]:
        """Return the parameters that training with this configuration does not read.

        Those of which it is not known, as they may be read while a trial trains, are not in.

        Parameters
        ----------
        config
            The configuration.
        """
        ...


class _Watched(dict[str, Any]):
    """A configuration that remembers what was read of it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.unread = set(config)

    def __getitem__(self, key: str) -> Any:
        self.unread.discard(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.unread.discard(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.unread.discard(str(key))
        return super().__contains__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self.unread.discard(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:  # also for **config and dict(config)
        self.unread.clear()
        return super().__iter__()

    def keys(self) -> Any:
        self.unread.clear()
        return super().keys()

    def values(self) -> Any:
        self.unread.clear()
        return super().values()

    def items(self) -> Any:
        self.unread.clear()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()


def unread_by(build: Callable[[Config], object], config: Config) -> frozenset[str]:
    """Return the parameters that a function does not read as it builds a trial.

    It is none where what was built keeps the configuration, and may read it later.

    Examples
    --------
    >>> config = {"width": 8, "lr": 0.1, "batch_size": 32}
    >>> sorted(unread_by(lambda config: [config["width"], config.get("lr")], config))
    ['batch_size']
    >>> unread_by(lambda config: [config], config), unread_by(lambda config: {**config}, config)
    (frozenset(), frozenset())
    """
    watched = _Watched(config)
    holders = sys.getrefcount(watched)
    built = build(watched)
    is_kept = sys.getrefcount(watched) > holders
    del built
    return frozenset() if is_kept else frozenset(watched.unread)


def saying_checks(
    workload: Workload, manifest: Manifest, goal: Goal | None = None, *, flow_reads: bool = False
) -> Callable[[Config], None]:
    """Return `dagsel.workloads.base.checks` that also say which parameters make no difference.

    Each is said once, in the log, as the first configurations that can be trained show it. Where
    the flow reads configurations, such as their number of epochs, it is said of the batch size
    alone.
    """
    check = checks(workload, manifest, goal)
    if not (isinstance(workload, KnowsUnread) and _speaks_for_all(workload)):
        return check
    unread = _UnreadParameters(workload, flow_reads=flow_reads)

    def check_and_say(config: Config) -> None:
        check(config)
        unread.look(config)

    return check_and_say


def _speaks_for_all(workload: Workload) -> bool:
    """Whether no subclass of somebody else's trains, and may read what `unread` does not know."""
    methods = (getattr(workload, name) for name in ("init", "train", "evaluate", "unread"))
    return len({method.__module__.partition(".")[0] for method in methods}) == 1


class _UnreadParameters:
    """What the first trials of a search have not read."""

    def __init__(self, workload: KnowsUnread, *, flow_reads: bool) -> None:
        self._workload, self._flow_reads = workload, flow_reads
        self._values: dict[str, set[str]] = {}  # by parameter that no trial has read, as text
        self._n = 0  # configurations that were looked at

    def look(self, config: Config) -> None:
        """Look at one of the first configurations."""
        if self._n == N_LOOKED_AT or (self._n and not self._values):
            return
        try:
            unread = self._workload.unread(config)
        except Exception:  # it can be trained, and no more than a remark is lost
            logger.debug("nobody knows what is read of %s", config, exc_info=True)
            self._n = N_LOOKED_AT
            return
        if self._flow_reads:
            unread &= {"batch_size"}
        if not self._n:
            self._values = {name: set() for name in config if name in unread and not _said(name)}
        self._n += 1
        for name in [*self._values]:
            if name in unread:
                self._values[name].add(repr(config[name]))
            elif name in config:
                del self._values[name]
        if self._n == N_LOOKED_AT:
            for name, values in self._values.items():
                if len(values) > 1:
                    _say(name, _NOWHERE)


def _said(name: str) -> bool:
    """Say it of a parameter that nobody reads for some configurations alone; return whether."""
    if name in _INSTEAD:
        _say(name, _INSTEAD[name])
    return name in _INSTEAD


def _say(name: str, instead: str) -> None:
    logger.warning(
        "nothing reads %r of the configuration, so it makes no difference: %s", name, instead
    )
