"""Keys and values that the ranks of a gang share, in the memory of rank 0.

PyTorch's ``TCPStore`` asks the name server for the name of each caller, which takes five seconds
without one, and listens on all addresses. This one looks up no name, listens on one address, and
refuses callers that do not know the gang's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
import threading
import time
from typing import Protocol

_LENGTH = struct.Struct(">Q")
_MAX_PART = 1 << 30
_N_TOKEN = 32
_TOKEN_WITHIN_S = 10.0  # who has not named the gang by then is sent away


class Rendezvous(Protocol):
    """Keys and values that the ranks of a gang share; the first value of a key stays."""

    address: str  # of this rank's machine

    def put(self, key: str, value: bytes) -> None:
        """Set a key that has no value yet."""
        ...

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key's value; None if it has none after so many seconds."""
        ...

    def close(self) -> None:
        """Leave. When rank 0 leaves, the others' calls raise an `OSError`."""
        ...


class RendezvousServer:
    """The rendezvous on rank 0, at the address `host`. Clients with another name are refused.

    Examples
    --------
    >>> with contextlib.closing(RendezvousServer("127.0.0.1", "unit 3")) as server:
    ...     address = "127.0.0.1", server.port, "unit 3"
    ...     with contextlib.closing(RendezvousClient(*address, seconds=5.0)) as client:
    ...         client.put("rank 1", b"has come")
    ...         server.get("rank 1", seconds=5.0), client.get("rank 2", seconds=0.0)
    (b'has come', None)
    """

    def __init__(self, host: str, name: str) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self.address: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._token = _token(name)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._clients: set[socket.socket] = set()
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="dagsel-gang", daemon=True)
        self._acceptor.start()

    def put(self, key: str, value: bytes) -> None:
        """Set a key that has no value yet."""
        with self._changed:
            self._values.setdefault(key, value)
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key's value."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._closed, seconds)
            return self._values.get(key)

    def close(self) -> None:
        """End the rendezvous."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            clients = [*self._clients]
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        # A thread that waits for callers is not woken by the end of its socket on every system.
        with contextlib.suppress(OSError):
            socket.create_connection((self.address, self.port), timeout=1.0).close()
        self._acceptor.join(1.0)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                if self._closed:
                    client.close()
                    return
                self._clients.add(client)
            threading.Thread(
                target=self._serve, args=(client,), name="dagsel-gang", daemon=True
            ).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.settimeout(_TOKEN_WITHIN_S)
            known = hmac.compare_digest(_read(client, _N_TOKEN), self._token)
            client.settimeout(None)
            while known:
                verb, key, value = _read_part(client), _read_part(client), _read_part(client)
                answer: bytes | None = b""
                if verb == b"put":
                    self.put(key.decode(), value)
                else:
                    answer = self.get(key.decode(), float(value))
                    if answer is None and self._closed:
                        break  # "not in time" would be another answer than "the rendezvous is over"
                client.sendall(b"\0" if answer is None else b"\1" + _part(answer))
        with self._changed:
            self._clients.discard(client)


class RendezvousClient:
    """The rendezvous on the other ranks; connects within `seconds`."""

    def __init__(self, host: str, port: int, name: str, seconds: float) -> None:
        self._grace = min(seconds, 10.0)
        self._socket = socket.create_connection((host, port), timeout=seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self.address: str = self._socket.getsockname()[0]  # the one that the leader's side sees
        self._socket.sendall(_token(name))

    def put(self, key: str, value: bytes) -> None:
        """Set a key that has no value yet."""
        self._call(b"put", key, value, 0.0)

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key's value."""
        return self._call(b"get", key, str(seconds).encode(), seconds)

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def _call(self, verb: bytes, key: str, value: bytes, patience: float) -> bytes | None:
        with self._lock:
            self._socket.settimeout(self._grace + patience)
            self._socket.sendall(_part(verb) + _part(key.encode()) + _part(value))
            return _read_part(self._socket) if _read(self._socket, 1) == b"\1" else None


def seconds_left(deadline: float) -> float:
    """Return the seconds until a moment of the monotonic clock."""
    return max(0.0, deadline - time.monotonic())


def _token(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _part(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _read_part(source: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_read(source, _LENGTH.size))
    if length > _MAX_PART:
        raise ConnectionError(f"a message of {length} bytes")
    return _read(source, length)


def _read(source: socket.socket, n_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < n_bytes:
        part = source.recv(min(n_bytes - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the gang's leader has left")
        parts += part
    return bytes(parts)
