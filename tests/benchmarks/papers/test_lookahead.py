"""The page says of each set of curves whether the target is met; ours draws as others do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.benchmarks.papers import lookahead
from tests.benchmarks.papers.seer import FIGURE_4, Found, Setting

PAGE = (Path(__file__).parents[3] / "docs/measured/papers/lookahead.md").read_text()


def found(ours: tuple[float, ...], best: tuple[float, ...]) -> dict[str, Found]:
    """Say that HyperSched is the best partner, and the others are far behind."""
    others = dict.fromkeys(lookahead.PARTNERS, Found((1.0, 1.1, 1.2), 1.0, 1.0, 1.0))
    return others | {
        "HyperSched": Found(best, 1.0, 1.0, 1.0),
        lookahead.OURS: Found(ours, 1.0, 1.0, 1.0),
    }


FIRST, CLEAR, BEHIND = (
    found((95.0, 95.4, 95.2), (95.1, 95.2, 95.1)),
    found((95.5, 95.6, 95.7), (95.1, 95.2, 95.2)),
    found((94.8, 95.0, 95.1), (95.1, 95.2, 95.1)),
)


@pytest.mark.parametrize(
    ("by_setting", "row"),
    [
        ([CLEAR, CLEAR, CLEAR, FIRST, FIRST], ["5 of 5", "3 of 5", "+0.07", "yes"]),
        ([CLEAR, CLEAR, FIRST, FIRST, FIRST], ["5 of 5", "2 of 5", "+0.07", "no"]),
        ([CLEAR, CLEAR, CLEAR, CLEAR, BEHIND], ["4 of 5", "4 of 5", "-0.17", "no"]),
    ],
)
def test_the_target_is_the_one_that_was_set(
    by_setting: list[dict[str, Found]], row: list[str]
) -> None:
    assert lookahead.target(dict(zip(FIGURE_4, by_setting, strict=True))) == row


def test_ours_begins_with_the_same_trials_as_its_partners() -> None:
    traces, at = lookahead.traces_of("table 1"), Setting(8, 10)
    drawn = [
        [
            dict(trial.config)
            for trial in lookahead.search(method, at, traces, 3).record.trials.values()
        ]
        for method in (lookahead.OURS, "HyperSched")
    ]
    n = min(map(len, drawn))
    assert drawn[0][:n] == drawn[1][:n]
    assert n >= 8


def test_the_page_says_for_all_curves_whether_the_target_is_met() -> None:
    for name in lookahead.SETS:
        assert re.search(rf"^\| {lookahead.TITLES[name]} \|.*\| (yes|no) \|$", PAGE, re.MULTILINE)
    assert "## What was changed after the first results" in PAGE
