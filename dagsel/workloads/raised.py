"""What a workload's code has raised: the error, where in the user's code, and the known cures."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

from dagsel.dispatch.units import Unit

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_NOT_THE_USERS = frozenset({"dagsel", "dask", "distributed"})
#: Functions of a workload that are named where none of the user's own code was running.
_PARTS = ("model", "loss", "optimizer", "lr_scheduler", "input_fn", "module", "batch_fn")
_MOST_FRAMES = 10
_MOST_LETTERS = 500

_CURES = tuple(
    (re.compile(pattern), cure)
    for pattern, cure in (
        (
            r"same dtype, but got [Dd]ouble|Input type \((torch\.cuda\.)?[Dd]ouble|mixed dtype"
            r"|RNN input dtype \(torch.float64\)|expected scalar type Float but found Double",
            "the inputs, or weights in the loss, are float64 and the model is float32: write the "
            'data set with x.astype("float32"), let input_fn return them with .float(), or give '
            "the loss torch.tensor(weights, dtype=torch.float32)",
        ),
        (
            r"same dtype, but got (Long|Int|Short|Char|Byte|Bool|long|int|unsigned char)"
            r"|Input type \((torch\.cuda\.)?(Long|Int|Short|Char|Byte|Bool|long|int|unsigned char)",
            'the inputs are integers: write the data set with x.astype("float32"), or let '
            "input_fn return them with .float()",
        ),
        (
            r"Found dtype Double but expected Float",
            "the targets are float64 and the model is float32: write the data set with "
            'y.astype("float32"), or let input_fn return them with .float()',
        ),
        (
            r"Found dtype (Long|Int) but expected"
            r"|can't be cast to the desired output type (Long|Int)",
            'the targets are integers and this loss needs numbers: write y.astype("float32")',
        ),
        (
            r"expected (target dtype to be Long|scalar type Long)",
            'this loss needs classes as integers: write the data set with y.astype("int64")',
        ),
        (
            r"implicitly created only for scalar outputs",
            "loss must return a scalar, and it returns several values: return their mean, as in "
            ".mean()",
        ),
        (
            r"'(float|int|NoneType|tuple|list|dict|float64|float32)' object has no attribute "
            r"'backward'",
            "loss must return one tensor, which depends on the model's output",
        ),
        (
            r"element 0 of tensors does not require grad",
            "loss does not depend on the model's parameters: compute it from the model's output "
            "without .detach(), .item() or torch.no_grad()",
        ),
        (
            r"shapes cannot be multiplied|to have \d+ channels|normalized_shape"
            r"|running_mean should contain|size mismatch|requires contracting dimensions",
            "the model does not fit the data set's arrays: compare the layer's size with the shape "
            "of a sample, or reshape in input_fn",
        ),
        (
            r"Expected more than 1 value per channel when training",
            "a batch has a single sample, of which batch normalisation can learn nothing: give "
            "the workload drop_last=True, or another batch_size",
        ),
        (
            r"multi-target not supported|indices and arr must have the same number of dimensions",
            "the targets have an axis more than classes have: write the data set with "
            "np.ravel(y), or let loss take target.squeeze(1)",
        ),
        (
            r"match target batch_size|Target size \(|target tensor expected|Shape mismatch: got \(",
            "output and target have other shapes than this loss needs: reshape one of them in "
            "loss, as in output.squeeze(1)",
        ),
        (
            r"Target -?\d+ is out of bounds",
            "a class is not among the model's outputs: give the model an output for each class; "
            "numbers count from 0, as in  classes, y = np.unique(y, return_inverse=True)",
        ),
        (
            r"index out of range in self",
            "an embedding of the model has no row for a number of the data, such as a token: give "
            "it a row for each, as many as len(tokenizer), numbers count from 0; or a sequence is "
            "longer than the model has positions for: cut it",
        ),
        (
            r"mix of the legacy and new APIs to set the matmul precision",
            'precision="tf32" and something that sets fp32_precision of torch.backends do not go '
            "together: leave the one or the other out",
        ),
        (
            r"device-side assert",
            "an index is outside its table on the GPU, often a class for which the model has no "
            "output: train this configuration on the CPU, where the error has the number",
        ),
        (
            r"must have the same shape\. Received: target\.shape",
            "if the target is the number of each sample's class, write "
            'loss="sparse_categorical_crossentropy"; else give it the shape of the output',
        ),
        (
            r"must have the same shape up until the last dimension",
            "this loss needs the number of each sample's class: if the target has a column for "
            'each class, write loss="categorical_crossentropy"',
        ),
        (
            r"subdtype of <class 'numpy.integer'>",
            'this loss needs classes as integers: write the data set with y.astype("int64"), or, '
            "if it has a column for each class, with y.argmax(1)",
        ),
        (
            r"Tracer\w*ConversionError",
            "JAX calls model and loss once, without numbers, and compiles what they do: write "
            "jax.numpy in place of NumPy, and jax.numpy.where in place of if",
        ),
        (
            r"Unknown label type",
            "a classifier takes classes, and the targets are numbers of all kinds: take a "
            "regressor, such as SGDRegressor",
        ),
        (
            r"y should be a 1d array",
            "the targets have a column for each class: write the data set with y.argmax(1)",
        ),
        (
            r"mean\(\): could not infer output dtype",
            "a mean is taken of numbers: write .float().mean()",
        ),
        (
            r"must be Tensor, not \w+Output\w*",
            "the output of a model of transformers has its scores in output.logits: write "
            "loss=lambda output, labels: torch.nn.functional.cross_entropy(output.logits, labels)",
        ),
        (
            r"'NoneType' object has no attribute 'experiment'",
            "a search has no logger of Lightning: write self.log(name, value), and give "
            "dagsel.optimize observers=[...]",
        ),
        (
            r"argument #1 'indices' to have one of the following scalar types: Long",
            'an embedding takes whole numbers: write the data set with x.astype("int64")',
        ),
        (
            r"could not convert string to float",
            "the array is text: write the data set with  classes, y = np.unique(y, "
            "return_inverse=True)",
        ),
    )
)
#: Patterns of a message and of the user's frames, and what to change where both are there.
_CURES_OF_PLACES = (
    (  # as while a state is scored
        re.compile(r"[Tt]ensors does not require grad"),
        re.compile(r"\bgrad\("),
        "what is differentiated must depend on a tensor with requires_grad=True, and scores are "
        "computed without gradients: write  with torch.enable_grad():  around it, in the model or "
        "loss",
    ),
    (
        re.compile(r"list indices must be integers or slices, not str"),
        re.compile(r"in (training|validation)_step\b"),
        "a batch of LightningWorkload is a list of its arrays, as in  x, y = batch; with "
        "batch_fn=lambda batch, config: batch  it has them by name",
    ),
)


@dataclass(frozen=True, slots=True)
class RanOut:
    """A unit had too little memory: an entry of the journal, too.

    The trial's units of this kind, from this one on, compute half as many samples at once.
    """

    unit: Unit
    worker: str  # name of the worker
    error: str  # what was raised
    limit: int | None = None  # bytes that there are; None if it is not known
    peak: int | None = None  # that were taken at most
    at_once: int | None = None  # samples that were computed at once; None if they cannot be fewer
    halved: int | None = None  # how often they were halved; None if it is not known


@dataclass(frozen=True, slots=True)
class Raised:
    """An error of the code that a workload runs.

    Examples
    --------
    >>> error = Raised("RuntimeError", "grad can be implicitly created only for scalar outputs", "")
    >>> error.reason
    'RuntimeError: grad can be implicitly created only for scalar outputs'
    >>> error.cure
    'loss must return a scalar, and it returns several values: return their mean, as in .mean()'
    """

    kind: str  # name of the error's class
    message: str  # in one line
    # File, line and function: the innermost of the user's code, or of any if none of it ran.
    place: str
    frames: str = ""  # the user's own frames, as Python prints them
    by_check: bool = False  # whether it was raised before anything was sent to a worker
    ran_out: RanOut | None = None  # if a unit had too little memory

    def of_memory(self, ran_out: RanOut, message: str) -> Raised:
        """Return what it is where memory ran out."""
        return replace(self, kind="OutOfMemoryError", message=message, ran_out=ran_out)

    @property
    def signature(self) -> tuple[str, str]:
        """What errors that are alike have in common; the message may name other numbers."""
        return self.kind, self.place

    @property
    def reason(self) -> str:
        """The error in one line."""
        return f"{self.kind}: {self.message}" if self.message else self.kind

    @property
    def cure(self) -> str:
        """What to change; empty if it is not known."""
        found = (
            cure
            for message, frames, cure in _CURES_OF_PLACES
            if message.search(self.message) and frames.search(self.frames)
        )
        return next(found, "") or cure_of(self.message)


def cure_of(message: str) -> str:
    """Return what to change for an error that reads so; empty if it is not known.

    Examples
    --------
    >>> cure_of("grad can be implicitly created only for scalar outputs")
    'loss must return a scalar, and it returns several values: return their mean, as in .mean()'
    """
    found = (cure for pattern, cure in _CURES if pattern.search(message))
    return next(found, "")


def raised(error: BaseException, workload: Any = None, *, by_check: bool = False) -> Raised:
    """Describe an error where it is caught."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    own = [(frame, line) for frame, line in frames if _is_the_users(frame.f_globals, frame.f_code)]
    if not own and error.__cause__ is not None:
        walked = traceback.walk_tb(error.__cause__.__traceback__)
        own = [(f, line) for f, line in walked if _is_the_users(f.f_globals, f.f_code)]
    place = ""
    for frame, line in (own or frames)[-1:]:
        place = f"{frame.f_code.co_filename}:{line} {frame.f_code.co_qualname}"
    lines = traceback.StackSummary.extract(iter(own)).format()[-_MOST_FRAMES:]
    return Raised(
        type(error).__name__,
        " ".join(str(error).split())[:_MOST_LETTERS],
        place,
        "".join(lines or _parts(workload)).rstrip("\n"),
        by_check,
    )


def _is_the_users(names: dict[str, Any], code: CodeType) -> bool:
    package = str(names.get("__name__", "")).partition(".")[0]
    return package not in _NOT_THE_USERS and _is_own_file(code.co_filename)


def _is_own_file(file: str) -> bool:
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return not (is_installed or file.startswith(("<frozen", *_LIBRARIES)))


def _parts(workload: Any) -> Iterable[str]:
    """Yield where the workload's functions are defined, as frames."""
    for name in _PARTS:
        code = getattr(getattr(workload, name, None), "__code__", None)
        if isinstance(code, CodeType) and _is_own_file(code.co_filename):
            yield f'  File "{code.co_filename}", line {code.co_firstlineno}, has {name}=\n'
            text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
            yield f"    {text}\n" if text else ""
