"""Each sample is in one part; classes have their share, groups are whole, whatever holds them."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from dagsel.errors import DatasetError, DatasetInputError
from dagsel.storage import Batches, ImageFolder, RaggedArray, ShardedDataset
from dagsel.storage.datasets.division import Division, by_class, by_group, class_shares, nearest_sum
from dagsel.storage.datasets.inputs.labels import Labels

N = 90
KINDS = ["ant", "bee", "cat"]


@given(
    st.lists(st.sampled_from(["train", "validation", "test"]), min_size=1, max_size=300),
    st.integers(0, 99),
)
def test_a_division_is_a_bijection_of_the_rows_that_are_kept(parts: list[str], seed: int) -> None:
    train, validation = (
        np.array([at for at, part in enumerate(parts) if part == wanted], np.int64)
        for wanted in ("train", "validation")
    )
    if not (train.size and validation.size):
        return
    division = Division(train, validation, seed)
    n = len(train) + len(validation)
    sources = division.sources(np.arange(n))
    assert sorted(sources[: len(train)]) == train.tolist()
    assert sorted(sources[len(train) :]) == validation.tolist()
    places = division.destinations(np.arange(len(parts)))
    assert np.array_equal(division.destinations(sources), np.arange(n))
    assert {at for at, place in enumerate(places) if place < 0} == {
        at for at, part in enumerate(parts) if part == "test"
    }


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_each_class_gives_its_share_within_one_sample(sizes: list[int], share: float) -> None:
    n_validation = round(sum(sizes) * share)
    shares = class_shares(sizes, n_validation)
    assert sum(shares) == n_validation
    for size, given_ in zip(sizes, shares, strict=True):
        exact = Fraction(size * n_validation, sum(sizes))
        assert abs(given_ - exact) < 1
        assert 0 <= given_ <= size


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=200),
    st.floats(0.05, 0.95),
    st.integers(0, 9),
)
def test_who_is_chosen_of_a_class_depends_on_seed_and_order_alone(
    values: list[int], share: float, seed: int
) -> None:
    names = np.array([f"class {value}" for value in values], object)
    numbers = Labels.of("x", [names]).numbers
    in_blocks = Labels.of("x", [names[:3], names[3:]]).numbers
    other_names = Labels.of("x", [np.array(values)]).numbers
    n_validation = round(len(values) * share)
    chosen = by_class(numbers, n_validation, seed)
    for same in (in_blocks, other_names):
        assert np.array_equal(by_class(same, n_validation, seed), chosen)
    shares = class_shares(np.bincount(numbers).tolist(), n_validation)
    assert np.bincount(numbers[chosen], minlength=len(shares)).tolist() == shares


def test_another_seed_chooses_others() -> None:
    labels = np.repeat(np.arange(3), 50)
    for choose in (by_class, lambda of, n, seed: by_group(of, n, seed)):
        groups = np.repeat(np.arange(30), 5)
        one, two = (choose(groups if choose is not by_class else labels, 30, k) for k in (0, 1))
        assert one.sum() == two.sum() == 30
        assert not np.array_equal(one, two)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(0, 120))
@example([20, 30], 5)
@example([3, 3, 3], 5)
def test_groups_are_as_near_to_the_share_as_any_of_them_are(sizes: list[int], wanted: int) -> None:
    every = (
        some
        for n in range(1, len(sizes) + 1)
        for some in itertools.combinations(range(len(sizes)), n)
    )
    nearest = min(abs(sum(sizes[at] for at in some) - wanted) for some in every)
    found = nearest_sum(sizes, wanted)
    assert len(set(found)) == len(found) > 0
    assert abs(sum(sizes[at] for at in found) - wanted) == nearest


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=120), st.integers(1, 60), st.integers(0, 9)
)
def test_no_group_is_in_both_parts(values: list[int], n_validation: int, seed: int) -> None:
    labels = Labels.of("x", [np.array(values)]).numbers
    chosen = by_group(labels, n_validation, seed)
    assert not set(labels[chosen]) & set(labels[~chosen])
    assert np.array_equal(by_group(labels, n_validation, seed), chosen)


def test_many_groups_are_divided_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagsel.storage.datasets.division._FITTED", 64)
    labels = np.random.default_rng(0).integers(0, 2000, 20_000)
    chosen = by_group(labels, 4000, seed=0)
    assert chosen.sum() == 4000
    assert not set(labels[chosen]) & set(labels[~chosen])


# ---- as it is written


def frame() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "id": np.arange(N),
            "kind": [KINDS[k] for k in rng.choice(3, N, p=[0.6, 0.3, 0.1])],
            "patient": [f"p{k}" for k in rng.integers(0, 17, N)],
            "part": rng.choice(["train", "valid", "test"], N, p=[0.6, 0.3, 0.1]),
        }
    )


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, table: pd.DataFrame) -> None:
        self.rows = table.to_dict("records")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        return dict(self.rows[at])


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, table: pd.DataFrame) -> None:
        self.rows = table.to_dict("records")

    def __iter__(self) -> Any:
        return iter(self.rows)


def of_arrow(table: pd.DataFrame, folder: Path) -> Any:
    return pytest.importorskip("pyarrow").Table.from_pandas(table)


def of_file(table: pd.DataFrame, folder: Path) -> Any:
    table.to_parquet(folder / "t.parquet", row_group_size=7)
    return folder / "t.parquet"


def of_batches(table: pd.DataFrame, folder: Path) -> Any:
    blocks = (table.iloc[at : at + 11] for at in range(0, len(table), 11))
    return Batches({name: block[name].to_numpy() for name in block} for block in blocks)


def of_hugging_face(table: pd.DataFrame, folder: Path) -> Any:
    return pytest.importorskip("datasets").Dataset.from_pandas(table)


def of_our_own(table: pd.DataFrame, folder: Path) -> Any:
    """One shard, in the order of its rows: then it is read in another order than the table."""
    return ShardedDataset.write(folder / "ours", table, n_shards=2)


KINDS_OF_INPUT: dict[str, Any] = {
    "pandas": lambda table, folder: table,
    "categories": lambda table, folder: table.astype({"kind": "category", "part": "category"}),
    "polars": lambda table, folder: pytest.importorskip("polars").DataFrame(
        {name: table[name].to_list() for name in table}
    ),
    "arrow": of_arrow,
    "parquet": of_file,
    "samples": lambda table, folder: Samples(table),
    "list": lambda table, folder: table.to_dict("records"),
    "stream": lambda table, folder: Stream(table),
    "generator": lambda table, folder: (row for row in table.to_dict("records")),
    "batches": of_batches,
    "hugging face": of_hugging_face,
    "hugging face stream": lambda t, f: of_hugging_face(t, f).to_iterable_dataset(),
}
RULES: dict[str, dict[str, Any]] = {
    "split": {"split": "part"},
    "stratify": {"stratify": "kind", "validation": 0.3},
    "groups": {"groups": "patient", "validation": 0.25},
}


def parts(data: ShardedDataset) -> tuple[list[int], list[int]]:
    """The ids of the training and of the validation samples, in their order."""
    train = [data.shard(k)["id"] for k in range(data.n_shards)]
    validation = [data.validation_shard(k)["id"] for k in range(data.n_shards)]
    return np.concatenate(train).tolist(), np.concatenate(validation).tolist()


def expected_parts(how: str, table: pd.DataFrame, found: tuple[list[int], list[int]]) -> None:
    train, validation = found
    if how == "split":
        assert sorted(train) == table.index[table["part"] == "train"].tolist()
        assert sorted(validation) == table.index[table["part"] == "valid"].tolist()
        return
    assert sorted(train + validation) == list(range(N))
    if how == "stratify":
        for _, of_kind in table.groupby("kind"):
            there = len(of_kind.index.intersection(validation))
            assert abs(there - 0.3 * len(of_kind)) <= 1
        assert len(validation) == 27
    else:
        assert not set(table["patient"][train]) & set(table["patient"][validation])
        assert len(validation) in (22, 23)


@pytest.mark.parametrize("how", RULES)
def test_the_parts_are_the_same_whatever_holds_the_rows(how: str, tmp_path: Path) -> None:
    table = frame()
    written = {}
    for kind, make in KINDS_OF_INPUT.items():
        (tmp_path / kind).mkdir()
        source = make(table, tmp_path / kind)
        data = ShardedDataset.write(tmp_path / kind / "d", source, n_shards=2, seed=5, **RULES[how])
        assert ("part" in data.schema) == (how != "split")
        assert data.classes["kind"] == tuple(KINDS)
        names = np.array(KINDS)
        for shard in (data.shard(0), data.validation_shard(1)):
            assert names[shard["kind"]].tolist() == table["kind"][shard["id"]].tolist()
        written[kind] = parts(data)
    expected_parts(how, table, written["pandas"])
    assert all(found == written["pandas"] for found in written.values()), written


@pytest.mark.parametrize("how", RULES)
def test_arrays_and_values_say_it_as_columns_do(how: str, tmp_path: Path) -> None:
    table = frame()
    wanted = parts(ShardedDataset.write(tmp_path / "t", table, n_shards=2, **RULES[how]))
    name = next(iter(RULES[how]))
    arrays: dict[str, Any] = {column: table[column].to_numpy() for column in ("id",)}
    arrays |= {column: table[column].to_list() for column in ("patient", "part", "kind")}
    found = ShardedDataset.write(tmp_path / "a", arrays, n_shards=2, **RULES[how])
    assert parts(found) == wanted
    assert ("part" in found.schema) == (how != "split")
    values = table[RULES[how][name]]
    for given_ in (values, values.to_numpy(), values.to_list(), values.to_numpy(str).astype("S")):
        data = ShardedDataset.write(
            tmp_path / "v", {"id": table["id"].to_numpy()}, n_shards=2, overwrite=True,
            **{**RULES[how], name: given_},
        )  # fmt: skip
        assert parts(data) == wanted


def test_a_column_may_divide_that_is_no_array(tmp_path: Path) -> None:
    data = ShardedDataset.write(
        tmp_path / "a", frame(), n_shards=2, columns=["id"], groups="patient"
    )
    assert list(data.schema) == ["id"]
    by_array = ShardedDataset.write(
        tmp_path / "b", frame(), n_shards=2, columns={"id": "id", "y": "kind"}, stratify="y"
    )
    by_column = ShardedDataset.write(
        tmp_path / "c", frame(), n_shards=2, columns={"id": "id", "y": "kind"}, stratify="kind"
    )
    assert parts(by_array) == parts(by_column)


def test_images_are_divided_by_their_folders(tmp_path: Path) -> None:
    for at in range(60):
        place = tmp_path / "images" / KINDS[(at > 29) + (at > 49)]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((3, 3, 3), at, np.uint8)).save(place / f"{at:03}.png")
    source = ImageFolder(tmp_path / "images")
    data = ShardedDataset.write(tmp_path / "d", source, n_shards=2, stratify="y", validation=0.2)
    counts = np.bincount(np.concatenate([data.validation_shard(k)["y"] for k in (0, 1)]))
    assert counts.tolist() == [6, 4, 2]


def test_a_data_set_is_divided_anew_by_its_classes(tmp_path: Path) -> None:
    ours = ShardedDataset.write(tmp_path / "ours", frame(), n_shards=2)
    again = ShardedDataset.write(tmp_path / "again", ours, n_shards=3, **RULES["stratify"])
    expected_parts("stratify", frame(), parts(again))


@pytest.mark.parametrize("how", RULES)
def test_shards_are_shuffled_and_depend_on_the_seed(how: str, tmp_path: Path) -> None:
    one, same, other = (
        parts(ShardedDataset.write(tmp_path / f"{k}", frame(), n_shards=2, seed=s, **RULES[how]))
        for k, s in enumerate((0, 0, 1))
    )
    assert one == same
    assert one != other
    assert one[0] != sorted(one[0])


def test_what_is_left_out_or_off_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = frame()
    ShardedDataset.write(tmp_path / "a", table, n_shards=2, split="part")
    n_test = (table["part"] == "test").sum()
    assert f"split='part': {n_test} of 90 rows say 'test' and are left out" in caplog.text
    caplog.clear()
    few = table.assign(patient=["a"] * 50 + ["b"] * 40)
    ShardedDataset.write(tmp_path / "b", few, n_shards=2, groups="patient")
    assert (
        "groups='patient': 44.4% of the samples are for validation instead of 20.0%" in caplog.text
    )
    caplog.clear()
    rare = table.assign(kind=["ant"] * 87 + ["bee", "cat", "cat"])
    ShardedDataset.write(tmp_path / "c", rare, n_shards=2, stratify="kind", validation=0.1)
    assert (
        "2 classes are too rare to be in the validation part: 'bee' (1), 'cat' (2)" in caplog.text
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another word": ({"split": "kind"}, r"split='kind': row \d says '...'; the values are 'train'"),
    "truth": ({"split": np.arange(N) > 70}, "split=: row 0 says False; the values are 'train'"),
    "nothing for validation": ({"split": ["train"] * N}, "no row says 'validation'"),
    "nothing to train": ({"split": ["val"] * N}, "no row says 'train'"),
    "no column": ({"groups": "hospital"}, "there is no column 'hospital', but 'id'"),
    "numbers with fractions": ({"stratify": np.linspace(0, 1, N)}, "holds 0.01.*whole numbers"),
    "one group": ({"groups": [1] * N}, "groups= has one group, 1, and no group may be in both"),
    "two rules": ({"groups": "patient", "stratify": "kind"}, "stratify= and groups= do not go"),
    "own validation": ({"groups": "patient", "validation": frame()}, "do not go together; leave"),
    "other length": ({"stratify": [1, 2, 3]}, "stratify= has 3 values, and there are 90 samples"),
    "no value": ({"groups": [1.0, float("nan")] * 45}, "groups=: row 1 has no value; fill it in"),
    "no word": ({"split": ["train", None] * 45}, "split=: row 1 has no value"),
    "two dimensions": ({"groups": np.zeros((N, 2))}, r"groups=: row 0 has \[2\] values"),
    "rows in another order": (
        {"groups": frame()["patient"].sample(frac=1, random_state=0)},
        r"rows of groups are in another order than those of arrays.*groups.loc\[arrays.index\]"),
    "words in another order": (
        {"split": frame()["part"].iloc[::-1]}, "rows of split are in another order"),
    "a number": ({"groups": 3}, "groups must be a column's name, or an array"),
    "objects": ({"groups": [[1]] * N}, "groups=: row 0 has|neither text nor numbers"),
    "too rare": (
        {"stratify": ["a"] * (N - 1) + ["b"], "validation": 0.9}, "'b' is too rare .1 sample.: no"),
    "too few": ({"split": ["train"] * (N - 1) + ["val"]}, "1 validation samples are fewer than 2"),
    "on_error": ({"on_error": "ignore"}, "on_error must be one of 'raise', 'skip'"),
    "nothing to skip": ({"on_error": "skip"}, "is for images, tar files and data sets of samples"),
    "workers": ({"workers": 2}, "workers= decode the samples of a data set that has a length"),
    "half a worker": ({"workers": 0.5}, "workers must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_division_is_named_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    options, says = WRONG[what]
    with pytest.raises(DatasetInputError, match=says):
        ShardedDataset.write(tmp_path / "a", frame(), n_shards=2, **options)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.integers(100, 400), st.sampled_from(["split", "stratify", "groups"]))
def test_blocks_and_runs_of_any_size_lose_and_double_no_sample(size: int, n: int, how: str) -> None:
    rng = np.random.default_rng(n)
    words = rng.choice(["train", "val", "test"], n, p=[0.6, 0.3, 0.1])
    by = {"split": words, "stratify": rng.integers(0, 4, n), "groups": rng.integers(0, 50, n)}
    rule: dict[str, Any] = {how: by[how], "overwrite": True}
    arrays: dict[str, Any] = {
        "id": np.arange(n),
        "v": np.arange(n)[:, None] * np.ones(3, "f4"),
        "uneven": RaggedArray.of([np.full(at % 5, at) for at in range(n)]),
    }
    blocks = ({name: a[at : at + 7] for name, a in arrays.items()} for at in range(0, n, 7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagsel.storage.datasets.sources.BLOCK_BYTES", 40 * size)
        patch.setattr("dagsel.storage.datasets.shuffled_write.RUN_BYTES", 30 * size)
        patch.setattr("dagsel.storage.datasets.ragged_write.RUN_BYTES", 30 * size)
        patch.setattr("dagsel.storage.datasets.plan.CHUNK_BYTES", 64)
        streamed = ShardedDataset.write("memory://d.zarr", Batches(blocks), n_shards=3, **rule)
        plain = ShardedDataset.write("memory://e.zarr", arrays, n_shards=3, **rule)
    assert parts(streamed) == parts(plain)
    kept = np.flatnonzero(words != "test") if how == "split" else range(n)
    assert sorted(int(sample["id"]) for sample in streamed) == list(kept)
    for data in (streamed, plain):
        for sample in data:
            at = int(sample["id"])
            assert sample["v"].tolist() == [at] * 3
            assert sample["uneven"].tolist() == [at] * (at % 5)


def test_a_stream_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield from frame().to_dict("records")[:50]
        raise KeyError("lost")

    with pytest.raises(DatasetError, match="the stream ended with an error after 50 samples: Key"):
        ShardedDataset.write(tmp_path / "a", broken(), n_shards=2, stratify="kind")
    assert list(tmp_path.iterdir()) == []
