"""What is shown while a search runs: in a terminal, in a notebook, and in a log."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from io import StringIO
from itertools import pairwise
from types import ModuleType
from typing import Any

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dagsel.console import Progress, is_notebook
from dagsel.dispatch.description import WorkerNow
from dagsel.dispatch.units import Unit
from dagsel.errors import ClusterError
from dagsel.flow import Asked, Reported, Stop, Train, TrialFailed
from dagsel.history.record import Record
from dagsel.messages import Turn, UnitRecord
from dagsel.steering import SetLimits
from dagsel.views.displays import InLog, line
from dagsel.views.facts import Facts
from dagsel.views.notebook import LiveView, command_of
from dagsel.views.progress import SPARING, SearchProgress, Terminal
from dagsel.views.snapshot import Snapshot
from dagsel.views.table import AROUND, IN_NOTEBOOK, notebook_table, terminal_lines
from dagsel.views.words import seconds_left
from dagsel.workloads.raised import Raised


def terminal(width: int = 100, height: int = 24) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width, height=height)


def written(console: Console) -> str:
    """What a console wrote, without its escape sequences."""
    assert isinstance(console.file, StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def make_record(n_trials: int = 4, config: dict[str, Any] | None = None) -> Record:
    """All trials have scored an epoch: the first is complete, the second failed, others go on."""
    record = Record("3f9a", n_shards=4, direction="maximize")
    numbers = tuple(range(n_trials))
    record.add(Turn(Asked(numbers), (), params={number: {} for number in numbers}))
    record.configure({number: config or {"lr": 0.1 / (1 + number)} for number in numbers})
    record.add(Turn(None, tuple(Train(number, 2) for number in numbers)))
    for number in numbers:
        value = round(0.9 - number / 1000 if n_trials > 9 else 0.9 - number / 10, 3)
        record.add(Turn(Reported(number, 1, value, {"accuracy": value}, 1.0), ()))
    record.add(Turn(None, (Stop(0, "", "complete"),)))
    record.add(Turn(TrialFailed(1, "broken\nbeyond repair"), ()))
    record.finished = True
    return record


def add_units(record: Record, n: int) -> None:
    unit = UnitRecord(Unit("train", 0, 1, 0), "w", 0, 0.0, 1.0, False, False, 0)
    record.units.extend([unit] * n)


def snapshot(record: Record, units_per_second: float = 41.27) -> Snapshot:
    return Snapshot.of(record, "accuracy", units_per_second)


class Clock:
    """A clock that stands still unless it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("dagsel.views.progress.time.monotonic", lambda: self.now)


# ---- in a terminal


def test_a_table_has_what_matters_and_the_best_trial_that_lives_first() -> None:
    head, counts, best, names, *rows = terminal_lines(snapshot(make_record()), height=24)
    assert head == "0:00 · 4 of 6 epochs"
    assert counts == "2 training · 1 complete · 1 failed · 0 workers · 41.3 units/s"
    assert best == "best accuracy 0.9: trial 0 after 1 epoch · lr=0.1"
    assert names.split() == ["trial", "state", "epochs", "accuracy", "configuration"]
    assert [row.split()[:4] for row in rows] == [
        ["2", "training", "1/2", "0.7"],
        ["3", "training", "1/2", "0.6"],
        ["0", "complete", "1", "0.9"],
        ["1", "failed", "1", "0.8"],
    ]


class WatchedConfig(Mapping[str, Any]):
    """The configuration of a trial, which notes that it is read."""

    def __init__(self, trial: int, read: set[int]) -> None:
        self._trial, self._read = trial, read

    def __getitem__(self, name: str) -> float:
        return {"lr": 0.1}[name]

    def __iter__(self) -> Iterator[str]:
        self._read.add(self._trial)
        return iter(["lr"])

    def __len__(self) -> int:
        return 1


