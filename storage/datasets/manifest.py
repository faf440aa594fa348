"""The manifest of a data set: its arrays, the sizes of its shards, their keys. Pure.

::

    dagsel.json                              the manifest, written last
    zarr.json                                a Zarr v3 group
    data-1f0c…/train/00000/x/zarr.json       a Zarr v3 array, one for each shard and name
    data-1f0c…/train/00000/x/c/0/0/0         its only object: a Zarr shard of inner chunks
    data-1f0c…/validation/00000/x/…
    data-1f0c…/train/00000/ids/shapes/…      of a ragged array: the shapes of the samples,
    data-1f0c…/train/00000/ids/values/…      and the values of all samples, one after the other

The manifest has a checksum of itself, and each object a seal (`zarr_shard`). Data sets of version 1
have neither. Only data sets with ragged arrays have version 3, and only those that know the columns
of a table version 4, which no earlier dagsel reads.

Each shard is an array of its own, since lengths differ by up to one sample and the shards of one
Zarr array have one length. Each write makes a new folder, so that the old data set stays whole.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

import google_crc32c
import numpy as np

from dagsel.errors import DatasetFormatError, DatasetInputError
from dagsel.storage.datasets.ragged import any_shape
from dagsel.storage.datasets.zarr_shard import ShardFormat

Split: TypeAlias = Literal["train", "validation"]

MANIFEST = "dagsel.json"
UNFINISHED = "dagsel.unfinished.json"
FORMAT = "dagsel.dataset"
VERSION = 4
RAGGED_VERSION = 3  # of data sets with ragged arrays, and without columns
REGULAR_VERSION = 2  # of data sets with neither ragged arrays nor columns
SPLITS: tuple[Split, ...] = get_args(Split)
CHUNK_BYTES = 1 << 20
SHAPE_DTYPE = "<i8"
MAX_SHARDS = 1_000_000
_MAX_BYTES = 1 << 60
_NAME = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
FOLDER_NAME = re.compile(r"data-[0-9a-f]{8,64}")
_SPLIT = f"(?:{'|'.join(SPLITS)})"
_PART = "(?:(?:shapes|values)/)?"  # of a ragged array
#: Keys in that folder.
OWN_FILE = re.compile(
    rf"(?:(?:{_SPLIT}/(?:\d{{5,}}/(?:{_NAME.pattern}/{_PART})?)?)?zarr\.json"
    rf"|{_SPLIT}/\d{{5,}}/{_NAME.pattern}/{_PART}c(?:/0)+"
    rf"|profiles/{_NAME.pattern}\.json)(?:\.[0-9a-f]{{8}}\.tmp)?"
)
_DTYPE = re.compile(r"[<|](?:[biufcSU]\d{1,9}|[mM]8\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])")


@dataclass(frozen=True, slots=True)
class ShardSize:
    """Size of one shard: its training and its validation part.

    Parameters
    ----------
    n_train, n_validation
        Number of samples.
    nbytes
        Bytes of both parts in memory.

    Examples
    --------
    >>> ShardSize(n_train=20, n_validation=5, nbytes=1000).n_train
    20
    """

    n_train: int
    n_validation: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array of a data set: dtype and shape of a sample, and how it is stored.

    The samples of a ragged array have shapes of their own, with `n_axes` axes.

    Examples
    --------
    >>> spec = ArraySpec(name="x", dtype="<f4", shape=(8, 8), train_chunk=90, validation_chunk=90)
    >>> spec.sample_bytes, spec.chunk("train")
    (256, 90)
    """

    name: str
    dtype: str  # NumPy's string, such as "<f4"
    shape: tuple[int, ...]  # of one sample
    train_chunk: int  # samples in an inner chunk of a training shard
    validation_chunk: int
    n_axes: int = 0  # of a ragged array, whose `shape` is empty; 0: all samples have `shape`

    def __post_init__(self) -> None:
        check_name(self.name)
        if not _is_text(self.dtype, _DTYPE):
            raise DatasetInputError(f"array {self.name!r}: dtype {self.dtype!r} cannot be stored")
        try:
            itemsize = np.dtype(self.dtype).itemsize
        except (TypeError, ValueError):
            raise DatasetInputError(
                f"array {self.name!r}: NumPy has no dtype {self.dtype!r}"
            ) from None
        if len(self.shape) > 31 or not all(_is_count(size, 1) for size in self.shape):
            raise DatasetInputError(
                f"array {self.name!r}: samples of shape {self.shape} cannot be stored"
            )
        if not _is_count(self.n_axes, 0) or self.n_axes > 31 or (self.n_axes and self.shape):
            raise DatasetInputError(f"array {self.name!r}: a sample cannot have {self.n_axes} axes")
        if not 0 < math.prod(self.shape) * itemsize <= _MAX_BYTES:
            raise DatasetInputError(
                f"array {self.name!r}: a sample of shape {self.shape} and dtype {self.dtype} has "
                "no sensible size"
            )
        if not (_is_count(self.train_chunk, 1) and _is_count(self.validation_chunk, 1)):
            raise DatasetInputError(f"array {self.name!r}: a chunk has at least one sample")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy's object."""
        return np.dtype(self.dtype)

    @property
    def is_ragged(self) -> bool:
        """Whether samples have shapes of their own."""
        return self.n_axes > 0

    @property
    def shape_text(self) -> str:
        """The shape of a sample for people, such as ``[8, 8]``, or ``[*]`` for any length."""
        return any_shape(self.n_axes) if self.is_ragged else str(list(self.shape))

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample; of a ragged array's, those of its shape."""
        if self.is_ragged:
            return self.n_axes * np.dtype(SHAPE_DTYPE).itemsize
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    def chunk(self, split: Split) -> int:
        """Return the samples in an inner chunk of a split's shards."""
        return self.train_chunk if split == "train" else self.validation_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a stored data set."""

    folder: str  # holds the shards
    seed: int  # of the shuffle
    n_shards: int  # for training, and as many for validation
    n_train: int  # samples in all training shards
    n_validation: int
    arrays: tuple[ArraySpec, ...]
    version: int = REGULAR_VERSION  # of the format
    # Of arrays that hold classes: what the numbers stand for, from 0.
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Of arrays that were made of several columns of a table: the columns.
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Of ragged arrays: the values in each shard of a split.
    n_values: Mapping[str, Mapping[Split, Sequence[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _is_text(self.folder, FOLDER_NAME):
            raise DatasetInputError(f"{self.folder!r} is no folder of a data set")
        if not _is_count(self.seed, 0):
            raise DatasetInputError(f"seed {self.seed!r} is no non-negative integer")
        if not (_is_count(self.n_shards, 1) and self.n_shards <= MAX_SHARDS):
            raise DatasetInputError(
                f"n_shards is {self.n_shards!r}: it must lie in 1 to {MAX_SHARDS}"
            )
        for split in SPLITS:
            n_samples = self.n_train if split == "train" else self.n_validation
            if not (_is_count(n_samples, self.n_shards) and n_samples <= _MAX_BYTES):
                raise DatasetInputError(
                    f"{n_samples} {split} samples cannot be divided into {self.n_shards} shards"
                )
        check_names(spec.name for spec in self.arrays)
        names = {spec.name for spec in self.arrays}
        for name, values in self.classes.items():
            if name not in names or not all(isinstance(value, str) for value in values):
                raise DatasetInputError(f"{name!r} has no classes {list(values)[:5]!r}")
        shapes = {spec.name: spec.shape for spec in self.arrays}
        for name, of in self.columns.items():
            if shapes.get(name) != (len(of),) or not all(isinstance(each, str) for each in of):
                raise DatasetInputError(f"{name!r} has no columns {list(of)[:5]!r}")
        self._check_values()
        if self.nbytes > _MAX_BYTES:
            raise DatasetInputError("the arrays' declared shapes are larger than any store")

    def _check_values(self) -> None:
        ragged = {spec.name for spec in self.arrays if spec.is_ragged}
        counts = [per for by_split in self.n_values.values() for per in by_split.values()]
        if (
            set(self.n_values) != ragged
            or any(set(by_split) != set(SPLITS) for by_split in self.n_values.values())
            or any(len(per) != self.n_shards for per in counts)
            or not all(_is_count(n, 0) and n <= _MAX_BYTES for per in counts for n in per)
        ):
            raise DatasetInputError("the numbers of values of ragged arrays do not fit the shards")

    @property
    def n_samples(self) -> int:
        """Number of samples, training and validation together."""
        return self.n_train + self.n_validation

    @property
    def nbytes(self) -> int:
        """Bytes of all samples in memory."""
        return sum(map(self.array_bytes, self.arrays))

    def array_bytes(self, spec: ArraySpec) -> int:
        """Return the bytes of all samples of an array."""
        n_values = sum(map(sum, self.n_values[spec.name].values())) if spec.is_ragged else 0
        return self.n_samples * spec.sample_bytes + n_values * spec.numpy_dtype.itemsize

    def shard_bytes(self, split: Split) -> list[int]:
        """Return the bytes of each shard of a split in memory."""
        sample_bytes = sum(spec.sample_bytes for spec in self.arrays)
        found = [n_samples * sample_bytes for n_samples in self.sizes(split)]
        for spec in self.arrays:
            if spec.is_ragged:
                itemsize, counts = spec.numpy_dtype.itemsize, self.n_values[spec.name][split]
                found = [n + count * itemsize for n, count in zip(found, counts, strict=True)]
        return found

    def sizes(self, split: Split) -> tuple[int, ...]:
        """Return the number of samples in each shard of a split."""
        n_samples = self.n_train if split == "train" else self.n_validation
        return shard_sizes(n_samples, self.n_shards)

    def key(self, split: Split, shard: int, name: str) -> str:
        """Folder of one array of one shard."""
        return f"{self.folder}/{split}/{shard:05d}/{name}"

    def form(self, split: Split, shard: int, spec: ArraySpec) -> ShardFormat:
        """Return the form of one array of one shard; of a ragged one, that of its shapes."""
        n_samples, chunk = self.sizes(split)[shard], spec.chunk(split)
        place = self.key(split, shard, spec.name)
        if spec.is_ragged:
            return ShardFormat(n_samples, SHAPE_DTYPE, (spec.n_axes,), chunk, f"{place}/shapes")
        return ShardFormat(n_samples, spec.dtype, spec.shape, chunk, self._seal(place))

    def values_form(
        self, split: Split, shard: int, spec: ArraySpec, n_values: int | None = None
    ) -> ShardFormat:
        """Return the form of a ragged array's values; `n_values` if it is not the manifest's."""
        n = self.n_values[spec.name][split][shard] if n_values is None else n_values
        chunk = chunk_samples(n, spec.numpy_dtype.itemsize, CHUNK_BYTES)
        place = f"{self.key(split, shard, spec.name)}/values"
        return ShardFormat(n, spec.dtype, (), max(1, chunk), place)

    def forms(self, split: Split, shard: int, spec: ArraySpec) -> dict[str, ShardFormat]:
        """Return the forms of all Zarr arrays of one array of one shard, by their folders."""
        key, form = self.key(split, shard, spec.name), self.form(split, shard, spec)
        if not spec.is_ragged:
            return {key: form}
        return {f"{key}/shapes": form, f"{key}/values": self.values_form(split, shard, spec)}

    def _seal(self, place: str) -> str:
        return place if self.version > 1 else ""

    def object_bytes(self) -> tuple[int, int]:
        """Return the bytes of all objects that hold samples together, and of the largest one."""
        total = largest = 0
        for split in SPLITS:
            sizes = self.sizes(split)
            for size, n_shards in Counter(sizes).items():
                for spec in self.arrays:
                    n_bytes = self.form(split, sizes.index(size), spec).object_bytes
                    total, largest = total + n_shards * n_bytes, max(largest, n_bytes)
            for spec in self.arrays:
                for shard in range(self.n_shards) if spec.is_ragged else ():
                    n_bytes = self.values_form(split, shard, spec).object_bytes
                    total, largest = total + n_bytes, max(largest, n_bytes)
        return total, largest

    def to_json(self) -> bytes:
        """Write it as JSON."""
        body = {"format": FORMAT, "version": self.version, **asdict(self)}
        for entry in body["arrays"]:
            if not entry["n_axes"]:  # as it was before there were ragged arrays
                del entry["n_axes"]
        for name in ("classes", "columns", "n_values"):
            if not body[name]:
                del body[name]
        if self.version > 1:
            text = json.dumps(body, indent=1).encode()
            body["crc32c"] = f"{google_crc32c.value(text):08x}"
        return json.dumps(body, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, url: str) -> Manifest:
        """Read it from JSON of any origin, or raise a `DatasetFormatError`."""
        body = _parse(data, url)
        try:
            has_checksum = body["version"] > 1
            checksum = body.pop("crc32c") if has_checksum else None
            arrays = tuple(_spec_from_json(entry) for entry in body.pop("arrays"))
            manifest = cls(arrays=arrays, **body)
            if has_checksum and json.loads(manifest.to_json())["crc32c"] != checksum:
                raise ValueError("its checksum does not match: it was changed")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DatasetFormatError(
                f"{url}: {MANIFEST} is damaged ({error}); restore it from a copy, or write the "
                "data set again"
            ) from None
        return manifest


def _parse(data: bytes, url: str) -> dict[str, Any]:
    """Read a JSON file of ours and check its format and version; return all but the format."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise DatasetFormatError(
            f"{url}: {MANIFEST} is no JSON: the data set is damaged or is not dagsel's"
        ) from None
    if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
        raise DatasetFormatError(f"{url} is not a data set of dagsel; check the URL")
    version = body.get("version")
    if not isinstance(version, int) or not _is_count(version, 1):
        raise DatasetFormatError(
            f"{url}: {MANIFEST} is damaged: its version is {version!r}; restore it from a copy"
        )
    if version > VERSION:
        raise DatasetFormatError(
            f"{url} was written by a newer dagsel (format {version}; this one reads up to "
            f"{VERSION}); upgrade dagsel to read it"
        )
    return body


