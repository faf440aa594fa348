"""KerasWorkload against Keras's own `train_on_batch`, bit for bit, on PyTorch and on JAX.

Keras has one backend in a process: here that of the environment, or PyTorch, and in a process of
its own, with ``LIBRARIES=all`` in the environment, as at night, the other one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np
import pytest

from dagsel import KerasWorkload
from dagsel.errors import CheckpointCorruptError, WorkloadError
from dagsel.metrics import over_set
from dagsel.state import State
from dagsel.testing import WorkloadSuite
from dagsel.workloads import Visit
from dagsel.workloads.base import DataOutline
from dagsel.workloads.keras import backend
from dagsel.workloads.raised import raised
from tests.workloads.test_flax import CONFIG, SEED, SIZES, TRIAL, arrays, train

BACKEND = os.environ.setdefault("KERAS_BACKEND", "torch")


def compiled(layers: list[Any], config: Any, **options: Any) -> Any:
    import keras

    model = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    schedule = keras.optimizers.schedules.ExponentialDecay(config["lr"], 3, 0.9)
    made = {
        "optimizer": keras.optimizers.SGD(schedule, momentum=0.9),
        "loss": loss,
        "metrics": ["accuracy"],
    }
    model.compile(**{**made, **options})
    return model


def net(config: Any) -> Any:
    """Build a model with all kinds of variables."""
    from keras import layers

    parts = [
        layers.Dense(8, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.3),  # draws from PyTorch's stream there
        layers.GaussianNoise(0.1),  # from a seed generator
        layers.Dense(3, dtype="bfloat16"),
        layers.Activation("linear", dtype="float32"),
    ]
    return compiled(parts, config)


def linear(config: Any, **options: Any) -> Any:
    import keras

    return compiled([keras.layers.Dense(config.get("width", 3))], config, **options)


def stepped(config: Any, **options: Any) -> Any:
    """Build a model whose optimizer keeps its learning rate."""
    import keras

    return linear(config, optimizer=keras.optimizers.SGD(config["lr"], momentum=0.9), **options)


def small(model: Callable[[Any], Any] = stepped, **options: Any) -> KerasWorkload:
    made: dict[str, Any] = {"batch_size": 11, "metrics": ["accuracy"], **options}
    return KerasWorkload(model, **made)


class TestKerasWorkload(WorkloadSuite):
    config: Mapping[str, Any] = CONFIG

    def make_workload(self) -> KerasWorkload:
        return KerasWorkload(net, batch_size=8, metrics=["accuracy"])

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return arrays(seed)


def plain() -> Any:
    """Train as a script of Keras does."""
    import keras

    from dagsel.workloads.random_streams import preserved_streams

    with preserved_streams(torch=True):
        keras.utils.set_random_seed(7)
        model = net(CONFIG)
        for epoch in (1, 2):
            for shard, n in enumerate(SIZES):
                data = arrays(shard, n)
                order = np.random.default_rng([SEED, TRIAL, epoch, shard]).permutation(n)
                for start in range(0, n, 8):
                    index = order[start : start + 8]
                    model.train_on_batch(data["x"][index], data["y"][index])
    return model


def units(workload: Any, *, cut: bool = False) -> State:
    state = workload.init(CONFIG, 7)
    for epoch in (1, 2):
        for shard, n in enumerate(SIZES):
            finished = False
            while not finished:
                trained = train(
                    workload, State(bytes(state.buffer)), arrays(shard, n),
                    visit=Visit(SEED, TRIAL, epoch, shard), should_stop=lambda: cut,
                )  # fmt: skip
                state, finished = trained.state, trained.finished
    return state


def test_units_equal_a_plain_loop() -> None:
    from dagsel.workloads.keras import models

    workload = TestKerasWorkload().make_workload()
    state = units(workload)
    expected, found = (models.read(m) for m in (plain(), workload.restore(state, CONFIG)))
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
    assert found["optimizer.0"] == 10
    assert units(workload, cut=True) == state


def regression(config: Any) -> Any:
    import keras

    return compiled([keras.layers.Dense(1)], config, loss="mse", metrics=["mae"])


def test_metrics_of_shards_are_those_of_the_whole_set() -> None:
    import keras

    from dagsel.workloads.keras.models import to_numpy

    rmse = keras.metrics.RootMeanSquaredError(name="rmse")
    metrics = {
        "mae": "minimize",
        "deviation": rmse,
        "spread": over_set(direction="minimize")(spread),
    }
    rmse.direction = "minimize"
    workload = small(regression, metrics=metrics, eval_batch_size=10)
    assert workload.metrics == dict.fromkeys(["loss", *metrics], "minimize")
    data = [
        {"x": arrays(n)["x"][:size], "y": arrays(n)["x"][:size, :1]}
        for n, size in ((5, 22), (6, 9))
    ]
    workload.validate_data(
        CONFIG,
        DataOutline((22,), {"x": (np.dtype("float32"), (6,)), "y": (np.dtype("float32"), (1,))}),
    )
    state = train(workload, workload.init(CONFIG, 0), data[0]).state
    scored = [workload.evaluate(state, workload.prepare(part), CONFIG) for part in data]
    x, y = (np.concatenate([part[name] for part in data]) for name in ("x", "y"))
    output = to_numpy(workload.restore(state, CONFIG)(x))
    pooled = workload.pool([part.kept for part in scored if part.kept is not None])
    assert pooled["deviation"] == pytest.approx(np.sqrt(((output - y) ** 2).mean()), rel=1e-5)
    assert pooled["spread"] == pytest.approx(np.ptp(output), rel=1e-5)
    for name, wanted in (("mae", np.abs(output - y).mean()), ("loss", ((output - y) ** 2).mean())):
        found = sum(part.n_samples * part.metrics[name] for part in scored) / 31
        assert found == pytest.approx(wanted, rel=1e-5)
    nothing = workload.prepare({name: part[:0] for name, part in data[0].items()})
    assert workload.evaluate(state, nothing, CONFIG).metrics == {"loss": 0.0, "mae": 0.0}


def spread(output: Any, target: Any) -> float:
    return float(np.ptp(output))


@pytest.mark.parametrize("name", ["accuracy", "out_auc", "MSE", "val_loss", "log_cosh_error"])
def test_directions_are_known_by_the_names_that_keras_gives(name: str) -> None:
    better = "maximize" if name in ("accuracy", "out_auc") else "minimize"
    assert small(metrics=[name]).metrics == {"loss": "minimize", name: better}


def test_inputs_may_be_named_and_the_last_batch_left_out() -> None:
    import keras

    def build(config: Any) -> Any:
        left, right = (keras.Input((3,), name=name) for name in ("left", "right"))
        output = keras.layers.Dense(3)(keras.layers.Concatenate()([left, right]))
        model = keras.Model({"left": left, "right": right}, output)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def pair(batch: Any, config: Any) -> Any:
        noise = np.random.normal(size=batch["x"].shape)  # float64, which Keras does not train
        x = batch["x"] + 0.1 * noise
        return {"left": x[:, :3], "right": x[:, 3:]}, batch["y"]

    workload = small(
        build, metrics=None, input_fn=pair, batch_size=lambda config: 8, drop_last=True
    )
    state = workload.init(CONFIG, 0)
    whole = train(workload, state)
    assert whole.n_samples == 16
    piece = train(workload, state, should_stop=lambda: True)
    assert train(workload, piece.state).state == whole.state
    assert list(workload.evaluate(state, workload.prepare(arrays(1)), CONFIG).metrics) == ["loss"]


def test_a_trial_goes_on_with_another_learning_rate_and_not_with_another_shape() -> None:
    workload = small()
    state = train(workload, workload.init(CONFIG, 0)).state
    slower = workload.reconfigure(state, CONFIG, {"lr": 0.01})
    changed = {n for n, t in slower.tensors.items() if (t.data != state.tensors[n].data).any()}
    assert [slower.tensors[n].numpy() for n in changed] == [np.float32(0.01)]
    with pytest.raises(WorkloadError, match=r"'trainable\.0' is F32 of shape \(6, 3\)"):
        workload.reconfigure(state, CONFIG, {**CONFIG, "width": 4})
    with pytest.raises(CheckpointCorruptError, match=r"'trainable\.0' is \('F32', \(6, 3\)\)"):
        workload.restore(state, {**CONFIG, "width": 4})


def unbuilt(config: Any) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def frozen(config: Any) -> Any:
    model = stepped(config)
    model.trainable = False
    return model


def uncompiled(config: Any) -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


def with_sum(config: Any) -> Any:
    import keras

    class Total(keras.metrics.Mean):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().update_state(y_pred)

        def result(self) -> Any:
            return self.total

    return stepped(config, metrics=["accuracy", Total(name="total")])


def drawing(library: str) -> Callable[[Any], Any]:
    def build(config: Any) -> Any:
        import keras

        class Noise(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                if library == "numpy":
                    return x * np.random.random()
                return x + keras.random.normal((6,))

        return compiled([Noise(), keras.layers.Dense(3)], config)

    return build


def test_random_numbers_that_no_state_determines_are_refused() -> None:
    workload = small(drawing("keras"))
    with pytest.raises(ValueError, match="SeedGenerator"):  # on JAX, by Keras itself
        train(workload, workload.init(CONFIG, 0))
    workload = small(drawing("numpy"))
    state = workload.init(CONFIG, 0)
    if BACKEND == "jax":  # which would compile them as constants
        with pytest.raises(WorkloadError, match="draws random numbers from Python or NumPy"):
            train(workload, state)
    else:  # where they travel
        assert train(workload, state).state == train(workload, state).state


def subclass(config: Any, modes: list[bool] | None = None) -> Any:
    """Build a model that notes in which mode it is called."""
    import keras

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any, training: bool = True) -> Any:  # as layers that augment have it
            if modes is not None:
                modes.append(training)
            return self.dense(x)

    made = Net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer="sgd", loss=loss, metrics=["accuracy"])
    return made


def fitted(config: Any) -> Any:
    model = stepped(config)
    model.fit(arrays(0)["x"], arrays(0)["y"], verbose=0)
    return model


def wide(config: Any) -> Any:
    import keras

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    return model


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a model": (lambda: small(uncompiled(CONFIG)), "model must be a function, called as model"),
    "another type": (lambda: small(lambda config: 3), "must return a compiled keras.Model, got 3"),
    "not compiled": (lambda: small(uncompiled), "the Sequential is not compiled: call"),
    "not built": (lambda: small(unbuilt), "has no weights yet: begin it with keras.Input"),
    "a subclass": (lambda: small(subclass), "no weights yet: .* or call it once, as in"),
    "frozen": (lambda: small(frozen), "has no weights to train"),
    "no loss": (lambda: small(lambda c: stepped(c, loss=None)), "compiled without a loss"),
    "a loss's name": (lambda: small(lambda c: stepped(c, loss="sparse")), "sparse"),
    "a metric's name": (lambda: small(lambda c: stepped(c, metrics=["acuracy"])), "acuracy"),
    "no such metric": (
        lambda: small(metrics=["mae"]),
        "compiled without a metric 'mae', its metrics: accuracy",
    ),
    "no mean": (
        lambda: small(with_sum, metrics={"total": "maximize"}),
        "'total', Total, is no mean over samples",
    ),
    "no direction": (lambda: small(metrics=["mine"]), 'write metrics={.mine.: "maximize"}'),
    "no metrics": (lambda: small(metrics=3), "metrics must be names of metrics that the model"),
    "a shape": (
        lambda: small(lambda c: stepped(c, loss="mse")),
        r"fails for inputs of shape \(11, 6\) and targets of shape \(11,\)",
    ),
    "fitted": (lambda: small(fitted), "calls fit on the Sequential that it returns: leave fit out"),
    "one-hot classes": (
        lambda: small(lambda c: stepped(c, loss="categorical_crossentropy")),
        r'if the target is the number of each .* write loss="sparse_categorical_crossentropy"',
    ),
    "another width": (
        lambda: small(wide),
        r"to have value 5, but received input with shape \(11, 6\); compare its layers",
    ),
    "a metric's class": (
        lambda: small(metrics=[__import__("keras").metrics.AUC]),
        r"metric 'AUC' is the class AUC: make one of it, as in metrics={'AUC': AUC\(\.\.\.\)}",
    ),
    "a function of keras": (
        lambda: small(metrics={"m": __import__("keras").metrics.mean_absolute_error}),
        r"takes the target first; write .*mean_absolute_error\(target, output\)",
    ),
    "no batches": (lambda: small(batch_size=0), "batch_size must be a whole number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trained_is_refused_in_a_sentence(name: str) -> None:
    make, said = WRONG[name]
    with pytest.raises(WorkloadError, match=said):
        check(make())


def test_a_class_without_an_output_is_refused() -> None:
    shard = arrays(0)
    state = small().init(CONFIG, 0)
    with pytest.raises((WorkloadError, IndexError), match="Target 3 is out of bounds") as caught:
        train(small(), state, {**shard, "y": shard["y"] + 1})
    assert "give the model an output for each class" in raised(caught.value).cure


def masked(config: Any) -> Any:
    """Return scores of each word; 0 pads a sequence."""
    import keras

    words = keras.layers.Embedding(9, 4, mask_zero=True)
    layers = [keras.Input((4,), dtype="int32"), words, keras.layers.Dense(3, activation="softmax")]
    model = keras.Sequential(layers)
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    return model


@pytest.mark.skipif(BACKEND != "jax", reason="PyTorch takes no such class, masked or not")
def test_the_class_of_what_is_masked_may_be_any_number() -> None:
    words = np.array([[1, 2, 3, 0], [4, 5, 0, 0]] * 4)
    shard = {"x": words, "y": np.where(words, words % 3, -1)}
    workload = small(masked, metrics=None)
    assert train(workload, workload.init(CONFIG, 7), shard).loss > 0


def test_a_model_may_have_a_history_of_its_own() -> None:
    def build(config: Any) -> Any:
        model = subclass(config)
        model.history = []
        model(np.zeros((1, 6)))
        return model

    small(build).validate(CONFIG)


def test_classes_are_those_of_the_loss() -> None:
    import keras

    from dagsel.workloads.keras.models import ClassNumbers

    name = "sparse_categorical_crossentropy"
    made = keras.losses.SparseCategoricalCrossentropy
    for loss in (name, keras.losses.sparse_categorical_crossentropy, made, made()):
        assert ClassNumbers.of(loss, 3) == ClassNumbers(3)
    assert ClassNumbers.of("mse", 3) is ClassNumbers.of(name, None) is None
    ClassNumbers.of(made(ignore_class=-1), 3).check(np.array([-1, 2]))  # type: ignore[union-attr]
    with pytest.raises(WorkloadError, match="Target -1 is out of bounds: the model has 3 outputs"):
        ClassNumbers(3).check(np.array([-1, 2]))


def test_a_metric_that_does_not_take_a_batch_is_named_with_the_shapes() -> None:
    import keras

    workload = small(metrics=[keras.metrics.AUC(name="auc")])
    kept = workload.evaluate(workload.init(CONFIG, 0), arrays(0), CONFIG).kept
    with pytest.raises(
        WorkloadError, match=r"AUC does not take outputs of shape \(22, 3\) and targ"
    ):
        workload.pool([kept])  # type: ignore[list-item]


def test_a_metric_for_each_sample_is_named() -> None:
    workload = small(metrics={"right": lambda output, target: target})
    with pytest.raises(WorkloadError, match="metric 'right' must return a number for a batch, and"):
        workload.evaluate(workload.init(CONFIG, 0), arrays(0), CONFIG)


def test_what_a_configuration_is_not_read_for_is_known() -> None:
    assert small().unread({"lr": 0.1, "rate": 0.1, "batch_size": 8}) == {"rate", "batch_size"}
    named = small(lambda config: stepped({"lr": 0.1}), batch_size=lambda config: config["n"])
    assert named.unread({"lr": 0.1, "n": 8}) == {"lr"}
    given = small(input_fn=lambda batch, config: (batch["x"], batch["y"]))
    assert given.unread({"lr": 0.1, "rate": 0.1}) == frozenset()  # who knows


def check(workload: KerasWorkload) -> None:
    given = {"x": (np.dtype("float64"), (6,)), "y": (np.dtype("int64"), ())}
    workload.validate(CONFIG)
    workload.validate_data(CONFIG, DataOutline((22, 16), given))


def test_a_worker_learns_the_backend_before_it_imports_keras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(small())
    packed = cloudpickle.dumps(small())
    assert packed.index(b"use_backend") < packed.index(b"stepped")
    told: list[str] = []
    monkeypatch.setattr(backend, "use_backend", told.append)
    assert pickle.loads(packed).backend == BACKEND
    assert told == [BACKEND]


def test_another_backend_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    other = "jax" if BACKEND == "torch" else "torch"
    with pytest.raises(WorkloadError, match=f"has imported Keras with its {BACKEND} backend, and"):
        backend.use_backend(other)
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    with pytest.raises(WorkloadError, match="has its tensorflow backend, on which dagsel does not"):
        small()


@pytest.mark.slow
@pytest.mark.skipif("DAGSEL_THE_OTHER_BACKEND" in os.environ, reason="this is the other process")
@pytest.mark.skipif(os.environ.get("LIBRARIES") != "all", reason="by night")
def test_this_holds_on_the_other_backend() -> None:
    other = "jax" if BACKEND == "torch" else "torch"
    variables = {**os.environ, "KERAS_BACKEND": other, "DAGSEL_THE_OTHER_BACKEND": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", __file__],
        env=variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_what_keras_is_told_of_numbers_travels_with_the_workload() -> None:
    """The policy is a thread's own, and a new process has neither."""
    import keras

    def build(config: Any) -> Any:
        assert keras.config.floatx() == "float32"
        return linear(config)

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        packed = cloudpickle.dumps(small(build))
    finally:
        keras.config.set_dtype_policy("float32")
    found: list[Any] = []

    def elsewhere() -> None:
        workload = pickle.loads(packed)
        state = workload.init(CONFIG, 7)
        trained = train(workload, state, arrays(0, 24), visit=Visit(SEED, TRIAL, 1, 0))
        model = workload.restore(trained.state, CONFIG)
        found.extend([model.layers[0].compute_dtype, keras.config.dtype_policy().name])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == ["bfloat16", "float32"]
    assert small().settings is None


