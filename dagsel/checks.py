"""Checks of plain arguments: each returns what is to be used, or raises an error with the cure.

Numbers of NumPy count as Python's; True and False count as no numbers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from dagsel.errors import DagselError, SearchError, WorkloadError

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST = 60  # characters of a value that an error shows
#: What libraries call the two arguments of a loss or a metric; those of Keras come the other way.
_ALIASES = {
    **dict.fromkeys(("label", "labels", "targets", "true", "truth", "y_true"), "target"),
    **dict.fromkeys(
        ("logits", "outputs", "pred", "prediction", "predictions", "preds", "y_hat", "y_pred"),
        "output",
    ),
}


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Leave the frames inside a function out of the traceback of a `DagselError`.

    The traceback of a wrong argument then ends where the argument is given.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except DagselError as error:
            raise error.with_traceback(None) from error.__cause__

    return call


def refuse_elsewhere(
    who: str,
    given: Iterable[str],
    known: Container[str],
    elsewhere: Mapping[str, str],
    *,
    error: type[DagselError],
) -> None:
    """Raise an error for arguments that are not taken and stand elsewhere: what to write there.

    Examples
    --------
    >>> from dagsel.errors import SearchError
    >>> refuse_elsewhere("f", ["y"], ["x"], {"y": "write g(y)"}, error=SearchError)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: f takes no y: write g(y)
    """
    refused = [name for name in given if name in elsewhere and name not in known]
    if refused:
        told = "; and no ".join(f"{name}: {elsewhere[name]}" for name in refused)
        raise error(f"{who} takes no {told}")


def named_arguments(
    who: str, elsewhere: Mapping[str, str], *, error: type[DagselError]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Say what to write instead of an argument that is called otherwise or belongs elsewhere."""
    refuse = short_traceback(refuse_elsewhere)

    def checked(function: Callable[P, T]) -> Callable[P, T]:
        """Return the function that says so."""
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            refuse(who, kwargs, known, elsewhere, error=error)
            return function(*args, **kwargs)

        return call

    return checked


def shown(value: Any) -> str:
    """Return what was given, for an error: on one line, however large it is.

    Examples
    --------
    >>> shown(3), shown(int), shown([0] * 100), shown(len)
    ('3', 'the class int', 'a list', 'the function len')
    """
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    name = type(value).__qualname__
    a = f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and all(isinstance(n, int) for n in shape):
        return f"{a} of shape {tuple(shape)}"
    text = repr(value)
    is_told = len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text.lower()
    return text if is_told else a


def imported(module: str, extra: str, *, by: str, error: type[DagselError]) -> Any:
    """Import a library that an extra of dagsel brings; say how to install it if it is missing.

    Examples
    --------
    >>> imported("no_such_library", "jax", by="FlaxWorkload", error=SearchError)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: FlaxWorkload needs no_such_library: pip install "dagsel[jax]" (No \
module named 'no_such_library')
    """
    try:
        return importlib.import_module(module)
    except ImportError as why:
        name = module.partition(".")[0]
        raise error(f'{by} needs {name}: pip install "dagsel[{extra}]" ({why})') from None


def whole(name: str, value: Any, *, least: int = 1, error: type[DagselError] = SearchError) -> int:
    """Return a whole number of `least` or more.

    Examples
    --------
    >>> whole("n_trials", 3)
    3
    >>> whole("n_trials", 2.5)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: n_trials must be a whole number of 1 or more, got 2.5
    """
    # An abstract class takes ten times as long to ask.
    is_whole = type(value) is int or (type(value) is not bool and isinstance(value, Integral))
    if is_whole and int(value) >= least:
        return int(value)
    raise error(f"{name} must be a whole number of {least} or more, got {shown(value)}")


def is_number(value: Any) -> bool:
    """Whether something is a number."""
    kind = type(value)
    return kind is float or kind is int or (kind is not bool and isinstance(value, Real))


def number(
    name: str,
    value: Any,
    what: str,
    fits: Callable[[float], bool],
    *,
    error: type[DagselError] = SearchError,
) -> float:
    """Return a number that fits; `what` says which do, as the end of "name must be".

    Examples
    --------
    >>> number("share", 2, "from 0 to 1", lambda share: 0 <= share <= 1)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: share must be from 0 to 1, got 2
    """
    if is_number(value) and fits(float(value)):
        return float(value)
    raise error(f"{name} must be {what}, got {shown(value)}")


