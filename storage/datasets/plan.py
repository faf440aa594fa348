"""The plan of a write: reads what it needs to know, and no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

from dagsel.checks import choice, named_arguments, short_traceback, whole
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.dividing import Rule, is_share
from dagsel.storage.datasets.division import Places
from dagsel.storage.datasets.inputs.arrays import check_order
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.labels import Labels
from dagsel.storage.datasets.inputs.read import Part, Sharded, read
from dagsel.storage.datasets.inputs.reading import Columns, Reading
from dagsel.storage.datasets.manifest import (
    CHUNK_BYTES,
    SPLITS,
    ArraySpec,
    Manifest,
    Split,
    chunk_samples,
    shard_sizes,
    version_of,
)
from dagsel.storage.datasets.permutation import Shuffle
from dagsel.storage.datasets.sources import Batches, Column, Source, check_input
from dagsel.storage.datasets.spool import must_be_spooled, spool

#: Keeps the parts of a data set that was written before, and takes `SHARE` of anything else.
AUTO = "auto"
SHARE = 0.2

#: The shards of an input, in the order of its samples' destinations: split, index, samples.
Shards: TypeAlias = tuple[tuple[Split, int, int], ...]

#: Arguments that a write does not take, and what to write instead.
_ELSEWHERE = {
    **dict.fromkeys(("X", "x", "y"), 'write arrays={"x": x, "y": y}'),
    **dict.fromkeys(("chunks", "npartitions", "num_shards", "shards"), "write n_shards="),
    **dict.fromkeys(
        ("chunk_size", "shard_size"), "write n_shards=, how many shards: several for each worker"
    ),
    **dict.fromkeys(
        ("test_size", "val_size", "validation_data", "validation_fraction", "validation_split"),
        "write validation=",
    ),
    **dict.fromkeys(("n_jobs", "n_workers", "num_workers"), "write workers="),
    **dict.fromkeys(("data", "dataset"), "write arrays="),
    "batch_size": "write dagsel.TorchWorkload(..., batch_size=32), which takes it",
    "exist_ok": "write overwrite=True",
    "path": "write url=",
    "random_state": "write seed=",
    "shuffle": "samples are shuffled, as seed= says; leave it out",
}
P = ParamSpec("P")
T = TypeVar("T")
#: A shard is not larger, unless there would be many or they would have too few samples. Small CNNs
#: on two cores train on so much in a quarter of a second: 4% of the workers' time is between units
#: then, and what a lost worker costs is not much more. Of a single shard each worker has a copy,
#: and no model hops.
SHARD_BYTES = 16_000_000
#: Larger data is divided into so many shards, until they are large.
MANY, LARGE_SHARD_BYTES = 64, 250_000_000
#: A shard has no fewer samples if there are others to join it with.
SHARD_SAMPLES = 256


def written_by_name(write: Callable[P, T]) -> Callable[P, T]:
    """Say what a write takes instead of an argument that is called otherwise."""
    who = "ShardedDataset.write"
    return short_traceback(named_arguments(who, _ELSEWHERE, error=DatasetInputError)(write))


@dataclass(frozen=True, slots=True)
class InputPlan:
    """One input, where its samples go, and the shards in the order of these destinations."""

    source: Source
    shuffle: Places
    shards: Shards


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The manifest, and what is written from each input."""

    manifest: Manifest
    inputs: tuple[InputPlan, ...]


