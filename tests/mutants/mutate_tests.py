"""What pytest is told for mutants: which tests run, in which order, and what they touch."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

#: A test that takes more CPU time is one that hangs.
LIMIT, LEAST_LIMIT_S = 3.0, 5.0
#: A failure need not be made small, and how long an example takes says how busy the machine is.
QUIET: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": list(HealthCheck),
}


def run(root: Path, folders: list[str], plugin: object) -> int:
    """Run tests in this process, whose dagsel is the copy's."""
    settings.register_profile("mutants", settings(), **QUIET)
    settings.load_profile("mutants")
    options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "--timeout=0", "-m", "not alone"]
    options += ["--doctest-modules"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported once
    if isinstance(plugin, Touched):
        options.remove("-x")
    return int(
        pytest.main([*options, "--hypothesis-seed=0", *folders], plugins=[plugin, Copy(root)])
    )


class Copy:
    """Refuses to test another dagsel than the copy's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def pytest_collection_finish(self) -> None:
        there = Path(sys.modules["dagsel"].__file__ or "")
        assert there.is_relative_to(self.root), f"dagsel is {there}, not in {self.root}"


class Touched:
    """Notes for each test its CPU time and the functions of dagsel that it calls."""

    def __init__(self) -> None:
        self.codes: dict[int, tuple[CodeType, str]] = {}
        self.shared: dict[str, set[str]] = {}  # by file: what fixtures call once for several tests
        self.tests: dict[str, Any] = {}
        self.failed: set[str] = set()

    def _trace(self, frame: FrameType, event: str, value: object) -> None:
        code = frame.f_code
        if id(code) not in self.codes:
            self.codes[id(code)] = (code, frame.f_globals.get("__name__", ""))

    def _functions(self) -> set[str]:
        return {
            f"{module}:{code.co_qualname.split('.<locals>.<')[0]}"
            if code.co_filename != "<string>"
            else f"{module}:"  # what a dataclass makes
            for code, module in list(self.codes.values())
            if module.startswith("dagsel.") and code.co_name != "<module>"
        }

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.codes = {}
        start = time.process_time()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        yield
        sys.settrace(None)
        threading.settrace(None)
        seconds = time.process_time() - start
        self.tests[item.nodeid] = [round(seconds, 3), sorted(self._functions())]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            yield
            return
        before, self.codes = self.codes, {}
        yield
        file = request.node.nodeid.split("::")[0]
        self.shared.setdefault(file, set()).update(self._functions())
        self.codes = before | self.codes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        for name, test in self.tests.items():
            test[1] = sorted({*test[1], *self.shared.get(name.split("::")[0], ())})


class Chosen:
    """Runs the chosen tests in their order, each with its limit; notes what failed."""

    def __init__(self, order: dict[str, float], others: set[str], failed: Path) -> None:
        self.seconds = order
        self.order = {name: i for i, name in enumerate(order)}
        self.others = others
        self.failed = failed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid not in self.others]
        items[:] = sorted(chosen, key=lambda item: self.order.get(item.nodeid, -1))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        limit_s = time.process_time() + LEAST_LIMIT_S + LIMIT * self.seconds.get(nodeid, 0.0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), resource.RLIM_INFINITY))
        self.failed.write_text(f"in {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = str(report.longrepr).splitlines() or [""]
            self.failed.write_text(f"{report.nodeid}: {text[-1]}"[:300])
