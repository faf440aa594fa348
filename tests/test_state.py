"""A state is a value: what goes in comes out, by whatever way."""

import json
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load, save

from dagsel.errors import CheckpointCorruptError, WorkloadError
from dagsel.state import NUMPY, State, Tensor, flatten, unflatten

arrays = st.sampled_from(sorted(NUMPY)).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5),
    st.floats(allow_nan=False), st.floats(width=32, allow_nan=False).map(np.float32),
    st.integers(0, 9).map(np.int64),
)  # fmt: skip
keys = st.one_of(st.text(max_size=3), st.integers(), st.just("$"), st.tuples(st.integers()))
trees = st.recursive(
    scalars | arrays,
    lambda nodes: st.one_of(
        st.lists(nodes, max_size=3), st.lists(nodes, max_size=3).map(tuple),
        st.dictionaries(keys, nodes, max_size=3),
        st.dictionaries(keys, nodes, max_size=3).map(OrderedDict),
        st.lists(nodes, max_size=3).map(lambda items: deque(items, 5)),
        st.frozensets(st.integers()), st.sets(st.text()),
        st.dictionaries(st.integers(), st.integers(0, 5)).map(Counter),
    ),
    max_leaves=8,
)  # fmt: skip


def as_tensor(leaf):
    return Tensor.from_numpy(leaf) if isinstance(leaf, np.ndarray) else None


def plain(node):
    """What two trees are compared by: types, order and bytes."""
    if isinstance(node, np.ndarray):
        return node.dtype, node.shape, node.tobytes()
    if isinstance(node, dict):
        return type(node), [(plain(key), plain(value)) for key, value in node.items()]
    if isinstance(node, (list, tuple, deque)):
        return type(node), getattr(node, "maxlen", 0), [plain(item) for item in node]
    return type(node), node


@given(trees)
@settings(max_examples=150, deadline=None)
def test_any_nested_structure_goes_through_a_state(tree):
    encoded, tensors = flatten(tree, as_tensor, prefix="x")
    state = State.pack(tensors, {"tree": encoded})
    opened = State(bytes(state.buffer))
    views = opened.tensors
    twin = unflatten(opened.meta["tree"], lambda name: views[name].numpy())
    assert plain(twin) == plain(tree)


@given(st.dictionaries(st.text(min_size=1, max_size=6), arrays, max_size=5))
@settings(max_examples=100, deadline=None)
def test_states_are_pickled_out_of_band_and_read_by_safetensors(named):
    named.pop("__metadata__", None)
    state = State.pack({name: Tensor.from_numpy(a) for name, a in named.items()}, {"n": 1})
    frames: list[Any] = []
    head = pickle.dumps(state, protocol=5, buffer_callback=frames.append)
    assert len(frames) == 1
    assert frames[0].raw().nbytes == state.nbytes
    assert len(head) < 200
    for twin in (
        pickle.loads(head, buffers=frames),
        pickle.loads(head, buffers=[bytes(frames[0].raw())]),
        pickle.loads(pickle.dumps(state, protocol=5)),
        pickle.loads(pickle.dumps(state, protocol=4)),
    ):
        assert twin == state
        assert hash(twin) == hash(state)
        assert twin.meta == {"n": 1}
    others = load(bytes(state.buffer))
    assert others.keys() == named.keys()
    for name, array in named.items():
        assert others[name].numpy().tobytes() == array.tobytes()
        assert tuple(others[name].shape) == array.shape


IN_A_CYCLE = """
import gc, pickle
from dagsel.state import State

def frames_of(state):
    frames = []
    head = pickle.dumps(state, protocol=5, buffer_callback=frames.append)
    return [pickle.loads(head, buffers=frames), frames]

for _ in range(3):
    state = State.pack({}, {"n": 1})
    first, second = frames_of(state), frames_of(frames_of(state)[0])
    first.append(second)
    second += [state, first]
    del state, first, second
    gc.collect()
"""


def test_a_cycle_of_references_with_a_pickled_state_is_collected():
    """Python to 3.12.6 ended with a segmentation fault, in whatever was collecting."""
    program = [sys.executable, "-X", "faulthandler", "-c", IN_A_CYCLE]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_bfloat16_is_read_by_safetensors_and_from_it():
    value = torch.randn(3, 2).bfloat16()
    data = value.view(torch.uint8).numpy().reshape(-1)
    state = State.pack({"w": Tensor("BF16", (3, 2), data)}, {})
    assert torch.equal(load(bytes(state.buffer))["w"], value)
    theirs = State(save({"w": value, "v": torch.ones(1)}, {"dagsel": "{}"}))
    assert theirs.tensors["w"].data.tobytes() == data.tobytes()