def test_of_many_trials_those_alone_are_described_that_are_shown() -> None:
    """Else a table of thousands would be so dear that it stands still for half a minute."""
    record, read = make_record(500), set[int]()
    for trial in record.trials.values():
        trial.state, trial.drawn = "pruned", WatchedConfig(trial.number, read)
    lines = terminal_lines(snapshot(record), height=24)
    assert lines[-1] == "and 484 more trials"
    assert len(read) == 16
    read.clear()
    line(snapshot(record))
    assert len(read) == 1  # the best one
    read.clear()
    log = InLog(terminal(), ended=range(4, 500))
    log.show(snapshot(record))
    assert read == {0, 1, 2, 3}  # those that have ended since, and the best one
    read.clear()
    command_of({"do": "clone", "trial": 3, "params": {"lr": "0.2"}}, snapshot(record))
    assert len(read) <= 2


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (44, 12)])
def test_a_table_fits_the_terminal(width: int, height: int) -> None:
    config = {f"a_long_name_of_a_parameter_{k}": "and a long value of it" for k in range(9)}
    console, record = terminal(width, height), make_record(100, config)
    assert isinstance(console.file, StringIO)
    screen = pyte.Screen(width, height)
    with SearchProgress("accuracy", "table", console=console) as progress:
        for _ in range(3):
            progress.update(record)
            progress._due = 0.0
    pyte.Stream(screen).feed(console.file.getvalue().replace("\n", "\r\n"))
    shown = [text.rstrip() for text in screen.display]
    assert shown[0] == "0:00 · 100 of 198 epochs"  # nothing has scrolled, and it stands once
    assert shown[3].startswith("trial  state")
    assert shown[3].endswith("configuration") or width < 80  # nothing of it is cut
    assert shown[4].startswith("2      training     1/2")
    assert f"and {100 - (height - AROUND)} more trials" in shown


def test_a_line_says_how_far_it_is() -> None:
    text = line(snapshot(make_record()))
    assert text == "4 epochs · 2 trials alive · 1 failed · best accuracy 0.9 · 41.3 units/s"


@pytest.mark.parametrize("how", ["table", "line"])
def test_the_rate_forgets_what_is_long_ago(how: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, console, record = Clock(monkeypatch), terminal(), make_record()
    with SearchProgress("accuracy", how, console=console) as progress:
        add_units(record, 1000)
        progress.update(record)
        for _ in range(30):
            clock.now += 1
            add_units(record, 3)
            progress.update(record)
    assert "3.0 units/s" in written(console)[-1000:]


@pytest.mark.parametrize("how", ["table", "line"])
def test_the_last_update_is_shown_however_quickly_it_came(how: Progress) -> None:
    console, record = terminal(), make_record()
    with SearchProgress("accuracy", how, console=console) as progress:
        progress.update(record)
        record.add(Turn(Reported(2, 2, 1.0, {"accuracy": 1.0}, 2.0), ()))
        progress.update(record)
    assert "best accuracy 1" in written(console)[-1000:]


@pytest.mark.parametrize("how", ["table", "line"])
def test_the_terminal_is_left_to_others_when_a_search_is_interrupted(how: Progress) -> None:
    console = terminal()

    def search() -> None:
        with SearchProgress("accuracy", how, console=console) as progress:
            progress.update(make_record())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert console._live_stack == []


@given(st.floats(0.0, 5.0), st.floats(0.0, 5.0))
def test_a_hundredth_of_the_time_is_spent_on_it(seconds: float, held_up_s: float) -> None:
    """While other threads hold it up, it costs nothing: it is not shown more seldom for that."""
    now, spent, shown = [0.0], [0.0], list[float]()

    class Slow:
        shows_workers = False

        def start(self) -> None: ...

        def show(self, snapshot: Snapshot) -> None:
            shown.append(now[0])
            now[0] += seconds + held_up_s
            spent[0] += seconds

        def stop(self, snapshot: Snapshot | None, error: BaseException | None) -> None: ...

    progress, record = SearchProgress("accuracy", False), make_record()
    progress._display = Slow()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagsel.views.progress.time.monotonic", lambda: now[0])
        patch.setattr("dagsel.views.progress.time.thread_time", lambda: spent[0])
        while len(shown) < 5:
            progress.update(record)
            now[0] += 0.25
    # The first one may have to import what it needs, and is not counted.
    gaps = [later - sooner for sooner, later in pairwise(shown[1:])]
    due_s = max(0.5, SPARING * seconds)
    assert min(gaps) >= due_s - 1e-9
    assert max(gaps) <= max(due_s, seconds + held_up_s) + 0.25 + 1e-9


# ---- in a notebook


def test_a_notebook_shows_text_of_the_study_as_text() -> None:
    html = notebook_table(snapshot(make_record(60, {"act": "<script>alert(1)</script>"})))
    assert "<script>" not in html
    assert "act=&lt;script&gt;" in html
    assert html.count("<tr>") == 1 + IN_NOTEBOOK
    assert "and 10 more trials" in html


# ---- in a log


def log(record: Record, *changes: Any, how: Progress = "log") -> list[str]:
    """What a log has after changes of the record, each seen 30 s after the one before."""
    file, now = StringIO(), [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagsel.views.progress.time.monotonic", lambda: now[0])
        ended = [trial.number for trial in record.trials.values() if not trial.is_live]
        shown = SearchProgress("accuracy", how, ended=ended, console=Console(file=file))
        with shown as progress:
            progress.update(record)
            for change in changes:
                change(record)
                now[0] += 30.0
                record.seconds += 30.0
                progress.update(record)
    return file.getvalue().splitlines()


def test_a_front_end_without_widgets_says_it_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget")
    shown = list[Mapping[str, str]]()
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle))
    view = LiveView(None)
    view.start()
    assert shown[0]["text/plain"] == shown[0]["text/html"] == "starting the workers"
    view.stop(None, None)


