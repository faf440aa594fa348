"""SklearnWorkload against a plain loop of partial_fit, bit for bit."""

import json
import os
import random
import re
import subprocess
import warnings
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.cluster import Birch, MiniBatchKMeans
from sklearn.decomposition import IncrementalPCA, MiniBatchNMF
from sklearn.linear_model import Perceptron, Ridge, SGDClassifier, SGDRegressor
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import BernoulliNB, GaussianNB, MultinomialNB
from sklearn.neural_network import BernoulliRBM, MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dagsel.metrics
from dagsel.errors import CheckpointCorruptError, WorkloadError
from dagsel.state import State
from dagsel.testing import WorkloadSuite
from dagsel.workloads import SklearnWorkload, Visit
from dagsel.workloads.raised import raised
from dagsel.workloads.sklearn import objects
from dagsel.workloads.sklearn.objects import Decoder, Encoder

SEED, TRIAL, N_EPOCHS, SIZES = 3, 2, 3, (40, 33, 31, 29)
CLASSES = ["a", "b", "c"]


def arrays(seed, n=40, labels=True):
    rng = np.random.default_rng(seed)
    x = rng.random((n, 6))
    y = np.array(CLASSES)[(x[:, 0] > 0.5).astype(int) + (x[:, 1] > 0.5)]
    return {"x": x, "y": y if labels else x[:, 0] - x[:, 1]}


class Counting(ClassifierMixin, BaseEstimator):
    """The user's own: a list shared by two attributes, a generator, a nested estimator."""

    def __init__(self, base=None, step=1, rule=len):
        self.base, self.step, self.rule = base, step, rule

    def partial_fit(self, X, y, classes=None):
        if not hasattr(self, "model_"):
            self.model_ = SGDClassifier(random_state=np.random.RandomState(3))
            self.rng_ = np.random.default_rng(4)
            self.log_: list[Any] = []
            self.also_log_ = self.log_
            self.seen_ = {("x", 1): np.float32(0), "set": {1, 2}, "z": 1j, "b": b"\x00\xff"}
            self.classes_ = np.asarray(classes)
            self.loop_ = [self]
        self.model_.partial_fit(X + self.rng_.normal(size=X.shape) * 0.01, y, classes=classes)
        self.log_.append(random.random())
        assert self.also_log_ is self.log_
        assert self.loop_[0] is self
        return self

    def predict(self, X):
        return self.model_.predict(X)


ESTIMATORS = {
    "sgd-classifier": SGDClassifier(random_state=0),
    "sgd-global-random-state": SGDClassifier(loss="modified_huber"),
    "sgd-average": SGDClassifier(average=True, random_state=0),
    "sgd-adaptive": SGDClassifier(learning_rate="invscaling", eta0=0.1, penalty="elasticnet"),
    "sgd-random-state-object": SGDClassifier(random_state=np.random.RandomState(5)),
    "sgd-regressor": SGDRegressor(random_state=0, average=5),
    "perceptron": Perceptron(),
    "mlp-adam": MLPClassifier((5, 4)),
    "mlp-sgd": MLPClassifier((5,), solver="sgd", learning_rate="adaptive", random_state=1),
    "mlp-regressor": MLPRegressor(hidden_layer_sizes=(5,), random_state=1),
    "multinomial-nb": MultinomialNB(),
    "bernoulli-nb": BernoulliNB(),
    "gaussian-nb": GaussianNB(),
    "one-vs-rest": OneVsRestClassifier(SGDClassifier(random_state=0)),
    "kmeans": MiniBatchKMeans(3, n_init=2),
    "birch": Birch(),
    "pca": IncrementalPCA(3),
    "nmf": MiniBatchNMF(2, init="random", random_state=0),
    "rbm": BernoulliRBM(3, n_iter=1),
    "scaler": StandardScaler(),
    "own": Counting(),
}
REGRESSORS = ("sgd-regressor", "mlp-regressor")
UNSUPERVISED = ("kmeans", "birch", "pca", "nmf", "rbm", "scaler")


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # Of one estimator after a few samples: not what is tested here.
        warnings.filterwarnings("ignore", module="sklearn")
        yield


def shard_of(name, shard, n):
    data = arrays(shard, n, labels=name not in REGRESSORS)
    return {"x": data["x"]} if name in UNSUPERVISED else data


def plain(name, batch_size):
    from sklearn.base import clone

    random.seed(7)
    np.random.seed(7)
    estimator = clone(ESTIMATORS[name])
    known = {} if name in (*REGRESSORS, *UNSUPERVISED) else {"classes": np.array(CLASSES)}
    for epoch in range(1, N_EPOCHS + 1):
        for shard, n in enumerate(SIZES):
            order = np.random.default_rng([SEED, TRIAL, epoch, shard]).permutation(n)
            for start in range(0, n, batch_size or n):
                index = order[start : start + (batch_size or n)]
                columns = [array[index] for array in shard_of(name, shard, n).values()]
                estimator.partial_fit(*columns, **known)
    return estimator


