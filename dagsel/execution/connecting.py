"""Finds the scheduler of a run, and says what is in the way if it does not answer."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed import Client
from distributed.comm import CommClosedError, get_address_host_port

from dagsel.console import span
from dagsel.errors import ClusterError
from dagsel.execution.answers import told_if_slow, within
from dagsel.execution.connection import Connection
from dagsel.execution.quiet_servers import silent

#: So long after its time for a connection.
_GRACE_S = 1.0
#: A scheduler on a busy machine has so long to answer, however soon a search is to begin or end.
_LEAST_S = 2.0
_NO_SCHEDULER = "what listens there does not answer as a scheduler does"


class PromptClient(Client):
    """A client that says soon what keeps it from its scheduler.

    Dask's waits forever for a server that accepts connections and says nothing, as a scheduler's
    dashboard is, and where it is refused it is open still: its end takes the program's a minute.
    """

    async def _start(self, *args: Any, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout + _GRACE_S):
                return await super()._start(*args, **kwargs)  # type: ignore[no-untyped-call]
        except Exception:
            await self._close()
            raise


@contextmanager
def connected(address: Any, within_s: float = math.inf) -> Iterator[Client]:
    """Open a client to a scheduler's address, or to a cluster object of Dask, and close it.

    Raises a `ClusterError` if no scheduler answers there within so many seconds, or within Dask's
    own time for a connection if that is shorter.
    """
    dasks_s = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    patience_s = min(dasks_s, max(_LEAST_S, within_s))
    waiting = (
        f"no answer from {address} yet; a scheduler is looked for there for {span(patience_s)}"
    )
    kind: Any = PromptClient
    try:
        with told_if_slow(lambda: waiting):
            client: Client = kind(address, set_as_default=False, timeout=patience_s)
    except Exception as error:  # noqa: BLE001 - what listens there may send anything
        raise ClusterError(
            f"no scheduler at {address}: {_why(error, address)}; take the address that the "
            "scheduler prints as it starts, and see that this machine reaches it"
        ) from None
    client._timeout = dasks_s  # of what it does from now on
    with client:
        try:
            yield client
        finally:
            if client.status == "connecting":  # its end would be logged with a traceback
                with silent("distributed.client"):
                    client.close()


def _why(error: Exception, address: Any) -> str:
    """Say what kept a client from a scheduler."""
    if isinstance(error, MemoryError | OverflowError):  # a greeting, read as a number of bytes
        return _NO_SCHEDULER
    if "identity()" in str(error):
        return "a worker or its nanny listens there"
    if "ssl_context" in str(error):
        return (
            "TLS needs certificates, and this process has none: give "
            f"client=distributed.Client({address!r}, security=...)"
        )
    if type(error) is CommClosedError:
        return "what listens there ends the connection; if it has TLS its address is tls://..."
    if isinstance(error, OSError) and isinstance(address, str):
        return _why_silent(address)
    return str(error)


def _why_silent(address: str) -> str:
    try:
        socket.create_connection(get_address_host_port(address), _GRACE_S).close()
    except socket.gaierror:
        return "no machine of that name is known here"
    except ConnectionRefusedError:
        return "nothing listens there"
    except (OSError, ValueError) as error:
        return f"that machine does not answer ({error})"
    return _NO_SCHEDULER


def check_answers(client: Client, within_s: float = math.inf) -> None:
    """Raise a `ClusterError` if a client's scheduler does not answer within so many seconds."""
    connection, patience_s = Connection.of(client), max(_LEAST_S, within_s)
    connection.check()
    scheduler: Any = client.scheduler
    waiting = f"the scheduler at {connection.address} is busy and has not answered yet"
    try:
        with told_if_slow(lambda: waiting):
            within(patience_s, partial(client.sync, scheduler.identity, n_workers=0))
    except TimeoutError as error:
        raise ClusterError(
            f"the scheduler at {connection.address} has not answered within {span(patience_s)}: it "
            "is busy with other work, or its process is frozen; begin again when it answers"
        ) from error
    except OSError as error:
        raise connection.lost() from error
