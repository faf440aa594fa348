"""A search that is held: looked at, steered, interrupted and killed while workers train."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import psutil
import pytest
from distributed import Client

import dagsel
from dagsel.driver.inbox import Inbox
from dagsel.errors import RunDirLockedError, SearchCancelledError, SearchError, WorkloadError
from dagsel.flows import ASHA, RandomSearch
from dagsel.interrupting import interruptible
from dagsel.observers import Observer, SearchEnded, TrialEnded, observing
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.execution import steered_driver
from tests.execution.helpers import own_cluster
from tests.waiting import wait_until

SLOW = SyntheticWorkload(seconds=0.03)
LONG = RandomSearch(max_epochs=10, n_trials=4)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    url = str(tmp_path_factory.mktemp("data") / "data.zarr")
    return ShardedDataset.write(url, {"x": np.arange(80)}, n_shards=4)


@pytest.fixture
def start(client: Client, data: ShardedDataset, run_dir: str) -> Callable[..., dagsel.Search]:
    def call(**given: Any) -> dagsel.Search:
        default: dict[str, Any] = {
            "study": optuna.create_study(direction="maximize"),
            "workload": SLOW,
        }
        default |= {"data": data, "space": space, "flow": LONG, "metric": "value"}
        default |= {"client": client, "run_dir": run_dir}
        return dagsel.start(**(default | given))

    return call


def wait_for_epoch(search: dagsel.Search, *trials: int) -> None:
    def have_epochs() -> bool:
        known = search.result.record.trials
        return all(trial in known and known[trial].epochs for trial in trials)

    wait_until(have_epochs, f"trials {trials} have ended an epoch")


def test_a_search_is_steered_and_a_replay_does_the_same(
    start: Callable[..., dagsel.Search], client: Client, study: optuna.Study, tmp_path: Path
) -> None:
    search = start(study=study)
    assert "goes on" in repr(search)
    wait_for_epoch(search, 1)
    before = search.result.record.seconds
    search.stop(0)
    search.pause(2)
    clone = search.clone(1, x=0.25)
    added = search.add({"x": 0.75})
    with pytest.raises(SearchError, match="trial 2 is paused already"):
        search.pause(trial=2)
    with pytest.raises(TimeoutError, match=r"goes on after 0\.01 s; wait longer"):
        search.wait("0.01 s")
    wait_for_epoch(search, clone, added)
    so_far = search.wait(until=lambda run: run.record.n_epochs >= 3)
    assert so_far.record.n_epochs >= 3
    assert "goes on" in repr(search)  # trial 2 rests
    search.resume(2)
    run = search.wait(timeout="2 min")
    assert not search.is_running
    assert search.result is run
    assert "has ended" in repr(search)
    trials = run.record.trials
    assert run.record.seconds > before
    assert trials[0].reason == "stopped by the user"
    assert trials[0].state in ("pruned", "complete")  # if it was the best
    assert len(trials[0].epochs) < 10
    assert {trials[n].state for n in (1, 2, 3, clone, added)} == {"complete"}
    assert [trials[n].params["x"] for n in (clone, added)] == [0.25, 0.75]
    assert not study.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    assert study.trials[added].params == {"x": 0.75}
    with pytest.raises(SearchError, match="the search has ended"):
        search.finish()
    again = dagsel.replay(
        search.run_dir, client, workload=SLOW, space=space, into=tmp_path / "again"
    )
    assert again.record.notes == []
    assert again.record.trials[clone].epochs[-1].digest == trials[clone].epochs[-1].digest


def test_a_cluster_grows_and_a_search_gets_another_deadline_while_it_runs(
    start: Callable[..., dagsel.Search],
) -> None:
    with own_cluster(1) as cluster:
        flow = RandomSearch(max_epochs=400, n_trials=2)
        search = start(client=None, cluster=cluster, flow=flow, max_cluster_workers=2)
        wait_for_epoch(search, 0)
        with pytest.raises(SearchError, match="3 workers are more than the cluster can have: 2"):
            search.scale(3)
        search.scale(2)
        wait_until(lambda: search.result.record.n_workers == 2, "there are two workers")
        search.extend(deadline="2 s")
        run = search.wait()
    assert run.record.wanted == 2
    assert run.record.limits is not None
    assert run.plan.deadline_s == run.record.limits.deadline_s
    assert {trial.reason for trial in run.record.trials.values()} == {
        "the time or the budget is over"
    }


def test_workers_that_dagsel_cannot_start_are_not_scaled(
    start: Callable[..., dagsel.Search], client: Client
) -> None:
    search = start(client=client.scheduler_info()["address"])
    with pytest.raises(SearchError, match="the cluster keeps its 2 workers: .*cluster="):
        search.scale(1)
    with pytest.raises(SearchError, match="n_workers must be"):
        search.scale(0)
    with pytest.raises(SearchError, match="deadline='soon' is no time"):
        search.extend(deadline="soon")
    search.finish()
    search.wait()


def test_a_clone_that_would_be_another_model_is_refused(
    start: Callable[..., dagsel.Search], digits: ShardedDataset
) -> None:
    import torch

    def model(config: Any) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(64, config["width"]), torch.nn.Linear(config["width"], 10)
        )

    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, config: torch.optim.SGD(parameters, lr=config["lr"]),
        batch_size=32,
    )

    def widths(trial: optuna.Trial) -> dict[str, Any]:
        lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        return {"lr": lr, "width": trial.suggest_int("width", 4, 64)}

    study = optuna.create_study(direction="minimize")
    flow = RandomSearch(max_epochs=60, n_trials=2)
    what = {"study": study, "workload": workload, "space": widths, "data": digits}
    search = start(**what, flow=flow, metric="loss")
    wait_for_epoch(search, 0)
    width = search.result.record.trials[0].params["width"]
    with pytest.raises(WorkloadError, match="'width'"):
        search.clone(0, width=5 if width != 5 else 6)
    number = search.clone(0, lr=1e-3)
    search.finish()
    run = search.wait()
    assert set(run.record.trials) == {0, 1, number}
    assert run.record.trials[number].config == {"lr": 1e-3, "width": width}


def test_a_search_that_finishes_early_has_the_best_so_far(
    start: Callable[..., dagsel.Search], study: optuna.Study
) -> None:
    search = start(study=study, flow=ASHA(max_epochs=50, n_trials=100))
    with pytest.raises(RunDirLockedError):
        start()
    wait_for_epoch(search, 1)
    search.finish()
    run = search.wait()
    assert run.record.finished
    assert run.best_value == study.best_value
    assert run.best_model()
    assert {trial.state.name for trial in study.trials} <= {"COMPLETE", "PRUNED"}


def test_a_search_that_is_cancelled_goes_on_with_resume(
    start: Callable[..., dagsel.Search], client: Client, study: optuna.Study
) -> None:
    search = start(study=study)
    wait_for_epoch(search, 1)
    search.cancel()
    with pytest.raises(SearchCancelledError, match=r"go on with  dagsel.resume\("):
        search.wait()
    with pytest.raises(SearchCancelledError):
        search.stop(0)
    run = dagsel.resume(search.run_dir, client, workload=SLOW, space=space, study=study)
    assert len(run.record.trials) == 4
    assert {trial.state for trial in run.record.trials.values()} == {"complete"}


def test_a_callback_commands_without_waiting_for_itself(
    start: Callable[..., dagsel.Search], caplog: pytest.LogCaptureFixture
) -> None:
    searches: list[dagsel.Search] = []
    is_held, refused = threading.Event(), list[str]()

    def command(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        is_held.wait()
        (search,) = searches
        folder = Path(search.run_dir)
        attached = dagsel.attach(f"{folder}/../{folder.name}")  # or a link to it
        calls = (search.wait, lambda: search.add({"x": 0.5}), lambda: search.clone(0))
        for call in (*calls, attached.wait, attached.watch, lambda: attached.add({"x": 0.5})):
            with pytest.raises(SearchError) as error:
                call()
            refused.append(str(error.value).partition(" ")[0])
        search.pause(trial.number)  # it has ended
        attached.finish()

    searches.append(start(flow=RandomSearch(max_epochs=2, n_trials=99), callbacks=[command]))
    is_held.set()
    run = searches[0].wait(timeout="1 min")
    assert run.record.finished
    assert len(run.record.trials) < 99
    assert {*refused} == {"wait()", "watch()", "add"}
    (told,) = [text for text in caplog.messages if "of a callback is not performed" in text]
    assert "cannot be paused: it is complete" in told


def test_a_search_that_has_ended_and_that_nobody_holds_is_freed() -> None:
    class Search:
        session = SimpleNamespace(
            folder=SimpleNamespace(url="x"), record=SimpleNamespace(run="r"), resume_call=""
        )

        def run(self, inbox: Inbox) -> str:
            return "a run"

    prepared: Any = Search()
    search = dagsel.Search(prepared)
    run: Any = search.wait()
    assert run == "a run"
    search._thread.join()
    freed = weakref.ref(search)
    del search, prepared
    gc.collect()
    assert freed() is None


def test_a_callback_cancels_its_search(start: Callable[..., dagsel.Search]) -> None:
    searches: list[dagsel.Search] = []
    is_held, has_returned = threading.Event(), threading.Event()

    def cancel(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        is_held.wait()
        searches[0].cancel()
        has_returned.set()

    searches.append(start(callbacks=[cancel]))
    is_held.set()
    with pytest.raises(SearchCancelledError):
        searches[0].wait(timeout="1 min")
    assert has_returned.is_set()


class Finishes(Observer):
    """Gives a command when the search has ended, as soon as it hears of a trial's end."""

    search: dagsel.Search

    def __init__(self) -> None:
        self.is_over, self.heard = threading.Event(), list[str]()

    def trial_ended(self, trial: TrialEnded) -> None:
        self.is_over.wait()
        with pytest.raises(SearchError, match="the search has ended"):
            self.search.finish()
        self.heard.append("refused")

    def search_ended(self, search: SearchEnded) -> None:
        self.heard.append("ended")


