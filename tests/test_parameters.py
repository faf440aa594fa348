"""A test gives each parameter of a public function or class, but for a few that are listed."""

from __future__ import annotations

from . import parameters

#: With the reason why no test gives them.
NONE = {
    ("Attached", "run_dir"): "`attach` makes it",
    ("Attached", "token"): "`attach` makes it",
    ("Attached", "opened_with"): "`attach` makes it",
    ("Profile", "fit"): "a profile is made by `given`, `learnt` and `profile`",
    ("ShardedDataset", "manifest"): "a data set is made by `write`",
    ("OverSet", "function"): "`over_set` makes it",
    ("OverSet", "direction"): "`over_set` makes it",
}


def test_every_parameter_is_given_by_a_test() -> None:
    found = {key: test for key, test in parameters.table().items() if "." not in key[0]}
    assert {key for key, test in found.items() if not test} == NONE.keys()
    assert found["optimize", "replicas"]  # nothing is missing as nothing is looked at
    assert len(found) > 150
