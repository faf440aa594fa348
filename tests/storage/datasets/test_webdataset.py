"""Tar files become samples, whatever their parts; hostile members do nothing but end the write."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dagsel.errors import DatasetError, DatasetInputError
from dagsel.storage import ShardedDataset, WebDataset
from dagsel.storage.datasets.inputs.paths import expand_braces

N = 60
KINDS = ["ant", "bee", "cat"]


def picture(at: int, form: str = "png", size: tuple[int, int] = (6, 4)) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), at, np.uint8)).save(stream, form)
    return stream.getvalue()


def array(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, **options)
    return stream.getvalue()


def sample(at: int) -> dict[str, bytes]:
    return {
        "png": picture(at),
        "cls": str(at % 3).encode(),
        "json": json.dumps({"label": KINDS[at % 3], "at": at, "box": [at, 1.5]}).encode(),
        "npy": array(np.full((2, 2), at, np.float32)),
        "txt": KINDS[at % 3].encode(),
        "weights.npy": array(np.float64(at)),
    }


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def shards(folder: Path, n: int = N, each: int = 25, suffix: str = "tar") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, n, each)):
        mode: Any = "w:gz" if suffix.endswith("gz") else "w"
        with tarfile.open(folder / f"train-{number:04}.{suffix}", mode) as tar:
            for at in range(first, min(first + each, n)):
                for extension, data in sample(at).items():
                    add(tar, f"sub/{at:06}.{extension}", data)
    return folder


ALL = {"x": "png", "y": "cls", "at": "json.at", "v": "npy", "box": "json.box", "kind": "txt"}


def check(data: ShardedDataset, wanted: Any = range(N)) -> None:
    found = sorted(data, key=lambda one: int(one["at"]))
    assert [int(one["at"]) for one in found] == list(wanted)
    for one in found:
        at = int(one["at"])
        assert one["x"].tolist() == np.full((4, 6, 3), at, np.uint8).tolist()
        assert (int(one["y"]), int(one["kind"])) == (at % 3, at % 3)
        assert one["v"].tolist() == [[at, at], [at, at]]
        assert one["box"].tolist() == [at, 1.5]
    assert data.classes["kind"] == tuple(KINDS)


@pytest.mark.parametrize("how", ["braces", "folder", "list", "star", "options", "gz"])
def test_tar_files_are_read_sample_by_sample(how: str, tmp_path: Path) -> None:
    folder = shards(tmp_path / "in", suffix="tar.gz" if how == "gz" else "tar")
    (folder / "other.idx").write_text("0")
    sources: dict[str, Any] = {
        "braces": f"{folder}/train-{{0000..0002}}.tar",
        "folder": folder,
        "list": [str(folder / f"train-{k:04}.tar") for k in range(3)],
        "star": f"{folder}/train-*.tar",
        "options": WebDataset(str(folder), size=(6, 4), mode="RGB"),
        "gz": folder,
    }
    data = ShardedDataset.write(tmp_path / "d", sources[how], n_shards=3, columns=ALL)
    check(data)
    assert data.schema["x"].numpy_dtype == np.uint8
    assert data.schema["y"].numpy_dtype == np.int64


def test_all_parts_are_arrays_unless_some_are_chosen(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "d", shards(tmp_path / "in"), n_shards=2)
    assert sorted(data.schema) == sorted(
        ["png", "cls", "json.label", "json.at", "json.box", "npy", "txt", "weights.npy"]
    )
    assert data.classes == {"json.label": tuple(KINDS), "txt": tuple(KINDS)}
    assert all(float(one["weights.npy"]) == int(one["json.at"]) for one in data)


def test_the_first_part_that_is_there_is_taken(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for at in range(20):
            form = "jpeg" if at % 2 else "png"
            add(tar, f"{at}.{'JPG' if at % 2 else 'png'}", picture(at, form))
            add(tar, f"{at}.cls", str(at).encode())
    grey = WebDataset(tmp_path / "a.tar", size=(3, 2), mode="L")
    data = ShardedDataset.write(
        tmp_path / "d", grey, n_shards=2, columns={"x": "jpg;png", "y": "cls"}
    )
    assert data.schema["x"].shape == (2, 3)
    assert all(abs(int(one["x"][0, 0]) - int(one["y"])) < 3 for one in data)


@pytest.mark.parametrize(
    "rule", [{"split": "json.part"}, {"stratify": "cls"}, {"stratify": "y"}, {"groups": "json.who"}]
)
def test_tar_files_are_divided_by_a_part(rule: dict[str, str], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts, who = rng.choice(["train", "val", "test"], N), rng.integers(0, 9, N)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for at in range(N):
            meta = {"part": parts[at], "who": int(who[at]), "at": at}
            add(tar, f"{at}.json", json.dumps(meta).encode())
            add(tar, f"{at}.cls", str(at % 3).encode())
    columns = {"at": "json.at", "y": "cls"}
    data = ShardedDataset.write(
        tmp_path / "d", tmp_path / "a.tar", n_shards=2, columns=columns, **rule  # type: ignore[arg-type]
    )  # fmt: skip
    validation = np.concatenate([data.validation_shard(k)["at"] for k in range(2)])
    train = np.concatenate([data.shard(k)["at"] for k in range(2)])
    if "split" in rule:
        assert sorted(train) == np.flatnonzero(parts == "train").tolist()
        assert sorted(validation) == np.flatnonzero(parts == "val").tolist()
    elif "groups" in rule:
        assert not set(who[train]) & set(who[validation])
    else:
        assert np.bincount(validation % 3).tolist() == [4, 4, 4]


def test_what_cannot_be_decoded_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for at in range(N):
            parts = sample(at)
            if at == 7:
                parts["png"] = parts["png"][:30]
            if at == 8:
                parts["cls"] = b"many"
            if at == 9:
                del parts["json"]
            for extension, content in parts.items():
                add(tar, f"{at}.{extension}", content)
    with pytest.raises(DatasetInputError, match=r"a.tar: 7.png cannot be decoded"):
        ShardedDataset.write(tmp_path / "d", tmp_path / "a.tar", n_shards=2, columns=ALL)
    assert not (tmp_path / "d").exists()
    data = ShardedDataset.write(
        tmp_path / "d", tmp_path / "a.tar", n_shards=2, columns=ALL, on_error="skip"
    )
    check(data, [at for at in range(N) if at not in (7, 8, 9)])
    assert "3 of 60 samples cannot be decoded and are left out" in caplog.text
    assert "a.tar: 9 has no 'json.at', but png, cls" in caplog.text


def test_images_of_unequal_size_are_refused_or_kept_ragged(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for at in range(12):
            add(tar, f"{at}.png", picture(at, size=(5 + at, 4)))
    source = tmp_path / "a.tar"
    with pytest.raises(
        DatasetInputError, match=r"a.tar: 1 is 6 × 4, and .*a.tar: 0 5 × 4; give We"
    ):
        ShardedDataset.write(tmp_path / "d", source, n_shards=2)
    data = ShardedDataset.write(tmp_path / "d", source, n_shards=2, ragged=["png"])
    assert sorted(one["png"].shape for one in data) == [(4, 5 + at, 3) for at in range(12)]
    data = ShardedDataset.write(tmp_path / "e", WebDataset(source, size=(3, 3)), n_shards=2)
    assert data.schema["png"].shape == (3, 3, 3)


def test_images_of_tar_files_may_stay_as_they_are(tmp_path: Path) -> None:
    source = WebDataset(shards(tmp_path / "in"), decode=False)
    columns = {"x": "jpg;png", "at": "json.at"}
    data = ShardedDataset.write(tmp_path / "d", source, n_shards=2, columns=columns)
    assert all(bytes(one["x"]) == picture(int(one["at"])) for one in data)


def test_tar_files_on_s3_are_read(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", s3_options)
    fsspec.filesystem("s3").put(str(shards(tmp_path / "in")), "bucket/tars", recursive=True)
    url = "s3://bucket/tars/train-{0000..0002}.tar"
    check(ShardedDataset.write(tmp_path / "d", url, n_shards=2, columns=ALL))


# ---- what is wrong, or wants to harm


def one(folder: Path, **parts: bytes) -> Path:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for at in range(8):
            add(tar, f"{at}.cls", str(at).encode())
            for extension, data in parts.items():
                add(tar, f"{at}.{extension}", data)
    return folder / "a.tar"


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/dagsel-was-harmed"),)


def torn(folder: Path) -> Path:
    path = one(folder, png=picture(1))
    path.write_bytes(path.read_bytes()[:3000])
    return path


def cut(n_bytes: int, junk: bytes = b"") -> Any:
    """A file of its first bytes alone: a member of these files is 1,024 with its header."""

    def make(folder: Path) -> Path:
        path = one(folder)
        whole = path.read_bytes()
        path.write_bytes(whole[:n_bytes] + junk + (whole[n_bytes + len(junk) :] if junk else b""))
        return path

    return make


def no_tar(folder: Path) -> Path:
    (folder / "a.tar").write_bytes(b"hello" * 1000)
    return folder / "a.tar"


def torn_gz(folder: Path) -> Path:
    packed = gzip.compress(one(folder, png=picture(1)).read_bytes())
    (folder / "a.tar.gz").write_bytes(packed[: len(packed) // 2])
    return folder / "a.tar.gz"


def too_large(folder: Path) -> Path:
    member = tarfile.TarInfo("0.cls")
    member.size = 1 << 50
    (folder / "a.tar").write_bytes(member.tobuf() + b"\0" * 20_000)
    return folder / "a.tar"


HUGE = b"\x93NUMPY\x01\x00v\x00" + str(
    {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
).encode().ljust(117) + b"\n"  # fmt: skip

WRONG: dict[str, tuple[Any, Any, str]] = {
    "a pickle": (lambda p: one(p, pyd=pickle.dumps(Bomb())), None, "0.pyd: a .pyd may be a pickle"),
    "a model": (lambda p: one(p, pth=b""), {"x": "pth"}, "a .pth may be a pickle, which can run"),
    "an array of objects": (
        lambda p: one(p, npy=array(np.array([Bomb()]), allow_pickle=True)), None,
        "0.npy cannot be decoded: Object arrays cannot be loaded"),
    "a pickle named npy": (lambda p: one(p, npy=pickle.dumps(Bomb())), None, "0.npy cannot be dec"),
    "an array that claims a petabyte": (lambda p: one(p, npy=HUGE), None, "0.npy cannot be dec"),
    "deep json": (lambda p: one(p, json=b"[" * 99_999), None, "0.json cannot be decoded"),
    "a number of many digits": (lambda p: one(p, id=b"9" * 9999), None, "0.id cannot be decoded"),
    "no text": (lambda p: one(p, txt=b"\xff\xfe"), None, "0.txt cannot be decoded: 'utf-8'"),
    "nothing known": (lambda p: one(p, flac=b""), None, r"0.flac: what a .flac is, is not known"),
    "no such part": (lambda p: one(p), {"x": "png"}, "there is no column 'png', but 'cls'"),
    "no such entry": (
        lambda p: one(p, json=b'{"a": 1}'), {"x": "json.b"}, "no column 'json.b', but 'cls'"),
    "an object as a value": (lambda p: one(p, json=b'{"a": {"b": 1}}'), {"x": "json.a"}, "make it"),
    "parts together": (lambda p: one(p), {"x": ["cls", "cls"]}, "an array is made of one part"),
    "a torn file": (torn, None, "a.tar cannot be read: unexpected end of data"),
    "a file without an end": (cut(8 * 1024), None, "it ends or is damaged at byte 8,192 .empty"),
    "a file cut in a header": (cut(5 * 1024 + 9), None, "or is damaged at byte 5,120"),
    "a damaged header": (cut(5 * 1024, b"?" * 512), None, "byte 5,120 .invalid header"),
    "no tar at all": (no_tar, None, "a.tar cannot be read"),
    "a torn gz": (torn_gz, None, "a.tar.gz cannot be read"),
    "a member of a petabyte": (too_large, None, "0.cls has 1.* may have"),
    "nothing there": (lambda p: p / "b-{0..1}.tar", None, "nothing is at .*b-0.tar"),
    "no samples": (lambda p: _links(p), None, "has no samples; files of one"),
}  # fmt: skip


def _links(folder: Path) -> Path:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for kind, name in ((tarfile.SYMTYPE, "0.cls"), (tarfile.LNKTYPE, "1.cls"),
                           (tarfile.CHRTYPE, "2.cls"), (tarfile.DIRTYPE, "3.cls")):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    return folder / "a.tar"


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    make, columns, says = WRONG[what]
    (tmp_path / "in").mkdir()
    with pytest.raises(DatasetError, match=says):
        ShardedDataset.write(tmp_path / "d", make(tmp_path / "in"), n_shards=2, columns=columns)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert not Path("/tmp/dagsel-was-harmed").exists()


def test_hostile_names_and_links_reach_no_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar", "w") as tar:
        for at in range(10):
            link = tarfile.TarInfo(f"../../{at}.png")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
            add(tar, f"../../{at}.cls", str(at).encode())
            add(tar, f"/{at}.txt", b"never looked at")
            add(tar, f"._{at}.cls", b"of a Mac")
    data = ShardedDataset.write(
        tmp_path / "d", tmp_path / "in", n_shards=2, columns={"y": "cls"}, on_error="skip"
    )
    assert sorted(int(one_["y"]) for one_ in data) == list(range(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "in"]


def test_an_image_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(stream, "png")
    with pytest.raises(DatasetInputError, match="0.png cannot be decoded.*decompression bomb"):
        ShardedDataset.write(tmp_path / "d", one(tmp_path, png=stream.getvalue()), n_shards=2)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=3000), st.integers(0, 9000))
def test_whatever_the_bytes_are_it_is_a_dataset_error_or_a_data_set(junk: bytes, at: int) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for number in range(8):
            add(tar, f"{number}.cls", b"1")
            add(tar, f"{number}.npy", array(np.zeros(2)))
    data = bytearray(stream.getvalue())
    data[at : at + len(junk)] = junk
    with fsspec.open("memory://junk.tar", "wb") as file:
        file.write(bytes(data))
    with contextlib.suppress(DatasetError):
        ShardedDataset.write("memory://j.zarr", "memory://junk.tar", n_shards=1, overwrite=True)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 6))
def test_braces_are_those_of_a_shell(first: int, n: int, width: int) -> None:
    start, stop = str(first).zfill(width), str(first + n).zfill(width)
    shell = subprocess.run(
        ["bash", "-c", f"echo a/{{{start}..{stop}}}-{{x,y}}.tar"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert expand_braces(f"a/{{{start}..{stop}}}-{{x,y}}.tar") == shell.stdout.split()


def test_one_thread_at_a_time_reads_the_header_of_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, inside, most = np.lib.format.read_array, set[int](), [0]

    def read_array(stream: io.BytesIO) -> Any:
        inside.add(threading.get_ident())
        most[0] = max(most[0], len(inside))
        for _ in range(10):
            time.sleep(0)  # another thread's turn
        array = read(stream)
        inside.remove(threading.get_ident())
        return array

    monkeypatch.setattr(np.lib.format, "read_array", read_array)
    ShardedDataset.write(tmp_path / "out", shards(tmp_path), n_shards=2, columns={"x": "npy"})
    assert most == [1]


PEAK = """
import sys
from dagsel.storage import ShardedDataset

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024

columns = {"x": "npy", "y": "cls"}
ShardedDataset.write(sys.argv[2] + "0", sys.argv[1] + "/0.tar", n_shards=1, columns=columns)
before = peak()
data = ShardedDataset.write(sys.argv[2], sys.argv[1], n_shards=4, columns=columns)
print(len(data), data.nbytes >> 20, peak() - before)
"""


@pytest.mark.slow
def test_tar_files_are_never_in_memory(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, n in enumerate([8, 1000, 1000]):
        with tarfile.open(tmp_path / "in" / f"{number}.tar", "w") as tar:
            for at in range(n):
                add(tar, f"{at}.npy", array(np.full((512, 512), at % 200, np.uint8)))
                add(tar, f"{at}.cls", b"1")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "in"), str(tmp_path / "out")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    n, nbytes_mb, more_mb = map(int, told.stdout.split())
    assert (n, nbytes_mb) == (2008, 502)
    assert 0 < more_mb < 200, f"tar files of {nbytes_mb} MB took {more_mb} MB"
