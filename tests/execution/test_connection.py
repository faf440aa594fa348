"""What listens at an address and is no scheduler that answers."""

from __future__ import annotations

import gc
import socket

import dask.config
import pytest

from dagsel.errors import ClusterError
from dagsel.execution.cluster import connect
from dagsel.execution.connection import PromptClient


def wrong_address(address: str, why: str) -> None:
    with dask.config.set({"distributed.comm.timeouts.connect": "0.1 s"}):
        with pytest.raises(ClusterError, match=f"no scheduler at {address}: {why}"):
            with connect(address):
                pass
    # One that is open when the program ends makes it wait for a minute.
    left = [x.status for x in gc.get_objects() if type(x) is PromptClient]
    assert {*left} <= {"closed"}


@pytest.mark.timeout(60)
def test_a_server_that_says_nothing_is_not_waited_for_without_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a dashboard's port is
        wrong_address(f"tcp://127.0.0.1:{silent.getsockname()[1]}", "what listens there does not")


def test_tls_without_certificates_is_an_error_and_leaves_no_client_open() -> None:
    wrong_address("tls://127.0.0.1:9", "TLS expects")
