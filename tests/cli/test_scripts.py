"""`dagsel run` and `preview` take what a script's search() returns; of a script that defines none,
or raises, they name the line, and nothing is begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dagsel.cli import main
from tests.cli.searches import SLEEPING, write_script


def call(*words: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path


SEER = """
from dagsel.flows import SEER

def search():
    limits = {"deadline": "10 min", "budget": "80 worker-minutes"}
    return {"flow": SEER(**limits, reduction_factor=2, min_stage="1 min", mode="paper")}
"""


def test_a_search_with_a_plan_is_previewed_as_it_is(here: Path) -> None:
    (here / "seer.py").write_text(SEER)
    told = json.loads(call("preview", "seer.py", "--json").stdout)
    assert (told["flow"], told["source"], told["seconds"]) == ("SEER", "arithmetic", 600.0)
    assert (told["trials"], len(told["rows"])) == (12, 3)
    assert "worker-minutes" in call("preview", "seer.py").stdout


def test_any_other_is_simulated(here: Path) -> None:
    write_script(here, epochs=4, trials=6)
    words = ("preview", "search.py", "--workers", 3, "--epoch", "10 s", "--json")
    told = json.loads(call(*words).stdout)
    assert (told["source"], told["seconds"], told["workers"]) == ("simulation", 80.0, 3)
    assert json.loads(call(*words[:5], "10", "--json").stdout) == told
    assert "--workers and --epoch" in call("preview", "search.py", code=1).stderr


def test_one_metric_for_a_study_with_two_directions_is_told_of(here: Path) -> None:
    write_script(here, epochs=4)
    script = (here / "search.py").read_text()
    (here / "search.py").write_text(
        script.replace('direction="maximize"', 'directions=["maximize", "minimize"]')
    )
    words = ("preview", "search.py", "--workers", 3, "--epoch", "10 s")
    assert "write metric=['value', ...]" in call(*words, code=1).stderr


SCRIPTS = {
    "x = 1": "defines no function search()",
    "import nothing_like_this": "line 1: ModuleNotFoundError",
    "def search():\n    return 1 / 0": "line 2: ZeroDivisionError: division by zero",
    "def search():\n    return 3": "returns int, and must return",
    "def search(": "SyntaxError",
    "def search():\n    return {'studdy': 3}": "studdy",
    "def search():\n    return {'flow': 3}": "does not return study and workload and",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_defines_no_search(here: Path, script: str) -> None:
    (here / "script.py").write_text(script)
    done = call("run", "script.py", code=1)
    assert SCRIPTS[script] in done.stderr
    assert "script.py" in done.stderr
    assert not (here / "dagsel-runs").exists()


def test_a_script_finds_what_lies_beside_it(here: Path) -> None:
    folder = here / "elsewhere"
    folder.mkdir()
    (folder / "cli_neighbour.py").write_text("N_TRIALS = 6\n")
    text = SLEEPING % {"epochs": 4, "trials": 0, "seconds": 0.0}
    text = text.replace("n_trials=0", "n_trials=cli_neighbour.N_TRIALS")
    (folder / "search.py").write_text(f"import cli_neighbour\n{text}")
    words = ("preview", "elsewhere/search.py", "--workers", 1, "--epoch", 1, "--json")
    assert json.loads(call(*words).stdout)["trials"] == 6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--scheduler", "tcp://127.0.0.1:1", "--workers", "2"), "give one of"),
        (("--gpus", "--workers", "2"), "give one of"),
        (("--resume", "run", "--deadline", "10 min"), "own folder, deadline and budget"),
        (("--workers", "0"), "0 is not in the range"),
        (("--progress", "loud"), "'loud' is not one of"),
    ],
)
def test_options_that_do_not_go_together(here: Path, options: tuple[str, ...], told: str) -> None:
    write_script(here, epochs=1)
    assert told in call("run", "search.py", *options, code=2).stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--deadline", "soon"), "is no time"),
        (("--budget", "much"), "budget"),
        (("--resume", "nowhere"), "holds no run"),
    ],
)
def test_limits_that_cannot_be_read(here: Path, options: tuple[str, ...], told: str) -> None:
    write_script(here, epochs=1)
    done: Any = call("run", "search.py", *options, code=1)
    assert told in done.stderr
