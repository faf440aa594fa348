"""Streams need no length, processes decode in order, and what cannot be decoded is counted."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import dagsel
from dagsel import errors
from dagsel.errors import DatasetError, DatasetInputError
from dagsel.storage import Batches, ImageFolder, ShardedDataset

N = 100
KINDS = ["ant", "bee", "cat"]


def ids(data: ShardedDataset) -> list[int]:
    return sorted(int(sample["id"]) for sample in data)


class Decoded(torch.utils.data.Dataset[Any]):
    """Samples, some of which cannot be read; `kill` ends the process."""

    def __init__(self, n: int = N, bad: tuple[int, ...] = (), kill: int = -1) -> None:
        self.n, self.bad, self.kill = n, bad, kill

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, at: int) -> Any:
        if at in self.bad:
            raise ValueError("truncated")
        if at == self.kill:
            os._exit(9)
        return {
            "x": torch.full((2, 3), float(at)),
            "kind": KINDS[at % 3],
            "id": at,
            "pid": os.getpid(),
        }


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that decode be copies of one that has imported: those of a write import anew.

    What a write starts by itself is seen below, in a script and in a notebook.
    """
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr("dagsel.storage.datasets.inputs.decoding._context", lambda: context)


@pytest.mark.usefixtures("copies")
def test_processes_decode_what_one_would(tmp_path: Path) -> None:
    alone = ShardedDataset.write(tmp_path / "a", Decoded(), n_shards=2)
    several = ShardedDataset.write(tmp_path / "b", Decoded(), n_shards=2, workers=2)
    assert several.classes == alone.classes == {"kind": tuple(KINDS)}
    for k in range(2):
        for read, other in ((alone.shard, several.shard),):
            for name in ("x", "kind", "id"):
                assert np.array_equal(read(k)[name], other(k)[name])
    pids = {int(sample["pid"]) for sample in several}
    assert os.getpid() not in pids
    assert len(pids) in (1, 2)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named_or_left_out(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Decoded(bad=(0, 17, 40, 99))
    with pytest.raises(DatasetInputError, match="sample 0 cannot be read: ValueError: truncated"):
        ShardedDataset.write(tmp_path / "a", broken, n_shards=2, workers=workers)
    assert list(tmp_path.iterdir()) == []
    data = ShardedDataset.write(
        tmp_path / "b", broken, n_shards=2, workers=workers, on_error="skip", stratify="kind"
    )
    assert ids(data) == [at for at in range(N) if at not in broken.bad]
    assert (len(data), data.n_train, data.n_validation) == (96, 77, 19)
    assert "4 of 100 samples cannot be decoded and are left out: arrays: sample 0" in caplog.text
    assert "; and 1 more" in caplog.text
    every = Decoded(8, bad=tuple(range(8)))
    with pytest.raises(DatasetInputError, match="sample 0 cannot be read"):
        ShardedDataset.write(tmp_path / "c", every, n_shards=2, on_error="skip")


@pytest.mark.usefixtures("copies")
def test_a_process_that_dies_ends_the_write(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="a process that decodes samples of arrays has ended"):
        ShardedDataset.write(tmp_path / "a", Decoded(kill=50), n_shards=2, workers=2)
    assert list(tmp_path.iterdir()) == []


class Unsendable(Decoded):
    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda x: x


def test_what_cannot_be_sent_to_a_process_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = multiprocessing.get_context("spawn")  # else nothing is sent
    monkeypatch.setattr("dagsel.storage.datasets.inputs.decoding._context", lambda: spawn)
    with pytest.raises(DatasetInputError, match="cannot be sent to the processes.*top of a module"):
        ShardedDataset.write(tmp_path / "a", Unsendable(), n_shards=2, workers=2)


SCRIPT = """
import os
from dagsel.storage import ShardedDataset

class Mine:
    def __len__(self):
        return 64

    def __getitem__(self, at):
        return {"id": at, "pid": os.getpid()}

if __name__ == "__main__":
    data = ShardedDataset.write("data", Mine(), n_shards=2, workers=2)
    pids = {int(sample["pid"]) for sample in data}
    print(sorted(int(sample["id"]) for sample in data) == list(range(64)), pids & {os.getpid()})
"""


@pytest.mark.parametrize("how", ["file", "pipe", "unguarded"])
def test_a_script_decodes_in_processes(how: str, tmp_path: Path) -> None:
    text = (
        SCRIPT.replace('if __name__ == "__main__":', "if True:") if how == "unguarded" else SCRIPT
    )
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, "-W", "error", *(["-"] if how == "pipe" else ["script.py"])]
    told = subprocess.run(
        command, cwd=tmp_path, input=text if how == "pipe" else None, text=True,
        capture_output=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    if how == "unguarded":
        assert told.returncode
        assert 'put ShardedDataset.write under  if __name__ == "__main__":' in told.stderr
        assert not (tmp_path / "data").exists()
    else:
        assert told.stdout.split() == ["True", "set()"], told.stderr


def test_a_notebook_decodes_in_processes(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="needs ipykernel and nbclient")
    nbclient = pytest.importorskip("nbclient", reason="needs ipykernel and nbclient")
    import nbformat

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SCRIPT)])
    place = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(book, timeout=120, resources=place).execute()
    (output,) = (o for o in book.cells[0].outputs if o.output_type == "stream")
    assert output.text.split() == ["True", "set()"]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, n: int = N) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((2,), float(at)), KINDS[at % 3]) for at in range(self.n))


