"""One pass over the batches of a shard, of any library: where it is, when it ends, its losses.

A unit may be told to stop. It then ends at a batch boundary, and its state keeps a `Cursor`: the
trial's next unit goes on from there, and has the losses of the batches before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from dagsel.checks import shown, whole
from dagsel.codec import Json, from_json
from dagsel.errors import WorkloadError
from dagsel.flow import Losses
from dagsel.state import State, reading_state
from dagsel.workloads.base import Config, DataOutline, Trained, Visit

logger = logging.getLogger("dagsel")

#: Losses kept as they were reported before they are added up.
FOLD = 4096


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place inside a shard at which a unit stopped, and the losses so far."""

    trial: int
    epoch: int
    shard: int
    n_batches: int = 0
    n_samples: int = 0
    loss_sum: float = 0.0
    n_logged: int = 0

    @classmethod
    def begin(cls, saved: dict[str, Any] | None, visit: Visit) -> Cursor:
        """Return the place where a visit begins: its start, or the saved place in its shard."""
        here = cls(visit.trial, visit.epoch, visit.shard)
        with reading_state():
            cursor: Cursor = here if saved is None else from_json(cls, saved)
            if min(cursor.n_batches, cursor.n_samples, cursor.n_logged) < 0:
                raise ValueError(f"a place inside a shard is {cursor}")
        if (cursor.trial, cursor.epoch, cursor.shard) != (here.trial, here.epoch, here.shard):
            raise WorkloadError(
                f"the state was stopped inside shard {cursor.shard} of epoch {cursor.epoch} of "
                f"trial {cursor.trial}; it cannot go on with shard {visit.shard} of epoch "
                f"{visit.epoch} of trial {visit.trial}"
            )
        return cursor


