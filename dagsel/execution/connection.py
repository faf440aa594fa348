"""The connection to Dask's scheduler, which is either the one that the run began with or lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from distributed import Client

from dagsel.errors import ClusterError

#: So often a command that waits for its answer looks at the connection.
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Connection:
    """A client's connection to its scheduler."""

    client: Client
    stream: Any  # on which the scheduler sends; the client replaces it when it connects again
    address: str

    @classmethod
    def of(cls, client: Client) -> Connection:
        """Return the connection that a client has now."""
        scheduler: Any = client.scheduler
        address = "an unknown address" if scheduler is None else str(scheduler.address)
        return cls(client, client.scheduler_comm, address)

    def check(self) -> None:
        """Raise a `ClusterError` if the connection broke.

        The client tries to connect again, for 30 s; but Dask has forgotten the run's tasks by then.
        A scheduler that only pauses keeps its connection.
        """
        if not self.is_there:
            raise self.lost()

    @property
    def is_there(self) -> bool:
        """Whether it never broke."""
        return self.client.status == "running" and self.client.scheduler_comm is self.stream

    def lost(self) -> ClusterError:
        """Return the error of a connection that broke."""
        return ClusterError(
            f"the scheduler at {self.address} is gone, or the connection to it broke"
        )

    def log(self, topic: str, message: str) -> None:
        """Log an event as `Client.log_event` does; do not wait for a scheduler that is gone."""
        self.check()
        self.client.sync(self._log, topic, message)

    async def _log(self, topic: str, message: str) -> None:
        scheduler: Any = self.client.scheduler
        logging = asyncio.ensure_future(scheduler.log_event(topic=topic, msg=message))
        try:
            while not (await asyncio.wait([logging], timeout=_LOOK_S))[0]:
                self.check()
            await logging
        except OSError as error:  # the client has not noticed yet
            raise self.lost() from error
        finally:
            logging.cancel()
