"""The line that lives while a search runs."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from dagsel.dispatch.units import Unit
from dagsel.flow import Asked, Reported, Stop, TrialFailed
from dagsel.history.record import Record
from dagsel.messages import Turn, UnitRecord
from dagsel.views.progress import SearchProgress, describe


def terminal(**options: object) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=100, **options)  # type: ignore[arg-type]


def written(console: Console) -> str:
    """What a console wrote, without its escape sequences."""
    assert isinstance(console.file, StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def make_record() -> Record:
    record = Record("3f9a", n_shards=4, direction="maximize")
    record.add(Turn(Asked((0, 1, 2, 3)), (), params={number: {} for number in range(4)}))
    for number in range(4):
        value = 0.98765 - 0.1 * number
        record.add(Turn(Reported(number, 1, value, {"accuracy": value}, 1.0), ()))
    record.add(Turn(None, (Stop(0, "", "complete"),)))
    record.add(Turn(TrialFailed(1, "broken"), ()))
    return record


def add_units(record: Record, n: int) -> None:
    unit = UnitRecord(Unit("train", 0, 1, 0), "w", 0, 0.0, 1.0, False, False, 0)
    record.units.extend([unit] * n)


def test_the_line_says_all_that_was_promised() -> None:
    line = describe(make_record(), "accuracy", 41.27)
    assert line == "4 epochs · 2 trials alive · 1 failed · best accuracy 0.9877 · 41.3 units/s"


def test_a_terminal_shows_where_the_search_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dagsel.views.progress.time.monotonic", lambda: now[0])
    console, record = terminal(), make_record()
    with SearchProgress("accuracy", console=console) as progress:
        progress.update(record)
        now[0] += 5
        add_units(record, 20)
        progress.update(record)
    first, *_, last = [line for line in re.split(r"[\r\n]+", written(console)) if line.strip()]
    assert "starting the workers" in first
    assert "best accuracy 0.9877 · 4.0 units/s" in last


def test_the_rate_forgets_what_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("dagsel.views.progress.time.monotonic", lambda: now[0])
    console, record = terminal(), make_record()
    with SearchProgress("accuracy", console=console) as progress:
        add_units(record, 1000)
        progress.update(record)
        for _ in range(30):
            now[0] += 1
            add_units(record, 3)
            progress.update(record)
    assert written(console).rstrip().splitlines()[-1].count("3.0 units/s") == 1


def test_the_last_update_is_shown_however_quickly_it_came() -> None:
    console, record = terminal(), make_record()
    with SearchProgress("accuracy", console=console) as progress:
        progress.update(record)
        record.add(Turn(Reported(2, 2, 1.0, {"accuracy": 1.0}, 2.0), ()))
        progress.update(record)
    assert "best accuracy 1 " in written(console).rstrip().splitlines()[-1]


def test_nothing_is_written_where_nobody_watches() -> None:
    file = StringIO()
    with SearchProgress("accuracy", console=Console(file=file)) as progress:
        progress.update(make_record())
    assert file.getvalue() == ""


def test_the_line_is_taken_down_when_a_search_is_interrupted() -> None:
    console = terminal()

    def search() -> None:
        with SearchProgress("accuracy", console=console) as progress:
            progress.update(make_record())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert console._live_stack == []