def flag(name: str, value: Any, *, error: type[DagselError] = SearchError) -> bool:
    """Return True or False, also NumPy's."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise error(f"{name} must be True or False, got {shown(value)}")


def choice(
    name: str, value: Any, known: tuple[str, ...], *, error: type[DagselError] = SearchError
) -> str:
    """Return one of the known words."""
    if isinstance(value, str) and value in known:
        return value
    raise error(f"{name} must be one of {', '.join(map(repr, known))}, got {shown(value)}")


def takes(function: Any, n: int) -> bool:
    """Whether something can be called with `n` arguments by position, as far as it tells.

    Examples
    --------
    >>> takes(lambda config: 0, 1), takes(lambda: 0, 1), takes("model", 1)
    (True, False, False)
    """
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(n))
    except TypeError:
        return False
    except ValueError:  # a function in C that has no signature
        pass
    return True


def takes_in_another_order(function: Any, names: Sequence[str]) -> bool:
    """Whether parameters by position are called as these, and are not where these are.

    An output and a target may have the names that they have elsewhere.

    Examples
    --------
    >>> takes_in_another_order(lambda target, output: 0, ["output", "target"])
    True
    >>> takes_in_another_order(lambda y, output, target=0: 0, ["output", "target"])
    True
    >>> takes_in_another_order(lambda config: 0, ["batch", "config"])
    True
    >>> takes_in_another_order(lambda y_true, y_pred: 0, ["output", "target"])
    True
    >>> takes_in_another_order(lambda prediction, target: 0, ["output", "target"])
    False
    """
    try:
        given = list(inspect.signature(function).parameters)[: len(names)]
    except (TypeError, ValueError):
        return False
    known = [_ALIASES.get(own, own) for own in given]
    return any(own != name and own in names for own, name in zip(known, names, strict=False))


def as_called(function: Any) -> Any:
    """Return what tells the arguments of a function, or of a class.

    The metaclass of a class, as that of Flax's modules, may take whatever comes.
    """
    if not isinstance(function, type):
        return function
    return functools.partial(getattr(function, "__init__"), None)  # noqa: B009


def check_call(name: str, function: Any, arguments: str, instead: str | None) -> None:
    """Raise a `WorkloadError` if a function is not called with these arguments, in this order.

    Parameters
    ----------
    instead
        What to write in its place; None if it may be called.

    Examples
    --------
    >>> check_call("loss", lambda target, output: 0, "output, target", None)
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: loss is called as loss(output, target), and the function <lambda> \
takes them in another order; write def loss(output, target): ...
    """
    if instead is not None:
        raise WorkloadError(
            f"{name} must be a function, called as {name}({arguments}), got {shown(function)}; "
            f"write {name}={instead}"
        )
    if takes_in_another_order(as_called(function), arguments.split(", ")):
        raise WorkloadError(
            f"{name} is called as {name}({arguments}), and {shown(function)} takes them in "
            f"another order; write def {name}({arguments}): ..."
        )


def check_takes_config(
    name: str, function: Any, config: Mapping[str, Any], *, error: type[DagselError]
) -> None:
    """Raise an error if a class is called with a configuration and takes a parameter of it.

    Examples
    --------
    >>> class Net:
    ...     def __init__(self, width, depth=2):
    ...         pass
    >>> check_takes_config("model", Net, {"lr": 0.1, "width": 8}, error=SearchError)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: model is called as Net(config), and the class Net begins with \
'width'; write model=lambda config: Net(width=config['width'])
    """
    if not isinstance(function, type):
        return
    first, *others = [*inspect.signature(function).parameters] or [""]
    if first in config:
        kind = function.__name__
        given = ", ".join(f"{its}=config[{its!r}]" for its in (first, *others) if its in config)
        raise error(
            f"{name} is called as {kind}(config), and {shown(function)} begins with {first!r}; "
            f"write {name}=lambda config: {kind}({given})"
        )