class ShardPass:
    """The batches of one pass over a shard.

    One pass only. It ends early, at a batch boundary, when the unit is told to stop.

    Parameters
    ----------
    parts
        The samples of each batch of the whole shard.
    sizes
        How many these are.
    make
        Makes a batch of its samples.
    cursor
        Where the pass begins.
    should_stop
        Called after every batch but the last.

    Examples
    --------
    >>> visit = Visit(seed=0, trial=0, epoch=1, shard=0)
    >>> batches = ShardPass(
    ...     [[3, 1], [0, 2], [4]], [2, 2, 1], make=list, cursor=Cursor.begin(None, visit),
    ...     should_stop=lambda: False,
    ... )
    >>> for batch in batches:
    ...     batches.log(float(sum(batch)))
    >>> batches.loss, batches.cursor.n_samples, batches.stopped
    (3.2, 5, False)
    """

    def __init__(
        self,
        parts: Sequence[Any],
        sizes: Sequence[int],
        *,
        make: Callable[[Any], Any],
        cursor: Cursor,
        should_stop: Callable[[], bool],
    ) -> None:
        self._parts, self._sizes = parts, list(sizes)
        self._make, self._should_stop, self._cursor = make, should_stop, cursor
        self._done = cursor.n_batches
        self._taken = self._done  # batches that were handed out, also one that a loop broke off at
        self._losses: dict[int, Any] = {}
        self._loss_sum, self._n_logged = cursor.loss_sum, cursor.n_logged
        self._low, self._high = math.inf, -math.inf
        self.stopped = self._is_over = False
        self.after_batch: Callable[[], object] | None = None
        self.n_after: int | None = None  # how often it is called, evenly; None: after each batch
        self.may_stop: Callable[[], bool] = lambda: True

    def __len__(self) -> int:
        """Count the batches of this pass: those of the shard, or what a stopped unit has left."""
        return len(self._parts) - self._cursor.n_batches

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            raise WorkloadError(
                "a loop goes over its batches a second time, and each is handed out once: let the "
                "flow's max_epochs say how often a trial sees the data"
            )
        n_batches = len(self._parts)
        wanted = False
        for batch in self._batches(self._parts[self._done :]):
            self._taken = self._done + 1
            yield batch
            self._done += 1
            if self.after_batch is not None:
                for _ in range(self._n_due()):
                    self.after_batch()
            wanted = wanted or self._is_to_stop()
            if wanted and self._done < n_batches and self.may_stop():
                self.stopped = True
                break
        self._is_over = True

    def log(self, loss: Any) -> None:
        """Report the mean loss of the present batch; costs no synchronization with a GPU."""
        if len(self._losses) >= FOLD and self._done not in self._losses:  # which may come again
            self._fold()
        self._losses[self._done] = loss

    def _n_due(self) -> int:
        if self.n_after is None:
            return 1
        n, n_batches, done = self.n_after, len(self._parts), self._done
        return done * n // n_batches - (done - 1) * n // n_batches

    def _is_to_stop(self) -> bool:
        return self._should_stop()

    def _batches(self, parts: Sequence[Any]) -> Iterable[Any]:
        return map(self._make, parts)

    def _fold(self) -> None:
        indices, losses = self._collect()
        if not losses:
            return
        self._low, self._high = min(self._low, *losses), max(self._high, *losses)
        # One after the other in float64, so that a unit cut into pieces has the same sum.
        for index, loss in zip(indices, losses, strict=True):
            size = self._sizes[min(index, len(self._sizes) - 1)]
            self._loss_sum += loss * size
            self._n_logged += size

    def _collect(self) -> tuple[list[int], list[float]]:
        # The batches with a loss that is not yet counted, and these losses.
        collected = [*self._losses], self._numbers([*self._losses.values()])
        self._losses.clear()
        return collected

    def _numbers(self, values: list[Any]) -> list[float]:
        return [float(value) for value in values]

    @property
    def cursor(self) -> Cursor:
        """The place that has been reached."""
        self._fold()
        start = self._cursor
        return Cursor(
            start.trial, start.epoch, start.shard, self._taken, sum(self._sizes[: self._taken]),
            self._loss_sum, self._n_logged,
        )  # fmt: skip

    @property
    def loss(self) -> float:
        """Mean of the losses reported; NaN if none was, 0 if there was nothing to report on."""
        self._fold()
        if self._n_logged:
            return self._loss_sum / self._n_logged
        return math.nan if self._taken else 0.0

    @property
    def losses(self) -> Losses:
        """Range of the losses reported since the beginning of this piece."""
        self._fold()
        n = self._taken - self._cursor.n_batches
        known = self._low <= self._high and not math.isnan(self._loss_sum)
        return Losses(n, self._low, self._high) if known else Losses(n)

    @property
    def diverged(self) -> bool:
        """Whether a loss reported was NaN."""
        self._fold()
        return math.isnan(self._loss_sum)

    def place(self) -> dict[str, Json]:
        """Return what a state says of its place inside the shard: nothing at the end of it."""
        return {"cursor": asdict(self.cursor)} if self.stopped else {}

    def trained(self, state: State) -> Trained:
        """Return what a unit has come to that has trained on these batches."""
        return Trained(
            state,
            self.cursor.n_samples,
            self.loss,
            finished=not self.stopped,
            diverged=self.diverged,
            losses=self.losses,
        )


def sizes_of(n_samples: int, batch_size: int, *, drop_last: bool) -> list[int]:
    """Return the sizes of a shard's batches.

    Examples
    --------
    >>> sizes_of(10, 4, drop_last=False), sizes_of(10, 4, drop_last=True)
    ([4, 4, 2], [4, 4])
    """
    n_whole, rest = divmod(n_samples, batch_size)
    return [batch_size] * n_whole + ([rest] if rest and not drop_last else [])


def weighted_means(
    sizes: Sequence[int], columns: Mapping[str, Sequence[float]]
) -> tuple[int, dict[str, float]]:
    """Return the number of samples, and the mean over them of what batches have as means.

    Examples
    --------
    >>> weighted_means([4, 1], {"loss": [1.0, 2.0]})
    (5, {'loss': 1.2})
    """
    total = sum(sizes)
    means = {
        name: math.fsum(n * value for n, value in zip(sizes, column, strict=True)) / total
        if total
        else 0.0
        for name, column in columns.items()
    }
    return total, means


