"""The shuffle of a data set, in little memory. Pure.

A permutation kept as an array takes 8 bytes a sample, twice that with its inverse. `Shuffle` keeps
small ones and computes others on demand, in both directions: a Feistel network (each round changes
one half of a number's bits by a hash of the other half, hence is its own inverse) permutes the
numbers below a power of two, and numbers outside the range are sent through it again until they
fall into it ("cycle walking"; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_N_KEPT = 1 << 16


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A random permutation of ``range(n_samples)``; equal seeds give equal permutations."""

    n_samples: int
    seed: int | Sequence[int]
    _keys: tuple[int, ...] = field(init=False, repr=False)
    _kept: NDArray[np.int64] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_small = self.n_samples <= _N_KEPT
        kept = np.random.default_rng(self.seed).permutation(self.n_samples) if is_small else None
        object.__setattr__(self, "_kept", kept)
        words = np.random.SeedSequence(self.seed).generate_state(_ROUNDS, np.uint64)
        object.__setattr__(self, "_keys", tuple(words.tolist()))

    def destinations(self, sources: NDArray[Any]) -> NDArray[np.int64]:
        """Return where samples go, by their places in the input, shape ``(n,)``."""
        if self._kept is not None:
            places: NDArray[np.int64] = self._kept[sources]
            return places
        return self._walk(sources, range(_ROUNDS))

    def sources(self, destinations: NDArray[Any]) -> NDArray[np.int64]:
        """Return where samples come from: the inverse of `destinations`."""
        if self._kept is not None:
            places: NDArray[np.int64] = np.argsort(self._kept)[destinations]
            return places
        return self._walk(destinations, range(_ROUNDS - 1, -1, -1))

    def _walk(self, numbers: NDArray[Any], rounds: range) -> NDArray[np.int64]:
        out = self._network(numbers.astype(np.uint64), rounds)
        (outside,) = np.nonzero(out >= self.n_samples)
        while outside.size:
            out[outside] = self._network(out[outside], rounds)
            outside = outside[out[outside] >= self.n_samples]
        return out.astype(np.int64)

    def _network(self, numbers: NDArray[np.uint64], rounds: range) -> NDArray[np.uint64]:
        bits = (self.n_samples - 1).bit_length()
        low_bits = bits // 2
        low_mask = np.uint64((1 << low_bits) - 1)
        high_mask = np.uint64((1 << (bits - low_bits)) - 1)
        shift = np.uint64(low_bits)
        for index in rounds:
            key = np.uint64(self._keys[index])
            if index % 2:
                numbers = numbers ^ (_hash(numbers >> shift, key) & low_mask)
            else:
                numbers = numbers ^ ((_hash(numbers & low_mask, key) & high_mask) << shift)
        return numbers


def _hash(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Mix 64 bits as SplitMix64's finalizer does (Steele, Lea and Flood 2014)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
