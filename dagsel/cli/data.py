"""The commands about data sets: write one, look at it, check it."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dagsel.cli.answer import Answer, answered
from dagsel.errors import DatasetInputError

if TYPE_CHECKING:
    from dagsel.storage import ShardedDataset


@click.command()
@click.argument("source", nargs=-1, required=True)
@click.argument("target")
@click.option("--n-shards", type=int, help="By default about one for each 16 MB.")
@click.option("--validation", type=float, default=0.2, show_default=True, help="Share of samples.")
@click.option("--column", "columns", multiple=True, metavar="ARRAY=COLUMN[,COLUMN...]",
              help="Which columns of a table become which array; may be repeated.")  # fmt: skip
@click.option("--split", help="Column that says train, validation or test of each sample.")
@click.option("--stratify", help="Column of classes that both parts have in the same shares.")
@click.option("--groups", help="Column whose values are not divided between the parts.")
@click.option("--skip-damaged", is_flag=True, help="Leave out what cannot be decoded.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the shuffle.")
@click.option("--overwrite", is_flag=True, help="Replace a data set that is there.")
@answered
def shard(
    source: tuple[str, ...],
    target: str,
    columns: tuple[str, ...],
    skip_damaged: bool,
    n_shards: int | None,
    **options: Any,
) -> Answer:
    """Write SOURCE as a data set to TARGET, a path or URL.

    SOURCE is a .npz file, CSV files, Parquet files, tar files, or a folder with a folder of images
    for each class.
    """
    from dagsel.storage import ShardedDataset

    chosen = dict(map(_column, columns))
    data = ShardedDataset.write(
        target,
        _read(source),
        n_shards="auto" if n_shards is None else n_shards,
        columns=chosen or None,
        on_error="skip" if skip_damaged else "raise",
        **options,
    )
    return _told(data)


@click.command()
@click.argument("data")
@click.option("--values", is_flag=True, help="Read all, and say what the arrays hold.")
@answered
def inspect(data: str, values: bool) -> Answer:
    """Say what the data set DATA holds."""
    opened = _opened(data)
    if not values:
        return _told(opened)
    told, table = _told(opened), opened.describe()
    body = {**told.body, "values": table.to_dict("records")}
    return Answer(f"{told.text}\n\n{table.to_string(index=False)}", body)


@click.command()
@click.argument("data")
@answered
def verify(data: str) -> Answer:
    """Check all of DATA, a data set, against its checksums."""
    opened = _opened(data)
    opened.verify()
    return Answer(f"{opened.url}: all {opened.n_shards:,} shards are whole", _about(opened))


def _opened(url: str) -> ShardedDataset:
    from dagsel.storage import ShardedDataset

    return ShardedDataset.open(url)


def _told(data: ShardedDataset) -> Answer:
    return Answer(repr(data).strip("<>"), _about(data))


def _about(data: ShardedDataset) -> dict[str, Any]:
    return {
        "url": data.url,
        "digest": data.digest,
        "n_shards": data.n_shards,
        "n_train": data.n_train,
        "n_validation": data.n_validation,
        "bytes": data.nbytes,
        "arrays": {
            name: {"dtype": str(spec.numpy_dtype), "shape": spec.shape_text}
            for name, spec in data.schema.items()
        },
        "classes": data.classes,
        "columns": data.columns,
    }


def _column(given: str) -> tuple[str, str | list[str]]:
    array, equals, names = given.partition("=")
    if not (array and equals and names):
        raise click.BadParameter(f"give ARRAY=COLUMN[,COLUMN...], not {given!r}")
    return array, names.split(",") if "," in names else names


def _read(source: tuple[str, ...]) -> Any:
    """Return what `ShardedDataset.write` takes: it knows paths but those of arrays and of CSV."""
    from dagsel.storage.datasets.inputs.paths import are_paths

    kinds = {Path(path).suffix.lower() for path in source}
    if kinds == {".csv"}:
        return _read_tables(source)
    path, *more = source
    if more and not are_paths(source):
        raise DatasetInputError(
            f"{path} is one of {len(source)} sources that are not read together; give CSV files, "
            "Parquet files or tar files alone, or a single one"
        )
    if kinds != {".npz"}:
        return list(source) if more else path
    try:
        import numpy as np

        with Path(path).open("rb") as file:
            return dict(np.lib.npyio.NpzFile(file, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise DatasetInputError(f"{path} cannot be read: {error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DatasetInputError(
            f"{path} is no whole .npz file ({error}); write it again with numpy.savez"
        ) from None


def _read_tables(paths: tuple[str, ...]) -> Any:
    """Read CSV files as one table."""
    import pandas as pd

    tables = []
    for path in paths:
        try:
            tables.append(pd.read_csv(path))
        except (OSError, ValueError) as error:
            raise DatasetInputError(f"{path} cannot be read: {error}") from None
        if differs := sorted({*map(str, tables[0])} ^ {*map(str, tables[-1])}):
            raise DatasetInputError(
                f"only one of {paths[0]} and {path} has the column {differs[0]!r}; give all files "
                "the same columns"
            )
    return pd.concat(tables, ignore_index=True)
