"""Functions that JAX compiles, once in a process for all that would give the same program.

JAX itself compiles anew for each function object, and each trial has its own. Here two functions
share what is compiled if they are lowered to the same text: same computation, same shapes, same
constants, and no call back to Python. So trials that differ in numbers that are in their states, or
not at all, compile once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dagsel.errors import WorkloadError
from dagsel.workloads.random_streams import read_streams

T = TypeVar("T")

#: So many programs a process keeps; of those that are used least, it would compile again.
_MOST_KEPT = 256
_kept: OrderedDict[str, Any] = OrderedDict()
_numbers = itertools.count()


class Program:
    """A compiled function of a trial's arrays, and of the inputs and targets of a batch.

    Parameters
    ----------
    function
        ``function(arrays, inputs, targets)``. It must not draw from Python's or NumPy's streams.
    trains
        Whether it returns a loss and the arrays after a batch. It may overwrite those that it is
        given then, which must be JAX's own, and computes one batch ahead at most: JAX would put a
        whole shard in its queue, and a unit that is told to stop could not.

    Examples
    --------
    >>> double = Program(lambda arrays, inputs, targets: arrays[0] * inputs)
    >>> double([jnp.float32(2)], np.ones(2, "float32"), np.zeros(2)).tolist()
    [2.0, 2.0]
    """

    def __init__(self, function: Callable[[Any, Any, Any], Any], *, trains: bool = False) -> None:
        def traced(arrays: Any, inputs: Any, targets: Any) -> Any:
            return no_draws(lambda: function(arrays, inputs, targets))

        self._traced = traced
        # Else which arrays are read is not in the text, and one function would get another's.
        self._jit = jax.jit(traced, donate_argnums=0 if trains else (), keep_unused=True)
        self._digests: dict[Hashable, str] = {}
        self._trains, self._last_loss = trains, None

    def __call__(self, arrays: Any, inputs: Any, targets: Any) -> Any:
        """Call the function; compile it if inputs and targets have shapes that are new."""
        batch = jax.tree.map(jnp.asarray, (inputs, targets))
        leaves, tree = jax.tree.flatten(batch)
        key = tree, tuple(map(jax.typeof, leaves))
        if (found := _kept.get(self._digests.get(key, ""))) is None:
            lowered = self._jit.lower(arrays, *batch)
            self._digests[key] = digest = _digest(lowered)
            if digest not in _kept:
                _kept[digest] = lowered.compile()
            found = _kept[digest]
        _kept.move_to_end(self._digests[key])
        if len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
        made = found(arrays, *batch)
        if self._trains:
            jax.block_until_ready(self._last_loss)  # type: ignore[no-untyped-call]
            self._last_loss = made[0]
        return made

    def trace(self, arrays: Any, inputs: Any, targets: Any) -> Any:
        """Go through the function without numbers: shapes and dtypes in, and the result's out."""
        return jax.eval_shape(self._traced, arrays, inputs, targets)


def _digest(lowered: Any) -> str:
    text = lowered.as_text()
    has_constants = not getattr(jax.config, "jax_use_simplified_jaxpr_constants", False)
    if not has_constants or "_callback" in text:  # which function it calls is not in the text
        text += f"number {next(_numbers)}"
    trees = f"{lowered.in_tree} {lowered.out_tree}"
    return hashlib.sha256(f"{text}\n{trees}".encode()).hexdigest()


def no_draws(function: Callable[[], T]) -> T:
    """Call what JAX traces; raise a `WorkloadError` if it draws from Python's or NumPy's streams.

    A number drawn there would be a constant of the compiled program.
    """
    before = read_streams()
    made = function()
    if _differ(before, read_streams()):
        raise WorkloadError(
            "the model or the loss draws random numbers from Python or NumPy, which JAX would "
            "compile as constants: draw them from the model's own generators (nnx.Rngs, "
            "keras.random.SeedGenerator), or in input_fn"
        )
    return made


def _differ(before: Any, after: Any) -> bool:
    if isinstance(before, dict):
        return any(_differ(before[key], after[key]) for key in before)
    return not np.array_equal(before, after)
