"""`SklearnWorkload`: any estimator of scikit-learn with ``partial_fit``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown, takes, whole
from dagsel.codec import from_json
from dagsel.errors import WorkloadError
from dagsel.flow import Direction, Losses
from dagsel.state import State, reading_state
from dagsel.workloads.argument_names import SKLEARN, named_arguments
from dagsel.workloads.base import (
    Config,
    DataOutline,
    Evaluated,
    Trained,
    Visit,
    never,
)
from dagsel.workloads.batches import check_order, number_of, say_unused
from dagsel.workloads.named_metrics import Metrics, directions, metric_functions
from dagsel.workloads.pooled import PoolsMetrics
from dagsel.workloads.random_streams import (
    preserved_streams,
    read_streams,
    seed_streams,
    write_streams,
)
from dagsel.workloads.sklearn.objects import Decoder, Encoder, set_state
from dagsel.workloads.unread import unread_by

Shard: TypeAlias = dict[str, NDArray[Any]]
#: Parameters that fix the shape of what is fitted, or what stands in it.
_SHAPING = frozenset(
    {"average", "hidden_layer_sizes", "n_clusters", "n_components", "priors", "solver"}
)
_OPTIMIZER_NAMES = {"learning_rate": "lr_schedule", "nesterovs_momentum": "nesterov"}
_DIRECTIONS: dict[str, Direction] = {"score": "maximize", "accuracy": "maximize"}


class SklearnWorkload(PoolsMetrics):
    """Train estimators of scikit-learn that have ``partial_fit``.

    The first array of a shard holds the samples, shape ``(n_samples, ...)``, flattened to two
    dimensions; the last one, if there is more than one, the targets. NumPy's and Python's global
    random streams travel with a trial, so that an estimator with ``random_state=None`` is
    reproducible too. A training unit has no loss.

    Parameters
    ----------
    estimator
        An estimator, cloned and given the configuration as its parameters, or a function of the
        configuration that makes one.
    metrics
        Functions of prediction and target by name; each returns the mean over the samples. A
        function may have a ``direction``. Names of `dagsel.metrics` will do. By default
        ``"score"``, the estimator's own, and of a classifier ``"accuracy"`` too.
    classes
        The classes of a classifier: numbers, or the texts that a data set has written as numbers.
        By default those of the first shard that a trial visits.
    batch_size
        Samples in a call of ``partial_fit``, or a function of the configuration that returns it;
        by default the whole shard.

    Notes
    -----
    The metric ``"score"`` is the estimator's own, averaged over the validation shards by their
    samples. For a classifier this is its accuracy; R² of a regressor differs slightly from R² over
    all samples. An estimator without a score has none here.

    Examples
    --------
    >>> import numpy as np
    >>> from dagsel.workloads import Visit
    >>> from sklearn.linear_model import SGDClassifier
    >>> workload = SklearnWorkload(SGDClassifier(random_state=0), classes=[0, 1])
    >>> workload.metrics
    {'score': 'maximize', 'accuracy': 'maximize'}
    >>> x = np.random.default_rng(0).normal(size=(64, 4))
    >>> shard = workload.prepare({"x": x, "y": (x[:, 0] > 0).astype(int)})
    >>> config = {"alpha": 1e-3}
    >>> state = workload.init(config, seed=0)
    >>> for epoch in range(1, 6):
    ...     visit = Visit(seed=0, trial=0, epoch=epoch, shard=0, ends_epoch=True)
    ...     state = workload.train(state, shard, config, visit=visit).state
    >>> workload.evaluate(state, shard, config).metrics["accuracy"] > 0.9
    True
    """

    @named_arguments(SKLEARN)
    def __init__(
        self,
        estimator: Any,
        *,
        metrics: Metrics | None = None,
        classes: Sequence[Any] | NDArray[Any] | None = None,
        batch_size: int | Callable[[Any], int] | None = None,
    ) -> None:
        self._check_estimator(estimator)
        if classes is not None and (isinstance(classes, str) or np.ndim(classes) != 1):
            raise WorkloadError(
                f"classes must be a list of all classes, got {shown(classes)}; write "
                "classes=[0, 1], or numpy.unique(y)"
            )
        if batch_size is not None and not callable(batch_size):
            whole("batch_size", batch_size, error=WorkloadError)
        self.estimator = estimator() if isinstance(estimator, type) else estimator
        self.classes = None if classes is None else np.unique(np.asarray(classes))
        self.batch_size = batch_size
        self._metrics = metric_functions(metrics)
        self._has_said = False

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """Names of the metrics, each with its better direction if known."""
        known: dict[str, Direction | None] = {}
        if self._is_factory or hasattr(self.estimator, "score"):
            known["score"] = "maximize"
        if self.classes is not None or (not self._is_factory and _is_classifier(self.estimator)):
            known["accuracy"] = "maximize"
        return known | directions(self._metrics)

    def validate(self, config: Config) -> None:
        """Raise a `WorkloadError` if nothing can be trained with this configuration.

        Examples
        --------
        >>> from sklearn.svm import SVC
        >>> SklearnWorkload(SVC()).validate({"C": 1.0})
        Traceback (most recent call last):
        ...
        dagsel.errors.WorkloadError: SVC has no partial_fit, so it cannot be trained shard by \
