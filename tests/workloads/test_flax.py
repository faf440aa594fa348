"""FlaxWorkload against a plain loop of Flax NNX and optax, bit for bit.

Programs that are equal are compiled once; what no state would keep is refused before it trains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

import dagsel.metrics
from dagsel import FlaxWorkload
from dagsel.errors import CheckpointCorruptError, NothingTrainedError, WorkloadError
from dagsel.state import State, Tensor
from dagsel.storage import RaggedArray
from dagsel.testing import WorkloadSuite
from dagsel.workloads import Visit
from dagsel.workloads.arrays import Kept, settle_jax
from dagsel.workloads.base import DataOutline

SEED, TRIAL, SIZES = 3, 2, (22, 16)
CONFIG = {"lr": 0.1}


def arrays(seed: int, n: int = 22) -> dict[str, Any]:
    x = np.random.default_rng(seed).normal(size=(n, 6)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)}


@cache
def net() -> Any:
    """A module with all kinds of variables."""
    import jax.numpy as jnp
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(6, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(8, 3, rngs=rngs, param_dtype=jnp.bfloat16)])
            self.calls = nnx.Variable(0)

        def __call__(self, x: Any) -> Any:
            self.calls[...] = self.calls[...] + 1
            hidden = self.dropout(nnx.relu(self.norm(self.first(x))))
            return self.layers[0](hidden).astype("float32")

    return Net


def cross_entropy(output: Any, target: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


def momentum(config: Any) -> Any:
    import optax

    return optax.sgd(optax.exponential_decay(config["lr"], 3, 0.9), momentum=0.9)


def injected(config: Any) -> Any:
    import optax

    return optax.inject_hyperparams(optax.sgd)(learning_rate=config["lr"])


def linear(config: Any, rngs: Any) -> Any:
    from flax import nnx

    return nnx.Linear(6, config.get("width", 3), rngs=rngs)


def deep(**options: Any) -> FlaxWorkload:
    made = {"batch_size": 8, "metrics": ["accuracy"], **options}
    return FlaxWorkload(lambda config, rngs: net()(rngs), cross_entropy, momentum, **made)


def small(**options: Any) -> FlaxWorkload:
    made: dict[str, Any] = {"model": linear, "loss": cross_entropy, "optimizer": injected}
    return FlaxWorkload(**{**made, "batch_size": 11, **options})


def train(workload: Any, state: State, data: Any = None, **options: Any) -> Any:
    config = options.pop("config", CONFIG)
    visit = options.pop("visit", Visit(SEED, TRIAL, 1, 0))
    shard = workload.prepare(arrays(0) if data is None else data)
    return workload.train(state, shard, config, visit=visit, **options)


class TestFlaxWorkload(WorkloadSuite):
    config: Mapping[str, Any] = CONFIG

    def make_workload(self) -> FlaxWorkload:
        return deep()

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return arrays(seed)


def plain(n_epochs: int = 2) -> tuple[Any, list[float]]:
    """Train as a script of Flax does."""
    import optax
    from flax import nnx

    model = net()(nnx.Rngs(7))
    model.train()
    optimizer = nnx.Optimizer(model, momentum(CONFIG), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    losses = []
    for epoch in range(1, n_epochs + 1):
        for shard, n in enumerate(SIZES):
            data = arrays(shard, n)
            order = np.random.default_rng([SEED, TRIAL, epoch, shard]).permutation(n)
            found = []
            for start in range(0, n, 8):
                index = order[start : start + 8]
                loss = float(step(model, optimizer, data["x"][index], data["y"][index]))
                found.append(loss * len(index))
            losses.append(sum(found) / n)
    return model, losses


def units(workload: Any, *, cut: bool = False) -> tuple[State, list[float]]:
    state, losses = workload.init(CONFIG, 7), []
    for epoch in (1, 2):
        for shard, n in enumerate(SIZES):
            finished = False
            while not finished:
                trained = train(
                    workload, State(bytes(state.buffer)), arrays(shard, n),
                    visit=Visit(SEED, TRIAL, epoch, shard), should_stop=lambda: cut,
                )  # fmt: skip
                state, finished = trained.state, trained.finished
            losses.append(trained.loss)
    return state, losses


def test_units_equal_a_plain_loop() -> None:
    import jax
    from flax import nnx

    expected, losses = plain()
    workload = deep()
    state, found = units(workload)
    assert found == losses
    model = workload.restore(state, CONFIG)
    expected.eval()
    for one, other in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, expected)), strict=True):
        if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert state.tensors["model.calls"].numpy() == 10
    assert state.tensors["model.layers.0.kernel"].dtype == "BF16"
    assert units(workload, cut=True) == (state, found)
    x = arrays(5)["x"]
    assert np.array_equal(model(x), expected(x))


def test_a_module_whose_code_looks_at_numbers_is_built_with_them() -> None:
    import jax.numpy as jnp
    from flax import nnx

    class Looks(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.inner = nnx.Linear(6, 3, rngs=rngs)
            self.offset = jnp.arange(3.0)  # an array that is no nnx.Variable travels too
            self.is_large = bool(self.inner.kernel[...].sum() > 100)

        def __call__(self, x: Any) -> Any:
            return self.inner(x) + self.offset

    workload = small(model=lambda config, rngs: Looks(rngs))
    check(workload)
    state = workload.init(CONFIG, 0)
    assert state.tensors["model.offset"].numpy().tolist() == [0, 1, 2]
    assert train(workload, state).state != state


def test_a_training_step_of_ones_own_is_compiled_and_kept_to() -> None:
    from flax import nnx

    def step(model: Any, optimizer: Any, inputs: Any, targets: Any, config: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda m: cross_entropy(m(inputs), targets))(model)
        optimizer.update(model, gradients)
        return config["scale"] * loss

    config = {**CONFIG, "scale": 2.0}
    ours, own = small(), small(train_step=step)
    state = ours.init(config, 0)
    expected, found = train(ours, state, config=config), train(own, state, config=config)
    assert found.state == expected.state
    assert found.loss == pytest.approx(2 * expected.loss)


def test_trials_whose_numbers_are_in_their_states_share_what_is_compiled() -> None:
    from dagsel.workloads import compiled

    def n_compiled(optimizer: Any) -> int:
        workload = small(optimizer=optimizer, batch_size=22)
        before = len(compiled._kept)
        states = [train(workload, workload.init(c, 0), config=c).state for c in configs]
        assert states[0] != states[1]
        return len(compiled._kept) - before

    configs: list[dict[str, Any]] = [{"lr": 0.07}, {"lr": 0.007}]
    import optax

    assert n_compiled(injected) <= 1
    assert n_compiled(lambda config: optax.sgd(config["lr"])) == 2


def test_what_is_compiled_to_read_another_array_is_another_program() -> None:
    from dagsel.workloads.compiled import Program

    def reading(at: int) -> Callable[[Any, Any, Any], Any]:
        return lambda arrays, inputs, targets: arrays[at] * inputs

    arrays = [np.float32(1), np.float32(2)]
    for at in (0, 1):
        program = Program(reading(at))
        assert program(arrays, np.float32(3), np.float32(0)) == 3 * arrays[at]


def test_what_is_compiled_to_call_another_function_is_another_program() -> None:
    import jax

    from dagsel.workloads.compiled import Program

    def calling(n: float) -> Callable[[Any, Any, Any], Any]:
        def called(arrays: Any, inputs: Any, targets: Any) -> Any:
            shape = jax.ShapeDtypeStruct((), "float32")
            return jax.pure_callback(lambda it: np.float32(n * it), shape, inputs)

        return called

    for n in (2.0, 5.0):
        assert Program(calling(n))([], np.float32(3), ()) == 3 * n


def test_what_is_compiled_for_other_constants_is_another_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax.numpy as jnp

    from dagsel.workloads.compiled import Program

    def adding(n: float) -> Callable[[Any, Any, Any], Any]:
        return lambda arrays, inputs, targets: inputs + jnp.full(3, n)

    monkeypatch.setattr("dagsel.workloads.compiled._MOST_KEPT", 1)
    for n in (1.0, 2.0, 1.0):
        program = Program(adding(n))
        assert program([], np.zeros(3, "float32"), ()).tolist() == [n] * 3
        assert program([], np.zeros(1, "float32"), ()).tolist() == [n] * 3


def test_inputs_may_be_named_and_samples_differ_in_length() -> None:
    from flax import nnx

    def pad(batch: Any, config: Any) -> Any:
        rows = np.stack([np.pad(row, (0, 6 - len(row))) for row in batch["x"]])
        drawn = np.random.normal(size=rows.shape) * config["noise"]
        first.append(drawn[0, 0])
        return {"inputs": (rows + drawn).astype("float32")}, batch["y"]

    first: list[float] = []
    config = {**CONFIG, "noise": 0.1}
    rows = [np.ones(1 + i % 6, "float32") * i for i in range(22)]
    data = {"x": RaggedArray.of(rows), "y": np.arange(22) % 3}
    workload = small(input_fn=pad, batch_size=lambda config: 8, drop_last=True, eval_batch_size=7)
    assert isinstance(workload.model(config, nnx.Rngs(0)), nnx.Linear)
    state = workload.init(config, 0)
    whole = train(workload, state, data, config=config)
    assert whole.n_samples == 16
    np.random.random()  # of somebody else
    pieces = train(workload, state, data, config=config, should_stop=lambda: True)
    assert not pieces.finished
    assert train(workload, pieces.state, data, config=config).state == whole.state
    assert first[:2] == first[2:]
    assert first[0] != first[1]
    quiet = train(workload, state, data, config={**config, "noise": 0})
    assert quiet.state != whole.state
    shard = workload.prepare(data)
    assert workload.evaluate(state, shard, config) == workload.evaluate(state, shard, config)


def test_metrics_of_the_whole_set_are_those_of_all_outputs() -> None:
    workload = small(metrics=["accuracy", "f1"], eval_batch_size=10)
    assert workload.metrics == {"loss": "minimize", "accuracy": "maximize", "f1": "maximize"}
    state = train(workload, workload.init(CONFIG, 0)).state
    data = [arrays(5), arrays(6, 9)]
    scored = [workload.evaluate(state, workload.prepare(part), CONFIG) for part in data]
    kept = [part.kept for part in scored if part.kept is not None]
    model = workload.restore(state, CONFIG)
    x, y = (np.concatenate([part[name] for part in data]) for name in ("x", "y"))
    output = np.asarray(model(x))
    assert workload.pool(kept)["f1"] == pytest.approx(dagsel.metrics.f1(output, y))
    accuracy = sum(part.n_samples * part.metrics["accuracy"] for part in scored) / 31
    assert accuracy == pytest.approx(float(dagsel.metrics.accuracy(output, y)))
    nothing = workload.prepare({name: part[:0] for name, part in data[0].items()})
    assert workload.evaluate(state, nothing, CONFIG).metrics == {"loss": 0.0, "accuracy": 0.0}


def test_a_trial_goes_on_with_another_learning_rate_and_not_with_another_shape() -> None:
    workload = small()
    state = train(workload, workload.init(CONFIG, 0)).state
    slower = workload.reconfigure(state, CONFIG, {"lr": 0.01})
    name = "optimizer.opt_state.hyperparams.learning_rate"
    assert slower.tensors[name].numpy() == np.float32(0.01)
    changed = {n for n, t in slower.tensors.items() if (t.data != state.tensors[n].data).any()}
    assert changed == {name}
    with pytest.raises(WorkloadError, match=r"'model\.bias' is F32 of shape \(3,\)"):
        workload.reconfigure(state, CONFIG, {**CONFIG, "width": 4})


def test_a_state_of_another_model_is_refused() -> None:
    workload = small()
    state = workload.init(CONFIG, 0)
    with pytest.raises(CheckpointCorruptError, match=r"'model\.bias' is \('F32', \(3,\)\) there"):
        workload.restore(state, {"width": 4, **CONFIG})
    more = State.pack({**state.tensors, "more": Tensor.from_numpy(np.zeros(2))}, state.meta)
    with pytest.raises(CheckpointCorruptError, match="'more'"):
        workload.restore(more, CONFIG)


def broken(what: str) -> Callable[[Any, Any], Any]:
    """Return a function that makes a module that cannot be trained."""
    import jax.numpy as jnp
    from flax import nnx

    class Broken(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.inner = nnx.Linear(6, 3, rngs=rngs)
            self.count = 0
            self.seen = nnx.Variable(jnp.zeros(1))

        def __call__(self, x: Any) -> Any:
            scale = 1.0
            if what == "draws":
                scale += np.random.random()
            elif what == "counts":
                self.count += 1
            elif what == "grows":
                self.seen.set_value(jnp.zeros(2))
            return self.inner(x) * scale

    return lambda config, rngs: Broken(rngs)


DATA = DataOutline(
    (22, 16), {"x": (np.dtype("float64"), (6,)), "y": (np.dtype("int64"), ())}
)  # fmt: skip
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a module": (lambda: small(model=net()), "model must be a function, called as model"),
    "an optimizer": (lambda: small(optimizer=momentum(CONFIG)), "optimizer must be a function"),
    "a function of optax": (
        lambda: small(optimizer=__import__("optax").adam),
        r"as optimizer\(config\), got the function adam; write optimizer=lambda config: optax.adam",
    ),
    "a module made": (
        lambda: small(model=broken("")(CONFIG, __import__("flax").nnx.Rngs(0))),
        r"got a .*Broken; write model=lambda config, rngs: Broken\(\.\.\., rngs=rngs\)",
    ),
    "a class with other arguments": (
        lambda: small(model=__import__("flax").nnx.Linear),
        r"got the class Linear; write model=lambda config, rngs: Linear\(\.\.\., rngs=rngs\)",
    ),
    "a class of linen": (
        lambda: small(model=__import__("flax").linen.Dense),
        r"got the class Dense; write model=.*lazy_init\(flax.nnx.bridge.ToNNX\(Dense\(",
    ),
    "a module of linen": (
        lambda: small(model=__import__("flax").linen.Dense(3)),
        r"got a Dense; write model=.*lazy_init\(flax.nnx.bridge.ToNNX\(Dense\(",
    ),
    "arguments in another order": (
        lambda: small(model=lambda rngs, config: 3),
        "takes them in another order; write def model",
    ),
    "a loss of keras": (
        lambda: small(loss=lambda y_true, y_pred: 3),
        "takes them in another order; write def loss",
    ),
    "a loss of optax": (
        lambda: small(loss=__import__("optax").huber_loss),
        r"write loss=lambda output, target: optax.huber_loss\(output, target\).mean\(\)",
    ),
    "an optimizer of torch": (
        lambda: small(optimizer=__import__("torch").optim.Adam),
        r"as optimizer\(config\), got the class Adam; write optimizer=lambda config: optax.adam",
    ),
    "a step of another kind": (
        lambda: small(train_step=lambda state, batch: 3),
        r"write train_step=step, with def step\(",
    ),
    "a loss and more": (lambda: small(loss=lambda o, t: (o.mean(), o)), "it returns a tuple: retu"),
    "numpy": (lambda: small(loss=lambda o, t: np.mean(np.asarray(o))), "write jax.numpy in place"),
    "another width": (
        lambda: small(model=lambda c, rngs: __import__("flax").nnx.Linear(5, 3, rngs=rngs)),
        "the model does not fit the data set's arrays",
    ),
    "no batches": (lambda: small(batch_size=0), "batch_size must be a whole number"),
    "no input_fn": (lambda: small(input_fn=3), "input_fn must be a function"),
    "an unknown metric": (lambda: small(metrics=["f2"]), "dagsel has no metric 'f2'"),
    "another type": (lambda: small(model=lambda c, rngs: 3), "must return a flax.nnx.Module, got"),
    "no parameters": (
        lambda: small(model=lambda c, rngs: __import__("flax").nnx.Dropout(0.1, rngs=rngs)),
        "the Dropout has no parameters to train",
    ),
    "no transformation": (lambda: small(optimizer=lambda c: None), "a transformation of optax"),
    "a vector": (lambda: small(loss=lambda o, t: o), r"loss must return the mean loss.*\(11, 3\)"),
    "nothing": (lambda: small(loss=lambda o, t: None), "loss returns None"),
    "a shape": (
        lambda: small(loss=lambda o, t: (o - t).mean()),
        r"fails for inputs 'x' of shape \(11, 6\) and targets 'y' of shape \(11,\)",
    ),
    "draws": (lambda: small(model=broken("draws")), "draws random numbers from Python or NumPy"),
    "counts": (lambda: small(model=broken("counts")), "an attribute of the Broken that is no"),
    "grows": (lambda: small(model=broken("grows")), r"makes 'model\.seen', float32 of shape \(1,"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trained_is_refused_in_a_sentence(name: str) -> None:
    make, said = WRONG[name]
    with pytest.raises(WorkloadError, match=said):
        check(make())


def check(workload: FlaxWorkload, data: DataOutline = DATA) -> None:
    workload.validate(CONFIG)
    workload.validate_data(CONFIG, data)


def test_data_that_does_not_fit_is_refused_in_a_sentence() -> None:
    check(small())
    number, text = (np.dtype("float32"), (6,)), (np.dtype("<U3"), ())
    with pytest.raises(WorkloadError, match="'y' is text"):
        check(small(), DataOutline((22,), {"x": number, "y": text}))
    with pytest.raises(WorkloadError, match="give the workload an input_fn"):
        check(small(), DataOutline((22,), {"x": number, "y": number}, frozenset({"x"})))
    with pytest.raises(WorkloadError, match="batch_size is 11 with drop_last=True"):
        check(small(drop_last=True), DataOutline((22, 9), DATA.arrays))
    with pytest.raises(WorkloadError, match="input_fn returns 3: return what the model gets"):
        train(small(input_fn=lambda batch, config: 3), small().init(CONFIG, 0))
    empty = small(input_fn=lambda batch, config: (batch["x"][:0], batch["y"][:0]))
    with pytest.raises(NothingTrainedError, match="inputs without a sample"):
        train(empty, empty.init(CONFIG, 0))


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        ("float32", (), r'y\.astype\("int64"\), or, if it has a column for each class'),
        ("int64", (1,), r"the targets have an axis more .* np\.ravel\(y\)"),
    ],
)
def test_targets_that_are_no_classes_are_refused_with_the_cure(
    kind: str, shape: tuple[int, ...], said: str
) -> None:
    arrays = {**DATA.arrays, "y": (np.dtype(kind), shape)}
    with pytest.raises(WorkloadError, match=said):
        check(small(), DataOutline((22,), arrays))


def test_a_class_without_an_output_is_named_where_the_loss_is_nan() -> None:
    shard = arrays(0)
    state = small().init(CONFIG, 0)
    assert not train(small(), state, shard).diverged
    with pytest.raises(WorkloadError, match="is NaN, and the target has the class 3, which is not"):
        train(small(), state, {**shard, "y": shard["y"] + 1})
    nan = {**shard, "x": np.full_like(shard["x"], np.nan)}
    assert train(small(), state, nan).diverged


def test_a_metric_for_each_sample_is_named() -> None:
    workload = small(metrics={"right": lambda output, target: target})
    with pytest.raises(WorkloadError, match="metric 'right' must return a number for a batch, and"):
        workload.evaluate(workload.init(CONFIG, 0), arrays(0), CONFIG)


def test_what_a_configuration_is_not_read_for_is_known() -> None:
    import optax

    config = {"lr": 0.1, "rate": 0.1, "batch_size": 8}
    workload = small(optimizer=lambda config: optax.sgd(0.1))
    assert workload.unread(config) == {"lr", "rate", "batch_size"}
    workload = small(optimizer=momentum, batch_size=lambda c: c["batch_size"])
    assert workload.unread(config) == {"rate"}
    stepped = small(optimizer=momentum, train_step=lambda m, o, x, y, config: config["rate"])
    assert stepped.unread(config) == frozenset()  # who knows


def test_objects_of_torchmetrics_are_refused() -> None:
    members = ("update", "compute", "reset", "metric_state", "merge_state")
    metric = type("R2Score", (), dict.fromkeys(members, print))()
    with pytest.raises(WorkloadError, match="a R2Score, which takes PyTorch's tensors"):
        small(metrics={"r2": metric})


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(
        WorkloadError, match=r'FlaxWorkload needs optax: pip install "dagsel\[jax\]"'
    ):
        small()


def test_the_users_settings_of_jax_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    settle_jax()
    import os

    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert os.environ["PJRT_NPROC"] == "3"
    monkeypatch.delenv("PJRT_NPROC")


def test_what_is_compiled_is_of_the_values_of_a_configuration_and_not_of_their_text() -> None:
    kept: Kept[int] = Kept(most=100)
    long = np.zeros(2000)
    other = long.copy()
    other[1000] = 1.0
    numbers = [
        kept.get({"value": value}, 0, lambda n=n: n)  # type: ignore[misc]
        for n, value in enumerate([long, other, long.copy(), lambda x: x, lambda x: -x])
    ]
    assert numbers == [0, 1, 0, 3, 4]


def test_a_module_of_linen_trains_as_the_error_says_that_it_is_wrapped() -> None:
    import jax.numpy as jnp
    from flax import linen, nnx

    with pytest.raises(WorkloadError, match=r"lazy_init\(nnx.bridge.ToNNX\(module, rngs"):
        check(small(model=lambda config, rngs: linen.Dense(3)))
    workload = small(
        model=lambda config, rngs: nnx.bridge.lazy_init(
            nnx.bridge.ToNNX(linen.Dense(3), rngs=rngs), jnp.zeros((1, 6))
        )
    )
    check(workload)
    assert train(workload, workload.init(CONFIG, SEED)).finished