def shards_for(nbytes: int, n_samples: int) -> int:
    """Return how many shards data is divided into if nobody says it.

    Examples
    --------
    >>> shards_for(nbytes=500_000, n_samples=1797), shards_for(nbytes=184_000_000, n_samples=60_000)
    (1, 12)
    >>> shards_for(nbytes=150 * 10**9, n_samples=1_281_167)
    600
    """
    size = min(max(SHARD_BYTES, nbytes / MANY), LARGE_SHARD_BYTES)
    return max(1, min(math.ceil(nbytes / size), n_samples // SHARD_SAMPLES))


def plan_write(
    arrays: Any,
    folder: str,
    *,
    n_shards: int | Literal["auto"],
    validation: Any,
    seed: int,
    columns: Columns | None = None,
    ragged: Sequence[str] = (),
    split: Any = None,
    stratify: Any = None,
    groups: Any = None,
    workers: int = 0,
    on_error: str = "raise",
    scratch: str | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    columns_of: Mapping[str, Sequence[str]] | None = None,
) -> WritePlan:
    """Check all arguments of a write and plan it, or raise a `DatasetInputError`.

    A stream whose length, classes or division are known only at its end is read to that end, into
    files in the folder `scratch`. `classes` are of arrays that are encoded already, and
    `columns_of` has the columns of those that are joined already.
    """
    is_auto = isinstance(n_shards, str) and n_shards == AUTO
    n = 1 if is_auto else whole("n_shards", n_shards, error=DatasetInputError)
    seed = whole("seed", seed, least=0, error=DatasetInputError)
    ragged = _names("ragged", ragged)
    if isinstance(validation, str) and validation == AUTO:
        divides = any(by is not None for by in (split, stratify, groups))
        arrays, validation = _kept_parts(arrays) if not divides else (arrays, SHARE)
    rule = Rule.of(validation, split=split, stratify=stratify, groups=groups)
    reading = Reading(
        columns=columns,
        by=rule.name if rule else None,
        keeps_by=split is None,
        workers=whole("workers", workers, least=0, error=DatasetInputError),
        skips=choice("on_error", on_error, ("raise", "skip"), error=DatasetInputError) == "skip",
        ragged=ragged,
    )
    known = Classes({name: list(values) for name, values in (classes or {}).items()})
    source, labels, names = _read(arrays, reading, known, "arrays", rule, ragged, scratch)
    known.say_unlike(source.length)
    if is_share(validation):
        shuffle: Places
        if rule is not None and labels is not None:
            if rule.kind != "split":
                _n_validation(source.length, float(validation), n)
            shuffle = rule.divide(labels, source.length, float(validation), seed)
            n_train, n_validation = len(shuffle.train), len(shuffle.validation)
        else:
            n_validation = _n_validation(source.length, float(validation), n)
            n_train = source.length - n_validation
            shuffle = Shuffle(source.length, seed)
        parts: list[tuple[Source, Places, Sequence[Split]]] = [(source, shuffle, SPLITS)]
    else:
        fixed = Classes(known.known, is_fixed=True)
        there = set(validation if isinstance(validation, Mapping) else source.columns)
        uneven = [name for name, column in source.columns.items() if column.n_axes]
        uneven = [name for name in uneven if name in there]
        found, _, theirs = _read(validation, reading, fixed, "validation", None, uneven, scratch)
        other = _validation_input(source, found)
        _check_columns(names, theirs)
        n_train, n_validation = source.length, other.length
        parts = [
            (each, Shuffle(each.length, (seed, number)), [split])
            for number, (each, split) in enumerate(zip((source, other), SPLITS, strict=True))
        ]
    if is_auto:
        n_samples = n_train + n_validation
        n = min(shards_for(n_samples * source.sample_bytes, n_samples), n_train, n_validation) or 1
    for what, n_samples in (("training", n_train), ("validation", n_validation)):
        if n_samples < n:
            raise DatasetInputError(
                f"{n_samples} {what} samples are fewer than {n} shards: lower n_shards to "
                f"{n_samples} or less, or give more samples or another validation part"
            )
    n_values = _expected_values(source, n_train, n_validation, n)
    names = {**names, **(columns_of or {})}
    manifest = Manifest(
        folder=folder,
        seed=seed,
        n_shards=n,
        n_train=n_train,
        n_validation=n_validation,
        arrays=_specs(source, n_train, n_validation, n),
        classes=known.known,
        columns=names,
        n_values=n_values,
        version=version_of(columns=names, n_values=n_values),
    )
    _check_storable(manifest)
    shards: dict[Split, Shards] = {
        "train": _shards("train", n_train, n),
        "validation": _shards("validation", n_validation, n),
    }
    inputs = tuple(
        InputPlan(each, places, tuple(shard for split in splits for shard in shards[split]))
        for each, places, splits in parts
    )
    return WritePlan(manifest, inputs)


def _read(
    arrays: Any,
    reading: Reading,
    classes: Classes,
    what: str,
    rule: Rule | None,
    ragged: Sequence[str],
    scratch: str | None,
) -> tuple[Source, Labels | None, Mapping[str, Sequence[str]]]:
    """Read an input as far as it must be known; return it, labels to divide it by, its columns."""
    made = read(arrays, reading, classes, what)
    labels = None
    if rule is not None and rule.name is None:
        tables = arrays if isinstance(arrays, Mapping) else {what: arrays}
        check_order({**tables, rule.kind: rule.by})
        labels = rule.given_labels()
    elif rule is not None and made.values is not None:
        labels = Labels.of(rule.what, made.values())
    found = made.arrays
    if isinstance(found, Batches) and must_be_spooled(found):
        from_stream = Labels(rule.what) if rule and made.values is None and rule.name else None
        found = spool(found, classes, from_stream, ragged, scratch, what)
        labels = labels or from_stream
    return check_input(found, what, ragged), labels, made.columns


def _kept_parts(arrays: Any) -> tuple[Any, Any]:
    """Return the parts of a data set that was written before; of anything else a share."""
    if isinstance(arrays, Sharded):
        return Part(arrays, "train"), Part(arrays, "validation")
    return arrays, SHARE


def _shards(split: Split, n_samples: int, n_shards: int) -> Shards:
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


def _validation_input(source: Source, other: Source) -> Source:
    if set(other.columns) != set(source.columns):
        raise DatasetInputError(
            f"validation has arrays {sorted(other.columns)}, training {sorted(source.columns)}; "
            "give the same names to both"
        )
    for name, column in source.columns.items():
        if other.columns[name] != column:
            raise DatasetInputError(
                f"validation array {name!r} holds {other.columns[name]}, training {column}; "
                "make dtype and shape of a sample equal"
            )
    return other


def _check_columns(ours: Mapping[str, Sequence[str]], theirs: Mapping[str, Sequence[str]]) -> None:
    """Raise a `DatasetInputError` if an array of both parts is made of other columns in one."""
    for name in ours.keys() & theirs.keys():
        for at, (our, their) in enumerate(zip(ours[name], theirs[name], strict=True)):
            if our != their:
                raise DatasetInputError(
                    f"column {at} of {name!r} is {their!r} in the validation data, and {our!r} in "
                    "the training data; write both with the same columns= in one order"
                )


def _specs(source: Source, n_train: int, n_validation: int, n_shards: int) -> tuple[ArraySpec, ...]:
    def chunk(n_samples: int, column: Column) -> int:
        sample_bytes = 8 * column.n_axes or column.sample_bytes  # shapes of a ragged array
        return chunk_samples(math.ceil(n_samples / n_shards), sample_bytes, CHUNK_BYTES)

    return tuple(
        ArraySpec(
            name=name,
            dtype=column.dtype,
            shape=column.shape,
            train_chunk=chunk(n_train, column),
            validation_chunk=chunk(n_validation, column),
            n_axes=column.n_axes,
        )
        for name, column in source.columns.items()
    )


def _expected_values(
    source: Source, n_train: int, n_validation: int, n_shards: int
) -> dict[str, dict[Split, list[int]]]:
    """Return the values of ragged arrays, as far as is known before they are read."""
    n_samples: dict[Split, int] = {"train": n_train, "validation": n_validation}
    return {
        name: {
            split: [math.ceil(size * column.mean_values) for size in shard_sizes(n, n_shards)]
            for split, n in n_samples.items()
        }
        for name, column in source.columns.items()
        if column.n_axes
    }


def _names(what: str, given: Any) -> list[str]:
    """Return a list of names, or raise a `DatasetInputError`."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    if not (is_list and all(isinstance(name, str) for name in given)):
        raise DatasetInputError(f"{what} is {given!r}; give a list of names, such as [{given!r}]")
    return list(given)


def _check_storable(manifest: Manifest) -> None:
    for spec in manifest.arrays:
        try:
            for form in manifest.forms("train", 0, spec).values():
                form.metadata()
        except (ValueError, TypeError) as error:
            raise DatasetInputError(
                f"array {spec.name!r} of dtype {spec.dtype} cannot be stored: {error}"
            ) from None
