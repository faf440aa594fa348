"""The sharded data set: users write it once, workers read it shard by shard."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from dagsel.checks import choice, flag, short_traceback, whole
from dagsel.console import ProgressBar, readable_size
from dagsel.errors import (
    DatasetError,
    DatasetFormatError,
    DatasetInputError,
    DatasetNotFoundError,
    ShardCorruptError,
)
from dagsel.storage.datasets import transaction
from dagsel.storage.datasets.inputs.paths import how_to_write
from dagsel.storage.datasets.inputs.reading import Columns
from dagsel.storage.datasets.manifest import (
    MANIFEST,
    SPLITS,
    UNFINISHED,
    ArraySpec,
    Manifest,
    ShardSize,
    Split,
)
from dagsel.storage.datasets.plan import plan_write, written_by_name
from dagsel.storage.datasets.ragged import RaggedArray, join_rows
from dagsel.storage.datasets.spool import scratch_folder
from dagsel.storage.datasets.summary import SplitInMemory, summaries
from dagsel.storage.datasets.zarr_shard import DamagedError, ShardFormat, group_metadata
from dagsel.storage.files import Folder, Url

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, repr=False)
class ShardedDataset:
    """Named arrays of equal length, shuffled once and divided into shards.

    Make one with `write` or `open`. It pickles without its data, which stays at the URL.

    Parameters
    ----------
    folder
        Where it is.
    manifest
        What it is.

    Examples
    --------
    >>> import numpy as np
    >>> arrays = {"x": np.zeros((100, 8), "float32"), "y": np.arange(100)}
    >>> data = ShardedDataset.write("memory://example.zarr", arrays, n_shards=4, overwrite=True)
    >>> data
    <ShardedDataset memory://example.zarr: 100 samples in 4 shards (80 train, 20 validation), 4.0 kB
      x: float32 [8]
      y: int64 []>
    >>> {name: array.shape for name, array in data.shard(0).items()}
    {'x': (20, 8), 'y': (20,)}
    >>> ShardedDataset.open("memory://example.zarr") == data
    True
    >>> data.validation_shard(0)["y"].shape, data.head(2)["x"].shape, len(data.describe())
    ((5,), (2, 8), 2)
    >>> (x, y), all_is_well = data.to_torch()[0], data.verify()
    """

    folder: Folder
    manifest: Manifest

    @classmethod
    @written_by_name
    def write(
        cls,
        url: Folder | Url,
        arrays: Any,
        *,
        n_shards: int | Literal["auto"] = "auto",
        validation: Any = "auto",
        columns: Columns | None = None,
        ragged: Sequence[str] = (),
        split: Any = None,
        stratify: Any = None,
        groups: Any = None,
        workers: int = 0,
        on_error: str = "raise",
        seed: int = 0,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> ShardedDataset:
        """Shuffle arrays, divide them into shards and store them, all or nothing.

        Memory holds about 200 MB whatever the size of the input, and `split`, `stratify` and
        `groups` up to 30 bytes a sample. Inputs that are not in memory are read in order, and need
        scratch space of their own size (beside the data if that is a local folder, else where
        `tempfile` puts it); streams without a length twice that.

        Parameters
        ----------
        url
            Any fsspec URL, or a path. Nothing may be there, or, with `overwrite`, a data set.
        arrays
            A mapping of names to arrays of equal length, samples first: NumPy, memmap, Dask, h5py,
            Zarr, anything with ``shape``, ``dtype`` and slicing, or a `Batches` of such an array's
            parts. Or a `Batches` of mappings. Or a table of pandas, polars or Arrow; the path or
            URL of Parquet files, or of tar files (`WebDataset`); a data set of PyTorch or Hugging
            Face, a list, or any other iterable of samples; the path of images in a folder for each
            class (`ImageFolder`). Text, one a sample, becomes numbers (`classes`).
        n_shards
            Number of training shards, and of validation shards: several for each worker. "auto" is
            one for each 16 MB, with 256 samples or more; above 1 GB shards are larger.
        validation
            Fraction of the samples kept for validation, or data of its own. "auto" is 0.2, or the
            parts of a data set that was written before if `split` and the like are not given.
        columns
            Which columns of a table or of files become which arrays, such as ``{"x": ["age",
            "height"], "y": "kind"}``: several columns become one array of float32. None for all,
            each an array.
        ragged
            Names of arrays whose samples may differ in shape though the first ones do not, such as
            token lists. If the first ones differ, this is found out (`RaggedArray`).
        split
            Name of a column or an array that says of each sample whether it is for ``"train"`` or
            ``"validation"`` (also ``"valid"``, ``"val"``), or these words themselves. Samples that
            say ``"test"`` are left out. The column is not stored.
        stratify
            Name of a column of classes, or their values: each class has the same share of its
            samples in the validation part, within one sample.
        groups
            Name of a column, or its values: samples with one value, such as those of a patient,
            are in one part. The share is as near to `validation` as groups allow.
        workers
            Processes that decode the samples of a data set of PyTorch or Hugging Face, or of
            another with a length; 0 for none.
        on_error
            What becomes of images and samples that cannot be decoded: ``"raise"``, or ``"skip"``,
            which leaves them out and logs how many they were, and the first ones.
        seed
            Of the shuffle.
        storage_options
            Passed to the file system.
        overwrite
            Replace a data set. The old one stays until the new one is complete.

        Raises
        ------
        DatasetInputError
            If the arrays cannot become a data set.
        DatasetExistsError
            If the URL is taken.
        DatasetError
            In a process that is still starting: the script lacks its main guard.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise DatasetError(
                "a worker process that imports your script again must not write the data set "
                'again: put ShardedDataset.write under  if __name__ == "__main__":'
            )
        folder = url if isinstance(url, Folder) else Folder(url, storage_options)
        overwrite = flag("overwrite", overwrite, error=DatasetInputError)
        plan = partial(
            plan_write,
            arrays,
            n_shards=n_shards,
            validation=validation,
            columns=columns,
            ragged=ragged,
            split=split,
            stratify=stratify,
            groups=groups,
            workers=workers,
            on_error=on_error,
            seed=seed,
            scratch=scratch_folder(folder),
        )
        return cls(folder, transaction.write(folder, plan, overwrite=overwrite))

    @classmethod
    @short_traceback
    def open(cls, url: Url, storage_options: Mapping[str, Any] | None = None) -> ShardedDataset:
        """Open a data set.

        Parameters
        ----------
        url
            Any fsspec URL, or a path.
        storage_options
            Passed to the file system.

        Raises
        ------
        DatasetNotFoundError
            If nothing is there, or a write there did not end.
        DatasetFormatError
            If what is there is not a data set of ours, is damaged, or of a newer version.
        """
        folder = Folder(url, storage_options)
        data = folder.read(MANIFEST)
        if data is not None:
            found = cls(folder, Manifest.from_json(data, folder.url))
            if found.manifest.version == 1:
                found._check_sizes()
            return found
        if transaction.unfinished_folders(folder.read(UNFINISHED)):
            raise DatasetNotFoundError(
                f"a write to {folder.url} did not end (or is still going on); "
                "write it again with overwrite=True"
            )
        if folder.is_file():
            raise DatasetFormatError(
                f"{folder.url} is a file, and a data set of dagsel is a folder: make one of it "
                f"with {how_to_write(folder.url)}, and give that"
            )
        if inside := folder.kinds():
            raise DatasetFormatError(
                f"{folder.url} is not a data set of dagsel: it has no {MANIFEST}; make one with "
                f"{how_to_write(folder.url, inside)}"
            )
        raise DatasetNotFoundError(
            f"nothing is at {folder.url}; check the URL, or make a data set there with "
            "ShardedDataset.write"
        )

    @property
    def url(self) -> str:
        """Its URL, without credentials."""
        return self.folder.url

    @property
    def is_view(self) -> bool:
        """Whether its shards are put together from those of another one."""
        return False

    @property
    def digest(self) -> str:
        """Checksum of the manifest. Each write gives another one."""
        return f"{google_crc32c.value(self.manifest.to_json()):08x}"

    @property
    def n_shards(self) -> int:
        """Number of training shards, and of validation shards."""
        return self.manifest.n_shards

    @property
    def n_train(self) -> int:
        """Number of samples in all training shards."""
        return self.manifest.n_train

    @property
    def n_validation(self) -> int:
        """Number of samples in all validation shards."""
        return self.manifest.n_validation

    @property
    def schema(self) -> dict[str, ArraySpec]:
        """Dtype and shape of a sample, by name."""
        return {spec.name: spec for spec in self.manifest.arrays}

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Of arrays that were text or folders: what their numbers stand for, from 0."""
        return {name: tuple(values) for name, values in self.manifest.classes.items()}

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Of arrays that were made of several columns of a table: the columns, in their order.

        Examples
        --------
        >>> import pandas as pd
        >>> table = pd.DataFrame({"age": [30, 40] * 9, "cm": [170, 180] * 9, "kind": [0, 1] * 9})
        >>> parts = {"x": ["cm", "age"], "y": "kind"}
        >>> ShardedDataset.write("memory://ages.zarr", table, columns=parts, n_shards=2).columns
        {'x': ('cm', 'age')}
        """
        return {name: tuple(of) for name, of in self.manifest.columns.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all samples in memory."""
        return self.manifest.nbytes

    @property
    def shard_sizes(self) -> tuple[ShardSize, ...]:
        """Size of each shard, by which shards are placed on workers."""
        sizes = [self.manifest.sizes(split) for split in SPLITS]
        n_bytes = [self.manifest.shard_bytes(split) for split in SPLITS]
        return tuple(
            ShardSize(n_train, n_validation, train + validation)
            for n_train, n_validation, train, validation in zip(*sizes, *n_bytes, strict=True)
        )

    def shard(self, index: int) -> dict[str, Any]:
        """Read a training shard.

        Parameters
        ----------
        index
            From 0 to ``n_shards - 1``.

        Returns
        -------
        arrays
            New arrays by name, each of shape ``(n_samples, *sample_shape)``, or a `RaggedArray`.

        Raises
        ------
        ShardCorruptError
            If an object is missing or a checksum does not match.
        """
        return self._read(index, "train")

    def validation_shard(self, index: int) -> dict[str, Any]:
        """Read a validation shard; returns and raises as `shard`.

        Parameters
        ----------
        index
            From 0 to ``n_shards - 1``.
        """
        return self._read(index, "validation")

    def head(self, n: int = 5) -> dict[str, Any]:
        """Return the first samples of the first training shard: reads that shard.

        Parameters
        ----------
        n
            How many at most.
        """
        wanted = whole("n", n, error=DatasetInputError)
        return {name: array[:wanted] for name, array in self.shard(0).items()}

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample, in the order of the training shards and then the validation shards.

        Reads its whole shard, so go over all samples by iteration.
        """
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"a sample's index is a whole number, got {index!r}; see shard(index)")
        place = range(len(self))[index]  # counts from the end, and ends
        for split in SPLITS:
            for shard, size in enumerate(self.manifest.sizes(split)):
                if place < size:
                    return {name: array[place] for name, array in self._read(shard, split).items()}
                place -= size
        raise AssertionError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Go over all samples, shard by shard: those to train on, then those for validation."""
        for split in SPLITS:
            for shard in range(self.n_shards):
                arrays = self._read(shard, split)
                for rows in zip(*arrays.values(), strict=True):
                    yield dict(zip(arrays, rows, strict=True))

    def describe(self) -> pd.DataFrame:
        """Return a row for each array: its dtype and shape, and what its training samples hold.

        Reads all training shards. ``missing`` counts what is not a number, ``classes`` the
        different values of whole numbers and of text, if they are at most 1,000.
        """
        import pandas as pd  # only here: workers that read shards do without

        return pd.DataFrame(summaries(self.schema, map(self.shard, range(self.n_shards))))

    def to_torch(self, split: Split = "train") -> SplitInMemory:
        """Read a split as a data set for PyTorch's ``DataLoader``: a tuple of arrays a sample.

        Parameters
        ----------
        split
            ``"train"`` or ``"validation"``.
        """
        choice("split", split, SPLITS, error=DatasetInputError)
        shards = [self._read(shard, split) for shard in range(self.n_shards)]
        return SplitInMemory(
            {name: join_rows([shard[name] for shard in shards]) for name in self.schema}
        )

    def verify(self) -> None:
        """Read and check everything; raise a `ShardCorruptError` at the first damage."""
        with ProgressBar(self.nbytes, f"verifying {self.url}") as progress:
            for split in SPLITS:
                for index in range(self.n_shards):
                    for name, spec in self.schema.items():
                        progress.advance(self._read_array(index, split, spec).nbytes)
                        self._check_metadata(index, split, name)

    def __len__(self) -> int:
        """Count all samples, training and validation."""
        return self.manifest.n_samples

    def __repr__(self) -> str:
        lines = [f"  {name}: {dtype} {shape}" for name, dtype, shape, _ in self._rows()]
        return "\n".join([f"<ShardedDataset {self.url}: {self._summary()}", *lines]) + ">"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in ("array", "dtype", "sample shape", "size"))
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._rows()
        )
        return (
            f"<div><strong>ShardedDataset</strong> <code>{escape(self.url)}</code><br>"
            f"{escape(self._summary())}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _summary(self) -> str:
        return (
            f"{len(self):,} samples in {self.n_shards:,} shards ({self.n_train:,} train, "
            f"{self.n_validation:,} validation), {readable_size(self.nbytes)}"
        )

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for spec in self.manifest.arrays:
            size = readable_size(self.manifest.array_bytes(spec))
            yield spec.name, str(spec.numpy_dtype), spec.shape_text, size

    def _read(self, index: int, split: Split) -> dict[str, Any]:
        if isinstance(index, bool) or not 0 <= index < self.n_shards:
            raise IndexError(f"shard {index} of {self.n_shards}: choose 0 to {self.n_shards - 1}")
        return {name: self._read_array(index, split, spec) for name, spec in self.schema.items()}

    def _read_array(self, index: int, split: Split, spec: ArraySpec) -> Any:
        forms = self.manifest.forms(split, index, spec)
        try:
            parts = [self._decode(key, form) for key, form in forms.items()]
            return ragged_array(*parts) if spec.is_ragged else parts[0]
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            reason = "missing object"
        except DamagedError as error:
            reason = str(error)
        raise ShardCorruptError(index, spec.name, self.url, reason, split)

    def _decode(self, key: str, form: ShardFormat) -> NDArray[Any]:
        stream, n_bytes = self.folder.open_read(f"{key}/{form.key}", expected=form.object_bytes)
        with stream:
            if n_bytes != form.object_bytes:
                raise DamagedError(f"{n_bytes} bytes instead of {form.object_bytes}")
            return form.decode(stream)

    def _check_metadata(self, index: int, split: Split, name: str) -> None:
        """Check Zarr's metadata: other readers use it, though dagsel does not."""
        forms = self.manifest.forms(split, index, self.schema[name])
        expected = {key: form.metadata() for key, form in forms.items()}
        if self.schema[name].is_ragged:
            expected[self.manifest.key(split, index, name)] = group_metadata()
        if any(self.folder.read(f"{key}/zarr.json") != text for key, text in expected.items()):
            raise ShardCorruptError(index, name, self.url, "damaged zarr.json", split)

    def _check_sizes(self) -> None:
        """Compare the manifest, which has no checksum, with the lengths of Zarr's arrays.

        Sizes fall by one where the smaller shards begin, and no shard may follow the last one.
        """
        name = self.manifest.arrays[0].name
        for split in SPLITS:
            sizes = dict(enumerate(self.manifest.sizes(split)))
            last = self.n_shards - 1
            edge = next(index for index in sizes if sizes[index] == sizes[last])
            for index in {max(0, edge - 1), edge, last, self.n_shards}:
                key = self.manifest.key(split, index, name)
                length = _zarr_length(self.folder.read(f"{key}/zarr.json"))
                if length not in (None, sizes.get(index)):
                    raise DatasetFormatError(
                        f"{self.url}: {split} shard {index} has {length} samples and "
                        f"{sizes.get(index, 0)} by {MANIFEST}, which was changed; restore it from "
                        "a copy, or write the data set again"
                    )


def ragged_array(shapes: NDArray[np.int64], values: NDArray[Any]) -> RaggedArray:
    """Make a ragged array of what was stored; raise a `DamagedError` if it is none."""
    if (shapes < 0).any() or sum(math.prod(shape) for shape in shapes.tolist()) != len(values):
        raise DamagedError("the samples' shapes do not fit the values")
    return RaggedArray(values, shapes)


def _zarr_length(metadata: bytes | None) -> int | None:
    """Return the length of a Zarr array; None if its metadata cannot be read."""
    try:
        length = json.loads(metadata or b"")["shape"][0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return length if isinstance(length, int) else None
