"""A fork server that is a copy of the driver has what that has imported, and nothing else of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dagsel.execution import copied_server
from dagsel.execution.user_modules import users_modules

SCRIPT = """\
import builtins, json, os, signal, sys, threading, time
import torch
from dagsel.execution.cluster import local_cluster
from dagsel.execution import copied_server
from distributed import Client

with open("imported.txt", "a") as file:
    file.write("x")


def look(path):
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return {
        "is_copy": hasattr(builtins, "made_in_the_driver"),
        "has_file": path in files,
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "threads": torch.get_num_threads(),
        "numbers": torch.rand(2).tolist(),
        "python_threads": [thread.name for thread in threading.enumerate()],
    }


def look_where_units_train(path):
    copied_server.limit_threads()
    torch.ones(1_000_000).exp()
    n = {library.omp_get_max_threads() for library in copied_server._openmp()}
    return look(path) | {"openmp": sorted(n)}


if __name__ == "__main__":
    builtins.made_in_the_driver = True
    torch.ones(1_000_000).exp()  # OpenMP has threads now, where there are cores for them
    mine = open("mine.txt", "w")
    signal.signal(signal.SIGTERM, lambda *_: print("mine"))
    sys.stdout.write("once ")  # stays in its buffer
    SETUP
    path = os.path.realpath("mine.txt")
    with local_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        told = [*client.run(look, path).values()]
        told += client.gather([client.submit(look_where_units_train, path)])
    print(json.dumps(told))
"""

SEARCH = """\
import dagsel, optuna, sklearn.datasets, torch
from dagsel.flows import RandomSearch


def space(trial):
    return {"lr": trial.suggest_float("lr", 1e-3, 0.1, log=True)}


if __name__ == "__main__":
    mine = torch.nn.Linear(640, 10)  # PyTorch's own threads have been at work
    mine(torch.rand(4000, 640)).sum().backward()
    torch.optim.Adam(mine.parameters()).step()
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    workload = dagsel.TorchWorkload(
        model=lambda config: torch.nn.Linear(64, 10), optimizer=torch.optim.Adam, batch_size=32,
        loss=torch.nn.functional.cross_entropy, metrics=["accuracy"])
    study = optuna.create_study(direction="maximize")
    run = dagsel.optimize(study, workload, (x.astype("float32"), y), space=space, metric="accuracy",
                          flow=RandomSearch(max_epochs=2, n_trials=3), run_dir="run")
    print(run.best_value.hex(), [w.tolist() for w in run.best_model().parameters()])