def test_a_command_of_an_observer_after_the_last_trial_is_answered_at_once(
    start: Callable[..., dagsel.Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    finishes, join = Finishes(), observing._Post.join

    def joining(post: Any, ended: float, until: float) -> None:
        finishes.is_over.set()  # it is waited for now
        join(post, ended, until)

    monkeypatch.setattr(observing._Post, "join", joining)
    monkeypatch.setattr(observing, "STUCK_S", 3.0)
    finishes.search = start(flow=RandomSearch(max_epochs=1, n_trials=1), observers=[finishes])
    finishes.search.wait(timeout="1 min")
    assert finishes.heard == ["refused", "ended"]


def test_what_cannot_be_searched_is_refused_at_once(start: Callable[..., dagsel.Search]) -> None:
    with pytest.raises(SearchError, match="the workload gives no metric 'accuracy'"):
        start(metric="accuracy")
    with pytest.raises(SearchError, match=r"dagsel.start takes no n_jobs"):
        start(n_jobs=2)


def test_two_searches_at_once_in_two_threads_and_one_in_a_running_loop(
    start: Callable[..., dagsel.Search], client: Client, data: ShardedDataset, tmp_path: Path
) -> None:
    def search(name: str) -> dagsel.Run:
        where: dict[str, Any] = {"client": client, "run_dir": tmp_path / name}
        study = optuna.create_study(direction="maximize")
        flow = RandomSearch(max_epochs=3, n_trials=3)
        return dagsel.optimize(study, SLOW, data, space=space, flow=flow, metric="value", **where)

    async def in_loop() -> dagsel.Run:
        held = start(flow=RandomSearch(max_epochs=3, n_trials=3))
        assert held.add({"x": 0.5}) < 4
        return held.wait()

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(search, name) for name in ("one", "other")]
        alone = asyncio.run(in_loop())
        one, other = (of.result() for of in both)
    for run, n_trials in ((one, 3), (other, 3), (alone, 4)):
        assert [trial.state for trial in run.record.trials.values()] == ["complete"] * n_trials
    values = [[t.value for t in run.record.trials.values()] for run in (one, other)]
    assert values[0] == values[1]
    assert threading.current_thread() is threading.main_thread()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("module", "is_taken"), [("dask_jobqueue.runner", True), ("mine", False)])
