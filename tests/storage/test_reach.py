"""Errors of a store are Python's, with its URL and no keys; one that was there is waited for."""

from __future__ import annotations

import errno
import io
import logging
import pickle
from functools import partial
from typing import Any

import aiohttp
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dagsel.storage import files, remote_files
from dagsel.storage.files import Folder
from dagsel.storage.reach import read_error, retry_while_away

boto: Any = pytest.importorskip("botocore.exceptions")
s3fs_errors: Any = pytest.importorskip("s3fs.errors")
URL = "s3://bucket/run"


class AzureError(Exception):
    """As `azure.core.exceptions.HttpResponseError`, which is not installed."""

    def __init__(self, status_code: int) -> None:
        super().__init__("Server Busy")
        self.status_code = status_code


def of_s3(status: int, code: str) -> Exception:
    """Return what s3fs makes of an answer."""
    about = {"Code": code, "Message": "m"}
    answer = {"Error": about, "ResponseMetadata": {"HTTPStatusCode": status}}
    made: Exception = s3fs_errors.translate_boto_error(boto.ClientError(answer, "PutObject"))
    return made


AWAY = [
    of_s3(503, "SlowDown"),
    of_s3(503, "SlowDownWrite"),
    of_s3(503, "XMinioServerNotInitialized"),
    of_s3(502, "502"),
    of_s3(504, "504"),
    of_s3(429, "429"),
    AzureError(503),
    boto.EndpointConnectionError(endpoint_url="http://host"),
    boto.ConnectTimeoutError(endpoint_url="http://host"),
    boto.ReadTimeoutError(endpoint_url="http://host"),
    boto.ConnectionClosedError(endpoint_url="http://host"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientPayloadError("cut off"),
    ConnectionRefusedError("no"),
    TimeoutError(),
    OSError(errno.EBUSY, "slow down"),
    OSError(errno.EREMOTEIO, "internal error"),
]


def plain(text: str) -> str:
    return text.replace("s3cr3t", "***")


@pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
def test_nobody_answers(error: Exception) -> None:
    found = read_error(error, URL, plain)
    assert type(found) is ConnectionError
    assert str(found).startswith(f"{URL} cannot be reached: {type(error).__name__}")


@pytest.mark.parametrize(
    "error", [boto.NoCredentialsError(), PermissionError("Forbidden")], ids=["none", "wrong ones"]
)
def test_keys_do_not_open_it(error: Exception) -> None:
    found = read_error(error, URL, plain)
    assert type(found) is PermissionError
    assert str(found).startswith(f"{URL} is not open to these keys")
    assert "storage_options" in str(found)


@pytest.mark.parametrize(
    "error", [of_s3(400, "ExpiredToken"), of_s3(404, "NoSuchKey"), AzureError(409)], ids=repr
)
def test_an_answer_is_no_silence(error: Exception) -> None:
    assert not isinstance(read_error(error, URL, plain), ConnectionError)


def test_other_errors_keep_what_they_say() -> None:
    missing = FileNotFoundError("no s3cr3t")
    assert repr(read_error(missing, URL, plain)) == repr(FileNotFoundError("no ***"))
    own = OSError(errno.ENOSYS, "not implemented")
    assert read_error(own, URL, plain) is own
    odd = read_error(RuntimeError("with s3cr3t"), URL, plain)
    assert type(odd) is OSError
    assert str(odd) == f"{URL}: RuntimeError: with ***"
    bucket = read_error(FileNotFoundError("The specified bucket does not exist"), URL, plain)
    assert type(bucket) is FileNotFoundError
    assert str(bucket).startswith(URL)


def test_it_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    left, pauses = [ConnectionError("away")] * 4, list[float]()

    def ask() -> str:
        if left:
            raise left.pop()
        return "there"

    with caplog.at_level(logging.WARNING, "dagsel"):
        assert retry_while_away(ask, URL, sleep=pauses.append) == "there"
    assert len(pauses) == 4
    assert len(caplog.messages) == 2, "it warns once, and says when it goes on"
    left += [ConnectionError("away")] * 1000
    with pytest.raises(ConnectionError):
        retry_while_away(ask, URL, patience_s=20.0, sleep=pauses.append)
    assert 20.0 <= sum(pauses[4:]) < 26.0


class Away(MemoryFileSystem):
    """Answers only when it is told to."""

    protocol = "away"
    n_away = 0

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        if Away.n_away:
            Away.n_away -= 1
            raise boto.EndpointConnectionError(endpoint_url="http://host")
        return super().cat_file(path, *args, **options)


def test_only_who_has_answered_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("away", Away, clobber=True)
    pauses = list[float]()
    waiting = partial(retry_while_away, sleep=pauses.append)
    monkeypatch.setattr("dagsel.storage.files.retry_while_away", waiting)
    folder = Folder("away://somewhere")
    Away.n_away = 1
    with pytest.raises(ConnectionError):
        folder.read("a")
    assert pauses == []
    assert folder.read("a") is None  # it answers: there is no such object
    Away.n_away = 3
    assert folder.read("a") is None
    assert len(pauses) == 3
    assert folder.child("b").read("a") is None
    Away.n_away = 3
    assert pickle.loads(pickle.dumps(Folder("away://somewhere"))).read("a") is None
    Away.n_away = 1
    with pytest.raises(ConnectionError):
        folder.impatient().read("a")


def test_a_large_object_is_read_in_ranges(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(remote_files, "_RANGE_BYTES", 300)
    folder, data = Folder("s3://bucket/ranges", s3_options), bytes(range(250)) * 13
    folder.replace("large", data)
    asked, cat = list[int](), remote_files.Ranges.readinto

    def counts(self: Any, into: Any) -> int:
        asked.append(cat(self, into))
        return asked[-1]

    monkeypatch.setattr(remote_files.Ranges, "readinto", counts)
    stream, size = folder.open_read("large", expected=len(data))
    with stream:
        assert size == len(data)
        assert b"".join(iter(partial(stream.read, 70), b"")) == data
    assert max(asked) <= 1000
    with pytest.raises(FileNotFoundError):
        folder.open_read("missing", expected=len(data))


def test_a_stream_that_breaks_goes_on_where_it_was() -> None:
    data, begun = bytes(range(250)), list[io.BytesIO]()

    class Breaks(io.BytesIO):
        def read(self, n: int | None = -1) -> bytes:
            if len(begun) == 1 and self.tell() >= 100:
                raise ConnectionError("cut off")
            return super().read(n)

    def begin() -> io.BytesIO:
        begun.append(Breaks(data))
        return begun[-1]

    def twice(call: Any) -> Any:
        try:
            return call()
        except ConnectionError:
            return call()

    with io.BufferedReader(remote_files.Stream(begin, twice), 50) as stream:
        assert stream.read() == data
    assert len(begun) == 2