"""


def run(folder: Path, script: str, kind: str = "true") -> str:
    (folder / "script.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**environment, "DASK_DAGSEL__FORK_SERVER": kind},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def looked(folder: Path, setup: str = "pass", kind: str = "true") -> list[dict[str, Any]]:
    before, told = run(folder, SCRIPT.replace("SETUP", setup), kind).split(" ", 1)
    assert before == "once"
    found: list[dict[str, Any]] = json.loads(told)
    assert len({tuple(one["numbers"]) for one in found}) == len(found) == 3
    for one in found:
        assert (one["has_file"], one["sigterm"], one["threads"]) == (False, True, 1)
    assert found[-1]["openmp"] == [1]
    return found


def test_workers_are_copies_of_a_driver_without_its_files_signals_and_threads(
    tmp_path: Path,
) -> None:
    assert all(one["is_copy"] for one in looked(tmp_path))
    assert (tmp_path / "imported.txt").read_text() == "x"  # the driver alone has imported it


ZARR = """import zarr; zarr.create_array("a.zarr", shape=(2,), dtype="f4")[:] = 1"""


def test_threads_that_are_begun_anew_in_a_copy_do_no_harm(tmp_path: Path) -> None:
    found = looked(tmp_path, ZARR + """; assert threading.active_count() > 1""")
    assert all(one["is_copy"] for one in found)
    assert not any("zarr_io" in one["python_threads"] for one in found)


#: What is imported computes nothing yet, nor does a check of a configuration.
FLAX = """\
import dagsel, flax.nnx, jax, optax
    workload = dagsel.FlaxWorkload(
        lambda config, rngs: flax.nnx.Linear(4, 1, rngs=rngs), lambda o, t: (o - t).mean(),
        lambda config: optax.adam(0.1), batch_size=2)
    from dagsel.workloads.base import DataOutline
    import numpy
    kind = numpy.dtype("float32")
    outline = {"x": (kind, (4,)), "y": (kind, (1,))}
    workload.validate({}); workload.validate_data({}, DataOutline((8,), outline))"""


def test_a_driver_that_has_checked_a_flax_model_is_copied(tmp_path: Path) -> None:
    assert all(one["is_copy"] for one in looked(tmp_path, FLAX))


THREAD = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
#: A thread that Python does not know of.
NATIVE = (
    "import ctypes; libc = ctypes.CDLL(None); "
    "libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.sleep, ctypes.c_void_p(600))"
)


@pytest.mark.parametrize(
    ("setup", "kind"),
    [
        (THREAD, "true"),
        (NATIVE, "true"),
        ("import jax; jax.numpy.ones(3).sum()", "true"),
        ("copied_server._IMPORTS_BYTES, copied_server._SHARE = 0, 1e-6", "true"),
        ("copied_server._cuda_has_begun = lambda: True", "true"),
        ("pass", "new"),
    ],
    ids=["a thread", "a native thread", "JAX at work", "too large", "CUDA", "unwanted"],
)
def test_where_a_copy_could_do_harm_the_server_is_a_new_process(
    tmp_path: Path, setup: str, kind: str
) -> None:
    assert not any(one["is_copy"] for one in looked(tmp_path, setup, kind))


def test_a_copy_trains_the_same_to_the_bit(tmp_path: Path) -> None:
    outcomes = []
    for kind in ("true", "new"):
        (tmp_path / kind).mkdir()
        outcomes.append(run(tmp_path / kind, SEARCH, kind))
    assert outcomes[0] == outcomes[1]


def test_a_copy_is_outdated_once_a_module_of_the_users_holds_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("mine")
    module.__file__ = str(tmp_path / "mine.py")
    monkeypatch.setitem(sys.modules, "mine", module)
    monkeypatch.setattr(copied_server, "_held", None)
    module.share, module.name, module.names = 0.5, "-".join("ab"), ["a"]
    module.call, module.array, module.arrays = lambda: 0, np.zeros(2), {"a": np.zeros(2)}

    def is_outdated() -> bool:
        found = copied_server.is_outdated()
        copied_server._held = copied_server._held_by_users()
        return found

    assert not is_outdated()  # there is no copy
    assert "mine" in (copied_server._held or ())
    module.share, module.name = 0.5, "-".join("ab")  # equal ones
    module.__warningregistry__ = {}
    module.later = 1  # workers import what was not there
    assert not is_outdated()
    for change in (
        lambda: setattr(module, "share", 0.25),
        lambda: setattr(module, "call", lambda: 0),
        lambda: setattr(module, "array", np.zeros(2)),
        lambda: module.names.append("b"),
        lambda: module.arrays.update(a=np.zeros(2)),
        lambda: delattr(module, "name"),
        lambda: sys.modules.pop("mine"),
    ):
        change()
        assert is_outdated()
        assert not is_outdated()


def test_what_is_installed_is_none_of_the_users_wherever_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on clusters that have PyTorch in a folder of the system, which PYTHONPATH names."""
    for folder in ("/sw/torch/lib/python3.11/site-packages", "/home/me"):
        module = ModuleType(folder)
        module.__file__ = f"{folder}/it.py"
        monkeypatch.setitem(sys.modules, folder, module)
    assert "/home/me" in users_modules()
    assert not {"/sw/torch/lib/python3.11/site-packages", "numpy", "json"} & {*users_modules()}


TWICE = """\
import importlib, logging, sys
import dagsel, mine, optuna, sklearn.datasets, torch
from dagsel.execution import copied_server
from dagsel.flows import RandomSearch


def search():
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    workload = dagsel.TorchWorkload(
        model=mine.model, loss=mine.loss, optimizer=torch.optim.SGD, batch_size=32)
    study = optuna.create_study()
    space = lambda trial: {"lr": trial.suggest_float("lr", 0.01, 0.1)}
    flow = RandomSearch(max_epochs=1, n_trials=1)
    run = dagsel.optimize(study, workload, (x.astype("float32"), y), space=space, metric="loss",
                          flow=flow, seed=0, progress=False)
    assert copied_server._held is not None
    print(run.best_value.hex())


class Telling(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())


told = []
logging.getLogger("dagsel").addHandler(Telling())
if __name__ == "__main__":
    search()
    search()
    with open("mine.py") as file:
        text = file.read()
    with open("mine.py", "w") as file:
        file.write(text.replace("0.0", "0.25"))
    search()
    mine.SHARE = 0.5
    search()
    importlib.reload(mine)
    search()
    mine.SHARES[0] = 0.5
    search()
    assert not [text for text in told if "is not what it is here" in text]
"""

MINE = """\
import torch

SHARE = 0.0
SHARES = [0.0]


def model(config):
    return torch.nn.Linear(64, 10)


def loss(output, target):
    wanted = max(SHARE, SHARES[0])
    return torch.nn.functional.cross_entropy(output, target, label_smoothing=wanted)
"""


def test_each_search_of_a_script_trains_what_its_modules_hold_by_then(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    first, again, written, set_, loaded, inside = run(tmp_path, TWICE).split()[-6:]
    assert first == again == written  # the file alone has changed, and nobody has read it
    assert len({first, set_, loaded}) == 3
    assert inside == set_  # as large a share, of a list that has changed
