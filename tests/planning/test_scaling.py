"""Laws of scaling: between known numbers, best by brute force, σ and κ found again, JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.codec import from_json, to_json
from dagsel.errors import SearchError
from dagsel.planning.scaling import Fit, Scaling, ScalingModel, UniversalScaling, fit, learn

SPEEDUPS = st.floats(0.1, 64)
tables = st.dictionaries(st.integers(2, 40), SPEEDUPS, max_size=6).map(Scaling)
laws = st.builds(UniversalScaling, st.floats(0, 1), st.floats(0, 0.2))
models: st.SearchStrategy[ScalingModel] = st.one_of(tables, laws)
gangs = st.sets(st.integers(1, 32), min_size=3, max_size=6).map(sorted)


@given(models)
def test_one_worker_is_as_fast_as_one(model: ScalingModel) -> None:
    assert model.speedup(1) == 1.0
    assert model.efficiency(1) == 1.0


@given(tables, st.integers(1, 60))
def test_between_known_numbers_and_flat_beyond(scaling: Scaling, n: int) -> None:
    known = scaling.speedups
    assert all(scaling.speedup(p) == known[p] for p in known)
    below, above = max(p for p in known if p <= n), [p for p in known if p > n]
    if not above:
        assert scaling.speedup(n) == known[max(known)]
    else:
        slope = (known[min(above)] - known[below]) / (min(above) - below)
        assert scaling.speedup(n) == pytest.approx(known[below] + slope * (n - below))


@given(models, st.integers(1, 50), st.floats(0, 0.5))
def test_best_is_the_smallest_near_the_top(model: ScalingModel, most: int, within: float) -> None:
    best = model.best(most, within=within)
    enough = (1 - within) * max(model.speedup(p) for p in range(1, most + 1))
    assert 1 <= best <= most
    assert model.speedup(best) >= enough
    assert all(model.speedup(p) < enough for p in range(1, best))


@given(models, st.integers(1, 50))
def test_a_larger_tolerance_takes_no_more_workers(model: ScalingModel, most: int) -> None:
    assert model.best(most, within=0.2) <= model.best(most, within=0.0)


@given(models)
def test_json_gives_it_back(model: ScalingModel) -> None:
    text = json.dumps(to_json(model))
    assert from_json(ScalingModel, json.loads(text)) == model


@given(laws, gangs, st.floats(1e-3, 1e4))
def test_exact_times_give_the_law_back(
    law: UniversalScaling, seen: list[int], seconds: float
) -> None:
    found = fit([(p, seconds / law.speedup(p)) for p in seen])
    assert found.error < 1e-6
    assert found.unseen_error is None or found.unseen_error < 1e-3
    assert found.gangs == tuple(seen)
    # Parameters of three numbers far from 1 are ill conditioned; what they say of these is not.
    for p in seen:
        assert found.predict(p) == pytest.approx(seconds / law.speedup(p), rel=1e-6)
    if seen[0] == 1:
        assert isinstance(found.model, UniversalScaling)
        assert found.model.contention == pytest.approx(law.contention, abs=1e-5)
        assert found.model.coherence == pytest.approx(law.coherence, abs=1e-5)
        assert found.seconds == pytest.approx(seconds)


@settings(max_examples=30)
@given(laws, st.integers(0, 1000))
def test_noise_leaves_the_law_near_and_says_how_near(law: UniversalScaling, seed: int) -> None:
    noise, sizes = 0.1, (1, 2, 4, 8) * 40
    factors = np.random.default_rng(seed).lognormal(0, noise, len(sizes))
    found = fit([(p, 7 / law.speedup(p) * f) for p, f in zip(sizes, factors, strict=True)])
    assert noise / 2 < found.error < 2 * noise
    assert found.unseen_error is not None
    assert found.unseen_error > 0.8 * found.error  # no better of what it did not see
    for p in (2, 4, 8):
        assert found.model.speedup(p) == pytest.approx(law.speedup(p), rel=0.25)


def test_the_error_on_what_was_not_seen_is_that_of_fits_without_it() -> None:
    seen = [(1, 9.0), (2, 6.5), (4, 3.0), (8, 3.5)]
    errors = [fit([s for s in seen if s != (p, t)]).predict(p) / t - 1 for p, t in seen]
    assert fit(seen).unseen_error == pytest.approx(math.hypot(*errors) / math.sqrt(len(seen)))


def test_a_unit_that_took_for_ever_counts_as_one() -> None:
    law = UniversalScaling(0.05, 0.01)
    honest = [(p, 10 / law.speedup(p)) for p in (1, 2, 4, 8) * 20]
    found = fit([*honest, (2, 1e6)])
    assert found.model.speedup(8) == pytest.approx(law.speedup(8), rel=0.1)


def test_the_error_is_that_of_a_model_that_cannot_say_it() -> None:
    # Faster than linear: no non-negative parameters say that.
    found = fit([(1, 8.0), (2, 2.0), (4, 0.5)])
    assert found.model == UniversalScaling(0, 0)
    assert found.error > 0.3


@pytest.mark.parametrize("one", [1.0, 3.0])
def test_two_numbers_give_amdahl(one: float) -> None:
    found = fit([(2, one * 0.75), (4, one * 0.625)])  # σ = 0.5
    assert isinstance(found.model, UniversalScaling)
    assert found.model.contention == pytest.approx(0.5)
    assert found.model.coherence == 0
    assert found.seconds == pytest.approx(one)
    assert found.unseen_error is None


def test_one_number_promises_nothing_beyond_it() -> None:
    assert fit([(1, 5.0), (1, 5.0)]).model == Scaling({1: 1.0})
    found = fit([(3, 2.0)])
    assert found.model == Scaling({3: 3.0})
    assert found.model.speedup(8) == 3.0
    assert found.seconds == pytest.approx(6.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 8), st.floats(0.1, 10))))
def test_architectures_do_not_mix(units: list[tuple[str, int, float]]) -> None:
    found = learn(units)
    assert found.keys() == {name for name, *_ in units}
    for name, learnt in found.items():
        assert learnt == fit([(p, t) for other, p, t in units if other == name])
        assert from_json(Fit, json.loads(json.dumps(to_json(learnt)))) == learnt


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Scaling({0: 1.0}), "whole number of 1 or more, got 0"),
        (lambda: Scaling({2: 0.0}), "of 2 workers must be above 0"),
        (lambda: Scaling({2: math.nan}), "of 2 workers must be above 0"),
        (lambda: Scaling({1: 3.0, 2: 5.0}), "of 1 worker is 1"),
        (lambda: UniversalScaling(-0.1, 0), "contention"),
        (lambda: UniversalScaling(0, math.inf), "coherence"),
        (lambda: Scaling({2: 2}).speedup(0), "got 0"),
        (lambda: Scaling({2: 2}).best(0), "got 0"),
        (lambda: Scaling({2: 2}).best(2, within=1.0), "within"),
        (lambda: fit([]), "nothing to fit"),
        (lambda: fit([(0, 1.0), (1, 1.0)]), "got 0"),
        (lambda: fit([(2, 0.0)]), "took 0.0 s"),
    ],
)
def test_bad_input_is_named(make: object, says: str) -> None:
    with pytest.raises(SearchError, match=says):
        make()  # type: ignore[operator]
