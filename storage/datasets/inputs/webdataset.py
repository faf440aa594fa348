"""WebDataset's tar files: the members with one name are the parts of a sample.

Nothing is extracted to a disk, links and devices are passed over, and no part is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from threading import Lock
from typing import Any, Self, TypeAlias

import fsspec
import numpy as np

from dagsel.console import readable_size
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.images import IMAGES, Alike, decoder
from dagsel.storage.datasets.inputs.paths import TAR, find_files, reading_file
from dagsel.storage.datasets.inputs.reading import (
    KEY,
    Input,
    Reading,
    Skipped,
    as_objects,
    blocks,
    in_threads,
)
from dagsel.storage.datasets.inputs.samples import stacked
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.storage.datasets.sources import Batches
from dagsel.storage.urls import without_credentials

_NUMBERS = ("cls", "cls2", "id", "index")
_TEXTS = ("txt", "text", "transcript")
_PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")
_IMAGES = tuple(suffix[1:] for suffix in IMAGES)
_KNOWN = (*_IMAGES, *_NUMBERS, *_TEXTS, "npy", "json")
_MOST_BYTES = 1 << 30  # of a member, which is read whole
#: NumPy parses the header of an array as Python, which before 3.11.8 fails by chance where two
#: threads do it at once (https://github.com/python/cpython/issues/106905).
_ONE_AT_A_TIME = Lock()

Decode: TypeAlias = Callable[[bytes, str], Any]


@dataclass(frozen=True)
class Members:
    """What a tar file has of one sample: bytes by what follows the first dot of the name."""

    where: str
    parts: Mapping[str, bytes]


@dataclass(frozen=True)
class WebDataset:
    """Tar files whose members ``0001.jpg``, ``0001.cls``, ... are a sample each.

    What follows the first dot names the parts: images (``jpg``, ``png``, ``webp``, ...) are decoded
    and stored as ``uint8``, ``cls`` is a whole number, ``npy`` an array, ``txt`` text, whose
    values become classes, and ``json`` a value, or an object whose entries are ``json.label`` and
    the like. ``columns=`` of `ShardedDataset.write` chooses among them, such as ``{"x": "jpg;png",
    "y": "cls"}``: the first that a sample has.

    Parameters
    ----------
    urls
        A path or URL of a tar file or of a folder of them, with braces or asterisks
        (``"s3://bucket/train-{000..012}.tar"``), or a list of these.
    size
        Width and height to which each image is resized; None if all have the same already.
    mode
        Mode of Pillow to which each is converted: ``"RGB"``, ``"L"`` for grey, or ``"F"`` for grey
        of more than 8 bits, as ``float32``.
    decode
        False to store the bytes of the images; see `ImageFolder`.

    Raises
    ------
    DatasetInputError
        When it is written: if a part cannot be decoded or is missing; names file and sample.

    Examples
    --------
    >>> from dagsel.storage import ShardedDataset
    >>> with tarfile.open("train.tar", "w") as tar:
    ...     for number in range(4):
    ...         for part, content in (("cls", str(number % 2)), ("txt", "yes")):
    ...             member = tarfile.TarInfo(f"{number:04}.{part}")
    ...             member.size = len(content)
    ...             tar.addfile(member, BytesIO(content.encode()))
    >>> columns = {"x": "txt", "y": "cls"}
    >>> files = WebDataset("train.tar")
    >>> data = ShardedDataset.write("text.zarr", files, n_shards=1, columns=columns)
    >>> len(data), data.classes
    (4, {'x': ('yes',)})
    """

    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    size: tuple[int, int] | None = None
    mode: str = "RGB"
    decode: bool = True

    def arrays(self, reading: Reading, classes: Classes) -> Input:
        """Return a stream of decoded samples."""
        files = find_files(self.urls, TAR)
        if not files:
            urls = [self.urls] if isinstance(self.urls, str | os.PathLike) else self.urls
            told = ", ".join(without_credentials(os.fspath(url)) for url in urls)
            raise DatasetInputError(f"{told} has no tar files; check the path or the pattern")
        if reading.workers:
            raise DatasetInputError("tar files are decoded in threads already; leave workers= out")
        what = without_credentials(files[0])
        first = next(_read(files[:1], None), None)
        if first is None:
            raise DatasetInputError(
                f"{what} has no samples; files of one belong together by name, as 0001.jpg and "
                "0001.cls"
            )
        names = _names(first, reading)
        wanted = reading.chosen_ones(names, what, "part of a sample")
        key = reading.key(names, what)
        specs = list(dict.fromkeys([*wanted.values(), *([key] if key else [])]))
        decode = _decoders(specs, what, self)
        members = {_place(name)[0] for spec in specs for name in spec.split(";")}
        skipped = Skipped(reading.skips, what)
        alike = Alike("WebDataset(..., size=(width, height))")

        def decoded(sample: Members) -> dict[str, Any] | DatasetInputError:
            try:
                return {spec: _part(sample, spec, decode) for spec in specs}
            except DatasetInputError as error:
                return error

        def good() -> Iterator[dict[str, Any]]:
            n_read = 0
            for sample, parts in in_threads(decoded, _read(files, members)):
                if isinstance(parts, DatasetInputError):
                    skipped.add(parts)
                    continue
                for name, of in wanted.items():
                    if _is_image(of) and self.decode and name not in reading.ragged:
                        alike.check(parts[of], sample.where, name)
                n_read += 1
                yield parts
            skipped.tell(n_read)

        def batches() -> Iterator[dict[str, Any]]:
            n_read = 0
            for block in blocks(good()):
                made: dict[str, Any] = {}
                for name, of in wanted.items():
                    values = [parts[of] for parts in block]
                    if isinstance(values[0], str):
                        made[name] = as_objects(values)
                    elif _is_image(of) and not self.decode:
                        made[name] = RaggedArray.of(values)
                    else:
                        made[name] = stacked(values, name, what, n_read)
                if key is not None:
                    made[KEY] = as_objects([parts[key] for parts in block])
                yield made
                n_read += len(block)

        return Input(Batches(batches()))


class _Header(tarfile.TarInfo):
    """Tells the end of an archive, which is zeros, from that of a file that was cut off."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            if not tar.offset or isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(
                f"it ends or is damaged at byte {tar.offset:,} ({error}); copy or write it anew, "
                "or if nothing is missing, append the 1,024 zeros that end a tar file"
            ) from None


