"""Numbers of workers are a mapping and an array, and stay the same numbers in the same order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.worker_numbers import WorkerNumbers

steps = st.tuples(
    st.sampled_from(["set", "drop", "add to all"]), st.sampled_from("abcd"), st.floats(-9, 9)
)


@given(st.lists(steps, max_size=20))
def test_it_does_what_a_dictionary_does(done: list[tuple[str, str, float]]) -> None:
    numbers: WorkerNumbers[str] = WorkerNumbers()
    known: dict[str, float] = {}
    for what, worker, number in done:
        n_changes, before = numbers.n_changes, list(known)
        if what == "set":
            numbers[worker] = known[worker] = number
        elif what == "drop":
            assert numbers.pop(worker, None) == known.pop(worker, None)
        else:
            numbers.numbers[:] += number
            known = {other: value + number for other, value in known.items()}
        assert list(numbers.items()) == list(known.items())
        assert np.array_equal(numbers.numbers, list(known.values()))
        assert (numbers.n_changes != n_changes) == (list(known) != before)
        assert all(type(value) is float for value in numbers.values())
        assert (worker in numbers) == (worker in known)
