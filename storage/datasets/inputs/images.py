"""Images in folders, a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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

#: An image as an array, or why it is none.
Image: TypeAlias = "NDArray[np.uint8] | DatasetInputError"

IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_PARTS = {"train", "validation", "valid", "val", "test"}


@dataclass(frozen=True)
class ImageFolder:
    """Images in folders, a folder for each class: decoded once, and stored as ``uint8``.

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
        Mode of Pillow to which each is converted: ``"RGB"``, or ``"L"`` for grey.
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
        files = self._files(root)
        if not classes.is_fixed:
            classes.known["y"] = sorted({name for _, name in files})
        decode = decoder(self.size, self.mode, keeps_bytes=not self.decode)
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
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        names = {folder.name for folder in folders}
        if "train" in names and names <= _PARTS:
            (other, *_) = sorted(names - {"train", "test"}) or ["validation"]
            raise DatasetInputError(
                f"the folders in {root} are no classes, but {', '.join(sorted(names))}; write "
                f"ImageFolder({str(root / 'train')!r}) with "
                f"validation=ImageFolder({str(root / other)!r})"
            )
        files = [
            (file, folder.name)
            for folder in folders
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in IMAGES
        ]
        if not files:
            raise DatasetInputError(
                f"{root} has no folders with images, no Parquet files and no tar files; images are "
                f"looked for in {root}/CLASS/*.png"
            )
        return files


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
            pixels: NDArray[np.uint8] = decoded_image(file, size, mode)
            return np.frombuffer(data, np.uint8) if keeps_bytes else pixels
        except Exception as error:  # noqa: BLE001  # decoders of damaged files raise many kinds
            return DatasetInputError(f"{where} cannot be decoded: {error}")

    return decode


@dataclass
class Alike:
    """Checks that images have the size of the first one; `cure` is what makes them so."""

    cure: str
    first: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def check(self, image: NDArray[np.uint8], where: str, array: str) -> None:
        """Raise a `DatasetInputError` if an image has another size."""
        name, shape = self.first.setdefault(array, (where, image.shape))
        if image.shape != shape:
            raise DatasetInputError(
                f"{where} is {image.shape[1]} × {image.shape[0]}, and {name} {shape[1]} × "
                f"{shape[0]}; give {self.cure}, or keep their sizes by ragged=[{array!r}]"
            )
