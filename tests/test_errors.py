"""Every error survives the trip between processes, and the drawn tree is the real one."""

import inspect
import pickle
import re

import pytest

from dagsel import errors

ALL = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.DagselError)
]


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_pickling(kind: type[errors.DagselError]) -> None:
    arguments = (3, "x", "s3://b/d", "bad", "train") if kind is errors.ShardCorruptError else ("m",)
    error = kind(*arguments)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.args == error.args


def test_the_docstring_draws_the_real_tree() -> None:
    drawn: dict[str, tuple[str, set[str]]] = {}  # error: its parent and its other bases
    branch = ["DagselError"]
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([ │]*[├└]──) (\w+Error)(?: +\((\w+)\))?", line):
            depth = len(found[1]) // 4
            branch[depth:] = [found[2]]
            drawn[found[2]] = branch[depth - 1], {found[3]} - {None}
    real = {
        kind.__name__: (
            kind.__bases__[0].__name__,
            {base.__name__ for base in kind.__bases__[1:]},
        )
        for kind in ALL
        if kind is not errors.DagselError
    }
    assert drawn == real