class Counted(Stream):
    def __len__(self) -> int:
        return self.n


@pytest.mark.parametrize(
    "make", [Stream, Counted, lambda: iter(Stream()), lambda: map(tuple, Stream())]
)
def test_a_stream_of_samples_needs_no_length(make: Any, tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a", make(), n_shards=3)
    assert data.classes == {"y": tuple(KINDS)}
    found = {int(sample["x"][0]): int(sample["y"]) for sample in data}
    assert found == {at: at % 3 for at in range(N)}
    plain = [(np.full(2, at, np.float32), KINDS[at % 3]) for at in range(N)]
    same = ShardedDataset.write(tmp_path / "b", plain, n_shards=3)
    assert all(np.array_equal(data.shard(1)[name], same.shard(1)[name]) for name in ("x", "y"))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=4, max_size=20), st.integers(16, 900))
def test_batches_without_a_length_are_as_those_with_one(sizes: list[int], block: int) -> None:
    def batches() -> Iterator[Any]:
        first = 0
        for size in sizes:
            rows = np.arange(first, first + size)
            yield {"id": rows, "t": rows.astype("U4"), "when": rows.astype("M8[s]")}
            first += size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagsel.storage.datasets.sources.BLOCK_BYTES", block)
        with_it, without = (
            ShardedDataset.write(
                f"memory://s{n}.zarr", Batches(batches(), n), n_shards=1, overwrite=True
            )
            for n in (sum(sizes), None)
        )
    for read in ("shard", "validation_shard"):
        one, two = getattr(with_it, read)(0), getattr(without, read)(0)
        assert all(np.array_equal(one[name], two[name]) for name in one)


def test_a_stream_for_validation_has_the_classes_of_the_training_data(tmp_path: Path) -> None:
    few = ((np.zeros(2, np.float32), "cat") for _ in range(9))
    data = ShardedDataset.write(tmp_path / "a", Stream(), n_shards=2, validation=few)
    assert {int(y) for k in (0, 1) for y in data.validation_shard(k)["y"]} == {2}
    other = ((np.zeros(2, np.float32), "dog") for _ in range(9))
    with pytest.raises(DatasetInputError, match="validation.*'y' has the class 'dog' in row 0"):
        ShardedDataset.write(tmp_path / "b", Stream(), n_shards=2, validation=other)


def images(folder: Path, bad: tuple[int, ...]) -> ImageFolder:
    for at in range(60):
        place = folder / KINDS[at % 3]
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{at:03}.png"
        Image.fromarray(np.full((4, 5, 3), at, np.uint8)).save(path)
        if at in bad:
            path.write_bytes(path.read_bytes()[: 40 if at % 2 else 0])
    return ImageFolder(folder)


def test_images_that_cannot_be_decoded_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = (0, 7, 8, 30, 59)
    source = images(tmp_path / "images", bad)
    with pytest.raises(DatasetInputError, match=r"ant/000.png cannot be decoded"):
        ShardedDataset.write(tmp_path / "a", source, n_shards=2)
    data = ShardedDataset.write(tmp_path / "b", source, n_shards=2, on_error="skip", stratify="y")
    assert sorted(int(s["x"][0, 0, 0]) for s in data) == [at for at in range(60) if at not in bad]
    assert all(int(s["y"]) == int(s["x"][0, 0, 0]) % 3 for s in data)
    assert len(ShardedDataset.open(data.url)) == 55
    assert "5 of 60 samples cannot be decoded and are left out" in caplog.text
    assert "ant/000.png cannot be decoded" in caplog.text


