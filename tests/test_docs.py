"""What the documents say: their programs run, their links resolve, their site builds offline.

The blocks ``python`` of a page are one script. A block behind the comment ``notest`` is left out. A
block behind ``needs: ray`` is a program of its own, and runs where Python finds that package.
Tutorials are notebooks, and run in ``test_tutorials.py``.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import dask.config
import numpy as np
import pytest
import torch

from . import tested

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(
    r"(?:<!-- (notest|needs: \w+) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
#: The Python that runs programs of packages that the environment of the tests lacks.
OTHER_PYTHON = os.environ.get("OTHER_PYTHON", sys.executable)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MNIST = ROOT / "examples/mnist_cnn.py"
#: Its program is run as a user runs it; `test_first_hour.py` runs others so.
FIRST = ROOT / "README.md"
#: How the example of adapters is called here; at night by each of its options.
ADAPTERS = ["--task=classify"]
if os.environ.get("EXAMPLES") == "all":
    ADAPTERS += ["--task=generate", "--flow=seer --deadline=60s --budget=100worker-s"]
#: What a page says that its programs print.
PRINTS = re.compile(r"[Pp]rints `([^`]+)`")
#: What it shows as their output.
SHOWN = re.compile(r'^```text title="Output"\n(.*?)\n```$', re.DOTALL | re.MULTILINE)
#: A dashboard of somebody else on this machine is no fault of a page.
PORT_TAKEN = "ignore:Port 8787 is already in use:UserWarning"
#: What Lightning's own Trainer says on a machine with Slurm, on one with many cores, and anywhere.
OF_LIGHTNING = (
    "ignore:The `srun` command is available",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
)
#: A test that a page refers to.
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def blocks(page: Path) -> list[str]:
    return [code for mark, code in BLOCK.findall(page.read_text()) if not mark]


#: Programs of other projects that pages show: the package that each needs, and its text.
OTHERS = [
    pytest.param(mark.removeprefix("needs: "), code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (mark, code) in enumerate(BLOCK.findall(page.read_text()))
    if mark.startswith("needs: ")
]


def name_of(page: Path) -> str:
    """Return how a page is called among the tests: by its path, as two may have one name."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def run(*command: str, folder: Path) -> str:
    """Run a command as a user does, in a folder of its own; any warning is an error."""
    temporary = folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", PORT_TAKEN, *command],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(program: Path, *arguments: str, folder: Path) -> None:
    """Run a program in this process, which has imported already what takes most of its time.

    What it says to Dask and PyTorch for all that follows is forgotten afterwards.
    """
    said, n_threads = copy.deepcopy(dask.config.config), torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(tempfile, "tempdir", str(folder))
            patch.setattr(sys, "argv", [str(program), *arguments])
            runpy.run_path(str(program), run_name="__main__")
    finally:
        torch.set_num_threads(n_threads)
        dask.config.config.clear()
        dask.config.config.update(said)


