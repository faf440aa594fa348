"""Random edits of valid states, in a process that watches what it does.

``python fuzz_states.py torch 500 0`` edits and uses 500 states, and prints as JSON how they ended.
An audit hook sees what Python code cannot hide: every import, exec, opened file, connection and new
process. Nothing of the sort may happen once each workload was used with a state as it was written.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import Counter
from copy import deepcopy
from importlib import import_module
from typing import Any

import numpy as np
import torch
from sklearn.cluster import Birch
from sklearn.linear_model import SGDClassifier
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from dagsel.errors import DagselError
from dagsel.state import State
from dagsel.workloads import SklearnWorkload, TorchWorkload, Visit
from dagsel.workloads.sklearn import objects

#: What reading a state has no need of. An event that begins so is a fault.
BANNED = (
    "import", "exec", "compile", "code.", "open", "os.", "pty.", "subprocess.", "socket.",
    "urllib.", "http.", "ctypes.", "pickle.", "marshal.", "shutil.", "tempfile.", "sqlite3.",
    "webbrowser.", "glob.", "cpython.run", "function.__new__", "sys.addaudithook", "mmap.",
    "signal.", "_posixsubprocess.", "sys.setprofile", "sys.settrace", "object.__delattr__",
)  # fmt: skip
CALLS = [
    [kind, module, name]
    for kind in ("new", "call", "class", "unpickle")
    for module, name in (
        ("subprocess", "Popen"), ("os", "system"), ("builtins", "eval"), ("numpy", "memmap"),
        ("sklearn.externals.array_api_compat.numpy", "f2py.subprocess.Popen"),
        ("sklearn.pipeline", "Pipeline"), ("sklearn.cluster", "_agglomerative.Memory"),
        ("sklearn.cluster._agglomerative", "AgglomerativeClustering"),
        ("sklearn.preprocessing._function_transformer", "FunctionTransformer"),
        ("scipy.sparse._csr", "csr_matrix"), ("sklearn.linear_model._sgd_fast", "Hinge"),
        ("antigravity", "fly"), ("this", "s"),
    )
]  # fmt: skip
LIBRARIES = {"sklearn", "torch"}
WORDS = [
    "__class__", "__dict__", "__reduce__", "__setstate__", "memory", "/tmp/planted", "|O", "<f8",
    "|V7", "<U3", "T", "ref", "list", "dict", "tuple", "view", "array", "objects", "random state",
    "generator", "scalar", "bytes", "dtype", "tensor", "deque", "counter", "numpy", "F64", "BF16",
]  # fmt: skip
#: Stand for parts that are nested so often; `json` itself cannot write them.
BRACKETS = {"list": ("[", "]"), "tuple": ('{"$":"tuple","items":[', "]}")}
NESTS = {
    f"nest-{n}-{of}": before * n + "0" + after * n
    for n in (10, 400, 100_000)
    for of, (before, after) in BRACKETS.items()
}
NUMBERS = [None, True, -1, 0, 1, 3, 624, 10**6, 2**31, 2**63, 2**70, 0.5, -1e308, float("nan")]


def sample(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.random((24, 6))
    return {"x": x.astype(np.float32), "y": (x[:, 0] > 0.5).astype(np.int64)}


def module(config: Any) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2)
    )


def torch_workload() -> TorchWorkload:
    return TorchWorkload(
        module,
        torch.nn.functional.cross_entropy,
        lambda parameters, config: torch.optim.Adam(parameters, lr=0.01),
        lr_scheduler=lambda optimizer, config: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        batch_size=8,
    )


def workloads(kind: str) -> list[Any]:
    if kind == "torch":
        return [torch_workload()]
    own = [
        SGDClassifier(random_state=np.random.RandomState(5), average=True),
        MLPClassifier((5,), random_state=1),
        Birch(),
        OneVsRestClassifier(SGDClassifier()),
        GaussianNB(),
        StandardScaler(),
    ]
    return [SklearnWorkload(estimator, batch_size=8) for estimator in own]


class Watch:
    """Records what the process does while it is `on`."""

    def __init__(self) -> None:
        self.on, self.seen, self.imported = False, list[str](), set[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: Any) -> None:
        if self.on and event.startswith(BANNED):
            self.seen.append(f"{event} {args!r}"[:200])
            if event == "import":
                self.imported.add(args[0].partition(".")[0])

    def use(self, *case: Any) -> str:
        """Watch a use. Libraries may import parts of their own, such as for their errors, once."""
        for _ in range(2):
            self.seen, self.imported = [], set()
            self.on = True
            end = use(*case)
            self.on = False
            if not self.imported or not self.imported <= LIBRARIES:
                break
        return end


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    found = []
    for key, value in items:
        found.append((*at, key))
        if isinstance(value, dict | list):
            found += places(value, (*at, key))
    return found


def value_for(rng: random.Random, tree: Any, found: list[tuple[Any, ...]]) -> Any:
    """Return something to put into a state: a foreign call, a reference, another part of it."""
    match rng.randrange(7):
        case 0:
            kind, module, name = rng.choice(CALLS)
            state = rng.choice([None, {}, {"$": "dict", "id": 7, "items": [["memory", "/tmp/x"]]}])
            told = {"class": [module, name], "args": [["true"]], "state": state, "pairs": []}
            return {"$": kind, "id": rng.randrange(5), **told}
        case 1:
            return rng.choice(WORDS)
        case 2:
            return rng.choice(NUMBERS)
        case 3:
            return {"$": "ref", "id": rng.randrange(30)}
        case 4:
            return rng.choice([*NESTS])
        case 5:
            return rng.choice([[], {}, "", [0, 0], {"$": "list", "id": 3, "items": []}])
    node = tree
    for key in rng.choice(found):
        node = node[key]
    return deepcopy(node)


def edit(rng: random.Random, tree: Any) -> None:
    found = places(tree)
    *path, last = rng.choice(found)
    node = tree
    for key in path:
        node = node[key]
    if rng.random() < 0.1:
        del node[last]
    elif rng.random() < 0.05 and isinstance(node, dict):
        node[rng.choice(WORDS)] = node.pop(last)
    elif type(node[last]) is int and rng.random() < 0.5:
        node[last] += rng.choice([-8, -1, 1, 8])
    else:
        node[last] = value_for(rng, tree, found)


def edited(rng: random.Random, state: State) -> State:
    """Return a state with one to three edits: of its values, its header, or its bytes."""
    raw = bytes(state.buffer)
    n_header = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + n_header]), bytearray(raw[8 + n_header :])
    meta = json.loads(header["__metadata__"]["dagsel"])
    how = rng.choice(["meta", "meta", "meta", "header", "body", "bytes", "cut"])
    if how == "cut":
        return State(raw[: rng.randrange(len(raw))])
    if how == "bytes":
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return State(bytes(damaged))
    for _ in range(rng.randint(1, 3)):
        if how == "meta" and meta:
            edit(rng, meta)
        elif how == "header" and header:
            edit(rng, header)
        else:
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    if how != "header":
        header["__metadata__"]["dagsel"] = nested(json.dumps(meta))
    text = nested(json.dumps(header)).encode()
    return State(len(text).to_bytes(8, "little") + text + bytes(body))


def nested(text: str) -> str:
    for name, nest in NESTS.items():
        text = text.replace(f'"{name}"', nest)
    return text


def use(workload: Any, shard: Any, state: State, visit: Visit) -> str:
    """Use a state as a run does; return how that ended."""
    try:
        workload.restore(state, {})
    except DagselError:
        return "refused"
    for act in (
        lambda: workload.train(state, shard, {}, visit=visit),
        lambda: workload.evaluate(state, shard, {}),
    ):
        try:
            act()
        except DagselError:
            return "refused"
        except Exception as error:  # a trial fails: numbers that fit no formula
            return f"failed: {type(error).__name__}"
    return "used"


def main(kind: str, n_cases: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    for package in (*objects._PUBLIC, *objects._PRIVATE):
        import_module(package)
    made = []
    for workload in workloads(kind):
        shard, visit = workload.prepare(sample(0)), Visit(0, 0, 1, 0)
        state = workload.train(workload.init({}, 0), shard, {}, visit=visit).state
        for again in (state, State(bytes(state.buffer)[:-1])):
            use(workload, shard, again, Visit(0, 0, 1, 1))
        made.append((workload, shard, state))
    watch, ends = Watch(), Counter[str]()
    for case in range(seed, seed + n_cases):
        rng = random.Random(case)
        workload, shard, state = rng.choice(made)
        planted = edited(rng, state)
        before = random.getstate()
        print(case, file=sys.stderr, flush=True)  # the last one is what a crash is due to
        end = watch.use(workload, shard, planted, Visit(0, 0, 1, 1))
        if watch.seen:
            sys.exit(f"case {case} ({end}): {watch.seen}")
        if random.getstate() != before:
            sys.exit(f"case {case} ({end}): the process's random numbers have changed")
        ends[end.partition(":")[0]] += 1
    print(json.dumps(ends))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
