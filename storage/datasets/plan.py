"""The plan of a write. Pure, except that a first batch may be read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dagsel.checks import whole
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.read import read
from dagsel.storage.datasets.inputs.tables import Columns
from dagsel.storage.datasets.manifest import (
    CHUNK_BYTES,
    SPLITS,
    ArraySpec,
    Manifest,
    Split,
    chunk_samples,
    shard_sizes,
)
from dagsel.storage.datasets.permutation import Shuffle
from dagsel.storage.datasets.sources import Column, Source, check_input


@dataclass(frozen=True, slots=True)
class InputPlan:
    """One input, where its samples go, and the shards in the order of these destinations.

    A shard is its split, its index and its number of samples.
    """

    source: Source
    shuffle: Shuffle
    shards: tuple[tuple[Split, int, int], ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The manifest, and what is written from each input."""

    manifest: Manifest
    inputs: tuple[InputPlan, ...]


def plan_write(
    arrays: Any,
    folder: str,
    *,
    n_shards: int,
    validation: Any,
    seed: int,
    columns: Columns | None = None,
) -> WritePlan:
    """Check all arguments of a write and plan it, or raise a `DatasetInputError`."""
    n_shards = whole("n_shards", n_shards, error=DatasetInputError)
    seed = whole("seed", seed, least=0, error=DatasetInputError)
    classes = Classes()
    source = check_input(read(arrays, columns, classes))
    if isinstance(validation, (float, int, np.number)) and not isinstance(validation, bool):
        n_validation = _n_validation(source.length, float(validation), n_shards)
        n_train = source.length - n_validation
        shards = _shards("train", n_train, n_shards) + _shards("validation", n_validation, n_shards)
        inputs: tuple[InputPlan, ...] = (InputPlan(source, Shuffle(source.length, seed), shards),)
    else:
        known = Classes(classes.known, is_fixed=True)
        other = _validation_input(source, read(validation, columns, known, "validation"))
        n_train, n_validation = source.length, other.length
        inputs = tuple(
            InputPlan(
                each, Shuffle(each.length, (seed, number)), _shards(split, each.length, n_shards)
            )
            for number, (each, split) in enumerate(zip((source, other), SPLITS, strict=True))
        )
    for split, n_samples in (("training", n_train), ("validation", n_validation)):
        if n_samples < n_shards:
            raise DatasetInputError(
                f"{n_samples} {split} samples are fewer than {n_shards} shards: lower n_shards to "
                f"{n_samples} or less, or give more samples or another validation part"
            )
    manifest = Manifest(
        folder=folder,
        seed=seed,
        n_shards=n_shards,
        n_train=n_train,
        n_validation=n_validation,
        arrays=_specs(source, n_train, n_validation, n_shards),
        classes=classes.known,
    )
    _check_storable(manifest)
    return WritePlan(manifest, inputs)


def _shards(split: Split, n_samples: int, n_shards: int) -> tuple[tuple[Split, int, int], ...]:
    return tuple((split, index, n) for index, n in enumerate(shard_sizes(n_samples, n_shards)))


def _n_validation(n_samples: int, fraction: float, n_shards: int) -> int:
    if not 0 < fraction < 1:
        raise DatasetInputError(
            f"validation is {fraction:g}; give a fraction between 0 and 1, both excluded, or "
            "arrays of its own: each shard needs validation samples"
        )
    n_validation = round(n_samples * fraction)
    if min(n_validation, n_samples - n_validation) < n_shards:
        raise DatasetInputError(
            f"{n_samples} samples with validation={fraction:g} leave {n_samples - n_validation} to "
            f"train and {n_validation} to validate: fewer than n_shards={n_shards}; lower n_shards "
            "or change validation"
        )
    return n_validation


def _validation_input(source: Source, validation: Any) -> Source:
    other = check_input(validation, "validation")
    if set(other.columns) != set(source.columns):
        raise DatasetInputError(
            f"validation has arrays {sorted(other.columns)}, training {sorted(source.columns)}; "
            "give the same names to both"
        )
    for name, column in source.columns.items():
        if other.columns[name] != column:
            raise DatasetInputError(
                f"validation array {name!r} holds {other.columns[name].dtype}"
                f"{list(other.columns[name].shape)}, training {column.dtype}{list(column.shape)}; "
                "make dtype and shape of a sample equal"
            )
    return other


def _specs(source: Source, n_train: int, n_validation: int, n_shards: int) -> tuple[ArraySpec, ...]:
    def chunk(n_samples: int, column: Column) -> int:
        return chunk_samples(math.ceil(n_samples / n_shards), column.sample_bytes, CHUNK_BYTES)

    return tuple(
        ArraySpec(
            name=name,
            dtype=column.dtype,
            shape=column.shape,
            train_chunk=chunk(n_train, column),
            validation_chunk=chunk(n_validation, column),
        )
        for name, column in source.columns.items()
    )


def _check_storable(manifest: Manifest) -> None:
    for spec in manifest.arrays:
        try:
            manifest.form("train", 0, spec).metadata()
        except (ValueError, TypeError) as error:
            raise DatasetInputError(
                f"array {spec.name!r} of dtype {spec.dtype} cannot be stored: {error}"
            ) from None
