"""Which backend Keras has, here and in workers: it is chosen when Keras is imported, for good."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dagsel.checks import imported
from dagsel.errors import WorkloadError
from dagsel.workloads.arrays import settle_jax

#: Those on which dagsel trains.
BACKENDS = ("torch", "jax")
_DEFAULTS = {"floatx": "float32", "image_data_format": "channels_last"}
_CHOOSE = (
    'set os.environ["KERAS_BACKEND"] = "torch" or "jax" before Keras is imported, or the variable '
    "KERAS_BACKEND of the environment"
)


def backend_here() -> str:
    """Return the backend of Keras in this process; import Keras if it is not.

    Raises
    ------
    WorkloadError
        If Keras is missing, or has a backend on which dagsel does not train.
    """
    name = str(import_keras().config.backend())
    if name not in BACKENDS:
        raise WorkloadError(
            f"Keras has its {name} backend, on which dagsel does not train: {_CHOOSE}"
        )
    return name


def import_keras() -> Any:
    """Import Keras: with its PyTorch backend, if nobody has chosen one that is installed."""
    is_open = "keras" not in sys.modules and not os.environ.get("KERAS_BACKEND")
    if is_open and _configured() == "tensorflow" and find_spec("tensorflow") is None:
        os.environ["KERAS_BACKEND"] = "torch"
    if "jax" in (os.environ.get("KERAS_BACKEND"), _configured()):
        settle_jax()
    try:
        return imported("keras", "keras", by="KerasWorkload", error=WorkloadError)
    except WorkloadError as error:
        if "tensorflow" in str(error):
            raise WorkloadError(
                f"Keras is to use its TensorFlow backend, on which dagsel does not train: {_CHOOSE}"
            ) from error
        raise


def _configured() -> str:
    """Return the backend that Keras's own file says; Keras writes one when it is imported first."""
    folder = os.environ.get("KERAS_HOME", "~/.keras")
    with suppress(OSError, ValueError, AttributeError):
        text = (Path(folder).expanduser() / "keras.json").read_text()
        return str(json.loads(text).get("backend", "tensorflow"))
    return "tensorflow"


def use_backend(name: str) -> str:
    """Import Keras with a backend: that of the driver, in a worker.

    Raises
    ------
    WorkloadError
        If this process has imported Keras with another one.
    """
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
    if (found := backend_here()) != name:
        raise WorkloadError(
            f"this worker has imported Keras with its {found} backend, and the driver's is {name}: "
            f"restart the workers, or set KERAS_BACKEND={name} for them"
        )
    return name


def settings_here() -> dict[str, Any] | None:
    """Return what Keras is told of numbers in this thread; None if it is told nothing.

    A new process knows nothing of it, and of the policy not even a new thread.
    """
    keras = import_keras()
    told = {
        "floatx": keras.config.floatx(),
        "image_data_format": keras.config.image_data_format(),
        "policy": keras.dtype_policies.serialize(keras.config.dtype_policy()),
    }
    is_plain = told["policy"]["config"] == {"name": "float32"}
    return None if is_plain and told.items() >= _DEFAULTS.items() else told


@contextmanager
def settings_of(told: dict[str, Any] | None) -> Iterator[None]:
    """Have Keras told so within the block, in this thread."""
    if told is None:
        yield
        return
    before = settings_here()
    try:
        _tell(told)
        yield
    finally:
        _tell(before or {**_DEFAULTS, "policy": "float32"})


def _tell(told: dict[str, Any]) -> None:
    keras = import_keras()
    keras.config.set_floatx(told["floatx"])
    keras.config.set_image_data_format(told["image_data_format"])
    keras.config.set_dtype_policy(keras.dtype_policies.get(told["policy"]))


class Backend:
    """The name of a backend; where it is unpickled, Keras is imported with it.

    It goes before the functions of a workload, which may import Keras when they are unpickled.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return use_backend, (self.name,)


def arrived(_: object, kind: type, attributes: dict[str, Any]) -> Any:
    """Make a workload that was pickled after its `Backend`."""
    made: Any = object.__new__(kind)
    made.__dict__.update(attributes)
    return made
