"""Flax, and Keras on both of its backends, on workers of our own: the same bits again.

A search is interrupted and goes on, and is replayed: the digests of all states are those of a
search that was left alone. The driver has computed with JAX before it starts its workers. With
``LIBRARIES=all`` in the environment, as at night, Keras on PyTorch too: a page searches with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ["flax", "keras-jax"]
if os.environ.get("LIBRARIES") == "all":
    KINDS.append("keras-torch")
SCRIPT = """\
import json, os, sys
import numpy as np, optuna
import dagsel
from distributed import Client
from dagsel.execution.cluster import local_cluster
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from tests.execution.interrupted import interrupt, stopping_after

KIND = sys.argv[1]


def cross_entropy(output, target):
    import optax
    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


def adam(config):
    import optax
    return optax.inject_hyperparams(optax.adam)(learning_rate=config["lr"])


def linear(config, rngs):
    from flax import nnx
    return nnx.Linear(6, 2, rngs=rngs)


def build(config):
    import keras
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    schedule = keras.optimizers.schedules.ExponentialDecay(config["lr"], 5, 0.9)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), loss, metrics=["accuracy"])
    return model


def workload():
    options = {"batch_size": 20, "metrics": ["accuracy"]}
    if KIND == "flax":
        return dagsel.FlaxWorkload(linear, cross_entropy, adam, **options)
    return dagsel.KerasWorkload(build, **options)


def space(trial):
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}


def digests(run):
    trials = run.record.trials.values()
    assert {trial.state for trial in trials} == {"complete"}, run.failures
    return {f"{t.number} {e.epoch}": e.digest for t in trials for e in t.epochs}


def search(name, client):
    study = optuna.create_study(study_name=name, direction="maximize")
    flow = RandomSearch(max_epochs=2, n_trials=2)
    return dagsel.optimize(
        study, workload(), data, space=space, flow=flow, metric="accuracy", client=client,
        run_dir=name, deterministic=True, progress=False)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if KIND != "keras-torch":
        import jax
        assert float(jax.numpy.ones(3).sum()) == 3
    x = np.random.default_rng(0).normal(size=(200, 6)).astype("float32")
    arrays = {"x": x, "y": (x[:, 0] > 0).astype("int64")}
    data = ShardedDataset.write("data.zarr", arrays, n_shards=4, validation=0.2)
    with local_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        whole = search("whole", client)
        try:
            with stopping_after(12, interrupt):
                search("halted", client)
            halted = False
        except KeyboardInterrupt:
            halted = True
        parts = {"workload": workload(), "space": space, "progress": False}
        study = optuna.create_study(study_name="halted", direction="maximize")
        again = dagsel.resume("halted", client, **parts, study=study)
        replayed = dagsel.replay("whole", client, **parts, into="replayed")
        output = whole.best_model()
        print(json.dumps({
            "halted": halted, "best": whole.best_value,
            "digests": [digests(run) for run in (whole, again, replayed)],
            "notes": replayed.record.notes,
            "threads": [*client.run(os.environ.get, "PJRT_NPROC").values()],
            "model": type(output).__name__,
        }))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_and_replayed_searches_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py", kind],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "KERAS_BACKEND": kind.partition("-")[2]},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fork()" not in done.stderr, "a driver is copied in which JAX has threads"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    whole, again, replayed = found["digests"]
    assert found["halted"]
    assert len(whole) == 4
    assert "" not in whole.values()
    assert whole == again == replayed
    assert found["notes"] == []
    assert found["best"] > 0.7
    assert kind == "keras-torch" or found["threads"] == ["1", "1"]
    assert found["model"] == ("Linear" if kind == "flax" else "Sequential")
