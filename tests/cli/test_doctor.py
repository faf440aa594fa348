"""`dagsel doctor` starts a real worker, finds this machine well, and names what is in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client

from tests.cli.searches import asked, call


def test_this_machine_is_well(tmp_path: Path) -> None:
    found = {finding["about"]: finding for finding in asked("doctor", cwd=tmp_path)}
    assert all(finding["is_well"] is not False for finding in found.values())
    assert {
        "Python",
        "dagsel",
        "torch",
        "cores",
        "allocator",
        "runs",
        "ports",
        "Dask",
    } <= found.keys()
    assert "a worker process started here" in found["Dask"]["text"]


def test_a_clusters_workers_are_counted(tmp_path: Path, client: Client) -> None:
    scheduler = client.scheduler_info(n_workers=0)["address"]
    found = {f["about"]: f for f in asked("doctor", "--scheduler", scheduler, cwd=tmp_path)}
    assert f"2 workers at {scheduler}" in found["Dask"]["text"]


def test_what_is_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is too old, another that is not there, a scheduler that does not answer."""
    for name, about in {"zarr": "Name: zarr\nVersion: 2.18.0\n"}.items():
        there = tmp_path / "packages" / f"{name}-2.18.0.dist-info"
        there.mkdir(parents=True)
        (there / "METADATA").write_text(f"Metadata-Version: 2.1\n{about}")
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "300ms")
    words = ("doctor", "--scheduler", "tcp://127.0.0.1:9")
    found = {
        finding["about"]: finding
        for finding in asked(*words, cwd=tmp_path, code=1, first=tmp_path / "packages")
    }
    assert found["zarr"]["is_well"] is False
    assert "zarr is 2.18.0, and should be <3.3,>=3.1" in found["zarr"]["text"]
    assert found["Dask"]["is_well"] is False
    assert "no scheduler at tcp://127.0.0.1:9" in found["Dask"]["text"]
    assert "BAD   Dask" in call(*words, cwd=tmp_path, code=1).stdout