def test_a_log_has_lines_less_and_less_often_and_says_what_came_out() -> None:
    lines = log(make_record(), *[lambda record: None] * 11, how="auto")  # a file is no terminal
    at = [text.partition(" · ")[0].removeprefix("dagsel ") for text in lines]
    # It is looked at every half a minute: due after 5 s, then 10, 20, 40 s and a minute later.
    assert at == ["0:30", "1:00", "1:30", "2:30", "3:30", "4:30", "5:30", "5:30"]
    assert "4 of 6 epochs · 2 training · 1 complete · 1 failed" in lines[0]
    assert lines[-1].endswith(
        "the search has ended: 4 trials, 4 epochs, 0 s of workers' time · best accuracy 0.9: "
        "trial 0 after 1 epoch · lr=0.1"
    )


@given(st.lists(st.sampled_from(["complete", "pruned", "fail", "report"]), max_size=12), st.data())
def test_a_log_has_one_line_for_each_trial_that_ends(steps: list[str], data: st.DataObject) -> None:
    def change(step: str) -> Any:
        def do(record: Record) -> None:
            live = [trial for trial in record.trials.values() if trial.is_live]
            if not live:
                return
            trial = data.draw(st.sampled_from(live))
            if step == "fail":
                record.add(Turn(TrialFailed(trial.number, "broken\nbeyond repair"), ()))
            elif step == "report":
                epoch = len(trial.epochs) + 1
                record.add(Turn(Reported(trial.number, epoch, 0.5, {"accuracy": 0.5}, 1.0), ()))
            else:
                record.add(Turn(None, (Stop(trial.number, "", step),)))  # type: ignore[arg-type]

        return do

    record = make_record(8)
    before = {trial.number for trial in record.trials.values() if not trial.is_live}
    lines = log(record, *map(change, steps))
    named = [re.search(r" · trial (\d+) (complete|pruned|failed) after", text) for text in lines]
    told = Counter(int(found[1]) for found in named if found)
    ended = {trial.number for trial in record.trials.values() if not trial.is_live}
    assert told == Counter(ended - before)
    whys = ["broken beyond repair" in text for text in lines]  # what has two lines is one here
    assert whys == [found is not None and found[2] == "failed" for found in named]


def test_a_trial_that_fails_is_told_with_the_line_that_has_raised() -> None:
    def fail(record: Record) -> None:
        told = Raised("ValueError", "odd", place="net.py:7 forward")
        record.add(Turn(TrialFailed(2, told.reason), (), raised=told))

    told = " · ValueError: odd (net.py:7 in forward) · lr="
    assert sum(told in text for text in log(make_record(), fail)) == 1


def test_trials_that_end_before_the_first_look_are_told_too() -> None:
    file = StringIO()
    with SearchProgress("accuracy", "log", console=Console(file=file)) as progress:
        progress.update(make_record())
    first, second, _ = file.getvalue().splitlines()
    assert "trial 0 complete after 1 epoch" in first
    assert "trial 1 failed after 1 epoch · accuracy 0.8 · broken" in second


@pytest.mark.parametrize("how", ["table", "line"])
def test_workers_are_said_to_start_until_there_is_something_to_see(how: Progress) -> None:
    console = terminal()
    with SearchProgress("accuracy", how, console=console):
        assert "starting the workers" in written(console)
        assert "epochs" not in written(console)