def test_images_that_are_stored_as_their_files_become_the_same_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(images(tmp_path / "images", (7, 8)).path)
    options: dict[str, Any] = {"n_shards": 2, "on_error": "skip"}
    plain = ShardedDataset.write(tmp_path / "a", ImageFolder(root, size=(3, 2)), **options)
    files = ShardedDataset.write(tmp_path / "b", ImageFolder(root, decode=False), **options)
    assert "2 of 60 samples cannot be decoded" in caplog.text
    decode, batch = dagsel.collate.images(size=(3, 2)), dict[str, Any]()
    for shard in range(2):
        one, two = plain.shard(shard), files.shard(shard)
        batch = {"x": [torch.tensor(file) for file in two["x"]]}
        batch["y"] = torch.tensor(two["y"])
        made = decode(batch)
        assert np.array_equal(made["x"].numpy(), one["x"])
        assert np.array_equal(made["y"].numpy(), one["y"])
        paths = {bytes(file) for file in two["x"]}
        assert paths <= {path.read_bytes() for path in root.rglob("*.png")}
    grey = dagsel.collate.images("x", mode="L")(batch)
    assert grey["x"].shape == (len(batch["y"]), 4, 5)
    wrong = [torch.tensor(files.shard(0)["x"][0]), torch.zeros(9, dtype=torch.uint8)]
    with pytest.raises(Exception, match="cannot identify image"):
        decode({"x": wrong})
    with pytest.raises(errors.WorkloadError, match="among x, y that is no array of files; write"):
        dagsel.collate.images("z")(batch)
    other = io.BytesIO()
    Image.new("RGB", (9, 9)).save(other, "png")
    uneven = [batch["x"][0], torch.tensor(np.frombuffer(other.getvalue(), np.uint8).copy())]
    with pytest.raises(errors.WorkloadError, match=r"differ in size: give .*images\(size="):
        dagsel.collate.images()({"x": uneven})


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a loader": (
        lambda: torch.utils.data.DataLoader(Decoded()), {}, "give its dataset: loader.dataset"),
    "several data sets": (
        lambda: type("DatasetDict", (dict,), {})(train=[1], test=[2]), {},
        r"is a DatasetDict of 'train', 'test'; .* write\(url, data\["),
    "parts of a data set": (
        lambda: torch.utils.data.random_split(Decoded(), [0.8, 0.2]), {},
        r"arrays is a list of 2 data sets; .* write\(url, data\[0\], validation=data\[1\]\)"),
    "an empty stream": (lambda: iter(()), {}, "arrays is empty"),
    "empty batches": (lambda: Batches(iter(())), {}, "the stream of batches is empty"),
    "workers of a stream": (Stream, {"workers": 2}, "workers= decode the samples of a data set"),
    "workers of images": (lambda: ImageFolder("."), {"workers": 2}, "decoded in threads already"),
    "images by themselves": (
        lambda: ImageFolder("."), {"stratify": "x"}, "images cannot say how they are divided"),
    "a stream that divides": (
        lambda: {"x": np.zeros(8), "g": Batches([np.zeros(8)], 8)}, {"groups": "g"},
        "'g' is a stream"),
    "no length of one": (
        lambda: {"x": np.zeros(8), "g": Batches([np.zeros(8)])}, {},
        "'g' is a stream without a length"),
    "other parts": (
        lambda: iter([{"a": 1}] * 5 + [{"a": [1, 2]}] * 5), {}, r"'a' of sample 5 is int64\[2\]"),
    "a word that is missing": (
        lambda: iter([{"a": "x"}] * 300 + [{"a": None}] * 5), {},
        "samples from 256 on: row 44 of 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_stream_is_named_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    make, options, says = WRONG[what]
    with pytest.raises(DatasetInputError, match=says):
        ShardedDataset.write(tmp_path / "a", make(), n_shards=2, **options)
    assert list(tmp_path.iterdir()) == []


def test_images_that_are_stored_as_their_files_have_no_size(tmp_path: Path) -> None:
    root = images(tmp_path / "i", ()).path
    with pytest.raises(DatasetInputError, match="size= and decode=False do not go together"):
        ShardedDataset.write(
            tmp_path / "a", ImageFolder(root, size=(2, 2), decode=False), n_shards=2
        )


def test_folders_that_are_a_split_are_no_classes(tmp_path: Path) -> None:
    images(tmp_path / "i" / "train", ())
    images(tmp_path / "i" / "val", ())
    with pytest.raises(DatasetInputError, match=r"are no classes, but train, val; .*validation=I"):
        ShardedDataset.write(tmp_path / "a", tmp_path / "i", n_shards=2)


def test_scratch_files_lie_beside_the_data_and_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = tempfile.TemporaryFile

    def noted(**options: Any) -> Any:
        made.append(options["dir"])
        return real(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", noted)
    (tmp_path / "here").mkdir()
    data = ShardedDataset.write(tmp_path / "here" / "new" / "d.zarr", Stream(), n_shards=2)
    assert made[0] == str(tmp_path / "here")
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"new"}
    made.clear()
    ShardedDataset.write("memory://scratch.zarr", Stream(), n_shards=2, overwrite=True)
    assert set(made) == {None}
    assert len(data) == N


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, **_: Any) -> None: ...
        def close(self) -> None: ...
        def write(self, _: Any) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("dagsel.storage.datasets.spool.tempfile.TemporaryFile", Full)
    with pytest.raises(
        DatasetError, match="No space left on device while arrays was read into scr"
    ):
        ShardedDataset.write(tmp_path / "a", Stream(), n_shards=2)
    assert list(tmp_path.iterdir()) == []


