"""How a data set shows itself, as text and in a notebook. Pure."""

from __future__ import annotations

import math
from html import escape

from dagsel.storage.datasets.manifest import Manifest


def size(n_bytes: float) -> str:
    """Write a number of bytes for people.

    Parameters
    ----------
    n_bytes
        How many.

    Examples
    --------
    >>> size(999), size(1_234_000), size(5e12)
    ('999 B', '1.2 MB', '5.0 TB')
    """
    if n_bytes < 1000:
        return f"{n_bytes:.0f} B"
    power = min(4, int(math.log10(n_bytes)) // 3)
    return f"{n_bytes / 1000**power:,.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def as_text(url: str, manifest: Manifest) -> str:
    """Show a data set in a few lines: one, and one for each array."""
    lines = [f"  {name}: {dtype} {shape}" for name, dtype, shape, _ in _rows(manifest)]
    return "\n".join([f"<ShardedDataset {url}: {_summary(manifest)}", *lines]) + ">"


def as_html(url: str, manifest: Manifest) -> str:
    """Show a data set as a table."""
    head = "".join(f"<th>{title}</th>" for title in ("array", "dtype", "sample shape", "size"))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(manifest)
    )
    return (
        f"<div><strong>ShardedDataset</strong> <code>{escape(url)}</code><br>"
        f"{escape(_summary(manifest))}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _summary(manifest: Manifest) -> str:
    n_bytes = manifest.n_samples * sum(spec.sample_bytes for spec in manifest.arrays)
    return (
        f"{manifest.n_samples:,} samples in {manifest.n_shards:,} shards "
        f"({manifest.n_train:,} train, {manifest.n_validation:,} validation), {size(n_bytes)}"
    )


def _rows(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    return [
        (
            spec.name,
            str(spec.numpy_dtype),
            str(list(spec.shape)),
            size(manifest.n_samples * spec.sample_bytes),
        )
        for spec in manifest.arrays
    ]
