"""The connection to Dask's scheduler, which is either the one that the run began with or lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from distributed import Client

from dagsel.errors import ClusterError

#: So long after Dask's own time for a connection.
_GRACE_S = 1.0
#: So often a command that waits for its answer looks at the connection.
_LOOK_S = 0.2


class PromptClient(Client):
    """A client that says soon what keeps it from its scheduler.

    Dask's waits forever for a server that accepts connections and says nothing, as a scheduler's
    dashboard is, and where it is refused it is open still: its end takes the program's a minute.
    """

    async def _start(self, *args: Any, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout + _GRACE_S):
                return await super()._start(*args, **kwargs)  # type: ignore[no-untyped-call]
        except TimeoutError:
            await self._close()
            raise TimeoutError("what listens there does not answer as a scheduler does") from None
        except Exception:
            await self._close()
            raise


def client_to(address: Any) -> Client:
    """Open a client to a scheduler's address, or to a cluster object of Dask."""
    kind: Any = PromptClient
    client: Client = kind(address, set_as_default=False)
    return client


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
            raise self._lost()

    @property
    def is_there(self) -> bool:
        """Whether it never broke."""
        return self.client.status == "running" and self.client.scheduler_comm is self.stream

    def _lost(self) -> ClusterError:
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
            raise self._lost() from error
        finally:
            logging.cancel()