@pytest.mark.slow
@pytest.mark.filterwarnings(PORT_TAKEN)
@pytest.mark.filterwarnings(*OF_LIGHTNING)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page) and page.parent.name != "tutorials"],
    ids=name_of,
)
def test_the_programs_of_a_page_run(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.py").write_text("\n".join(blocks(page)))
    if page == FIRST:
        printed = run("page.py", folder=tmp_path)
    else:
        run_here(tmp_path / "page.py", folder=tmp_path)
        printed = capsys.readouterr().out
    for said in (*PRINTS.findall(page.read_text()), *SHOWN.findall(page.read_text())):
        assert said in "\n".join(line.rstrip() for line in printed.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("package", "code"), OTHERS)
def test_the_programs_of_others_run_where_their_package_is(
    package: str, code: str, tmp_path: Path
) -> None:
    """`OTHER_PYTHON=/path/to/python` names a Python that has it; what these warn of is theirs."""
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    if subprocess.run([OTHER_PYTHON, "-c", find], check=False).returncode:
        pytest.skip(f"{OTHER_PYTHON} has no {package}")
    (tmp_path / "program.py").write_text(code)
    environment = {**os.environ, "HOME": str(tmp_path)}  # where some of them keep their results
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [OTHER_PYTHON, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_few_blocks_are_left_out() -> None:
    fences = [found for page in PAGES for found in BLOCK.findall(page.read_text())]
    assert sum(mark == "notest" for mark, _ in fences) <= 4
    assert len(fences) == sum(page.read_text().count("```python") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    for path, name in TEST.findall(page.read_text()):
        if "/" in path:
            text = (ROOT / path).read_text()
            assert not name or re.search(rf"def {name}\(", text), (path, name)


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert all(re.search(rf"[:-] {page}\n", config) for page in pages)


def test_the_page_of_the_tests_is_what_they_say() -> None:
    wrong = "docs/measured/tests.md is out of date: python tests/tested.py"
    assert tested.PAGE.read_text() == tested.page(), wrong
    files = {path.relative_to(ROOT).as_posix() for path in tested.TESTS.rglob("test_*.py")}
    assert files == set(re.findall(r"^\| \S.* \| `([^`]+)` \|$", tested.page(), re.MULTILINE))


@pytest.mark.slow
def test_the_site_builds_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="needs the extra docs")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("dagsel", "flows", "storage"):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    site = tmp_path / "site"
    asked = re.compile(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="?((?:https?:)?//[^"\s>]+)')
    imported = re.compile(r"(?:@import|url\()[\s\"']*((?:https?:)?//[^\"')]+)")
    for path in site.rglob("*"):
        if path.suffix == ".html":
            assert not asked.findall(path.read_text()), path
        elif path.suffix == ".css":
            assert not imported.findall(path.read_text()), path
    found = (site / "search.json").read_text().casefold()
    for word in ("tensorboard", "parquet", "f1", "augment", "tutorial", "faq", "csv", "slurm"):
        assert word in found, word


def saved_model(output: str) -> dict[str, torch.Tensor]:
    """Load what a program says that it has saved."""
    (path,) = re.findall(r"model saved in (\S+)", output)
    model: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return model


def best_accuracy(output: str) -> float:
    (accuracy,) = re.findall(r"best accuracy (\d\.\d+)", output)
    return float(accuracy)


@pytest.mark.slow
def test_the_digits_example_keeps_its_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(ROOT / "examples/digits.py", folder=tmp_path)
    output = capsys.readouterr().out
    assert best_accuracy(output) >= 0.95
    leaderboard = re.findall(r"^ *\d+ +0\.\d+ .*$", output, re.MULTILINE)
    assert len(leaderboard) == 8
    assert saved_model(output)["2.bias"].shape == (10,)


@pytest.mark.slow
def test_the_lightning_example_saves_a_checkpoint_that_lightning_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning", reason="needs the extra lightning")
    program = ROOT / "examples/lightning_cnn.py"
    run_here(program, "--trials", "3", "--epochs", "3", folder=tmp_path)
    output = capsys.readouterr().out
    assert best_accuracy(output) > 0.5
    (path,) = re.findall(r"model saved in (\S+)", output)
    module = runpy.run_path(str(program))["DigitsCNN"].load_from_checkpoint(path, weights_only=True)
    assert module.hparams.channels in (4, 8)


def write_idx(path: Path, array: np.ndarray) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    header = (0x0800 + array.ndim).to_bytes(4, "big") + sizes
    path.write_bytes(gzip.compress(header + array.tobytes(), compresslevel=1))


@pytest.mark.slow
def test_the_mnist_example_reads_the_original_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = np.tile(np.arange(10, dtype=np.uint8), 60)
    images = np.zeros((600, 28, 28), np.uint8)
    for index, label in enumerate(labels):  # a bar whose place is the class
        images[index, 2 * label + 4 : 2 * label + 7] = 255
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", labels)
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", images[:50])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", labels[:50])
    options = ["--trials", "2", "--epochs", "3", "--shards", "2"]
    run_here(MNIST, "--data", str(tmp_path), *options, folder=tmp_path)
    output = capsys.readouterr().out
    assert "600 samples in 2 shards" in output
    assert best_accuracy(output) > 0.5
    assert saved_model(output)["0.weight"].shape[1:] == (1, 3, 3)


def test_the_mnist_example_says_what_it_misses(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="give --data the folder of the files"):
        run_here(MNIST, "--data", str(tmp_path), folder=tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
@pytest.mark.parametrize("options", ADAPTERS)
def test_the_example_of_adapters_writes_one_that_peft_reads(
    options: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    few = ["--trials", "2", "--epochs", "1", "--sentences", "60", "--steps", "3"]
    run_here(ROOT / "examples/lora.py", *few, *options.split(), folder=tmp_path)
    (folder,) = re.findall(r"adapter saved in (\S+)", capsys.readouterr().out)
    assert (Path(folder) / "adapter_model.safetensors").exists()
    assert json.loads((Path(folder) / "adapter_config.json").read_text())["r"] >= 1