def test_tensors_are_aligned_and_read_only_and_the_size_is_known():
    tensors = {
        name: Tensor.from_numpy(np.ones(3, dtype))
        for name, dtype in {"a": "int8", "b": "float64", "c": "float16", "d": "float32"}.items()
    }
    state = State.pack(tensors, {"long": "x" * 37})
    for tensor in state.tensors.values():
        array = tensor.numpy()
        assert array.flags.aligned
        assert array.tolist() == [1, 1, 1]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2
    assert sys.getsizeof(state) >= state.nbytes
    assert "4 tensors" in repr(state)


def test_a_non_contiguous_array_is_stored_in_order():
    array = np.arange(12.0).reshape(3, 4).T[::2]
    state = State.pack({"w": Tensor.from_numpy(array)}, {})
    assert state.tensors["w"].numpy().tolist() == array.tolist()


def test_reserved_tensors_are_written_once_by_whoever_owns_them():
    state, views = State.reserve({"w": ("F32", (2, 2)), "e": ("I64", (0, 3))}, {})
    views["w"].numpy()[:] = 5
    assert state.tensors["w"].numpy().tolist() == [[5, 5], [5, 5]]
    assert state.tensors["e"].numpy().shape == (0, 3)


def test_what_is_the_same_is_kept_once_and_equal_names_are_told_apart():
    array = np.ones(2)
    encoded, tensors = flatten(
        {"a": array, "b": [array]}, as_tensor, same=lambda t: t.data.tobytes()
    )
    assert list(tensors) == ["a"]
    assert unflatten(encoded, lambda name: name) == {"a": "a", "b": ["a"]}
    tree = {"a": {"b": np.zeros(1)}, "a.b": np.ones(1)}
    encoded, tensors = flatten(tree, as_tensor)
    twin = unflatten(encoded, lambda name: tensors[name].numpy().tolist())
    assert twin == {"a": {"b": [0.0]}, "a.b": [1.0]}


@pytest.mark.parametrize("leaf", [object(), print, lambda: 0, {1: 2}.keys(), type])
def test_what_cannot_be_stored_is_named(leaf):
    with pytest.raises(WorkloadError, match=r"optimizer\.state\.0"):
        flatten({"state": [leaf]}, as_tensor, prefix="optimizer")


def buffer(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


META = {"__metadata__": {"dagsel": "{}"}}


def entry(shape, offsets, dtype="F32"):
    return META | {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "bad",
    [
        b"", b"1234567", buffer(META, length=2**63), buffer(META, length=10**7),
        buffer(b"{"), buffer(b"[]"), buffer(b'"__metadata__"'), buffer(b"\xff\xfe"), buffer({}),
        buffer({"__metadata__": {}}), buffer({"__metadata__": {"dagsel": "[]"}}),
        buffer({"__metadata__": {"dagsel": "{"}}), buffer(b"[" * 100_000),
        buffer({"__metadata__": {"dagsel": "[" * 100_000}}),
        buffer(entry([2], [0, 8]), b"1234"), buffer(entry([1], [0, 4]), b"12345"),
        buffer(entry([2**62, 2**62], [0, 4]), b"1234"), buffer(entry([-1, -1], [0, 4]), b"1234"),
        buffer(entry([1.0], [0, 4]), b"1234"), buffer(entry([True], [0, 4]), b"1234"),
        buffer(entry([0, 10**30], [0, 0])), buffer(entry([1], [4, 8]), b"12345678"),
        buffer(entry([1], [-4, 0]), b"1234"), buffer(entry([1], [0]), b"1234"),
        buffer(entry([1], [0, 4], "F99"), b"1234"), buffer(entry([1], [0, 4], ["F32"]), b"1234"),
        buffer(entry("1", [0, 4]), b"1234"), buffer(entry(None, [0, 4]), b"1234"),
        buffer(META | {"w": 3}), buffer(META | {"w": [1]}), buffer(META | {"w": None}),
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused(bad):
    with pytest.raises(CheckpointCorruptError):
        State(bad).tensors  # noqa: B018


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_flipped_byte_of_the_header_is_refused_or_harmless(data):
    state = State.pack({"w": Tensor.from_numpy(np.ones((2, 3), "float32"))}, {"n": 3})
    raw = bytearray(state.buffer)
    place = data.draw(st.integers(0, len(raw) - 25))
    raw[place] = data.draw(st.integers(0, 255))
    damaged = State(raw)
    try:
        assert all(t.data.nbytes <= 24 for t in damaged.tensors.values())
        assert isinstance(damaged.meta, dict)
    except CheckpointCorruptError:
        pass


def test_an_unknown_container_is_refused():
    with pytest.raises(CheckpointCorruptError, match=r"os\.system"):
        unflatten({"$": "os.system", "items": []}, str)
