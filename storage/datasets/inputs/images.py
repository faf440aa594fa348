"""Images in folders, a folder for each class."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.collate import decoded_image
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.reading import (
    KEY,
    Input,
    Reading,
    Skipped,
    as_objects,
    blocks,
    in_threads,
)
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.storage.datasets.sources import Batches

logger = logging.getLogger("dagsel")

#: An image as an array, or why it is none.
Image: TypeAlias = "NDArray[Any] | DatasetInputError"

IMAGES = (".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_SUFFIXES = 5  # that the log names
_PARTS = {"train", "validation", "valid", "val", "test"}


@dataclass(frozen=True)
class ImageFolder:
    """Images in folders, a folder for each class: decoded once, and stored as ``uint8``.

    Folders and files whose names begin with a dot are left out, and so are, with a warning, files
    that are no images by their suffixes.

    Or stored as the files are, which takes less room, and decoded whenever they are trained on.

    The arrays are ``x``, shape ``(height, width, 3)``, or ``(height, width)`` for ``mode="L"``,
    and ``y``, the number of the class; `ShardedDataset.classes` has the folders' names.

    Parameters
    ----------
    path
        The folder of these folders.
    size
        Width and height to which each image is resized; None if all have the same already.
    mode
        Mode of Pillow to which each is converted: ``"RGB"``, ``"L"`` for grey, or ``"F"`` for grey
        of more than 8 bits, as ``float32``.
    decode
        False to store the bytes of the files: ``x`` is a ragged array of them, of which
        `dagsel.collate.images` makes batches, and `size` and `mode` are given there. Each is
        decoded once all the same, to see that it can be.

    Raises
    ------
    DatasetInputError
        When it is written: if Pillow is missing, or a file cannot be decoded or has another size
        than the first; names the file.

    Examples
    --------
    >>> from PIL import Image
    >>> from dagsel.storage import ShardedDataset
    >>> for kind in ("cat", "dog"):
    ...     Path("photos", kind).mkdir(parents=True)
    ...     for number in range(2):
    ...         Image.new("RGB", (6, 4)).save(f"photos/{kind}/{number}.png")
    >>> photos = ImageFolder("photos", size=(3, 2))
    >>> data = ShardedDataset.write("photos.zarr", photos, n_shards=1, validation=0.5)
    >>> data.classes, data.shard(0)["x"].shape
    ({'y': ('cat', 'dog')}, (2, 2, 3, 3))
    """

    path: str | os.PathLike[str]
    size: tuple[int, int] | None = None
    mode: str = "RGB"
    decode: bool = True

    def arrays(self, reading: Reading, classes: Classes) -> Input:
        """Return a stream of decoded images, and note their classes."""
        root = Path(self.path)
        reading.no_columns(
            "images in folders always become two arrays, x and y; leave columns= out"
        )
        if reading.workers:
            raise DatasetInputError("images are decoded in threads already; leave workers= out")
        key = reading.key(["x", "y"], str(root))
        if key == "x":
            raise DatasetInputError(f"{root}: images cannot say how they are divided; give 'y'")
        decode = decoder(self.size, self.mode, keeps_bytes=not self.decode)
        files = self._files(root)
        if not classes.is_fixed:
            classes.known["y"] = sorted({name for _, name in files})
        is_ragged = "x" in reading.ragged or not self.decode
        skipped = Skipped(reading.skips, str(root))
        alike = Alike(f"ImageFolder({str(root)!r}, size=(width, height))")

        def good() -> Iterator[dict[str, Any]]:
            n_read = 0
            for (file, name), image in in_threads(
                lambda each: decode(each[0], str(each[0])), files
            ):
                if isinstance(image, DatasetInputError):
                    skipped.add(image)
                    continue
                if not is_ragged:
                    alike.check(image, str(file), "x")
                n_read += 1
                yield {"x": image, "y": name}
            skipped.tell(n_read)

        def batches() -> Iterator[dict[str, Any]]:
            for block in blocks(good()):
                told = as_objects([sample["y"] for sample in block])
                images = [sample["x"] for sample in block]
                made: dict[str, Any] = {"y": classes.encode("y", told, str(root))}
                if key and reading.skips:
                    made[KEY] = told
                yield {"x": RaggedArray.of(images) if is_ragged else np.stack(images), **made}

        if reading.skips:
            return Input(Batches(batches()))
        return Input(
            Batches(batches(), len(files)),
            lambda: [np.array([name for _, name in files], dtype=object)],
        )

    def _files(self, root: Path) -> list[tuple[Path, str]]:
        """Return the images with their classes."""
        inside = _shown(root, root.iterdir()) if root.is_dir() else []
        folders = [path for path in inside if path.is_dir()]
        names = {folder.name for folder in folders}
        if "train" in names and names <= _PARTS:
            (other, *_) = sorted(names - {"train", "test"}) or ["validation"]
            raise DatasetInputError(
                f"the folders in {root} are no classes, but {', '.join(sorted(names))}; write "
                f"ImageFolder({str(root / 'train')!r}) with "
                f"validation=ImageFolder({str(root / other)!r})"
            )
        suffixes = _readable()
        files, others = list[tuple[Path, str]](), Counter[str]()
        for folder in folders:
            for file in _shown(folder, folder.rglob("*")):
                suffix = file.suffix.lower()
                if suffix in suffixes:
                    files.append((file, folder.name))
                elif file.is_file():
                    others[suffix or file.name] += 1
        if not files:
            raise DatasetInputError(
                f"{root} has no folders with images, no Parquet files and no tar files; images are "
                f"looked for in {root}/CLASS/*.png"
            )
        _tell_left_out(root, others, sorted(names - {name for _, name in files}))
        return files


def _readable() -> set[str]:
    """Return the suffixes of images that Pillow reads here: old ones lack some."""
    from PIL import Image

    return set(IMAGES) & Image.registered_extensions().keys()


def _shown(root: Path, paths: Iterable[Path]) -> list[Path]:
    """Return paths below a folder in their order, without those that are hidden."""
    found = [(path, path.relative_to(root).parts) for path in paths]
    return sorted(path for path, parts in found if not any(part[0] == "." for part in parts))


def _tell_left_out(root: Path, others: Counter[str], without: list[str]) -> None:
    """Say in the log which files are no images, and which folders have none."""
    if others:
        told = ", ".join(f"{n} {suffix}" for suffix, n in others.most_common(_SUFFIXES))
        logger.warning(
            "%s: files that are no images by their suffixes are left out: %s%s",
            root,
            told,
            ", ..." if len(others) > _SUFFIXES else "",
        )
    if without:
        told = ", ".join(map(repr, without))
        logger.warning("%s: folders without images become no classes: %s", root, told)


def decoder(
    size: tuple[int, int] | None, mode: str, *, keeps_bytes: bool = False
) -> Callable[[str | os.PathLike[str] | BinaryIO, str], Image]:
    """Return a function that decodes an image, or returns the error that names it.

    With `keeps_bytes` it returns the bytes of the file, which can be decoded.
    """
    if keeps_bytes and size is not None:
        raise DatasetInputError(
            "size= and decode=False do not go together: images that are stored as they are get "
            "their size when they are decoded: dagsel.collate.images(size=...)"
        )
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise DatasetInputError(
            f'images need Pillow: pip install "dagsel[images]" ({error})'
        ) from None

    def decode(file: Any, where: str) -> Image:
        try:
            data = b""
            if keeps_bytes:
                data = file.read() if hasattr(file, "read") else Path(file).read_bytes()
                file = BytesIO(data)
            pixels: NDArray[Any] = decoded_image(file, size, mode)
            return np.frombuffer(data, np.uint8) if keeps_bytes else pixels
        except Exception as error:  # noqa: BLE001  # decoders of damaged files raise many kinds
            return DatasetInputError(f"{where} cannot be decoded: {error}")

    return decode


@dataclass
class Alike:
    """Checks that images have the size of the first one; `cure` is what makes them so."""

    cure: str
    first: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def check(self, image: NDArray[Any], where: str, array: str) -> None:
        """Raise a `DatasetInputError` if an image has another size."""
        name, shape = self.first.setdefault(array, (where, image.shape))
        if image.shape != shape:
            raise DatasetInputError(
                f"{where} is {image.shape[1]} × {image.shape[0]}, and {name} {shape[1]} × "
                f"{shape[0]}; give {self.cure}, or keep their sizes by ragged=[{array!r}]"
            )
