"""What is compiled for one configuration of a Flax model: a training step and an evaluation.

Flax NNX splits objects into a description and arrays. The description of a trial's model and
optimizer follows from its configuration and its seed; the arrays are the trial's state. A program
puts both together inside ``jax.jit``, trains, and returns the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dagsel.checks import shown
from dagsel.errors import WorkloadError
from dagsel.state import State, Tensor, reading_state
from dagsel.workloads.arrays import check_shapes, code_of, to_array, to_tensor
from dagsel.workloads.base import Config
from dagsel.workloads.compiled import Program
from dagsel.workloads.raised import cure_of
from dagsel.workloads.random_streams import seed_streams

_COMPARE = "compare model and loss with the shape of a batch, or reshape it in input_fn"
#: Name, shape and dtype of an array.
Outline: TypeAlias = tuple[str, tuple[int, ...], Any]


@dataclass(frozen=True, slots=True)
class FlaxParts:
    """The functions that a `FlaxWorkload` is made of."""

    model: Callable[..., Any]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    train_step: Callable[..., Any] | None = None

    def transform(self, config: Config) -> Any:
        """Return the transformation of optax that trains with a configuration."""
        transform = self.optimizer(config)
        if not (hasattr(transform, "init") and hasattr(transform, "update")):
            raise WorkloadError(
                f"optimizer must return a transformation of optax, got {shown(transform)}; write "
                'optimizer=lambda config: optax.adam(config["lr"])'
            )
        return transform

    def make(self, config: Config, seed: int, transform: Any) -> dict[str, Any]:
        """Build a trial's model and its optimizer, as a script would."""
        seed_streams(seed)
        model = self.model(config, nnx.Rngs(seed))
        if not isinstance(model, nnx.Module):
            raise WorkloadError(
                f"model must return a flax.nnx.Module, got {shown(model)}; write "
                "model=lambda config, rngs: MyModule(config, rngs=rngs), or for a module of Linen "
                "nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), x) with x like a batch"
            )
        if not jax.tree.leaves(nnx.state(model, nnx.Param)):
            raise WorkloadError(
                f"the {type(model).__name__} has no parameters to train: keep its weights as "
                "nnx.Param"
            )
        model.train()  # type: ignore[no-untyped-call]
        return {"model": model, "optimizer": nnx.Optimizer(model, transform, wrt=nnx.Param)}

    def outlined(self, config: Config) -> tuple[Any, Any]:
        """Return what a trial begins with, as far as it is known without computing a number."""
        transform = self.transform(config)
        return _outlined(lambda: self.make(config, 0, transform))


