"""The part of a module that training leaves as it is, and that is in no state.

A state may hold only what trains: the parameters with ``requires_grad`` and the buffers. What is
frozen is built anew by the factory, or is that of a base that the trials of a process share. A
checksum of it travels with the trial.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from dagsel.console import readable_size

logger = logging.getLogger("dagsel")

#: So many bytes of frozen parameters are worth a word where each state holds them.
_MUCH = 20_000_000


class BaseBuffer(NamedTuple):
    """A buffer of a trial, and the one of the base of which it is a copy."""

    name: str
    buffer: torch.Tensor
    original: torch.Tensor

    def is_changed(self) -> bool:
        """Whether the two differ."""
        buffer, original = (held.detach().contiguous() for held in (self.buffer, self.original))
        if (buffer.shape, buffer.dtype) != (original.shape, original.dtype):
            return True
        mine, theirs = (held.reshape(-1).view(torch.uint8) for held in (buffer, original))
        return not torch.equal(mine, theirs.to(mine.device))


@dataclass(frozen=True, slots=True)
class Frozen:
    """What of a module is not in its states.

    Parameters
    ----------
    parameters
        The frozen ones, by their names in the state dict.
    buffers
        Those of a base: in a state only once they were changed.
    """

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: tuple[BaseBuffer, ...] = ()

    @classmethod
    def of(cls, module: torch.nn.Module, buffers: Iterable[BaseBuffer] = ()) -> Frozen:
        """Return the frozen part of a module as it is now.

        Examples
        --------
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> _ = module[0].requires_grad_(requires_grad=False)
        >>> [*Frozen.of(module).parameters]
        ['0.weight', '0.bias']
        """
        held = module.state_dict(keep_vars=True).items()
        names: dict[str, torch.Tensor] = {
            name: tensor
            for name, tensor in held
            if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        }
        return cls(names, tuple(buffers))

    def left_out(self) -> frozenset[str]:
        """Return the names of the state dict that a state of now does not have."""
        unchanged = (of_base.name for of_base in self.buffers if not of_base.is_changed())
        return frozenset((*self.parameters, *unchanged))

    def may_lack(self) -> frozenset[str]:
        """Return the names of the state dict that some state does not have."""
        return frozenset((*self.parameters, *(of_base.name for of_base in self.buffers)))

    def checksum(self) -> str:
        """Return a checksum of the frozen parameters' numbers."""
        sums = checksums({id(held): held for held in self.parameters.values()}.values())
        return hashlib.blake2b(np.array(sums, np.int64).tobytes(), digest_size=8).hexdigest()


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that changes with its bits: the sum of its 64-bit words.

    It is read as fast as memory is, on the tensor's device. It does not see that words have changed
    places.

    Examples
    --------
    >>> weights = torch.ones(5)
    >>> before = checksums([weights])
    >>> weights[3] += 1e-6
    >>> checksums([weights]) == before
    False
    """
    with torch.no_grad():
        sums = [_sum(tensor) for tensor in tensors]
        return torch.stack(sums).cpu().tolist() if sums else []


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    data = plain.contiguous().reshape(-1).view(torch.uint8)
    n_words = data.numel() // 8
    words, rest = data[: 8 * n_words], data[8 * n_words :]
    if words.storage_offset() % 8:
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total + rest.sum(dtype=torch.int64) if rest.numel() else total


def say_frozen(module: torch.nn.Module) -> None:
    """Say in the log if most of a large model is frozen: each of its states holds all of it."""
    frozen = sum(it.nbytes for it in module.parameters() if not it.requires_grad)
    whole = sum(it.nbytes for it in module.parameters())
    if frozen > max(_MUCH, whole / 2):
        logger.warning(
            "%s of the model's %s of parameters do not train (requires_grad=False), and are stored "
            'with each state: base= or state="trainable" leaves them out',
            readable_size(frozen),
            readable_size(whole),
        )