PEAK = """
import os
import shutil
import sys
from pathlib import Path
import numpy as np
import pandas
import torch
from PIL import Image
from dagsel.storage import Batches, ImageFolder, ShardedDataset

place, *kinds = sys.argv[1:]

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024

def sample(at):
    return {"x": np.full((32, 32, 16), at % 251, np.uint8), "y": "odd" if at % 2 else "even"}

class Samples:
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, at):
        return sample(at)

def batches(n):
    for start in range(0, n, 50):
        rows = [sample(at) for at in range(start, start + 50)]
        yield {name: np.array([row[name] for row in rows]) for name in rows[0]}

def folder(n):
    root = Path(place) / f"images{n}"
    for at in range(n // 10):
        (root / "ab"[at % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.full((256, 256, 3), at % 251, np.uint8)
        Image.fromarray(pixels).save(root / "ab"[at % 2] / f"{at}.png")
    return ImageFolder(root)

make = {
    "stream": lambda n: map(sample, range(n)),
    "samples": Samples,
    "processes": Samples,
    "batches": lambda n: Batches(batches(n)),
    "images": folder,
}

def write(kind):
    options = {"n_shards": 4, "stratify": "y"}
    ShardedDataset.write(f"{place}/{kind}/small", make[kind](200), **options)  # imports
    options |= {"workers": 2} if kind == "processes" else {}
    source = make[kind](18_000)
    before = peak()
    data = ShardedDataset.write(f"{place}/{kind}/out", source, **options)
    print(kind, data.nbytes >> 20, peak() - before, flush=True)
    shutil.rmtree(f"{place}/{kind}")

if __name__ == "__main__":
    for kind in kinds:
        if os.fork():
            assert os.wait()[1] == 0
        else:
            write(kind)
            os._exit(0)
"""
KINDS_OF_STREAM = ["stream", "samples", "processes", "batches", "images"]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """How much each kind has written and taken, in MB; each in a copy of one process."""
    folder = tmp_path_factory.mktemp("peaks")
    (folder / "peak.py").write_text(PEAK)
    command = [sys.executable, "peak.py", str(folder), *KINDS_OF_STREAM]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=500, env=path, cwd=folder
    )
    rows = [line.split() for line in told.stdout.splitlines()]
    return {kind: (int(nbytes_mb), int(more_mb)) for kind, nbytes_mb, more_mb in rows}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_OF_STREAM)
def test_what_is_streamed_is_never_in_memory(kind: str, peaks: dict[str, tuple[int, int]]) -> None:
    nbytes_mb, more_mb = peaks[kind]
    assert nbytes_mb > 270
    assert more_mb < 200, f"{nbytes_mb} MB took {more_mb} MB"


def test_a_stream_of_samples_of_unequal_size_is_spooled(tmp_path: Path) -> None:
    def tokens() -> Iterator[Any]:
        for at in range(N):
            yield {"ids": [at] * (at % 7), "y": KINDS[at % 3], "id": at}

    data = ShardedDataset.write(tmp_path / "a", tokens(), n_shards=2, stratify="y", ragged=["ids"])
    assert sorted(int(sample["id"]) for sample in data) == list(range(N))
    for sample in data:
        at = int(sample["id"])
        assert (sample["ids"].tolist(), int(sample["y"])) == ([at] * (at % 7), at % 3)
