"""The random streams of a sampler. They are seeded for each draw, so none has to be stored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from optuna.samplers import BaseSampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.search_space import IntersectionSearchSpace
from optuna.search_space.group_decomposed import _GroupDecomposedSearchSpace

#: A collection with more items holds points or trials, not samplers.
_MANY = 64


def _parts(sampler: BaseSampler) -> Iterator[Any]:
    """Walk through a sampler and what it holds: other samplers, their helpers, random streams."""
    waiting: list[Any] = [sampler]
    met: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in met:
            continue
        met.add(id(part))
        yield part
        match part:
            case LazyRandomState():
                waiting.append(part.rng)
            case Mapping() if len(part) <= _MANY:
                waiting.extend(part.values())
            case list() | tuple() if len(part) <= _MANY:
                waiting.extend(part)
            case _ if _is_a_samplers(part):
                waiting.extend(vars(part).values())


def _is_a_samplers(part: Any) -> bool:
    if isinstance(part, BaseSampler):
        return True
    return type(part).__module__.startswith("optuna.samplers") and hasattr(part, "__dict__")


def samplers(sampler: BaseSampler) -> Iterator[BaseSampler]:
    """Return a sampler and those that it wraps."""
    return (part for part in _parts(sampler) if isinstance(part, BaseSampler))


def reseed(sampler: BaseSampler, *entropy: int) -> None:
    """Seed each random stream of a sampler from these numbers alone.

    Examples
    --------
    >>> from optuna.samplers import RandomSampler
    >>> one, other = RandomSampler(), RandomSampler()
    >>> for sampler in (one, other):
    ...     reseed(sampler, 7, 0)
    >>> one._rng.rng.uniform() == other._rng.rng.uniform()
    True
    """
    kinds = (np.random.RandomState, np.random.Generator, random.Random)
    found = [part for part in _parts(sampler) if isinstance(part, kinds)]
    words = np.random.SeedSequence(entropy).generate_state(max(len(found), 1))
    for stream, word in zip(found, words.tolist(), strict=False):
        if isinstance(stream, np.random.Generator):
            stream.bit_generator.state = type(stream.bit_generator)(word).state
        else:
            stream.seed(word)


def draw_seed(sampler: BaseSampler, default: int) -> int:
    """Draw a number from a sampler's own stream; return the default if it has none."""
    for part in _parts(sampler):
        if isinstance(part, LazyRandomState):
            return int(part.rng.randint(2**31))
    return default


def forget_spaces(sampler: BaseSampler) -> None:
    """Make a sampler look at all trials again; it expects that a finished one never changes."""
    for part in samplers(sampler):
        for name, value in list(vars(part).items()):
            if isinstance(value, IntersectionSearchSpace | _GroupDecomposedSearchSpace):
                setattr(part, name, type(value)(value._include_pruned))