def check_name(name: object) -> None:
    """Raise a `DatasetInputError` if a name cannot be part of a key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "zarr.json":
        raise DatasetInputError(
            f"{name!r} cannot be an array's name: use letters, digits, '_', '-' and '.', at most "
            "100, not beginning with '-', '.' or '__'"
        )


def check_names(names: Iterable[object]) -> None:
    """Raise a `DatasetInputError` if names cannot be arrays of one data set."""
    seen: dict[str, str] = {}
    for name in names:
        check_name(name)
        assert isinstance(name, str)
        if (other := seen.get(name.casefold())) is not None:
            # Some file systems do not tell them apart.
            raise DatasetInputError(f"arrays {other!r} and {name!r} differ at most in case")
        seen[name.casefold()] = name
    if not seen:
        raise DatasetInputError("no arrays were given: pass a mapping of names to arrays")


def version_of(*, columns: Mapping[str, Any], n_values: Mapping[str, Any]) -> int:
    """Return the version of the format that a data set needs.

    Examples
    --------
    >>> version_of(columns={}, n_values={}), version_of(columns={"x": ["a", "b"]}, n_values={})
    (2, 4)
    """
    if columns:
        return VERSION
    return RAGGED_VERSION if n_values else REGULAR_VERSION


def shard_sizes(n_samples: int, n_shards: int) -> tuple[int, ...]:
    """Divide samples among shards: sizes differ by at most one, larger ones first.

    Examples
    --------
    >>> shard_sizes(11, 4)
    (3, 3, 3, 2)
    """
    size, n_larger = divmod(n_samples, n_shards)
    return (size + 1,) * n_larger + (size,) * (n_shards - n_larger)


def chunk_samples(n_samples: int, sample_bytes: int, target_bytes: int) -> int:
    """Choose the number of samples in an inner chunk.

    Chunks have about `target_bytes`: large enough that Python's overhead does not count, small
    enough to stay in the processor's cache while the checksum is computed. They divide the shard
    evenly, since the last one is padded.
    """
    n_chunks = min(n_samples, math.ceil(n_samples * sample_bytes / target_bytes))
    return math.ceil(n_samples / max(1, n_chunks))


def _spec_from_json(entry: Mapping[str, Any]) -> ArraySpec:
    unknown = set(entry) - {field.name for field in fields(ArraySpec)}
    if unknown:
        raise TypeError(f"unknown entries {sorted(unknown)}")
    return ArraySpec(**{**entry, "shape": tuple(entry["shape"])})


def _is_text(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
