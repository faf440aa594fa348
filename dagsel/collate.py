"""Makes tensors of batches whose samples differ in shape; for `TorchWorkload`'s ``collate``.

A function of your own gets the arrays of a batch by name, each a tensor, or a list of tensors if
the array is ragged, and returns such a mapping, with tensors alone. It is called for training and
for scores, before ``input_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from dagsel.errors import WorkloadError

if TYPE_CHECKING:
    import torch

__all__ = ["Images", "Pad", "Samples", "images", "pad", "samples"]

#: Modes of Pillow with more than 8 bits, and what their arrays are.
_DEEP = {"I": "int32", "F": "float32"}
_MOST = 255  # what 8 bits hold


def pad(**fill: float) -> Pad:
    """Fill up ragged arrays to the largest sample of their batch.

    Parameters
    ----------
    **fill
        What to fill each array with. Each gets a mask of its own shape, true where a sample has
        values: ``ids`` gets ``ids_mask``.

    Examples
    --------
    >>> import torch
    >>> batch = {"ids": [torch.tensor([5, 7]), torch.tensor([3])], "y": torch.tensor([1, 0])}
    >>> padded = pad(ids=0)(batch)
    >>> {name: values.tolist() for name, values in padded.items()}
    {'ids': [[5, 7], [3, 0]], 'ids_mask': [[True, True], [True, False]], 'y': [1, 0]}
    """
    return Pad(fill)


def samples(function: Callable[[Any], Mapping[str, Any]]) -> Samples:
    """Use a function of a list of samples, such as a collator of transformers.

    Parameters
    ----------
    function
        Gets a list of mappings of names to tensors, one a sample, and returns one mapping.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import default_collate
    >>> batch = samples(default_collate)({"x": torch.ones(2, 3), "y": torch.zeros(2)})
    >>> {name: tuple(values.shape) for name, values in batch.items()}
    {'x': (2, 3), 'y': (2,)}
    """
    return Samples(function)


def images(array: str = "x", *, size: tuple[int, int] | None = None, mode: str = "RGB") -> Images:
    """Decode images that are stored as their files are, by Pillow.

    They become ``uint8`` of shape ``(n, height, width, 3)``, or ``(n, height, width)`` for
    ``mode="L"``: as if they had been decoded when they were written.

    Parameters
    ----------
    array
        The array of their bytes; see `dagsel.storage.ImageFolder`.
    size
        Width and height to which each is resized; None if all have the same already.
    mode
        Mode of Pillow to which each is converted: ``"RGB"``, ``"L"`` for grey, or ``"F"`` for grey
        of more than 8 bits, as ``float32``.

    Examples
    --------
    >>> import io, torch
    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (6, 4)).save(file, "png")
    >>> data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    >>> images(size=(3, 2))({"x": [data, data], "y": torch.tensor([0, 1])})["x"].shape
    torch.Size([2, 2, 3, 3])
    """
    return Images(array, size, mode)


@dataclass(frozen=True)
class Images:
    """What `images` returns: a function of a batch.

    Parameters
    ----------
    array
        The array that holds the files' bytes.
    size
        Width and height to which each image is resized; None if all have the same already.
    mode
        Mode of Pillow to which each is converted.

    Examples
    --------
    >>> images("x", size=(3, 2)) == Images("x", (3, 2), "RGB")
    True
    """

    array: str
    size: tuple[int, int] | None
    mode: str

    def decode(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with its images as a list of tensors; ``augment`` gets these."""
        import torch

        files = batch.get(self.array)
        if not isinstance(files, list):
            raise WorkloadError(
                f"dagsel.collate.images decodes {self.array!r}, and among {', '.join(batch)} that "
                "is no array of files; write them with ImageFolder(..., decode=False)"
            )
        streams = [BytesIO(file.cpu().numpy().tobytes()) for file in files]
        made = [decoded_image(stream, self.size, self.mode) for stream in streams]
        device = files[0].device
        images = [torch.tensor(image, device=device) for image in made]
        return {name: images if name == self.array else rows for name, rows in batch.items()}

    def stack(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch of decoded images with these as one tensor."""
        import torch

        images = batch[self.array]
        if len({tuple(image.shape) for image in images}) > 1:
            raise WorkloadError(
                "the images of a batch differ in size: give the workload "
                "collate=dagsel.collate.images(size=(width, height))"
            )
        stacked = torch.stack(images)
        return {name: stacked if name == self.array else rows for name, rows in batch.items()}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with its images as one tensor."""
        return self.stack(self.decode(batch))


def decoded_image(file: Any, size: tuple[int, int] | None, mode: str) -> Any:
    """Return an image as an array; raises whatever Pillow does if it is none.

    It is of ``uint8``, but for the modes of more bits, ``"I"`` and ``"F"``.
    """
    import numpy as np
    from PIL import Image

    with Image.open(file) as image:
        if mode not in _DEEP and image.mode.startswith(tuple(_DEEP)):
            values = np.asarray(image)
            low, high = values.min(), values.max()
            if low < 0 or high > _MOST or (values % 1).any():  # Pillow makes 255 of what is more
                raise ValueError(
                    f"its values go from {low:g} to {high:g}, and mode={mode!r} keeps whole ones "
                    f'from 0 to {_MOST}; give mode="F", which is float32'
                )
        made = image.convert(mode)
        made = made if size is None else made.resize(size)
        return np.asarray(made, dtype=_DEEP.get(mode, "uint8"))


@dataclass(frozen=True)
class Pad:
    """What `pad` returns: a function of a batch.

    Parameters
    ----------
    fill
        What to fill each array with, by its name.

    Examples
    --------
    >>> pad(ids=0) == Pad({"ids": 0})
    True
    """

    fill: Mapping[str, float]

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with tensors alone; masks stand between the first array and the last."""
        missing = [name for name in self.fill if name not in batch]
        ragged = [name for name, rows in batch.items() if isinstance(rows, list)]
        unfilled = [name for name in ragged if name not in self.fill]
        if missing or unfilled:
            wrong = f"names {missing[0]!r}" if missing else f"leaves {unfilled[0]!r} out"
            last = [*batch][-1]  # the target: of a class no loss counts -100
            of_classes = {last} if len(batch) > 1 and not batch[last][0].is_floating_point() else {}
            written = ", ".join(f"{it}={-100 if it in of_classes else 0}" for it in ragged)
            raise WorkloadError(
                f"collate=dagsel.collate.pad(...) {wrong}, and of the arrays {', '.join(batch)} "
                f"those of unequal length are {', '.join(ragged) or 'none'}: write pad({written})"
            )
        rows = dict(batch)
        masks = {}
        for name, fill in self.fill.items():
            rows[name], masks[f"{name}_mask"] = _padded(batch[name], fill)
        (first, of_first), *others = rows.items()
        return {first: of_first, **masks, **dict(others)}


@dataclass(frozen=True)
class Samples:
    """What `samples` returns: a function of a batch.

    Parameters
    ----------
    function
        Called with a list of samples; returns a mapping of names to tensors.

    Examples
    --------
    >>> samples(list) == Samples(list)
    True
    """

    function: Callable[[Any], Mapping[str, Any]]

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the function makes of the batch's samples."""
        names = list(batch)
        made = self.function(
            [dict(zip(names, parts, strict=True)) for parts in zip(*batch.values(), strict=True)]
        )
        if not isinstance(made, Mapping):
            raise WorkloadError(
                f"the function of dagsel.collate.samples returns a {type(made).__name__}: return "
                "a mapping of names to tensors"
            )
        return dict(made)


def _padded(rows: Sequence[torch.Tensor], fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    largest = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    shape, device = (len(rows), *largest), rows[0].device
    padded = torch.full(shape, fill, dtype=rows[0].dtype, device=device)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for at, row in enumerate(rows):
        place: Any = (at, *map(slice, row.shape))
        padded[place], mask[place] = row, True
    return padded, mask