@pytest.mark.parametrize(("how", "asks"), [("table", True), ("line", False), ("log", False)])
def test_the_scheduler_is_asked_only_for_what_is_shown(how: Progress, asks: bool) -> None:
    asked = []

    def workers() -> tuple[WorkerNow, ...]:
        asked.append(how)
        return ()

    with SearchProgress("accuracy", how, console=terminal()) as progress:
        progress.follow(workers, "")
        progress.update(make_record())
        assert bool(asked) == asks


def test_a_log_is_silent_where_a_search_could_not_begin() -> None:
    file = StringIO()

    def search() -> None:
        with SearchProgress("accuracy", "log", console=Console(file=file)):
            raise ClusterError("no scheduler")

    with pytest.raises(ClusterError):
        search()
    assert file.getvalue() == ""


def test_a_log_begins_with_the_runs_folder() -> None:
    file = StringIO()
    facts = Facts(folder="/runs/digits")
    with SearchProgress("accuracy", "log", console=Console(file=file), facts=facts) as progress:
        progress.update(make_record())
    first, *rest = file.getvalue().splitlines()
    assert first.endswith(" · the run is in /runs/digits")
    assert not any("/runs/digits" in line for line in rest)


def test_a_terminal_that_cannot_move_its_cursor_has_a_log() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, _environ={"TERM": "dumb"})
    with SearchProgress("accuracy", console=console) as progress:
        progress.update(make_record())
    assert " · the search has ended: 4 trials" in file.getvalue()


class Tty(StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_only_a_terminal_has_a_table_by_itself(forced: dict[str, str]) -> None:
    environ = {"TERM": "xterm", **forced}
    for file in (StringIO(), Tty()):
        console = Console(file=file, width=100, height=24, _environ=environ)
        with SearchProgress("accuracy", console=console) as progress:
            progress.update(make_record())
        assert ("the search has ended" in file.getvalue()) is not file.isatty()


@pytest.mark.parametrize("how", ["table", "line"])
def test_two_searches_do_not_draw_over_each_other(how: Progress) -> None:
    first, second, third = terminal(), terminal(), terminal()
    with SearchProgress("accuracy", how, console=first) as progress:
        progress.update(make_record())
        with SearchProgress("accuracy", how, console=second) as beside:
            beside.update(make_record())
    with SearchProgress("accuracy", how, console=third) as progress:
        progress.update(make_record())
    logs = ["the search has ended" in written(console) for console in (first, second, third)]
    assert logs == [False, True, False]


def test_a_log_stands_above_a_table_of_another_search(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Tty()
    monkeypatch.setattr("sys.stderr", screen)
    table, beside = (Console(stderr=True, force_terminal=True, width=100) for _ in range(2))
    with SearchProgress("accuracy", "table", console=table) as first:
        first.update(make_record())
        at = len(screen.getvalue())
        with SearchProgress("accuracy", "table", console=beside) as second:
            second.update(make_record())
        told = screen.getvalue()[at:]
    assert "the search has ended" in told
    assert told.startswith("\r\x1b[2K")  # the table makes room


@pytest.mark.parametrize(("name", "base"), [("Shell", "ZMQInteractiveShell"), ("A", "B")])
def test_a_notebook_is_known_by_what_its_shell_derives_from(
    name: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = type(name, (type(base, (), {}),), {})()
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert is_notebook() is (base == "ZMQInteractiveShell")


def test_a_log_says_that_a_search_was_interrupted() -> None:
    file = StringIO()

    def search() -> None:
        with SearchProgress("accuracy", "log", console=Console(file=file)) as progress:
            progress.update(make_record())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert "interrupted by KeyboardInterrupt: 4 trials" in file.getvalue()


def test_a_search_whose_driver_is_gone_has_not_ended() -> None:
    record = make_record()
    record.finished = False
    assert " · the search was interrupted: 4 trials" in log(record)[-1]
    record.finished, record.interrupted = True, {2}  # by Ctrl-C: a resume goes on
    assert " · the search was interrupted: 4 trials" in log(record)[-1]


@pytest.mark.parametrize("force_terminal", [False, True])
def test_nothing_is_shown_where_nobody_wants_it(force_terminal: bool) -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=force_terminal)
    with SearchProgress("accuracy", False, console=console) as progress:
        progress.update(make_record())
    assert file.getvalue() == ""


# ---- how long it may take


@given(
    st.lists(st.floats(0.1, 10.0), min_size=2, max_size=64),
    st.integers(1, 100),
    st.integers(1, 8),
    st.integers(1, 16),
)
def test_the_time_left_surrounds_that_of_mean_units(
    took: list[float], n_epochs: int, n_shards: int, n_workers: int
) -> None:
    units = [
        UnitRecord(Unit("train", 0, 1, k), "w", k, 5.0, 5.0 + seconds, hop=False)
        for k, seconds in enumerate(took)
    ]
    found = seconds_left(units, n_epochs, n_shards=n_shards, n_workers=n_workers)
    assert found is not None
    likely = sum(took) / len(took) * n_epochs * n_shards / n_workers
    assert 0 <= found[0] <= likely * (1 + 1e-9)
    assert found[1] >= likely * (1 - 1e-9)


def test_evaluating_counts_too() -> None:
    kinds = ["train", "evaluate"] * 4
    units = [
        UnitRecord(Unit(kind, 0, 1, k), "w", k, 0.0, 3.0 if kind == "train" else 1.0, hop=False)  # type: ignore[arg-type]
        for k, kind in enumerate(kinds)
    ]
    least, most = seconds_left(units, 100, n_shards=2, n_workers=4) or (0.0, 0.0)
    assert least < 100 * 2 * (3.0 + 1.0) / 4 < most
    assert seconds_left(units, 0, n_shards=2, n_workers=4) is None
    assert seconds_left(units[:1], 9, n_shards=2, n_workers=4) is None


class Breaks(StringIO):
    """A file that can be written no longer after some writes, as a pipe whose reader has gone."""

    def __init__(self, n_writes: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = n_writes, error

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("how", ["table", "line", "log"])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), ValueError("closed")])
@given(n_writes=st.integers(0, 12))
def test_nobody_has_to_look_on(how: Progress, error: Exception, n_writes: int) -> None:
    file, record = Breaks(n_writes, error), make_record()
    console = Terminal(file=file, force_terminal=how != "log", width=80, height=24)
    with SearchProgress("accuracy", how, console=console) as progress:
        for _ in range(3):
            progress.update(record)
            progress._due = 0.0


