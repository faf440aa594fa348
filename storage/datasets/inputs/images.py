"""Images in folders, a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.samples import SAMPLES
from dagsel.storage.datasets.sources import Batches

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class ImageFolder:
    """Images in folders, a folder for each class: decoded once, and stored as ``uint8``.

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

    Raises
    ------
    DatasetInputError
        When it is written: if Pillow is missing, or a file cannot be decoded or has another size
        than the first; names the file.
    """

    path: str | os.PathLike[str]
    size: tuple[int, int] | None = None
    mode: str = "RGB"

    def arrays(self, classes: Classes) -> Batches:
        """Return a stream of decoded images, and note their classes."""
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError as error:
            raise DatasetInputError(f"images need Pillow: pip install pillow ({error})") from None
        root = Path(self.path)
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        files = [
            (file, folder.name)
            for folder in folders
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        if not files:
            raise DatasetInputError(
                f"{root} has no folders with images and no Parquet files; images are looked for in "
                f"{root}/CLASS/*.png"
            )
        if not classes.is_fixed:
            classes.known["y"] = sorted({name for _, name in files})

        def decoded(file: Path) -> NDArray[np.uint8]:
            try:
                with Image.open(file) as image:
                    made = image.convert(self.mode)
                    if self.size is not None:
                        made = made.resize(self.size)
                    return np.asarray(made, dtype=np.uint8)
            except (OSError, UnidentifiedImageError, ValueError) as error:
                raise DatasetInputError(f"{file} cannot be decoded: {error}") from None

        def batches() -> Iterator[dict[str, NDArray[Any]]]:
            first: tuple[int, ...] | None = None
            left = iter(files)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                while block := list(islice(left, SAMPLES)):
                    images = list(pool.map(decoded, [file for file, _ in block]))
                    for (file, _), image in zip(block, images, strict=True):
                        first = first or image.shape
                        if image.shape != first:
                            raise DatasetInputError(
                                f"{file} is {image.shape[1]} × {image.shape[0]}, and {files[0][0]} "
                                f"{first[1]} × {first[0]}; give "
                                f"ImageFolder({str(root)!r}, size=(width, height))"
                            )
                    names = np.array([name for _, name in block], dtype=object)
                    yield {"x": np.stack(images), "y": classes.encode("y", names, str(root))}

        return Batches(batches(), len(files))
