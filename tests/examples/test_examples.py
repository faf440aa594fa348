"""Each example keeps its promise in a small form, prints no warning, and needs no checkout.

What it says that it has written is read back. With EXAMPLES=all they run with their own defaults
as well.
"""

from __future__ import annotations

import ast
import gc
import gzip
import importlib.util
import json
import os
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch

from tests.programs import PORT_TAKEN, ROOT, run_here

from .forms import LARGE, SMALL

EXAMPLES = ROOT / "examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.py"))
#: What an example needs that is no part of dagsel's own requirements.
NEEDS = {
    "gateway.py": ["dask_gateway", "dask_gateway_server"],
    "image_folder.py": ["PIL"],
    "lightning_cnn.py": ["lightning", "torchmetrics"],
    "lora.py": ["transformers", "peft"],
    "own_flow.py": ["hypothesis"],
}
#: What a small form's best value is at least, whatever the order of training.
LEAST = {
    "cluster_and_resume.py": 0.8,
    "csv_table.py": 0.5,
    "digits.py": 0.95,
    "gateway.py": 0.7,
    "hermes.py": 0.7,
    "image_folder.py": 0.35,
    "lightning_cnn.py": 0.5,
    "lora.py": 0.2,
    "marble_queue.py": 0.6,
    "mnist_cnn.py": 0.6,
    "multi_objective.py": 0.6,
    "own_flow.py": 0.7,
    "own_workload.py": 0.85,
    "pbt.py": 0.75,
    "seer.py": 0.5,
    "sklearn_sgd.py": 0.85,
    "text.py": 0.52,
}
#: PEFT's word, and what dask-gateway's client raises when it is collected after it was closed.
SAID_BY_OTHERS = (
    "ignore:`is_gradient_checkpointing` is:FutureWarning",
    "ignore:Exception ignored in. <function Gateway.__del__:"
    "pytest.PytestUnraisableExceptionWarning",
)


class Printed:
    """What a run of an example has printed."""

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def best(self) -> float:
        """Return the value of the line that says the outcome."""
        (value,) = re.findall(r"^best (?:accuracy|perplexity) (\d+\.\d+)", self.text, re.MULTILINE)
        return float(value)

    def path(self, said: str = "(?:model|adapter) saved in") -> Path:
        """Return the file that was written, as the last lines say it."""
        (path,) = re.findall(rf"{said} (\S+)$", self.text, re.MULTILINE)
        return Path(path)

    def weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = torch.load(self.path(), weights_only=True)
        return weights


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run an example, with these options or those of its small form, in a folder of its own."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))

    def call(name: str, options: list[str] | None = None) -> Printed:
        for module in NEEDS.get(name, ()):
            pytest.importorskip(module)
        capfd.readouterr()
        run_here(EXAMPLES / name, *(SMALL[name] if options is None else options), folder=tmp_path)
        out, err = capfd.readouterr()
        if name == "gateway.py":
            gc.collect()  # in this test and no other
        assert not re.search("warning|traceback|exception", out + err, re.IGNORECASE), out + err
        printed = Printed(out)
        assert printed.path().exists()
        assert re.search("^best .*$|written to", out.splitlines()[-1])
        return printed

    return call


def test_each_has_a_small_form_and_a_line_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) \|", table, re.MULTILINE)
    assert [(name, name) for name in FILES] == sorted(rows)
    assert sorted(SMALL) == sorted(LARGE) == sorted(LEAST) == FILES
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {one for row in re.findall(r"`dagsel\[([\w,]+)\]`", table) for one in row.split(",")}
    assert named <= set(extras)


@pytest.mark.parametrize("name", FILES)
def test_it_says_how_to_run_it_and_needs_no_checkout(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    told = ast.get_docstring(tree) or ""
    assert f"python examples/{name}" in told
    assert re.search(r"(minutes?|seconds)\s+on\s+two\s+cores|deadline", told), "how long it takes"
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in imported}
    assert not roots & {"", "tests", "examples", *(Path(one).stem for one in FILES)}


@pytest.mark.parametrize("name", FILES)
def test_no_file_has_the_name_of_a_package(name: str) -> None:
    assert importlib.util.find_spec(Path(name).stem) is None