def own_steps(config: Any, *, evaluates: bool = True) -> Any:
    """Build an autoencoder as in Keras's examples, which computes its loss by itself."""
    import keras

    class Encoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
            self.mean, self.beta = keras.metrics.Mean(name="loss"), 1.0

        def build(self, shape: Any) -> None:
            self.built = True

        def call(self, x: Any) -> Any:
            return self.net(x)

        @property
        def metrics(self) -> list[Any]:
            return [self.mean]

        def loss_here(self, data: Any) -> Any:
            return keras.ops.mean((self(data[0]) - data[0]) ** 2)

        def train_step(self, data: Any) -> Any:
            import torch

            self.zero_grad()
            loss = self.loss_here(data)
            loss.backward()
            with torch.no_grad():
                gradients = [weight.value.grad for weight in self.trainable_weights]
                self.optimizer.apply(gradients, self.trainable_weights)
            self.beta += config.get("grows", 0.0)
            return {"loss": loss}

        def test_step(self, data: Any) -> Any:
            self.mean.update_state(self.loss_here(data))
            return {"loss": self.mean.result()}

    if not evaluates:
        del Encoder.test_step
    made = Encoder()
    made.build(None)
    made.compile(optimizer=keras.optimizers.Adam(0.1))
    return made


def test_nothing_but_training_goes_through_a_model_as_training_does() -> None:
    modes: list[bool] = []

    def build(config: Any) -> Any:
        made = subclass(config, modes)
        made(np.zeros((1, 6)), training=False)
        return made

    workload = small(build)
    check(workload)
    state = workload.init(CONFIG, 0)
    workload.evaluate(state, workload.prepare(arrays(0, 24)), CONFIG)
    assert not any(modes)
    train(workload, state)
    assert any(modes)


