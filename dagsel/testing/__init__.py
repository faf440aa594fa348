"""Conformance suites: tests that you inherit to check your own flow or workload."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from dagsel.checks import shown
from dagsel.errors import DagselError

if TYPE_CHECKING:
    from dagsel.testing.flows import FlowSuite
    from dagsel.testing.workloads import WorkloadSuite

__all__ = ["FlowSuite", "WorkloadSuite", "check"]

_LAZY = {
    "FlowSuite": "dagsel.testing.flows",
    "WorkloadSuite": "dagsel.testing.workloads",
}


def check(suite: type) -> list[str]:
    """Run the tests of a suite in a script or a notebook; in a test file pytest finds them.

    Parameters
    ----------
    suite
        Your class, which inherits `FlowSuite` or `WorkloadSuite`.

    Returns
    -------
    list of str
        The names of the tests that have passed. Tests for other kinds of procedures or workloads
        are left out.

    Raises
    ------
    AssertionError
        Of the first test that fails, or any other error that it raises; its note has the name.
    DagselError
        If the class has no tests.

    Examples
    --------
    >>> from dagsel.flows import RandomSearch
    >>> from dagsel.testing import FlowSuite, check
    >>> class TestFourTrials(FlowSuite):
    ...     def make_flow(self):
    ...         return RandomSearch(max_epochs=2, n_trials=4)
    >>> "test_a_deadline_ends_the_search_at_once" in check(TestFourTrials)
    True
    """
    names = [name for name in dir(suite) if name.startswith("test_")]
    given: Any = suite
    if not isinstance(given, type) or not names:
        raise DagselError(
            f"{shown(suite)} has no tests: inherit FlowSuite or WorkloadSuite, and give that class"
        )
    kept = list[str]()
    for name in names:
        try:
            getattr(suite(), name)()
        except SkipTest:  # it is for other kinds
            continue
        except Exception as error:
            error.add_note(f"{suite.__name__}.{name} has failed")
            raise
        kept.append(name)
    return kept


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