def apply(model: Any, inputs: Any) -> Any:
    """Call a model: with named inputs if they are a mapping, one by one if they are a tuple."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


class FlaxPrograms:
    """What is compiled for a configuration and a seed; nothing in it is of a trial's state.

    Parameters
    ----------
    parts
        The workload's functions.
    config, seed
        What the model is made of.

    Attributes
    ----------
    train
        ``train(leaves, inputs, targets)`` returns the loss of a batch and the arrays after it. The
        arrays that it is given are used up.
    score
        ``score(leaves, inputs, targets)`` returns the loss and the output of a batch.
    """

    def __init__(self, parts: FlaxParts, config: Config, seed: int) -> None:
        self._parts, self._config = parts, config
        self._transform = parts.transform(config)  # one for all: descriptions name its functions
        self._make: Callable[[], Any] = lambda: parts.make(config, seed, self._transform)
        self._graph, arrays = _outlined(self._make)
        paths, self._tree = jax.tree_util.tree_flatten_with_path(arrays)
        self.names = _names([path for path, _ in paths])
        leaves = [leaf for _, leaf in paths]
        self._keys = [_key_kind(leaf) for leaf in leaves]
        self.shapes = jax.eval_shape(self._plained, leaves)
        self.expected = {
            name: (code_of(leaf.dtype, name), tuple(leaf.shape))
            for name, leaf in zip(self.names, self.shapes, strict=True)
        }
        self.train = Program(self._train, trains=True)
        self.score = Program(self._score)

    def objects(self, leaves: list[Any]) -> Any:
        """Make the model and the optimizer of a trial's arrays."""
        keyed = [_typed(leaf, key) for leaf, key in zip(leaves, self._keys, strict=True)]
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, keyed))

    def leaves(self, objects: Any) -> list[Any]:
        """Return the arrays of a model and its optimizer, as a state has them."""
        graph, arrays = nnx.split(objects)
        leaves = jax.tree.leaves(arrays)
        if graph != self._graph or len(leaves) != len(self.names):
            raise WorkloadError(
                f"training changes an attribute of the {type(objects['model']).__name__} that is "
                "no array, which no state keeps: make it an nnx.Variable"
            )
        return self._plained(leaves)

    def _plained(self, leaves: list[Any]) -> list[Any]:
        return [_plain(leaf, key) for leaf, key in zip(leaves, self._keys, strict=True)]

    def _train(self, leaves: list[Any], inputs: Any, targets: Any) -> tuple[Any, list[Any]]:
        objects = self.objects(leaves)
        model, optimizer = objects["model"], objects["optimizer"]
        if self._parts.train_step is not None:
            loss = self._parts.train_step(model, optimizer, inputs, targets, self._config)
            loss = _scalar(loss, "train_step")
        else:
            loss, gradients = nnx.value_and_grad(
                lambda model: _scalar(self._parts.loss(apply(model, inputs), targets), "loss")
            )(model)
            optimizer.update(model, gradients)
        after = self.leaves(objects)
        for name, old, new in zip(self.names, leaves, after, strict=True):
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise WorkloadError(
                    f"training makes {name!r}, {old.dtype} of shape {old.shape}, one of "
                    f"{new.dtype} and shape {new.shape}: it must stay as it begins"
                )
        return loss, after

    def _score(self, leaves: list[Any], inputs: Any, targets: Any) -> tuple[Any, Any]:
        model = self.objects(leaves)["model"]
        model.eval()
        output = apply(model, inputs)
        return _scalar(self._parts.loss(output, targets), "loss"), output

    def check(self, inputs: Outline, targets: Outline) -> None:
        """Raise a `WorkloadError` if a training step fails for arrays of such shapes and dtypes."""
        outlined: Any = jax.ShapeDtypeStruct
        batch = [
            outlined(shape, jax.dtypes.canonicalize_dtype(dtype))
            for _, shape, dtype in (inputs, targets)
        ]
        try:
            self.train.trace(self.shapes, *batch)
        except WorkloadError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise WorkloadError(
                f"a training step fails for inputs {inputs[0]!r} of shape {inputs[1]} and targets "
                f"{targets[0]!r} of shape {targets[1]}: {text}; {cure_of(text) or _COMPARE}"
            ) from error

    def stray_class(self, leaves: list[Any], inputs: Any, targets: Any) -> int | None:
        """Return a class of a batch that has no score, where a model gives one for each class."""
        _, output = self.score.trace(leaves, inputs, targets)
        has_scores = getattr(output, "ndim", 0) == targets.ndim + 1 and targets.size
        ends = (int(targets.min()), int(targets.max())) if has_scores else ()
        return next((end for end in ends if not 0 <= end < output.shape[-1]), None)

    def scored(self, leaves: list[Any], inputs: Any, targets: Any) -> tuple[float, Any, Any]:
        """Return the loss of a batch, its output and its targets, as metrics take them."""
        loss, output = self.score(leaves, inputs, targets)
        return float(loss), *(jax.tree.map(_wide, value) for value in (output, targets))

    # ---- arrays and states

    def begin(self) -> list[Any]:
        """Return the arrays with which a trial begins."""
        return self.leaves(self._make())

    def read(self, state: State) -> list[Any]:
        """Return the arrays of a state: copies, which a program may use up."""
        with reading_state():
            tensors = state.tensors
            check_shapes(tensors, self.expected)
            return [jnp.array(to_array(tensors[name]), copy=True) for name in self.names]

    def tensors(self, leaves: list[Any]) -> dict[str, Tensor]:
        """Return arrays as the tensors of a state."""
        found = jax.device_get(leaves)
        return {name: to_tensor(x, name) for name, x in zip(self.names, found, strict=True)}

    def new_optimizer(self, leaves: list[Any]) -> list[Any]:
        """Return a trial's arrays with an optimizer that begins; its parameters stay."""
        model = self.objects(leaves)["model"]
        optimizer = nnx.Optimizer(model, self._transform, wrt=nnx.Param)
        return self.leaves({"model": model, "optimizer": optimizer})


def _outlined(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the description of a model and its optimizer, and shapes and dtypes of their arrays.

    No number is computed, if their code does not look at any. So the driver, which checks
    configurations, does not start JAX's threads: with them it could not be copied for workers.
    """
    graphs: list[Any] = []

    def outlined() -> Any:
        graph, arrays = nnx.split(make())
        graphs.append(graph)
        return arrays

    try:
        arrays = jax.eval_shape(outlined)
        hash(graphs[0])  # an attribute may have kept what stands for a number
    except WorkloadError:
        raise
    except Exception:  # noqa: BLE001 - if the user's code is at fault, it raises again
        graph, arrays = nnx.split(make())
        return graph, jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), arrays)
    return graphs[0], arrays


def _names(paths: list[Any]) -> list[str]:
    names: list[str] = []
    for path in paths:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        while name in names:
            name += "'"
        names.append(name)
    return names


def _key_kind(leaf: Any) -> Any:
    """Return how a leaf's random keys are made; None if it holds none."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    kinds: list[Any] = []
    jax.eval_shape(lambda keys: kinds.append(jax.random.key_impl(keys)), leaf)
    return kinds[0]


def _plain(leaf: Any, key: Any) -> Any:
    if key is not None:
        return jax.random.key_data(leaf)
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)  # its dtype is no suggestion any more


def _typed(leaf: Any, key: Any) -> Any:
    return leaf if key is None else jax.random.wrap_key_data(leaf, impl=key)


def _wide(value: Any) -> Any:
    """Return an array as NumPy has it; half precision becomes float32."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _scalar(loss: Any, what: str) -> Any:
    if isinstance(loss, tuple | list | dict):
        raise WorkloadError(
            f"{what} must return the mean loss of a batch, and it returns a "
            f"{type(loss).__name__}: return the loss alone"
        )
    shape = np.shape(loss)
    if shape:
        raise WorkloadError(
            f"{what} must return the mean loss of a batch, and it returns values of shape "
            f"{shape}: return their mean, as in  loss=lambda output, target: "
            "optax.softmax_cross_entropy_with_integer_labels(output, target).mean()"
        )
    if loss is None:
        raise WorkloadError(f"{what} returns None: return the mean loss of a batch")
    return loss
