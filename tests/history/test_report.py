"""The report in a real browser: it sorts, tells, fits, loads nothing, runs no foreign code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from dagsel.errors import SearchError
from dagsel.flows import ASHA, MOASHA, RandomSearch
from dagsel.history.record import Record
from dagsel.history.report import report_page
from dagsel.history.search_result import Result
from dagsel.history.summary import summary_html
from dagsel.history.trial import TrialRecord
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, simulate
from tests.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
CLUSTER = SimulatedCluster(n_workers=3, n_shards=4)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        EVIL: trial.suggest_categorical(EVIL, [EVIL, "plain"]),
    }


def searched() -> SimulatedRun:
    run = simulate(
        ASHA(max_epochs=9, n_trials=16), PowerLaw(epoch_s=2.0), CLUSTER, space=space, seed=1,
        deadline="5 min", budget="20 worker-minutes", price_per_worker_hour="2.50 USD",
    )  # fmt: skip
    run.record.trials[3].state, run.record.trials[3].reason = "failed", EVIL
    run.record.trials[3].traceback = EVIL
    return run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return searched().report(tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


class Heard:
    """What a page does that it should not."""

    def __init__(self, page: Page) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append("a dialog"))
        page.on("request", lambda request: self.requests.append(request.url))


def opened(browser: Browser, report: str, width: int = 1280, **how: Any) -> tuple[Page, Heard]:
    page = browser.new_page(viewport={"width": width, "height": 900}, **how)
    heard = Heard(page)
    page.goto(f"file://{report}")
    return page, heard


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_and_loads_nothing_and_runs_nothing_of_the_studys(
    browser: Browser, report: str, width: int, scheme: str
) -> None:
    page, heard = opened(browser, report, width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for canvas in ("curves", "timeline", "cost"):
        page.wait_for_function(f"document.getElementById('{canvas}').width > 100")
    assert heard.errors == []
    assert heard.requests == [f"file://{report}"]
    assert page.title() != "taken"
    assert EVIL in page.inner_text("#leaderboard")
    page.click("summary")
    assert page.inner_text("pre") == EVIL
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    page.close()


def column(page: Page, n: int) -> list[str]:
    cells = page.query_selector_all(f"#leaderboard tbody tr td:nth-child({n})")
    return [cell.get_attribute("data-key") or cell.inner_text() for cell in cells]


def test_the_leaderboard_sorts_by_a_click_on_a_heading(browser: Browser, report: str) -> None:
    page, _ = opened(browser, report)
    before = column(page, 1)
    page.click("#leaderboard th:nth-child(1) button")
    up = column(page, 1)
    assert up == sorted(before, key=int) != before
    page.click("#leaderboard th:nth-child(1) button")
    assert column(page, 1) == up[::-1]
    assert page.get_attribute("#leaderboard th:nth-child(1)", "aria-sort") == "descending"
    page.click("#leaderboard th:nth-child(5) button")
    states = column(page, 5)
    assert states == sorted(states)
    page.close()


def test_what_is_under_the_pointer_is_told(browser: Browser, report: str) -> None:
    page, _ = opened(browser, report)
    for canvas, told in (("timeline", "trial "), ("cost", "worker-seconds after"), ("curves", "")):
        place = page.locator(f"#{canvas}")
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        assert box is not None
        for step in range(2, 60):
            page.mouse.move(box["x"] + box["width"] * step / 60, box["y"] + 60)
            if page.is_visible("#tip") and told in page.inner_text("#tip"):
                break
        else:
            assert canvas == "curves", "nothing was told"
    page.close()


def test_a_report_of_a_search_of_which_nothing_has_ended_is_a_page(tmp_path: Path) -> None:
    page = report_page("empty", "loss", Record("run"), None, None, {})
    assert "none began" in page
    assert "<canvas" not in page
    assert "no trial" not in summary_html("head", "loss", Record("run"))


def test_several_metrics_have_a_column_each() -> None:
    run = simulate(
        MOASHA(max_epochs=3, n_trials=6), {"a": PowerLaw(), "b": PowerLaw()}, CLUSTER,
        direction=["minimize", "maximize"], metric=["a", "b"], space=space,
    )  # fmt: skip
    page = report_page("several", "a", run.record, None, None, {})
    assert "on the Pareto front" in page
    for text in (page, run._repr_html_()):
        assert re.search(r">(<button[^>]*>)?a<.*>(<button[^>]*>)?b<", text)


def test_what_a_notebook_shows_has_pruned_trials_and_curves_and_escapes_all() -> None:
    shown = searched()._repr_html_()
    assert EVIL not in shown
    assert shown.count("<svg") > 1
    assert "pruned" in shown
    assert "and 6 more" in shown
    assert "of workers" in shown


def test_a_report_is_written_whole_to_any_url_or_not_at_all(tmp_path: Path) -> None:
    run: Result = simulate(RandomSearch(max_epochs=2, n_trials=2), PowerLaw(), CLUSTER, space=space)
    assert run.report("memory://reports/one.html") == "memory://reports/one.html"
    before = (tmp_path / "report.html", tmp_path / "file")
    before[1].write_text("no folder")
    run.report(before[0])
    assert before[0].read_text().endswith("</html>\n")
    with pytest.raises(SearchError, match="the report cannot be written to"):
        run.report(before[1] / "report.html")


def test_a_report_of_thousands_of_trials_compares_none_of_them_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compare(trial: TrialRecord, other: object) -> bool:
        raise AssertionError(f"{trial!r} is compared with {other!r}")

    record = searched().record
    monkeypatch.setattr(TrialRecord, "__eq__", compare)
    assert "trial 3" in report_page("s", "value", record, None, None, {})  # the one that failed


def test_the_data_in_a_page_ends_no_script_and_is_json(report: str) -> None:
    text = Path(report).read_text()
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    data = json.loads(found)
    assert len(data["bars"]) > 50
    assert data["deadline"] == 300.0
    assert data["end"] >= data["bound"] > 0