def units(workload, name, cut=False):
    state = workload.init({}, 7)
    for epoch in range(1, N_EPOCHS + 1):
        for shard, n in enumerate(SIZES):
            data = workload.prepare(shard_of(name, shard, n))
            finished = False
            while not finished:
                trained = workload.train(
                    State(bytes(state.buffer)), data, {}, visit=Visit(SEED, TRIAL, epoch, shard),
                    should_stop=lambda: cut,
                )  # fmt: skip
                state, finished = trained.state, trained.finished
    return state


def content(estimator, state=None):
    """Everything that an estimator holds, as bytes."""
    encoder = Encoder([Counting])
    tree = encoder.encode(vars(estimator), "estimator")
    tensors = {key: (t.dtype, t.shape, t.data.tobytes()) for key, t in encoder.tensors.items()}
    return json.dumps(tree), tensors


@pytest.mark.parametrize("batch_size", [None, 9])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_units_equal_a_plain_loop(name, batch_size):
    if name == "own":
        ESTIMATORS[name].rule = 3  # what `content` can hold
    workload = SklearnWorkload(
        ESTIMATORS[name], classes=None if name in REGRESSORS else CLASSES, batch_size=batch_size
    )
    expected = plain(name, batch_size)
    of_numpy: Any = np.random.get_state()
    stream = of_numpy[1].tolist(), random.getstate()[1]
    state = units(workload, name)
    assert content(workload.restore(state, {})) == content(expected)
    assert state.tensors["random.numpy.state.key"].numpy().tolist() == stream[0]
    assert tuple(state.tensors["random.python.words"].numpy().tolist()) == stream[1][:]
    if batch_size:
        assert units(workload, name, cut=True) == state


def test_the_configuration_sets_parameters():
    workload = SklearnWorkload(SGDClassifier())
    assert workload.restore(workload.init({"alpha": 0.5}, 0), {"alpha": 0.5}).alpha == 0.5
    with pytest.raises(WorkloadError, match="no_such"):
        workload.validate({"no_such": 1})


def test_a_function_among_the_parameters_comes_from_the_configuration():
    workload = SklearnWorkload(lambda config: Counting(rule=max), classes=CLASSES)
    assert workload.metrics == {"score": "maximize", "accuracy": "maximize"}
    assert workload.restore(workload.init({}, 0), {}).rule is max


def test_classes_of_the_first_shard_do_until_another_appears():
    workload = SklearnWorkload(SGDClassifier())
    data = arrays(0)
    visit = Visit(0, 0, 1, 1)
    state = workload.train(workload.init({}, 0), workload.prepare(data), {}, visit=visit).state
    data["y"] = np.array(["d"] * len(data["y"]))
    with pytest.raises(WorkloadError, match=r"shard 1 has classes \['d'\] beside"):
        workload.train(state, workload.prepare(data), {}, visit=visit)


def test_classes_may_be_the_texts_that_a_data_set_has_numbered():
    data = arrays(0, labels=False)
    data["y"] = (data["x"][:, 0] > 0).astype("int64")  # the first shard lacks the third
    states = []
    for classes in (["ant", "cat", "bee"], [0, 1, 2]):
        workload = SklearnWorkload(SGDClassifier(), classes=classes)
        shard, visit = workload.prepare(data), Visit(0, 0, 1, 1)
        states.append(workload.train(workload.init({}, 0), shard, {}, visit=visit).state)
    assert states[0] == states[1]
    assert workload.restore(states[0], {}).classes_.tolist() == [0, 1, 2]
    data["y"] += 2
    with pytest.raises(WorkloadError, match=r"shard 1 has classes \[3\] beside \[0, 1, 2\]"):
        workload.train(states[0], workload.prepare(data), {}, visit=visit)


def test_metrics_of_the_users_own_and_of_an_estimator_without_score():
    data = arrays(0, labels=False)
    workload = SklearnWorkload(SGDRegressor(), metrics={"mse": dagsel.metrics.mean_squared_error})
    assert workload.metrics == {"score": "maximize", "mse": "minimize"}
    shard = workload.prepare(data)
    state = workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0)).state
    predicted = workload.restore(state, {}).predict(data["x"])
    values = workload.evaluate(state, shard, {}).metrics
    assert values["mse"] == pytest.approx(np.mean((predicted - data["y"]) ** 2))
    nothing = workload.prepare({name: array[:0] for name, array in data.items()})
    assert workload.evaluate(state, nothing, {}).metrics == {"score": 0.0, "mse": 0.0}
    assert "score" not in SklearnWorkload(IncrementalPCA()).metrics


