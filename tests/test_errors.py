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


def test_the_docstring_draws_every_error() -> None:
    drawn = re.findall(r"([A-Z]\w+Error)\b(?!\))", errors.__doc__ or "")
    assert set(drawn) >= {kind.__name__ for kind in ALL}
    for kind in ALL:
        depth = len(kind.__mro__[: kind.__mro__.index(errors.DagselError)])
        base = [k for k in kind.__mro__ if k in ALL][: depth + 1]
        assert kind is errors.DagselError or base[-1] is errors.DagselError