def number_of(name: str, value: Any) -> float:
    """Return what a metric makes of a batch, or raise a `WorkloadError` if it is no number.

    Examples
    --------
    >>> number_of("right", [1, 0])
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: metric 'right' must return a number for a batch, and returns \
[1, 0]: return a mean, as in .float().mean()
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise WorkloadError(
            f"metric {name!r} must return a number for a batch, and returns {shown(value)}: "
            "return a mean, as in .float().mean()"
        ) from None


def as_pair(made: Any) -> tuple[Any, Any]:
    """Return inputs and targets that an ``input_fn`` has returned.

    Examples
    --------
    >>> as_pair([1, 2])
    (1, 2)
    """
    if not (isinstance(made, tuple | list) and len(made) == 2):
        raise WorkloadError(
            f"input_fn returns {shown(made)}: return what the model gets and the targets, as in  "
            "return batch['x'], batch['y']"
        )
    return made[0], made[1]


def batch_size_of(given: int | Callable[[Any], int], config: Config) -> int:
    """Return the samples in a batch, given as a number or as a function of the configuration.

    Examples
    --------
    >>> batch_size_of(lambda config: config["n"] // 2, {"n": 9})
    4
    """
    size: Any = given(config) if callable(given) else given
    return whole("batch_size", size, error=WorkloadError)


def check_numbers(data: DataOutline) -> None:
    """Raise a `WorkloadError` if an array is text.

    Examples
    --------
    >>> import numpy as np
    >>> check_numbers(DataOutline((8,), {"y": (np.dtype("<U3"), ())}))
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: array 'y' is text (dtype <U3), and a model takes numbers: write \
the data set with  classes, y = np.unique(y, return_inverse=True)  or without it
    """
    for name, (dtype, _) in data.arrays.items():
        if dtype.kind in "US":
            raise WorkloadError(
                f"array {name!r} is text (dtype {dtype.str}), and a model takes numbers: write "
                f"the data set with  classes, {name} = np.unique({name}, return_inverse=True)  or "
                "without it"
            )


def check_order(data: DataOutline) -> None:
    """Raise a `WorkloadError` if x would be taken for the targets, and y for the inputs.

    Examples
    --------
    >>> import numpy as np
    >>> number = (np.dtype("float32"), ())
    >>> check_order(DataOutline((8,), {"y": number, "x": number}))
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: the first array of the data set, 'y', is the input, and the last \
one, 'x', the target: write x before y, or give them other names
    """
    names = [*data.arrays]
    if (names[0], names[-1]) == ("y", "x"):
        raise WorkloadError(
            "the first array of the data set, 'y', is the input, and the last one, 'x', the "
            "target: write x before y, or give them other names"
        )


def say_unused(data: DataOutline, cure: str) -> None:
    """Log which arrays of a data set no batch has: all but the first one and the last one."""
    arrays = [*map(repr, data.arrays)]
    if arrays[1:-1]:
        logger.warning(
            "the model gets %s, the target is %s, and nothing uses %s: %s",
            arrays[0],
            arrays[-1],
            " and ".join(arrays[1:-1]),
            cure,
        )


def check_batches(batch_size: int, data: DataOutline, *, drop_last: bool) -> None:
    """Log that no shard has a whole batch, or raise a `WorkloadError` if it is then left out.

    Examples
    --------
    >>> check_batches(512, DataOutline((301, 300), {}), drop_last=True)
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: batch_size is 512 with drop_last=True, and the smallest of the 2 \
training shards has 300 samples: nothing of it would be trained on; take a batch_size of at most \
300, leave drop_last out, or write the data set with fewer shards
    """
    least, most = min(data.n_train), max(data.n_train)
    if batch_size > most and len(data.n_train) > 1 and not drop_last:
        _say_smaller(batch_size, most, len(data.n_train))
    if batch_size > least and drop_last:
        raise WorkloadError(
            f"batch_size is {batch_size} with drop_last=True, and the smallest of the "
            f"{len(data.n_train)} training shards has {least} samples: nothing of it would be "
            f"trained on; take a batch_size of at most {least}, leave drop_last out, or write the "
            "data set with fewer shards"
        )


@cache
def _say_smaller(batch_size: int, most: int, n_shards: int) -> None:
    logger.warning(
        "batch_size is %d, and the largest of the %d training shards has %d samples: no batch is "
        "larger than its shard; take a batch_size of at most %d, or write the data set with fewer "
        "shards",
        batch_size,
        n_shards,
        most,
        most,
    )