def test_images_are_flattened():
    shard = SklearnWorkload(SGDClassifier()).prepare({"x": np.zeros((5, 4, 3)), "y": np.zeros(5)})
    assert shard["x"].shape == (5, 12)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(12.0).reshape(3, 4)[:, ::2],
        np.array(["x", None, 1.5], object), np.array(["ab", "c"]), np.array([1 + 2j]),
        np.array([(1, 2.0)], [("a", "<i4"), ("b", "<f8", (1,))]), np.array(5), np.zeros((0, 3)),
        np.arange(3, dtype=">i4"), np.array(["2020-01-01"], "M8[D]"), np.arange(6).reshape(2, 3).T,
    ],
)  # fmt: skip
def test_arrays_keep_dtype_values_and_order(array):
    encoder = Encoder()
    encoded = json.loads(json.dumps(encoder.encode(array, "a")))
    twin = Decoder(encoder.tensors).decode(encoded)
    assert twin.dtype == array.dtype
    assert twin.shape == array.shape
    assert twin.tolist() == array.tolist()
    assert twin.flags.writeable
    assert twin.flags.f_contiguous == np.copy(array, order="K").flags.f_contiguous


def test_views_of_one_memory_stay_so():
    memory = np.arange(6.0)
    encoder = Encoder()
    encoded = encoder.encode([memory, memory.reshape(2, 3), memory.reshape(3, 2).T], "a")
    first, second, third = Decoder(encoder.tensors).decode(encoded)
    first[0] = 9
    assert (second[0, 0], third[0, 0]) == (9, 9)


@pytest.mark.parametrize("value", [print, lambda: 0, object(), np.vectorize(abs), open])
def test_what_is_no_data_is_refused_by_name(value):
    with pytest.raises(WorkloadError, match=r"estimator\.hook"):
        Encoder().encode({"hook": value}, "estimator")


@pytest.mark.parametrize(
    "node",
    [
        {"$": "new", "id": 1, "class": ["subprocess", "Popen"], "args": [["true"]]},
        {"$": "call", "id": 1, "class": ["os", "system"], "args": ["true"]},
        {"$": "call", "id": 1, "class": ["sklearn.utils", "os.system"], "args": ["true"]},
        {"$": "call", "id": 1, "class": ["numpy", "memmap"], "args": ["/tmp/x"]},
        {"$": "unpickle", "id": 1, "class": ["builtins", "eval"], "args": ["1"]},
        {"$": "unpickle", "id": 1, "class": ["sklearn", "clone"], "args": ["1"]},
        {"$": "call", "id": 1, "class": ["builtins", "eval"], "args": ["1"]},
        {"$": "anything"},
    ],
)
def test_a_state_cannot_run_foreign_code(node):
    with pytest.raises(CheckpointCorruptError):
        Decoder({}).decode(node)


# Ways to `subprocess.Popen` and others through modules that scikit-learn and NumPy have imported.
FOREIGN = [
    ["sklearn.externals.array_api_compat.numpy", "f2py.subprocess.Popen"],
    ["sklearn.externals.array_api_compat.numpy.f2py.subprocess", "Popen"],
    ["sklearn.utils._joblib", "os.system"],
    ["sklearn.linear_model", "_base.numbers.abc.os.system"],
    ["sklearn.utils.fixes", "platform.subprocess.Popen"],
    ["sklearn.linear_model._base", "sp.sparse._csr.csr_matrix"],
    ["sklearn.linear_model", "SGDClassifier"],
    ["sklearn.utils._testing", "TempMemmap"],
    ["sklearn.neural_network._stochastic_optimizers", "np.memmap"],
    ["sklearn._loss._loss", "__loader__"],
    ["scipy.sparse._csr", "csr_matrix.__init__"],
    ["numpy", "f2py.subprocess.Popen"],
    ["numpy.f2py", "subprocess.Popen"],
    ["numpy", "memmap"],
    ["builtins", "exec"],
    ["subprocess", "Popen"],
]


@pytest.fixture
def imported(monkeypatch):
    """Modules that the decoder imports; foreign code that is called ends the test."""

    def called(*args, **_):
        raise KeyboardInterrupt(f"called with {args}")

    def importing(module):
        found.append(module)
        return import_module(module)

    found: list[str] = []
    monkeypatch.setattr(objects, "import_module", importing)
    for module, name in ((subprocess.Popen, "__init__"), (os, "system"), (np.memmap, "__new__")):
        monkeypatch.setattr(module, name, called)
    return found