@pytest.mark.parametrize("how", ["table", "line", "log"])
def test_a_display_that_fails_ends_no_search(
    how: Progress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("lr")

    console = terminal()
    with SearchProgress("accuracy", how, console=console) as progress:
        monkeypatch.setattr("dagsel.views.progress.Snapshot.of", fail)
        for _ in range(2):
            progress.update(make_record())
            progress._due = 0.0
    assert caplog.text.count("its progress is shown no longer: KeyError") == 1
    assert console.file.getvalue().count("\x1b[?25h") == (how != "log")  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["table", "line", "log"])
def test_no_name_moves_the_cursor_or_breaks_a_line(how: Progress) -> None:
    console = terminal(width=200)
    record = make_record(config={"act\x1b[8m": "a\nb\x1b]52;c;cm0=\x07"})
    record.trials[1].reason = "broken\x1b[2J"
    with SearchProgress("f1\n\x1b[8m", how, console=console) as progress:
        progress.update(record)
    assert "f1��[8m" in written(console)
    if how != "line":
        assert "act�[8m=a�b�]52;c;cm0=�" in written(console)
    assert "\x1b[8m" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("metric", ["f1[macro]", "accuracy[/val]", "[red]loss"])
@pytest.mark.parametrize("how", ["table", "line", "log"])
def test_brackets_in_a_metric_are_no_markup(how: Progress, metric: str) -> None:
    console = terminal(width=200)
    with SearchProgress(metric, how, console=console) as progress:
        progress.update(make_record())
    assert f"best {metric} 0.9" in written(console)


def test_a_budget_of_workers_time_is_shown_as_that_where_workers_differ_in_price() -> None:
    record = make_record()
    record.worker_seconds, record.money = 2700.0, 0.30
    facts = Facts(SetLimits(budget_s=3000.0), price_per_worker_hour=3.6, currency="USD")
    told = "workers' time 45 min of 50 min, 5 min left", "cost 0.30 USD"
    assert tuple(map(str, facts.gauges(record))) == told
    assert " · ".join(told) in Snapshot.of(record, "loss", 1.0, facts).head
    facts.limits = SetLimits(budget_money=3.0)
    assert [str(gauge) for gauge in facts.gauges(record)] == [
        "cost 0.30 USD of 3.00 USD, 2.70 USD left"
    ]
    facts.limits, record.money = SetLimits(budget_s=3000.0), None
    assert [str(gauge) for gauge in facts.gauges(record)] == [
        "cost 2.70 USD of 3.00 USD, 0.30 USD left"
    ]
