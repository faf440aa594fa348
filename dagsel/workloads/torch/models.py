"""Trained modules after a search: several as one, and files that need no dagsel to be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dagsel.codec import plain_part
from dagsel.errors import WorkloadError
from dagsel.state import State, Tensor
from dagsel.workloads.torch.state import DTYPES

_LOADER = '''"""{about}. Needs torch and safetensors."""
import json
from pathlib import Path

from safetensors.torch import load_file

HERE = Path(__file__).parent
CONFIG = json.loads((HERE / "config.json").read_text())


def load(model):
    """Fill the module that CONFIG makes with the trained weights."""
    model.load_state_dict(load_file(HERE / "weights.safetensors"))
    return model.eval()
'''


class Ensemble(torch.nn.Module):
    """The mean of what several models return: a tensor each, or tuples or mappings of tensors.

    Parameters
    ----------
    models
        The models.

    Examples
    --------
    >>> one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> x = torch.ones(1, 1)
    >>> bool(Ensemble([one, other])(x) == (one(x) + other(x)) / 2)
    True
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mean of the models' outputs."""
        return _mean([model(*args, **kwargs) for model in self.models])


def _mean(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(outputs).mean(0)
    if isinstance(first, Mapping):
        return {key: _mean([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple | list):
        means = [_mean(list(parts)) for parts in zip(*outputs, strict=True)]
        return type(first)(*means) if hasattr(first, "_fields") else type(first)(means)
    raise WorkloadError(
        f"an ensemble averages tensors, and the models return {type(first).__name__}; "
        "average what run.models() returns yourself"
    )


class GivesModules:
    """What a workload of PyTorch does with modules (`dagsel.workloads.base.GivesModels`)."""

    def ensemble(self, models: Sequence[torch.nn.Module]) -> torch.nn.Module:
        """Make one module of several: it returns the mean of their outputs."""
        return Ensemble(models).eval()

    def export(
        self, model: torch.nn.Module, config: Mapping[str, Any], about: str
    ) -> dict[str, bytes]:
        """Return files by name: weights in the safetensors format, configuration, a loader.

        Raises
        ------
        WorkloadError
            If the model keeps something else than tensors; names it.
        """
        tensors: dict[str, Tensor] = {}
        for name, value in model.state_dict().items():
            if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES:
                kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
                raise WorkloadError(
                    f"{name!r} of the model is {kind}, which the safetensors format does not hold; "
                    "keep it in a buffer of numbers, or save run.best_model() with torch.save"
                )
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            tensors[name] = Tensor(DTYPES[value.dtype], tuple(value.shape), flat.numpy())
        return {
            "weights.safetensors": bytes(State.pack(tensors, {}).buffer),
            "config.json": json.dumps(plain_part(config), indent=1).encode(),
            "load.py": _LOADER.format(about=about.replace("\\", "/").replace('"', "'")).encode(),
        }