@pytest.mark.parametrize("kind", ["new", "call", "unpickle", "class"])
@pytest.mark.parametrize("name", FOREIGN, ids=".".join)
def test_a_planted_state_reaches_nothing_through_a_module(imported, kind, name):
    workload = SklearnWorkload(SGDClassifier(random_state=0), classes=CLASSES)
    shard = workload.prepare(shard_of("sgd-classifier", 0, 20))
    state = workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0)).state
    meta = state.meta
    node = {"$": kind, "id": 99, "class": name, "args": [["touch", "/tmp/x"]]}
    meta["estimator"]["planted_"] = {**node, "state": None, "pairs": []}
    imported.clear()
    with pytest.raises(CheckpointCorruptError):
        workload.restore(State.pack(state.tensors, meta), {})
    assert set(imported) <= objects._PUBLIC | objects._PRIVATE.keys()


def trained_tree(name):
    workload = SklearnWorkload(ESTIMATORS[name], classes=None if name == "birch" else CLASSES)
    shard = workload.prepare(shard_of(name, 0, 20))
    state = workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0)).state
    return state.meta["estimator"], state.tensors


def places(node, at=()):
    """Paths of all parts of a JSON value."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


def put(node, path, value):
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


@pytest.fixture(scope="module")
def trees():
    return [trained_tree(name) for name in ("sgd-classifier", "mlp-adam", "birch", "one-vs-rest")]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_an_edited_state_calls_and_imports_nothing_off_the_list(trees, imported, data):
    tree, tensors = trees[data.draw(st.integers(0, len(trees) - 1))]
    tree = json.loads(json.dumps(tree))
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(tree))
        path = found[data.draw(st.integers(0, len(found) - 1))]
        words = ["new", "call", "unpickle", "class", "view", "array", "|O", *map(".".join, FOREIGN)]
        calls = [
            {"$": kind, "id": 1, "class": name, "args": [["true"]], "state": None, "pairs": []}
            for kind in ("new", "call")
            for name in FOREIGN
        ]
        values = [None, -1, 0, 2**70, 1.5, "x", [], {}, *words, *FOREIGN, *calls]
        # A copy: the next edit may reach into it, and must not change FOREIGN.
        put(tree, path, deepcopy(data.draw(st.sampled_from(values))))
    imported.clear()
    decoder = Decoder(tensors)
    for value in tree.values():
        with suppress(CheckpointCorruptError):
            decoder.decode(value)
    assert set(imported) <= objects._PUBLIC | objects._PRIVATE.keys()


class TestSklearnWorkload(WorkloadSuite):
    config: Mapping[str, Any] = {"alpha": 1e-3}

    def make_workload(self):
        return SklearnWorkload(SGDClassifier(), classes=CLASSES, batch_size=11)

    def make_arrays(self, seed):
        return arrays(seed)


class TestMLP(TestSklearnWorkload):
    def make_workload(self):
        return SklearnWorkload(
            MLPClassifier((4,)), classes=CLASSES, batch_size=11,
            metrics={"mine": dagsel.metrics.accuracy},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (make_pipeline(StandardScaler(), SGDClassifier()),
         r"Pipeline has no partial_fit, .*give its last step alone.*fit_transform\(x\)"),
        (MLPClassifier(solver="lbfgs"),
         r"MLPClassifier has no partial_fit \(.*lbfgs is not stochastic"),
        (Ridge(), "Ridge has no partial_fit, .*such as SGDRegressor"),
        (lambda config: SGDClassifier, "must return an estimator .*, got the class SGDC"),
        (lambda config: None, "must return an estimator .*, got None; write est"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_says_what_can(estimator: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        SklearnWorkload(estimator).validate({})


@pytest.mark.parametrize(
    ("targets", "cure"),
    [(np.linspace(0, 1, 8), "take a regressor"), (np.eye(2)[[0, 1] * 4], r"y.argmax\(1\)")],
)
def test_targets_that_a_classifier_does_not_take_are_told_with_the_cure(
    targets: Any, cure: str
) -> None:
    workload, visit = SklearnWorkload(SGDClassifier()), Visit(0, 0, 1, 0)
    shard = workload.prepare({"x": np.zeros((8, 2)), "y": targets})
    with pytest.raises(ValueError, match="label type|1d array") as caught:
        workload.train(workload.init({}, 0), shard, {}, visit=visit)
    assert re.search(cure, raised(caught.value).cure)


def test_a_metric_for_each_sample_is_named() -> None:
    workload = SklearnWorkload(SGDClassifier(), metrics={"right": lambda output, target: target})
    shard, visit = workload.prepare({"x": np.eye(8), "y": np.arange(8) % 2}), Visit(0, 0, 1, 0)
    state = workload.train(workload.init({}, 0), shard, {}, visit=visit).state
    with pytest.raises(WorkloadError, match="metric 'right' must return a number for a batch, and"):
        workload.evaluate(state, shard, {})
