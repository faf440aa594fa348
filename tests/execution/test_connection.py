"""What listens at an address and is no scheduler that answers."""

from __future__ import annotations

import gc
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import dask.config
import pytest
from distributed import Client

from dagsel.errors import ClusterError
from dagsel.execution import connecting
from dagsel.execution.cluster import connect, workers_of
from dagsel.execution.connecting import PromptClient
from tests.conftest import Optimize

from .helpers import threads_of_this_process

NO_SCHEDULER = "what listens there does not answer as a scheduler does"


def wrong_address(address: str, why: str, *, timeout: str = "0.1 s") -> None:
    with dask.config.set({"distributed.comm.timeouts.connect": timeout}):
        with pytest.raises(ClusterError, match=re.escape(f"no scheduler at {address}: {why};")):
            with connect(address):
                pass
    # One that is open when the program ends makes it wait for a minute.
    left = [x.status for x in gc.get_objects() if type(x) is PromptClient]
    assert {*left} <= {"closed"}


@pytest.fixture
def server() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening, f"tcp://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.timeout(60)
def test_a_server_that_says_nothing_is_not_waited_for_without_end(
    server: tuple[socket.socket, str],
) -> None:
    wrong_address(server[1], NO_SCHEDULER)  # as a dashboard's port is


def test_a_server_that_greets_in_words_is_none(server: tuple[socket.socket, str]) -> None:
    """Dask reads the first eight letters as a number of bytes, and wants the memory for them."""

    def greet() -> None:
        with server[0].accept()[0] as caller:
            caller.sendall(b"SSH-2.0-OpenSSH\r\n")

    greeting = threading.Thread(target=greet)
    greeting.start()
    wrong_address(server[1], NO_SCHEDULER, timeout="10 s")
    greeting.join()


def test_a_server_that_hangs_up_may_have_tls(server: tuple[socket.socket, str]) -> None:
    def hang_up() -> None:
        with suppress(OSError):
            while True:
                server[0].accept()[0].close()

    hanging_up = threading.Thread(target=hang_up)
    hanging_up.start()
    why = "what listens there ends the connection; if it has TLS its address is tls://..."
    wrong_address(server[1], why, timeout="10 s")
    server[0].shutdown(socket.SHUT_RDWR)
    hanging_up.join()


def test_tls_without_certificates_is_an_error_and_leaves_no_client_open() -> None:
    why = (
        "TLS needs certificates, and this process has none: give "
        "client=distributed.Client('tls://127.0.0.1:9', security=...)"
    )
    wrong_address("tls://127.0.0.1:9", why)


def test_a_worker_a_free_port_and_a_name_that_is_nowhere_are_told_apart() -> None:
    with threads_of_this_process(1) as client:
        (worker,) = workers_of(client)
        wrong_address(f"{worker}", "a worker or its nanny listens there", timeout="10 s")
    wrong_address("tcp://127.0.0.1:9", "nothing listens there")
    wrong_address("tcp://no-such-machine.invalid:8786", "no machine of that name is known here")


def test_a_scheduler_is_looked_for_no_longer_than_a_worker(optimize: Optimize) -> None:
    long = dask.config.set({"distributed.comm.timeouts.connect": "1 h"})
    with long, pytest.raises(ClusterError, match="nothing listens there"):
        optimize(client="tcp://127.0.0.1:9", worker_timeout=1)


def test_a_frozen_scheduler_is_waited_for_as_long_as_for_a_worker(
    optimize: Optimize, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dagsel.execution.answers.TELL_AFTER_S", 0.0)
    monkeypatch.setattr(connecting, "_LEAST_S", 0.5)
    goes_on = threading.Event()
    with threads_of_this_process(1) as their:
        cluster: Any = their.cluster
        address = cluster.scheduler_address
        with Client(address, set_as_default=False) as client:
            cluster.loop.add_callback(goes_on.wait)
            try:
                with (
                    caplog.at_level(logging.WARNING),  # the cluster has silenced all handlers
                    pytest.raises(ClusterError, match=r"has not answered within 0\.5 s: it is"),
                ):
                    optimize(client=client, worker_timeout=0.1)
            finally:
                goes_on.set()
    assert f"the scheduler at {address} is busy and has not answered yet" in caplog.text
