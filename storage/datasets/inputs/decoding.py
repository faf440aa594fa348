"""The samples of a data set one after the other, decoded here or in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeAlias

import numpy as np

from dagsel.errors import DatasetError, DatasetInputError

#: Parts of a sample by name, or why there are none.
Sample: TypeAlias = "dict[str, Any] | DatasetInputError"

_CHUNK = 16  # samples that a process decodes at a time
_AHEAD = 2  # chunks that are asked for in advance, for each process

#: What a process decodes; it has one data set.
_source: Any = None


def samples(source: Any, workers: int, what: str) -> Iterator[Sample]:
    """Go over the samples of a data set with a length, in order."""
    if not workers:
        yield from (_sample(source, at, what) for at in range(len(source)))
        return
    chunks = iter(range(0, len(source), _CHUNK))
    pool = ProcessPoolExecutor(
        workers, mp_context=_context(), initializer=_begin, initargs=(source,)
    )
    try:
        waiting: deque[Future[list[Sample]]] = deque()
        for start in chunks:
            waiting.append(_submitted(pool, start, min(start + _CHUNK, len(source)), what))
            if len(waiting) > _AHEAD * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise DatasetError(
            f"a process that decodes samples of {what} has ended: the error above says why, or it "
            "was killed, perhaps for want of memory; lower workers=, and in a script put "
            'ShardedDataset.write under  if __name__ == "__main__":'
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def stream_samples(source: Any, what: str) -> Iterator[Sample]:
    """Go over the samples of a stream."""
    n_read, items = 0, iter(source)
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:
            raise DatasetInputError(
                f"{what}: the stream ended with an error after {n_read} samples: {_told(error)}"
            ) from error
        yield named(item, what, n_read)
        n_read += 1


def named(item: Any, what: str, at: int) -> dict[str, Any]:
    """Return the parts of a sample by name: x and y of a pair."""
    if isinstance(item, Mapping):
        return {str(name): part for name, part in item.items()}
    is_row = isinstance(item, list) and all(isinstance(part, int | float) for part in item)
    if isinstance(item, tuple | list) and not is_row:  # a list of numbers is one array
        if len(item) == 2:
            return dict(zip(("x", "y"), item, strict=True))
        return {f"x{number}": part for number, part in enumerate(item)}
    if item is None:
        raise DatasetInputError(f"{what}: sample {at} is None; leave it out, or return its parts")
    return {"x": item}


def as_numbers(value: Any) -> Any:
    """Return an array of a tensor, a picture or a number; text as it is."""
    if isinstance(value, str) or value is None:
        return value
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def _sample(source: Any, at: int, what: str) -> Sample:
    try:
        item = source[at]
    except Exception as error:  # noqa: BLE001  # the data set's own
        told = DatasetInputError(f"{what}: sample {at} cannot be read: {_told(error)}")
        told.__cause__ = error
        return told
    return named(item, what, at)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _submitted(pool: ProcessPoolExecutor, start: int, stop: int, what: str) -> Future[list[Sample]]:
    try:
        return pool.submit(_chunk, start, stop, what)
    except BrokenProcessPool:
        raise
    except Exception as error:  # noqa: BLE001  # whatever pickling raises
        raise DatasetInputError(
            f"{what} cannot be sent to the processes that workers= asks for: {error}; define its "
            "class and functions at the top of a module, or leave workers= out"
        ) from None


def _context() -> Any:
    """Return how processes start: afresh, unless they could not import what is run now."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    can_import = main is not None and os.path.isfile(main)  # noqa: PTH113
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("spawn" if can_import or not has_fork else "fork")


def _begin(source: Any) -> None:
    global _source
    _source = source
    if (torch := sys.modules.get("torch")) is not None:
        with contextlib.suppress(Exception):
            torch.set_num_threads(1)  # the processes share the cores


def _chunk(start: int, stop: int, what: str) -> list[Sample]:
    found = (_sample(_source, at, what) for at in range(start, stop))
    return [
        {name: as_numbers(value) for name, value in parts.items()}
        if isinstance(parts, dict)
        else parts
        for parts in found
    ]
