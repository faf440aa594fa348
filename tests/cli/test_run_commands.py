"""A search of `dagsel run` is looked at, watched and stopped by other processes; Ctrl-C ends it and
it goes on; all commands tell of it in the same words."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import dagsel
from dagsel.cli import main
from dagsel.errors import SearchError
from tests.cli.searches import DAGSEL, asked, call, environment, write_script
from tests.waiting import wait_until


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a search in a process of its own; one worker, and nothing shown."""
    process = subprocess.Popen(
        [DAGSEL, "run", *words, "--workers", "1", "--progress", "none"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def has_epochs(folder: Path) -> bool:
    """Whether the search there has ended an epoch."""
    if not (folder / "journal.jsonl").exists():
        return False
    return dagsel.load(folder).record.n_epochs > 0


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a search has ended, in ``run``."""
    folder = tmp_path_factory.mktemp("ended")
    write_script(folder, epochs=2)
    call("run", "search.py", "--run-dir", "run", "--workers", "1", cwd=folder)
    return folder


def test_all_commands_tell_the_same_of_a_search_that_has_ended(ended: Path) -> None:
    told = asked("status", "run", cwd=ended)
    assert (told["state"], told["driver"], told["counts"]) == ("ended", "", {"complete": 3})
    assert (told["epochs"], told["metric"], told["money"]) == (6, "value", None)
    run = dagsel.load(ended / "run")
    assert (told["best"]["trial"], told["best"]["value"]) == (run.best.trial, run.best_value)
    assert told["best"]["params"] == run.best_params
    watched = call("watch", "run", "--json", cwd=ended).stdout.splitlines()
    assert [json.loads(line) for line in watched] == [told]
    text = call("status", "run", cwd=ended).stdout
    assert "has ended" in text.splitlines()[0]
    assert "worker" not in text  # those that it had
    assert call("watch", "run", cwd=ended).stdout == text
    assert asked("stop", "run", cwd=ended, code=1)["error"] == "SearchError"
    assert asked("report", "run", "-o", "page.html", cwd=ended) == {"report": "page.html"}
    assert "<html" in (ended / "page.html").read_text()


def test_the_runs_of_a_folder_are_listed_the_newest_first(ended: Path, tmp_path: Path) -> None:
    runs = tmp_path / "dagsel-runs"
    for name in ("a-20260301-101501-22bb", "b-20260301-101500-11aa"):
        shutil.copytree(ended / "run", runs / name)
    (runs / "b-20260301-101500-11aa" / "run.json").write_text("{")
    (runs / "notes").mkdir()
    good, damaged = asked("status", cwd=tmp_path)["runs"]
    run = dagsel.load(ended / "run")
    assert (good["run_dir"], good["state"]) == (str(runs / "a-20260301-101501-22bb"), "ended")
    assert (good["metric"], good["value"], good["front"]) == ("value", run.best_value, None)
    assert (damaged["state"], "no JSON" in damaged["error"]) == ("damaged", True)
    text = call("status", str(runs), cwd=tmp_path).stdout.splitlines()
    assert text[0].split() == ["run", "procedure", "state", "best"]
    best = f"{run.best_value:.4g}"
    assert text[1].split() == ["a-20260301-101501-22bb", good["flow"], "ended", "value", best]
    assert text[2].split() == ["b-20260301-101500-11aa", "damaged"]
    assert "holds no run" in call("status", cwd=ended, code=1).stderr


def test_a_search_is_watched_and_stopped(tmp_path: Path) -> None:
    write_script(tmp_path, epochs=1000, trials=3, seconds=0.05)
    with running(tmp_path, "search.py", "--run-dir", "run", "--json") as process:
        wait_until(lambda: has_epochs(tmp_path / "run"), "an epoch")
        told = asked("status", "run", cwd=tmp_path)
        assert told["state"] == "running"
        assert f"pid {process.pid} " in told["driver"]
        assert {trial["state"] for trial in told["trials"]} == {"training"}
        watching = subprocess.Popen(
            [DAGSEL, "watch", "run", "--json"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["state"] == "running"
        assert asked("stop", "run", "1", cwd=tmp_path)["stopped"] == 1
        assert "no such trial" in call("stop", "run", "7", cwd=tmp_path, code=1).stderr
        assert "token" in call("stop", "run", "--token", "x", cwd=tmp_path, code=1).stderr
        stopped = asked("stop", "run", cwd=tmp_path)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, err)
        lines = watching.communicate(timeout=60)[0].splitlines()
    assert json.loads(out) == stopped == json.loads(lines[-1])
    assert stopped["state"] == "ended"
    trials = {trial["trial"]: trial for trial in stopped["trials"]}
    assert trials[1]["reason"] == "stopped by the user"
    assert sum(stopped["counts"].values()) == 3
    assert "training" not in stopped["counts"]


def test_ctrl_c_is_130_and_the_run_goes_on(tmp_path: Path) -> None:
    write_script(tmp_path, epochs=60, trials=2, seconds=0.05)
    with running(tmp_path, "search.py", "--run-dir", "run", "--json") as process:
        wait_until(lambda: has_epochs(tmp_path / "run"), "an epoch")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Ctrl-C: the search ends at the next batch" in err
    assert json.loads(out)["state"] == "interrupted"
    assert json.loads(out)["epochs"] < 120
    assert "--resume" in call("status", "run", cwd=tmp_path).stdout
    words = ("run", "search.py", "--resume", "run", "--workers", "1")
    assert asked(*words, cwd=tmp_path)["epochs"] == 120


def test_a_killed_driver_leaves_a_run_that_is_told_as_interrupted(tmp_path: Path) -> None:
    write_script(tmp_path, epochs=1000, seconds=0.05)
    with running(tmp_path, "search.py", "--run-dir", "run") as process:
        wait_until(lambda: has_epochs(tmp_path / "run"), "an epoch")
        process.kill()
        process.wait(60)
    stands = asked("status", "run", cwd=tmp_path)
    assert stands["state"] == "interrupted"
    assert (stands["workers"], stands["units_per_second"], stands["seconds_left"]) == (0, 0, None)
    assert "--resume" in call("status", "run", cwd=tmp_path).stdout
    last = call("watch", "run", "--json", cwd=tmp_path).stdout.splitlines()[-1]
    assert json.loads(last)["state"] == "interrupted"
    assert "nobody drives" in call("stop", "run", cwd=tmp_path, code=1).stderr


def test_what_a_run_of_anothers_says_is_logged_without_what_a_terminal_obeys(
    tmp_path: Path,
) -> None:
    shutil.copytree(Path(__file__).parents[1] / "data/runs_of_163b1ee/asha-ended", tmp_path / "run")
    about = tmp_path / "run/run.json"
    home = "journal:///none\x1b[2J"
    about.write_text(json.dumps({**json.loads(about.read_text()), "home": home}))
    told = call("report", "run", cwd=tmp_path).stderr
    assert "opened without its study: study 'asha-ended' at journal:///none�[2J" in told


def test_a_token_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[str | None]()

    def attach(run_dir: str, *, token: str | None) -> None:
        given.append(token)
        raise SearchError("enough")

    monkeypatch.setattr(dagsel, "attach", attach)
    CliRunner().invoke(main, ["stop", "run"], env={"DAGSEL_TOKEN": "from there"})
    assert given == ["from there"]


def test_the_shell_completes_commands_and_options(tmp_path: Path) -> None:
    def completed(words: str) -> list[str]:
        about = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = subprocess.run(
            [DAGSEL],
            env={**environment(), "_DAGSEL_COMPLETE": "bash_complete", **about},
            capture_output=True,
            text=True,
        )
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("dagsel st") == ["status", "stop"]
    assert completed("dagsel run --re") == ["--resume"]
    source = subprocess.run(
        [DAGSEL],
        env={**environment(), "_DAGSEL_COMPLETE": "zsh_source"},
        capture_output=True,
        text=True,
    )
    assert "compdef" in source.stdout