shard; take an estimator that has it, such as SGDClassifier
        """
        self._batch_size(config, 1)
        if not self._is_factory:  # what would not help is not asked for first
            _check_trainable(self.estimator)
        with preserved_streams():
            estimator = self._make(config)
        _check_trainable(estimator)
        name = type(estimator).__name__
        if "score" in self.metrics and not hasattr(estimator, "score"):
            raise WorkloadError(f"{name} has no score; give metrics, and an estimator to clone")

    def unread(self, config: Config) -> frozenset[str]:
        """Return the parameters that training with this configuration does not read.

        Examples
        --------
        >>> from sklearn.linear_model import SGDClassifier
        >>> make = lambda config: SGDClassifier(alpha=config["alpha"])
        >>> sorted(SklearnWorkload(make, classes=[0, 1]).unread({"alpha": 0.1, "batch_size": 32}))
        ['batch_size']
        """

        def build(config: Config) -> object:
            self._batch_size(config, 1)
            return self._make(config)

        with preserved_streams():
            return unread_by(build, config)

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if an estimator cannot be given the data set's arrays."""
        check_order(data)
        if not self._has_said:
            self._has_said = True
            say_unused(
                data,
                "several columns become one array where the data set is written, as in "
                f'columns={{"x": [...], "y": {[*data.arrays][-1]!r}}}',
            )
        if data.ragged:
            raise WorkloadError(
                f"the samples of {sorted(data.ragged)[0]!r} differ in shape, and estimators take "
                "arrays: cut or pad them to one length before ShardedDataset.write"
            )

    def prepare(self, arrays: Mapping[str, NDArray[Any]]) -> Shard:
        """Flatten the samples of a shard to two dimensions."""
        shard = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        first = next(iter(shard))
        if shard[first].ndim != 2:
            shard[first] = shard[first].reshape(len(shard[first]), -1)
        return shard

    def init(self, config: Config, seed: int) -> State:
        """Begin a trial: seed the streams, make the estimator."""
        with preserved_streams():
            seed_streams(seed)
            return self._capture(self._make(config), self.classes, {})

    def train(
        self,
        state: State,
        shard: Shard,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        """Train on one shard, or on what is left of it; at least one batch, if one is left."""
        place = [visit.trial, visit.epoch, visit.shard]
        samples, targets = _parts(shard)
        order = visit.order(len(samples))
        size = self._batch_size(config, len(samples))
        with preserved_streams():
            estimator, classes, meta = self._restore(state, config)
            with reading_state():
                begin, *begun = from_json(list[int], meta.get("cursor", [0, *place]))
                if not 0 <= begin < max(len(samples), 1):
                    raise ValueError(f"a place after {begin} of {len(samples)} samples")
            if begun != place:
                raise WorkloadError(f"the state was stopped inside (trial, epoch, shard) {begun}; "
                                    f"it cannot go on with {place}")  # fmt: skip
            if classes is None and targets is not None and _is_classifier(estimator):
                classes = np.unique(targets)
            classes = _as_in(targets, classes)
            self._check_classes(classes, targets, visit)
            takes_classes = "classes" in inspect.signature(estimator.partial_fit).parameters
            known = {"classes": classes} if takes_classes and classes is not None else {}
            end = begin
            for start in range(begin, len(samples), size):
                index, end = order[start : start + size], min(start + size, len(samples))
                if targets is None:
                    estimator.partial_fit(samples[index])
                else:
                    estimator.partial_fit(samples[index], targets[index], **known)
                if should_stop():
                    break
            finished = end == len(samples)
            after = {} if finished else {"cursor": [end, *place]}
            losses = Losses(-(-(end - begin) // size))
            after_unit = self._capture(estimator, classes, after)
            return Trained(after_unit, end, None, finished, losses=losses)

    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        """Score a state on one validation shard."""
        samples, targets = _parts(shard)
        names, (pool, means) = self.metrics, self._parted()
        if not len(samples):
            nothing = {name: 0.0 for name in names if name not in self.pooled_metrics}
            return Evaluated(0, nothing, None if pool is None else pool.pack())
        with preserved_streams():
            estimator, _, _ = self._restore(state, config)
            values: dict[str, float] = {}
            scores = "score" in names and "score" not in self._metrics
            of_predicted = _score_of_predicted(estimator) if scores else None
            if scores and of_predicted is None:
                values["score"] = float(estimator.score(samples, targets))
            if values.keys() != names.keys():
                predicted = estimator.predict(samples)
                if of_predicted is not None:
                    values["score"] = float(of_predicted(targets, predicted))
                if "accuracy" in names and "accuracy" not in self._metrics:
                    values["accuracy"] = float(np.mean(predicted == targets))
                for name, metric in means.items():
                    values[name] = number_of(name, metric(predicted, targets))
                if pool is not None:
                    pool.add(predicted, np.asarray(targets))
        found = {name: values[name] for name in names if name in values}
        return Evaluated(len(samples), found, None if pool is None else pool.pack())

    def restore(self, state: State, config: Config) -> Any:
        """Make the trained estimator of a state."""
        with preserved_streams():
            return self._restore(state, config)[0]

    def reconfigure(self, state: State, config: Config, new_config: Config) -> State:
        """Make a state continue with another configuration: its estimator gets the new parameters.

        Raises
        ------
        WorkloadError
            If a parameter has shaped what is fitted, or belongs to an estimator inside this one.
        """
        with preserved_streams():
            before, after = self._parameters(config), self._parameters(new_config)
            changed = {k: v for k, v in after.items() if k not in before or not _same(before[k], v)}
            estimator, classes, _ = self._restore(state, config)
            for name in changed:
                if name in _SHAPING or "__" in name:
                    raise WorkloadError(
                        f"a trial cannot go on with another {name!r}: it has shaped what the "
                        f"{type(estimator).__name__} has fitted"
                    )
            if changed:
                estimator.set_params(**changed)
                _set_optimizer(estimator, changed)
            return self._capture(estimator, classes, {})

    @staticmethod
    def _check_estimator(estimator: Any) -> None:
        is_module = hasattr(estimator, "state_dict")
        if is_module or not (hasattr(estimator, "get_params") or takes(estimator, 1)):
            raise WorkloadError(
                "estimator must be an estimator of scikit-learn, or a function of the "
                f"configuration that makes one, got {shown(estimator)}; write "
                "estimator=sklearn.linear_model.SGDClassifier()"
            )

    @property
    def _is_factory(self) -> bool:
        return callable(self.estimator) and not hasattr(self.estimator, "get_params")

    def _make(self, config: Config) -> Any:
        from sklearn.base import clone

        if self._is_factory:
            return self.estimator(config)
        try:
            return clone(self.estimator).set_params(**config)
        except ValueError as error:
            raise WorkloadError(f"the estimator refuses the configuration: {error}") from error

    def _parameters(self, config: Config) -> dict[str, Any]:
        estimator = self._make(config)
        if not hasattr(estimator, "set_params"):
            raise WorkloadError(
                f"a trial cannot go on with another configuration: {type(estimator).__name__} has "
                "no get_params and set_params"
            )
        parameters: dict[str, Any] = estimator.get_params()
        return parameters

    def _batch_size(self, config: Config, n_samples: int) -> int:
        size: Any = self.batch_size(config) if callable(self.batch_size) else self.batch_size
        if size is None:
            return max(n_samples, 1)
        return whole("batch_size", size, error=WorkloadError)

    def _check_classes(self, classes: Any, targets: Any, visit: Visit) -> None:
        if classes is None or targets is None:
            return
        unknown = np.setdiff1d(targets, classes)
        if len(unknown):
            raise WorkloadError(
                f"shard {visit.shard} has classes {unknown.tolist()} beside {classes.tolist()}; "
                "give SklearnWorkload all classes"
            )

    def _capture(self, estimator: Any, classes: Any, meta: dict[str, Any]) -> State:
        encoder = Encoder(_own_classes(estimator))
        encoder.register(estimator)
        attributes = estimator.__getstate__()
        parameters = estimator.get_params(deep=False) if hasattr(estimator, "get_params") else {}
        if not isinstance(attributes, dict):
            raise WorkloadError(
                f"the state of a {type(estimator).__name__} is not a dict; take another estimator"
            )
        tree: dict[str, Any] = {}
        for name, value in attributes.items():
            if name in parameters and inspect.isroutine(value):
                continue  # the configuration gives it again
            tree[name] = encoder.encode(value, f"estimator.{name}")
        return State.pack(
            encoder.tensors,
            {
                "kind": "sklearn",
                "estimator": tree,
                "classes": encoder.encode(classes, "classes"),
                "random": encoder.encode(read_streams(), "random"),
                **meta,
            },
        )

    def _restore(self, state: State, config: Config) -> tuple[Any, Any, dict[str, Any]]:
        meta = state.meta
        estimator = self._make(config)
        with reading_state():
            decoder = Decoder(state.tensors, _own_classes(estimator))
            decoder.nodes[0] = estimator
            attributes = {name: decoder.decode(value) for name, value in meta["estimator"].items()}
            classes = from_json(np.ndarray | None, decoder.decode(meta["classes"]))
            set_state(estimator, attributes)
            write_streams(decoder.decode(meta["random"]))
        return estimator, classes, meta


def _score_of_predicted(estimator: Any) -> Callable[[Any, Any], float] | None:
    """Return what an estimator's ``score`` makes of targets and predictions; None for its own.

    A sample is predicted once, for the score and for all metrics.
    """
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.metrics import accuracy_score, r2_score

    known = {ClassifierMixin.score: accuracy_score, RegressorMixin.score: r2_score}
    return known.get(getattr(type(estimator), "score", None))


def _parts(shard: Shard) -> tuple[NDArray[Any], NDArray[Any] | None]:
    arrays = list(shard.values())
    return arrays[0], arrays[-1] if len(arrays) > 1 else None


def _as_in(targets: Any, classes: Any) -> Any:
    """Return the classes as numbers if they are texts that a data set has numbered."""
    if classes is None or targets is None or targets.dtype.kind not in "iu":
        return classes
    return np.arange(len(classes)) if all(isinstance(each, str) for each in classes) else classes


def _set_optimizer(estimator: Any, changed: Mapping[str, Any]) -> None:
    # A multi-layer perceptron copies these at its first batch, and reads only the copies then.
    optimizer = getattr(estimator, "_optimizer", None)
    if optimizer is None:
        return
    if "learning_rate_init" in changed:
        lowered = optimizer.learning_rate / optimizer.learning_rate_init
        optimizer.learning_rate = changed["learning_rate_init"] * lowered
    for name, value in changed.items():
        copy = _OPTIMIZER_NAMES.get(name, name)
        if hasattr(optimizer, copy):
            setattr(optimizer, copy, value)


def _same(first: Any, second: Any) -> bool:
    one, other = Encoder(), Encoder()
    try:
        if one.encode(first, "") != other.encode(second, ""):
            return False
    except WorkloadError:
        return True  # a function, say: no state holds it, the configuration gives it anew
    pairs = zip(one.tensors.values(), other.tensors.values(), strict=True)
    return all(a.data.tobytes() == b.data.tobytes() for a, b in pairs)


def _check_trainable(estimator: Any) -> None:
    """Raise a `WorkloadError` if an estimator cannot be trained on one shard after the other."""
    if isinstance(estimator, type) or not (
        hasattr(estimator, "fit") or hasattr(estimator, "partial_fit")
    ):
        raise WorkloadError(
            f"estimator(config) must return an estimator of scikit-learn, got {shown(estimator)}; "
            "write estimator=lambda config: SGDClassifier(**config)"
        )
    if not hasattr(estimator, "partial_fit"):
        raise WorkloadError(
            f"{type(estimator).__name__} has no partial_fit{_why_none(estimator)}, so it cannot be "
            f"trained shard by shard; {_instead_of(estimator)}"
        )


def _why_none(estimator: Any) -> str:
    """Return why a class has ``partial_fit`` for other parameters; empty if it has none at all."""
    try:
        estimator.partial_fit  # noqa: B018 - scikit-learn raises why
    except AttributeError as error:
        return f" ({error.__cause__})" if error.__cause__ is not None else ""
    return ""


def _instead_of(estimator: Any) -> str:
    from sklearn.base import RegressorMixin

    if hasattr(estimator, "steps"):
        return (
            "give its last step alone, and write the data set of what the others make of it, as "
            "in x = StandardScaler().fit_transform(x)"
        )
    such = "SGDRegressor" if isinstance(estimator, RegressorMixin) else "SGDClassifier"
    return f"take an estimator that has it, such as {such}"


def _is_classifier(estimator: Any) -> bool:
    from sklearn.base import is_classifier

    return bool(is_classifier(estimator))


def _own_classes(estimator: Any) -> set[type]:
    parameters = estimator.get_params() if hasattr(estimator, "get_params") else {}
    return {type(estimator)} | {
        type(value) for value in parameters.values() if hasattr(value, "get_params")
    }
