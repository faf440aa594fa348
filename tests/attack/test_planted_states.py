"""States that someone planted: they run no code, read nothing else, and crash no process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.cluster import AgglomerativeClustering, Birch
from sklearn.linear_model import SGDClassifier

from dagsel.errors import CheckpointCorruptError
from dagsel.state import State, Tensor, reading_state
from dagsel.workloads import SklearnWorkload, Visit
from dagsel.workloads.sklearn.objects import Decoder, Encoder

CASES = int(os.environ.get("ATTACK_CASES", "120"))
FUZZER = Path(__file__).with_name("fuzz_states.py")


@pytest.mark.parametrize("kind", ["sklearn", "torch"])
def test_random_edits_of_a_state_run_nothing(kind: str) -> None:
    command = [sys.executable, "-X", "faulthandler", str(FUZZER), kind, str(CASES), "0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    ends = json.loads(ran.stdout)
    assert sum(ends.values()) == CASES
    assert min(ends.get("refused", 0), ends.get("used", 0)) > CASES // 10, ends


class Mark:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def trained(workload: SklearnWorkload, shard: Any) -> State:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        visit = Visit(0, 0, 1, 0, ends_epoch=True)
        return workload.train(workload.init({}, 0), shard, {}, visit=visit).state


def planted(state: State, change: Callable[[dict[str, Any]], Any]) -> State:
    meta = state.meta
    change(meta["estimator"])
    return State.pack(state.tensors, meta)


def test_a_cache_folder_that_a_state_names_is_not_read(tmp_path: Path) -> None:
    workload = SklearnWorkload(Birch(n_clusters=AgglomerativeClustering(2)))
    shard = workload.prepare({"x": np.random.default_rng(0).random((20, 3))})
    state = trained(workload, shard)

    def name_cache(tree: dict[str, Any]) -> None:
        pairs = tree["n_clusters"]["state"]["items"]
        next(pair for pair in pairs if pair[0] == "memory")[1] = str(tmp_path / "cache")

    state = planted(state, name_cache)
    for _ in range(2):  # the second time there would be pickles to read
        visit = Visit(0, 0, 2, 0, ends_epoch=True)
        workload.train(state, shard, {}, visit=visit)
        for output in (tmp_path / "cache").rglob("output.pkl"):
            output.write_bytes(pickle.dumps(Mark(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "name", ["partial_fit", "score", "__class__", "__sklearn_clone__", "__doc_link_template"]
)
def test_a_state_hides_no_method(name: str) -> None:
    workload = SklearnWorkload(SGDClassifier())
    shard = workload.prepare({"x": np.eye(4), "y": np.arange(4)})
    hides = planted(trained(workload, shard), lambda tree: tree.update({name: "planted"}))
    with pytest.raises(CheckpointCorruptError, match=f"cannot set SGDClassifier.{name}"):
        workload.restore(hides, {})


def test_a_state_changes_no_class_through_slots() -> None:
    encoder = Encoder()
    node = encoder.encode(csr_matrix(np.eye(3)), "m")
    slots = {
        "$": "dict",
        "id": 90,
        "items": [["__class__", {"$": "class", "class": node["class"]}]],
    }
    node["state"] = {"$": "tuple", "items": [node["state"], slots]}
    with pytest.raises(CheckpointCorruptError, match="no slot '__class__'"):
        Decoder(encoder.tensors).decode(node)


CRASHES = """
import sys, json, numpy as np
from dagsel.workloads.sklearn.objects import Decoder, Encoder
from dagsel.workloads import random_streams
from dagsel.errors import CheckpointCorruptError
from scipy.sparse import csr_matrix

def decoded(node, edit):
    encoder = Encoder()
    encoded = encoder.encode(node, "n")
    edit(encoded)
    return Decoder(encoder.tensors).decode(encoded)

def set_place(name, place):
    def edit(encoded):
        text = json.dumps(encoded)
        start = text.index(name) + len(name) + 3
        end = min(text.index(mark, start) for mark in "]," if mark in text[start:])
        encoded.clear()
        encoded.update(json.loads(text[:start] + str(place) + text[end:]))
    return edit

generator = np.random.Generator(np.random.Philox(0))
matrix = csr_matrix(np.eye(3))
matrix.indices[:] = 10**8
for act in (
    lambda: decoded(np.random.RandomState(0), set_place("pos", 10**6)).random(9),
    lambda: decoded(np.random.RandomState(0), set_place("pos", -3000)).random(9),
    lambda: decoded(generator, set_place("buffer_pos", -10**8)).random(9),
    lambda: decoded(matrix, lambda encoded: None).toarray(),
):
    try:
        act()
    except CheckpointCorruptError as error:
        print("refused", error)
"""


def test_a_planted_state_crashes_no_process() -> None:
    # Each of them is read by compiled code that does not look where it is led.
    command = [sys.executable, "-X", "faulthandler", "-c", CRASHES]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 4, ran.stdout


@pytest.mark.parametrize(
    "node",
    [
        {"$": "objects", "id": 1, "shape": [10**8], "items": [None]},
        {"$": "array", "id": 1, "name": "x", "dtype": "<f8", "shape": [10**8], "order": "C"},
        {"$": "array", "id": 1, "name": "x", "dtype": "|O", "shape": [1], "order": "C"},
        {"$": "array", "id": 1, "name": "x", "dtype": [["a", "|O"]], "shape": [1], "order": "C"},
        {"$": "array", "id": 1, "name": "x", "dtype": ["|O", [1]], "shape": [1], "order": "C"},
        {"$": "scalar", "dtype": "T", "base64": "AAAAAAAAAAAAAAAAAAAAAA=="},
        {"$": "scalar", "dtype": "V999999999", "base64": ""},
        {"$": "range", "items": [0, "x", 1]},
        {"$": "list", "id": 1, "items": 3},
        {"$": "new", "class": ["sklearn.cluster._birch", "Birch"]},
    ],
)
def test_parts_that_are_none_are_refused_before_memory_is_taken(node: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptError):
            Decoder({"x": Tensor.from_numpy(np.zeros(2))}).decode(node)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


class Odd(ClassifierMixin, BaseEstimator):
    """A user's own, with all that may stay: a cached value, a parameter named as a cache."""

    def __init__(self, memory: str = "replay") -> None:
        self.memory = memory

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Odd:
        self.__hidden = getattr(self, "_Odd__hidden", 0) + 1
        self.n_ = self.__hidden
        return self


def test_what_users_own_estimators_hold_stays() -> None:
    workload = SklearnWorkload(Odd(memory="short"), classes=[0, 1])
    shard = workload.prepare({"x": np.eye(4), "y": np.array([0, 1, 0, 1])})
    state = trained(workload, shard)
    assert workload.restore(state, {}).n_ == 1
    assert workload.restore(state, {}).memory == "short"


def test_a_lack_of_memory_is_no_damage() -> None:
    for error in (MemoryError(), torch.OutOfMemoryError()):
        with pytest.raises(type(error)), reading_state(torch.OutOfMemoryError):
            raise error