def _read(files: Iterable[str], needed: Collection[str] | None) -> Iterator[Members]:
    """Go over the samples of tar files, with the needed parts of each."""
    for file in files:
        name = without_credentials(file)
        at, parts = "", dict[str, bytes]()
        with reading_file(file):
            with (
                fsspec.open(file, "rb") as stream,
                tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as tar,
            ):
                for member in tar:
                    folder, _, base = member.name.rpartition("/")
                    stem, _, extension = base.partition(".")
                    if not (member.isreg() and stem and extension):
                        continue
                    if (place := f"{folder}/{stem}" if folder else stem) != at:
                        if parts:
                            yield Members(f"{name}: {at}", parts)
                        at, parts = place, {}
                    extension = extension.lower()
                    if needed is None or extension in needed:
                        parts[extension] = _bytes_of(tar, member, name)
            if parts:
                yield Members(f"{name}: {at}", parts)


def _bytes_of(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> bytes:
    if member.size > _MOST_BYTES:
        raise DatasetInputError(
            f"{name}: {member.name} has {readable_size(member.size)}, and a part of a sample may "
            f"have {readable_size(_MOST_BYTES)}"
        )
    stream = tar.extractfile(member)
    assert stream is not None  # it is a regular file
    return stream.read()


def _names(first: Members, reading: Reading) -> list[str]:
    """Return what may be chosen of samples: their parts, entries of objects, and alternatives."""
    names = list(first.parts)
    if reading.columns is None:
        for name in names:
            _kind(name, first.where)
    for name in [name for name in names if name.rpartition(".")[2] == "json"]:
        value: Any = None
        with contextlib.suppress(
            ValueError, RecursionError
        ):  # the same is said when the sample is decoded
            value = _json(first.parts[name], first.where)
        if isinstance(value, dict):
            at = names.index(name)
            names[at : at + 1] = [f"{name}.{entry}" for entry in value]
    columns = reading.columns or []
    chosen = columns.values() if isinstance(columns, Mapping) else columns
    specs = [of for each in chosen for of in ([each] if isinstance(each, str) else each)]
    more = [spec for spec in [*specs, reading.by or ""] if set(spec.split(";")) & set(names)]
    return [*names, *(spec for spec in more if spec not in names)]


def _place(name: str) -> tuple[str, str]:
    """Return the part of a sample that a name means, and the entry of its object.

    Examples
    --------
    >>> _place("seg.png"), _place("json.label"), _place("meta.json.a.b")
    (('seg.png', ''), ('json', 'label'), ('meta.json', 'a.b'))
    """
    head, found, entry = f".{name}".partition(".json.")
    return (f"{head}.json"[1:], entry) if found else (name, "")


def _kind(part: str, where: str) -> str:
    kind = part.rpartition(".")[2]
    if kind in _PICKLES:
        raise DatasetInputError(
            f"{where}.{part}: a .{kind} may be a pickle, which can run any code and is never read; "
            "choose other parts by columns=, or store it as .npy or .json"
        )
    if kind not in _KNOWN:
        raise DatasetInputError(
            f"{where}.{part}: what a .{kind} is, is not known; choose other parts, such as "
            'columns={"x": "jpg", "y": "cls"}'
        )
    return kind


def _decoders(specs: Iterable[str], what: str, source: WebDataset) -> dict[str, Decode]:
    """Return what decodes each part that may be needed."""
    found: dict[str, Decode] = {}
    for spec in specs:
        for name in spec.split(";"):
            part = _place(name)[0]
            kind = _kind(part, what)
            if kind in _IMAGES:
                image = decoder(source.size, source.mode, keeps_bytes=not source.decode)
                found[part] = partial(_image, image)
            elif kind in _NUMBERS:
                found[part] = lambda data, where: int(data)
            elif kind in _TEXTS:
                found[part] = lambda data, where: data.decode()
            else:
                found[part] = _json if kind == "json" else _npy
    return found


def _part(sample: Members, spec: str, decode: Mapping[str, Decode]) -> Any:
    """Decode the first part of a sample that there is; raise a `DatasetInputError` if none is."""
    for name in spec.split(";"):
        part, entry = _place(name)
        if part not in sample.parts:
            continue
        where = f"{sample.where}.{part}"
        try:
            value = decode[part](sample.parts[part], where)
            value = value[entry] if entry else value
        except Exception as error:  # noqa: BLE001  # damaged bytes raise many kinds
            told = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise DatasetInputError(f"{where} cannot be decoded: {told}") from None
        if isinstance(value, DatasetInputError):
            raise value
        if isinstance(value, dict) or value is None:
            raise DatasetInputError(f"{where}: {name!r} is {value!r:.60}; make it numbers or text")
        return value
    raise DatasetInputError(f"{sample.where} has no {spec!r}, but {', '.join(sample.parts)}")


def _image(decode: Callable[[BytesIO, str], Any], data: bytes, where: str) -> Any:
    return decode(BytesIO(data), where)


def _json(data: bytes, where: str) -> Any:
    return json.loads(data)


def _npy(data: bytes, where: str) -> Any:
    with _ONE_AT_A_TIME:
        return np.lib.format.read_array(BytesIO(data))  # by default without pickles


def _is_image(spec: str) -> bool:
    return all(name.rpartition(".")[2] in _IMAGES for name in spec.split(";"))
