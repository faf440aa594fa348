"""One driver holds a run_dir at a time, others are told who, and the dead stand in nobody's way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dagsel.errors import RunDirError, RunDirLockedError
from dagsel.storage import RunDir
from dagsel.storage.files import Folder
from dagsel.storage.runs.lock import Holder, RunLock, _started
from tests.waiting import wait_until

# Waits for a line, tries to take the lock, says how it went, holds it until it is killed.
CONTENDER = """
import sys
from dagsel.errors import RunDirLockedError
from dagsel.storage import RunDir
print("ready", flush=True)
for _ in sys.stdin:
    try:
        lock = RunDir(sys.argv[1]).lock(sys.argv[2])
    except RunDirLockedError as error:
        print("refused", error, flush=True)
    else:
        print("held", flush=True)
"""


@pytest.fixture
def contenders(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(tmp_path / "run"), f"run-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(5)
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def ask(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Let all try at once; give what each says."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.stdout.readline().strip() for process in processes if process.stdout]


def test_of_many_processes_one_wins_and_when_it_is_killed_another(
    contenders: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert {process.stdout.readline() for process in contenders if process.stdout} == {"ready\n"}
    while len(contenders) > 1:
        said = ask(contenders)
        assert said.count("held") == 1, said
        winner = contenders.pop(said.index("held"))
        said.remove("held")
        assert all(f"pid {winner.pid} " in text for text in said)
        with pytest.raises(RunDirLockedError, match=f"pid {winner.pid} "):
            RunDir(tmp_path / "run").lock("mine")
        winner.send_signal(signal.SIGKILL)
        winner.wait()
        winner.communicate()


def test_the_second_is_told_who_where_and_since_when(place: Any) -> None:
    with RunDir(place.url, place.options).lock("3f9a") as lock:
        with pytest.raises(RunDirLockedError) as error:
            RunDir(place.url, place.options).lock("other")
        holder = lock.holder
        for part in ("run 3f9a", f"pid {os.getpid()}", holder.user, holder.host, holder.since):
            assert part in str(error.value)
        assert holder.since.startswith("20")
        assert holder.since.endswith("+00:00")
    with RunDir(place.url, place.options).lock("other"):
        pass
    assert place.files() == []


def test_it_is_given_back_whatever_happens(tmp_path: Path) -> None:
    lock = RunDir(tmp_path).lock("one")
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    lock.release()
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name == "dagsel-lock"]


def left_behind(
    folder: Path | str, options: dict[str, Any] | None = None, **changes: Any
) -> Holder:
    """Leave the lock of another driver, like ours but for the changes."""
    Folder(folder, options).remove_file("lock.json")
    with RunDir(folder, options).lock("dead") as lock:
        holder = replace(lock.holder, token="another", **changes)
    Folder(folder, options).replace("lock.json", json.dumps(asdict(holder)).encode())
    return holder


def test_a_number_that_another_process_has_now_holds_nothing(tmp_path: Path) -> None:
    left_behind(tmp_path, process="1", beat=time.time() + 1e6)
    with RunDir(tmp_path).lock("new") as lock:
        assert json.loads((tmp_path / "lock.json").read_text())["token"] == lock.holder.token


@pytest.mark.parametrize("pid", [-1, 2**31, 10**30])
def test_a_number_that_no_process_can_have_holds_nothing(tmp_path: Path, pid: int) -> None:
    left_behind(tmp_path, pid=pid)
    assert RunDir(tmp_path).driver is None
    RunDir(tmp_path).lock("new").release()


def test_a_living_process_of_this_machine_holds_it_however_old_its_heartbeat(
    tmp_path: Path,
) -> None:
    left_behind(tmp_path, beat=0.0)
    with pytest.raises(RunDirLockedError):
        RunDir(tmp_path).lock("new")


def test_one_that_has_died_but_was_not_waited_for_is_dead(tmp_path: Path) -> None:
    code = "import sys; from dagsel.storage import RunDir; RunDir(sys.argv[1]).lock('a'); print(1)"
    code += "; sys.stdout.flush(); import os; os._exit(0)"
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.read() == b"1\n"
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        RunDir(tmp_path).lock("new").release()


def test_a_driver_elsewhere_is_dead_when_its_heartbeat_is_old(place: Any) -> None:
    run_dir = RunDir(place.url, place.options)
    left_behind(place.url, place.options, machine="far away", beat=time.time() - 55)
    with pytest.raises(RunDirLockedError, match="run dead"):
        run_dir.lock("new", beat_s=0.01)
    left_behind(place.url, place.options, machine="far away", beat=time.time() - 65)
    with run_dir.lock("new", beat_s=0.01), pytest.raises(RunDirLockedError, match="run new"):
        run_dir.lock("third")


def test_a_driver_elsewhere_whose_clock_is_slow_is_seen_to_live(tmp_path: Path) -> None:
    there = left_behind(tmp_path, machine="far away", beat=1.0)
    folder, is_over = Folder(tmp_path), threading.Event()

    def beat() -> None:
        for n in range(10**6):
            if is_over.wait(0.002):
                return
            folder.replace("lock.json", json.dumps(asdict(replace(there, beat=1.0 + n))).encode())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunDirLockedError, match="run dead"):
            RunDir(tmp_path).lock("new", beat_s=0.1)
    finally:
        is_over.set()
        thread.join()


def test_the_heartbeat_is_renewed_and_a_holder_that_lost_it_finds_out(place: Any) -> None:
    folder = Folder(place.url, place.options)
    lock: RunLock = RunDir(place.url, place.options).lock("one", beat_s=0.01)
    begin = lock.holder.beat
    wait_until(lambda: json.loads(folder.read("lock.json") or b"")["beat"] > begin, "a heartbeat")
    lock.check()
    taken = replace(lock.holder, token="another", run="two")
    # It may be renewing just now, which is the moment that the module's text speaks of.
    now_theirs = json.dumps(asdict(taken)).encode()

    def is_told() -> bool:
        folder.replace("lock.json", now_theirs)
        return lost(lock)

    wait_until(is_told, "it is told")
    with pytest.raises(RunDirLockedError, match="run two"):
        lock.check()
    lock.release()
    assert json.loads(folder.read("lock.json") or b"")["run"] == "two", "it is not ours to remove"


def lost(lock: RunLock) -> bool:
    try:
        lock.check()
    except RunDirLockedError:
        return True
    return False


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 100_000, b'{"run": 7}', b"\x80\x04."])
def test_a_damaged_lock_is_refused_with_its_cure(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "lock.json").write_bytes(data)
    with pytest.raises(RunDirLockedError, match="lock.json is damaged; .* delete that file"):
        RunDir(tmp_path).lock("new")


def test_a_file_system_without_links_locks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    with RunDir(tmp_path).lock("one"), pytest.raises(RunDirLockedError):
        RunDir(tmp_path).lock("two")
    assert list(tmp_path.iterdir()) == []


class Undecided(MemoryFileSystem):
    """A store that cannot write on a condition."""

    protocol = "undecided"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("undecided://", "memory://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if mode == "create":
            raise NotImplementedError
        super().pipe_file(path, value)


def test_a_store_that_knows_no_conditions_locks_too() -> None:
    fsspec.register_implementation("undecided", Undecided, clobber=True)
    with RunDir("undecided://run").lock("one"), pytest.raises(RunDirLockedError, match="run one"):
        RunDir("undecided://run").lock("two")


def test_of_two_that_take_over_at_once_the_last_to_write_wins() -> None:
    """A store that does not decide: both find a dead driver, both write, one reads its own."""
    fsspec.register_implementation("undecided", Undecided, clobber=True)
    left_behind("undecided://race", machine="far away", beat=0.0)
    ends: list[RunLock | RunDirLockedError] = []

    def contend(run: str) -> None:
        try:
            ends.append(RunDir("undecided://race").lock(run, beat_s=0.05))
        except RunDirLockedError as error:
            ends.append(error)

    threads = [threading.Thread(target=contend, args=(run,)) for run in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [end for end in ends if isinstance(end, RunLock)]
    assert len(held) == 1, ends
    held[0].release()


def test_a_claim_is_read_back_and_never_changed(place: Any) -> None:
    run_dir = RunDir(place.url, place.options)
    run_dir.claim("3f9a", {"space": {"lr": [1e-4, float("inf")]}, "n": 3})
    run_dir.journal.append([{"is": "session"}])
    kept = place.files()
    for run in ("3f9a", "77aa"):
        with pytest.raises(RunDirError, match="holds run 3f9a already; go on with it"):
            run_dir.claim(run, {})
    about = RunDir(place.url, place.options).about()
    assert about == {"run": "3f9a", "space": {"lr": [1e-4, float("inf")]}, "n": 3}
    assert place.files() == kept
    for bad in ({"run": "x"}, {"format": "x"}, {"a": object()}):
        with pytest.raises(RunDirError, match=r"rename|no JSON"):
            RunDir("memory://bad-claim").claim("3f9a", bad)


def test_a_folder_in_which_nothing_has_begun_is_claimed_again(place: Any) -> None:
    run_dir = RunDir(place.url, place.options)
    run_dir.claim("3f9a", {"n": 3})
    run_dir.claim("77aa", {"n": 4})
    assert RunDir(place.url, place.options).about() == {"run": "77aa", "n": 4}
    run_dir.states.save(0, 1, 0, b"a state", {})
    with pytest.raises(RunDirError, match="holds run 77aa already"):
        run_dir.claim("d00d", {"n": 5})
    run_dir.states.drop(0)
    run_dir.write_best({"trial": 0})
    with pytest.raises(RunDirError, match="holds run 77aa already"):
        run_dir.claim("d00d", {"n": 5})


@pytest.mark.parametrize("text", ["{", "[]", '{"run": "3f9a"}', ""])
def test_a_run_json_of_another_program_is_never_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunDirError, match="holds run .* already; go on with it"):
        RunDir(tmp_path).claim("77aa", {})
    assert (tmp_path / "run.json").read_text() == text


def test_a_folder_of_runs_names_the_newest(tmp_path: Path) -> None:
    for name in ("b-20260301-101500-11aa", "a-20260301-101501-22bb", "a-20260228-235959-33cc"):
        RunDir(tmp_path / name).claim(name[-4:], {})
    for name in ("c-20270301-101500-44dd", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "d-20270301-101500-55ee").write_text("")
    newest = re.escape(str(tmp_path / "a-20260301-101501-22bb"))
    with pytest.raises(RunDirError, match=f"is a folder of runs; .* the newest: .*{newest}$"):
        RunDir(tmp_path).about()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "holds no run: run.json is missing"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "not the run_dir of a run of dagsel"),
        ('{"format": "dagsel.dataset", "version": 1}', "not the run_dir of a run of dagsel"),
        ('{"format": "dagsel.run", "version": "1", "run": "a"}', "damaged"),
        ('{"format": "dagsel.run", "version": 1}', "damaged"),
        ('{"format": "dagsel.run", "version": 9, "run": "a"}', r"newer dagsel \(run format 9; .*1"),
        ('{"format": "dagsel.run", "version": 9, "run": "a"}', "install a newer one to use it"),
        ('{"format": "dagsel.run", "version": 9, "run": "a", "dagsel": "7"}', "dagsel 7 or newer"),
    ],
)
def test_what_is_not_ours_or_newer_is_refused_and_untouched(
    tmp_path: Path, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(RunDirError, match=says):
        RunDir(tmp_path).about()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_folder_that_cannot_be_written_is_read_and_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        RunDir(folder / "run").claim("3f9a", {})
        (folder / "run").chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            run_dir = RunDir(folder / "run")
            assert run_dir.about() == {"run": "3f9a"}
            acts = (
                lambda: run_dir.lock("3f9a"),
                lambda: run_dir.journal.append([{}]),
                lambda: RunDir(folder / "new/run").claim("77aa", {}),
            )
            for act in acts[: 2 if user else 3]:
                with pytest.raises(RunDirError, match=rf"{name}.*Permission denied"):
                    act()
        finally:
            os.seteuid(user)
        (folder / "run").chmod(0o755)
        assert sorted(p.name for p in folder.rglob("*")) == ["run", "run.json"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_a_process_is_told_from_others_with_its_number_by_when_it_started() -> None:
    """In ticks since the boot."""
    for pid in (os.getpid(), os.getppid()):
        started_s = int(_started(pid)) / os.sysconf("SC_CLK_TCK")
        told_s = psutil.Process(pid).create_time() - psutil.boot_time()
        assert started_s == pytest.approx(told_s, abs=1.0)