@pytest.mark.skipif(BACKEND != "torch", reason="its step is one of PyTorch's")
def test_a_model_may_have_all_its_steps_by_itself() -> None:
    workload = small(own_steps, metrics=None)
    state, shard = workload.init(CONFIG, 7), arrays(0, 24)
    workload.validate(CONFIG)
    before = workload.evaluate(state, shard, CONFIG).metrics["loss"]
    for epoch in range(1, 6):
        state = train(workload, state, shard, visit=Visit(SEED, TRIAL, epoch, 0)).state
    assert workload.evaluate(state, shard, CONFIG).metrics["loss"] < before
    with pytest.raises(WorkloadError, match="without a loss.*train_step and a test_step of its"):
        small(lambda config: own_steps(config, evaluates=False)).validate(CONFIG)


@pytest.mark.skipif(BACKEND != "torch", reason="JAX refuses it by itself")
def test_what_training_changes_outside_of_variables_is_not_lost_in_silence() -> None:
    config = {**CONFIG, "grows": 0.1}
    workload = small(own_steps, metrics=None)
    state, visit = workload.init(config, 7), Visit(SEED, TRIAL, 1, 0)
    with pytest.raises(WorkloadError, match=r"has changed Encoder\.beta, .*self\.add_weight"):
        workload.train(state, workload.prepare(arrays(0, 24)), config, visit=visit)


def test_an_optimizer_beside_that_of_the_model_is_refused() -> None:
    import keras

    def build(config: Any) -> Any:
        model = linear(config)
        model.second = keras.optimizers.Adam()
        return model

    with pytest.raises(WorkloadError, match="holds the optimizer 'second' beside.*Lightning"):
        small(build).validate(CONFIG)


def test_the_direction_of_an_object_is_that_of_its_class_or_its_own() -> None:
    import keras

    given = [keras.metrics.F1Score(average="macro", name="quality"), keras.metrics.Mean(name="it")]
    assert small(metrics=given[:1]).metrics["quality"] == "maximize"
    with pytest.raises(WorkloadError, match='metric.direction = "maximize".*metrics=.metric.'):
        small(metrics=given)
    given[1].direction = "minimize"
    assert small(metrics=given).metrics["it"] == "minimize"
    each = small(metrics=[keras.metrics.F1Score(name="f1")])
    ((_, of_classes),) = each._metrics.items()
    with pytest.raises(WorkloadError, match="F1Score returns 3 numbers.*average='macro'"):
        of_classes(np.eye(3, dtype="float32"), np.eye(3, dtype="float32"))