@pytest.mark.slow
@pytest.mark.filterwarnings(PORT_TAKEN, *SAID_BY_OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_its_small_form_comes_to_a_good_model(name: str, run: Any) -> None:
    printed = run(name)
    assert LEAST[name] <= printed.best <= 1.0
    check = CHECKS.get(name)
    if check is not None:
        check(printed)
    elif printed.path().suffix == ".pt":
        assert printed.weights()


def check_csv(printed: Printed) -> None:
    assert "2,700 samples in 4 shards" in printed.text
    predictions = pd.read_csv(printed.path("300 predictions written to"))
    letters = pd.read_csv(printed.path().parent / "letters.csv")["letter"]
    assert len(predictions) == 300
    assert set(predictions["predicted"]) <= set(letters)
    assert predictions["probability"].between(0, 1).all()


def check_digits(printed: Printed) -> None:
    assert len(re.findall(r"^ *\d+ +0\.\d+ .*$", printed.text, re.MULTILINE)) == 8
    assert printed.weights()["2.bias"].shape == (10,)


def check_hermes(printed: Printed) -> None:
    turns = re.findall(r"^ *\d+ .* (\d+)$", printed.text, re.MULTILINE)
    assert len(turns) == 4
    assert min(map(int, turns)) >= 4  # an epoch is a turn at least


def check_lightning(printed: Printed) -> None:
    example = runpy.run_path(str(EXAMPLES / "lightning_cnn.py"))
    module = example["DigitsCNN"].load_from_checkpoint(printed.path(), weights_only=True)
    assert module.hparams.channels in (4, 8)


def check_adapter(printed: Printed) -> None:
    assert (printed.path() / "adapter_model.safetensors").exists()
    assert json.loads((printed.path() / "adapter_config.json").read_text())["r"] >= 1


def check_queue(printed: Printed) -> None:
    gangs = re.findall(r"^\d +(small|wide) .* (\d) +\S+ +\S+ +\S+$", printed.text, re.MULTILINE)
    assert [name for name, _ in gangs] == ["wide", "small", "small", "wide", "small"]
    n_cores = os.cpu_count() or 1
    assert {n for name, n in gangs if name == "small"} == {"1"}
    assert ("wide", "2" if n_cores > 1 else "1") in gangs


def check_front(printed: Printed) -> None:
    (n_front, n_trials) = re.findall(
        r"^(\d+) of (\d+) trials are on the front", printed.text, re.M
    )[0]
    assert 1 <= int(n_front) <= int(n_trials) == 6


def check_own_flow(printed: Printed) -> None:
    assert "10 laws kept" in printed.text
    assert "among the worst of its epoch" in printed.text


def check_own_workload(printed: Printed) -> None:
    assert np.load(printed.path()).shape == (64, 10)
    assert "laws kept" in printed.text


def check_population(printed: Printed) -> None:
    assert re.search(r"  trial \d after epoch [123]", printed.text)


def check_seer(printed: Printed) -> None:
    assert "trials  workers a trial" in printed.text  # the preview
    assert "planned" in printed.text
    assert "</svg>" in printed.path("report written to").read_text()


def check_resumed(printed: Printed) -> None:
    (before, of) = re.findall(r"killed after (\d+) of (\d+) epochs", printed.text)[0]
    (after,) = re.findall(r"^the other (\d+) epochs", printed.text, re.MULTILINE)
    assert int(before) + int(after) == int(of) == 12
    assert 4 <= int(before) <= 12  # a busy machine kills late
    check_estimator(printed)


def check_estimator(printed: Printed) -> None:
    assert joblib.load(printed.path()).predict(np.zeros((1, 64))).shape == (1,)


CHECKS = {
    "cluster_and_resume.py": check_resumed,
    "csv_table.py": check_csv,
    "digits.py": check_digits,
    "hermes.py": check_hermes,
    "lightning_cnn.py": check_lightning,
    "lora.py": check_adapter,
    "marble_queue.py": check_queue,
    "multi_objective.py": check_front,
    "own_flow.py": check_own_flow,
    "own_workload.py": check_own_workload,
    "pbt.py": check_population,
    "seer.py": check_seer,
    "sklearn_sgd.py": check_estimator,
}


@pytest.mark.slow
def test_one_runs_twice_in_a_row_and_takes_a_file_of_your_own(run: Any, tmp_path: Path) -> None:
    """A second file of its own, with words as label and rows without one to predict."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(400, 3)).round(3), columns=["long", "wide", "deep"])
    table["kind"] = np.where(table["long"] > table["wide"], "spoon", "fork")
    table.to_csv(tmp_path / "mine.csv", index=False)
    table.drop(columns="kind").head(20).to_csv(tmp_path / "new.csv", index=False)
    own = ["--data=mine.csv", "--label=kind", "--predict=new.csv", "--trials=2", "--epochs=9"]
    for _ in range(2):
        printed = run("csv_table.py", own)
        assert printed.best > 0.7
        predicted = pd.read_csv(printed.path("20 predictions written to"))["predicted"]
        assert (predicted == table["kind"].head(20)).mean() > 0.6


def write_idx(path: Path, array: np.ndarray) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    header = (0x0800 + array.ndim).to_bytes(4, "big") + sizes
    path.write_bytes(gzip.compress(header + array.tobytes(), compresslevel=1))


@pytest.mark.slow
def test_the_mnist_example_reads_the_original_files(run: Any, tmp_path: Path) -> None:
    labels = np.tile(np.arange(10, dtype=np.uint8), 60)
    images = np.zeros((600, 28, 28), np.uint8)
    for index, label in enumerate(labels):  # a bar whose place is the class
        images[index, 2 * label + 4 : 2 * label + 7] = 255
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", labels)
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", images[:50])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", labels[:50])
    printed = run("mnist_cnn.py", ["--data", str(tmp_path), *SMALL["mnist_cnn.py"]])
    assert "600 samples in 2 shards" in printed.text
    assert printed.best > 0.5
    assert printed.weights()["0.weight"].shape[1:] == (1, 3, 3)


def test_the_mnist_example_says_what_it_misses(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="give --data the folder of the files"):
        run_here(EXAMPLES / "mnist_cnn.py", "--data", str(tmp_path), folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings(PORT_TAKEN, *SAID_BY_OTHERS)
@pytest.mark.skipif(os.environ.get("EXAMPLES") != "all", reason="takes minutes: EXAMPLES=all")
@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, forms in LARGE.items() for options in forms]
)
def test_a_larger_form_comes_to_a_good_model(name: str, options: list[str], run: Any) -> None:
    assert run(name, options).best >= LEAST[name]