def test_a_handler_of_jobqueues_is_taken_for_a_while_and_the_users_is_not(
    module: str, is_taken: bool
) -> None:
    def theirs(*_: Any) -> None: ...

    theirs.__module__ = module
    before = signal.signal(signal.SIGINT, theirs)
    try:
        with interruptible('dagsel.resume("memory://run")') as inbox:
            assert (signal.getsignal(signal.SIGINT) is not theirs) == is_taken
            signal.raise_signal(signal.SIGINT)
            assert (inbox.next() is not None) == is_taken
        assert signal.getsignal(signal.SIGINT) is theirs
    finally:
        signal.signal(signal.SIGINT, before)


# ---- processes of their own


@contextmanager
def driver(folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """Begin a search in a process with a group of its own, as a terminal's are."""
    file = Path(steered_driver.__file__)
    command = [sys.executable, str(file), str(folder), how]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(what):
            return line
    raise AssertionError(f"it never said {what!r}")


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def have_ended(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


def states(folder: Path) -> set[str]:
    study = optuna.load_study(study_name="test", storage=f"sqlite:///{folder}/study.db")
    return {trial.state.name for trial in study.trials}


@pytest.mark.parametrize("moment", ["connecting", "reported"])
def test_ctrl_c_ends_a_search_in_order_and_a_resume_goes_on(
    tmp_path: Path, client: Client, moment: str
) -> None:
    with driver(tmp_path, "optimize") as process:
        wait_for(process, moment)
        here = children(process)
        os.killpg(process.pid, signal.SIGINT)
        out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    *_, last = out.splitlines()
    assert last == f"run {steered_driver.N_TRIALS} 0"
    assert "Traceback" not in said
    assert said.count("dagsel.resume(") == 1
    progress = [line.startswith("dagsel ") for line in said.splitlines()]
    assert progress.count(False) == 1, said
    assert "RUNNING" not in states(tmp_path)
    assert have_ended(here)
    given: dict[str, Any] = {"workload": steered_driver.WORKLOAD, "space": steered_driver.space}
    before = dagsel.load(tmp_path / "run").record
    assert before.finished
    run = dagsel.resume(tmp_path / "run", client, **given)
    ends = {(trial.state, len(trial.epochs)) for trial in run.record.trials.values()}
    assert ends == {("complete", steered_driver.N_EPOCHS)}
    assert run.record.n_epochs > before.n_epochs
    assert run.record.worker_seconds > before.worker_seconds
    for number, trial in before.trials.items():
        assert run.record.trials[number].epochs[: len(trial.epochs)] == trial.epochs
    stored = run.run_dir.states
    assert [n for n in run.record.trials if stored.list(n)] == [run.best.trial]
    assert dagsel.resume(tmp_path / "run", client, **given).record.seconds == run.record.seconds
    assert (
        dagsel.replay(tmp_path / "run", client, **given, into=tmp_path / "again").record.notes == []
    )


def test_python_waits_for_a_search_whose_script_has_ended(tmp_path: Path) -> None:
    with driver(tmp_path, "leave") as process:
        wait_for(process, "left")
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"the search in {tmp_path / 'run'} goes on; Ctrl-C ends it" in said
    assert "Traceback" not in said
    record = dagsel.load(tmp_path / "run").record
    ends = {(trial.state, len(trial.epochs)) for trial in record.trials.values()}
    assert ends == {("complete", steered_driver.N_EPOCHS)}
    assert "RUNNING" not in states(tmp_path)


@pytest.mark.parametrize("then", ["extended", "given up"])
def test_what_ctrl_c_has_ended_can_be_extended_or_given_up_too(
    start: Callable[..., dagsel.Search], client: Client, then: str
) -> None:
    before = signal.getsignal(signal.SIGINT)  # dask-jobqueue's, if another test has imported it

    def interrupt() -> None:
        wait_until(lambda: signal.getsignal(signal.SIGINT) is not before, "Ctrl-C is heard")
        signal.raise_signal(signal.SIGINT)

    search = start()
    wait_for_epoch(search, 0)
    with ThreadPoolExecutor(1) as pool:  # Ctrl-C comes while the main thread waits
        pool.submit(interrupt)
        run = search.wait()
    assert run.record.finished
    stored = run.run_dir.states
    assert [n for n in run.record.trials if stored.list(n)] != [run.best.trial]
    if then == "extended":
        run = run.extend(client, n_trials=1)
        assert len(run.record.trials) == 5
        assert run.record.trials[4].state == "complete"
    else:
        dagsel.abandon(search.run_dir)
        run = dagsel.resume(search.run_dir, client, workload=SLOW, space=space)
        assert run.record.abandoned
    assert [n for n in run.record.trials if stored.list(n)] == [run.best.trial]


def test_a_second_ctrl_c_leaves_at_once_and_a_resume_goes_on(tmp_path: Path) -> None:
    with driver(tmp_path, "optimize") as process:
        wait_for(process, "connecting")  # the cluster takes longer than two signals
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        assert "Press it again" in process.stderr.readline()
        here = children(process)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert said.splitlines()[-1].startswith(("KeyboardInterrupt", "the run is kept"))
    assert have_ended(here)


def test_commands_are_performed_once_though_the_driver_is_killed_after_them(
    tmp_path: Path, client: Client
) -> None:
    with driver(tmp_path, "kill") as process:
        _, clone, added = map(str, wait_for(process, "given").split())
        here = children(process)
        process.wait(60)
    assert process.returncode == -signal.SIGKILL
    assert have_ended(here)
    assert "RUNNING" in states(tmp_path)
    found = dagsel.load(tmp_path / "run").record.trials
    assert found[2].paused_by_user
    run = dagsel.resume(
        tmp_path / "run",
        client,
        workload=steered_driver.WORKLOAD,
        space=steered_driver.space,
        callbacks=[_stop_when_one_is_left],
    )
    trials = run.record.trials
    assert set(trials) == {*range(steered_driver.N_TRIALS), int(clone), int(added)}
    assert trials[0].reason == "stopped by the user"
    assert [len(trials[n].adoptions) for n in (int(clone), int(added))] == [1, 0]
    assert trials[2].reason == "the search was ended by the user"  # it was paused until the end
    assert "RUNNING" not in states(tmp_path)


def _stop_when_one_is_left(study: optuna.Study, trial: Any) -> None:
    left = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    if len(left) == 1:
        study.stop()
