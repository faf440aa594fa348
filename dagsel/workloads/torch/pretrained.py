"""Pretrained models: one copy of the weights in each process, shared by all trials there."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import cloudpickle
import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.utils.weak import WeakTensorKeyDictionary

from dagsel.checks import short_traceback, shown, takes
from dagsel.errors import DagselError, WorkloadError
from dagsel.storage.urls import said_of, without_credentials
from dagsel.workloads.random_streams import own_streams, preserved_streams, seed_streams
from dagsel.workloads.torch.build import build_unfilled
from dagsel.workloads.torch.frozen import BaseBuffer, checksums

_CHUNK = 16_000_000


class Base:
    """A pretrained model that trials share, and of which each trains a part or an addition.

    Each worker loads its weights once. `TorchWorkload` gives its ``model(config, base)`` a module
    of the trial's own whose parameters lie in that one copy; they are frozen
    (``requires_grad=False``). What the function unfreezes is copied, and is the trial's own.

    Parameters
    ----------
    model
        ``model()`` builds the module; called once in each process. It must give the same weights
        everywhere, unless `files` has them. Or a module: its weights are sent to each worker.
    files
        Files of weights in the safetensors format, with the names of the module's state dict: a
        path or a URL of fsspec, or several. They are mapped into memory, so workers of one machine
        share a local file's pages. Each worker must reach them.
    sha256
        The digest of each file, as ``sha256sum`` prints it. By default that which a file has when
        the search begins. A file with another one is refused.

    Raises
    ------
    WorkloadError
        If an argument is of the wrong kind; and from what loads it: if a file cannot be read, has
        another digest, or does not fit the module.

    Examples
    --------
    >>> import torch
    >>> base = Base(torch.nn.Linear(8, 4))
    >>> first, second = base.module(), base.module()
    >>> first.weight is second.weight, first.weight.data_ptr() == second.weight.data_ptr()
    (False, True)
    >>> first.weight.requires_grad
    False
    """

    @short_traceback
    def __init__(
        self,
        model: Callable[[], torch.nn.Module] | torch.nn.Module,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        *,
        sha256: str | Sequence[str] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module) and not takes(model, 0):
            raise WorkloadError(
                "base must be a function without arguments that returns a torch.nn.Module, or "
                f"such a module, got {shown(model)}; write base=lambda: MyModel()"
            )
        paths = [files] if isinstance(files, str | os.PathLike) else list(files)
        digests = [sha256] if isinstance(sha256, str) else sha256
        if digests is not None and len(digests) != len(paths):
            raise WorkloadError(
                f"a base of {len(paths)} files has {len(digests)} sha256: give one for each file"
            )
        self.model = model
        self.files = tuple(os.fspath(path) for path in paths)
        self._sha256 = None if digests is None else tuple(digest.lower() for digest in digests)
        self._digest: str | None = None
        self._form: str | None = None  # of `model`, as it was where the search began
        self._loaded: dict[torch.device, _Loaded] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what is loaded, and with its digest and its form."""
        return {**vars(self), "_digest": self.digest, "_form": self._key, "_loaded": {}}

    @property
    def _key(self) -> str:
        """Text that differs where `model` makes another module, be it of the same weights."""
        if self._form is None:
            self._form = _form_of(self.model)
        return self._form

    @property
    def digest(self) -> str:
        """The SHA-256 that states and records name it by: of its files, else of its weights."""
        if self._digest is None:
            self.load()
        assert self._digest is not None
        return self._digest

    def described(self) -> str:
        """Describe it as text that is equal for equal bases."""
        return f"a base of sha256 {self.digest}"

    def module(self, device: torch.device | None = None) -> torch.nn.Module:
        """Make a module of a trial's own, with frozen parameters that lie in the shared copy.

        Parameters
        ----------
        device
            Where the frozen parameters lie; None for this worker's device.
        """
        return self.load(device).copied()

    def buffers_of(self, module: torch.nn.Module) -> list[BaseBuffer]:
        """Return the buffers of a module that were copied from the shared one's, with these."""
        return [
            BaseBuffer(name, buffer, _originals[buffer])
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if buffer in _originals
        ]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the shared copy."""
        place = tensor.untyped_storage().data_ptr()
        return any(place in loaded.places for loaded in self._loaded.values())

    def has_kept(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter that lies in the shared copy is as it was loaded."""
        return all(loaded.has_kept(parameter) for loaded in self._loaded.values())

    def is_intact(self) -> bool:
        """Whether the shared copies are as they were loaded."""
        return all(loaded.is_intact() for loaded in self._loaded.values())

    def forget(self) -> None:
        """Load it anew when it is used next."""
        for loaded in self._loaded.values():
            loaded.is_spoiled = True

    def load(self, device: torch.device | None = None) -> _Loaded:
        """Load it to a device, if it is not there; the CPU by default."""
        with own_streams(), _loading:  # in this order, as in a unit
            return self._load(device or _HOST)

    def _load(self, device: torch.device) -> _Loaded:
        loaded = self._held_on(device)
        if loaded is None:
            on_host = self._held_on(_HOST)
            module, digest = self._read() if on_host is None else (on_host.copied(), self.digest)
            if self._digest not in (None, digest):
                raise WorkloadError(
                    f"the base is another one here: its weights have sha256 {digest}, and the "
                    f"search began with {self._digest}; let base give the same weights in each "
                    "process, or name their file: base=dagsel.Base(model, files=...)"
                )
            self._digest = digest
            loaded = _Loaded(module.to(device))
            _held[digest, self._key, device] = loaded
        self._loaded[device] = loaded
        return loaded

    def _held_on(self, device: torch.device) -> _Loaded | None:
        """Return what is loaded on a device, as it was loaded."""
        loaded = None if self._digest is None else _held.get((self._digest, self._key, device))
        return None if loaded is None or loaded.is_spoiled else loaded

    def _read(self) -> tuple[torch.nn.Module, str]:
        with preserved_streams(torch=True):
            seed_streams(0, torch=True)
            if not self.files:
                module = self._built()
                return module, _digest_of(module)
            module = build_unfilled(self._built) or self._built()
        weights: dict[str, torch.Tensor] = {}
        found = []
        for number, file in enumerate(self.files):
            wanted = None if self._sha256 is None else self._sha256[number]
            name = without_credentials(file)
            with _local(file) as (path, digest):
                if wanted not in (None, digest):
                    raise WorkloadError(
                        f"the base's file {name} has changed: its sha256 is {digest} and should be "
                        f"{wanted}; restore the file, or give its new sha256"
                    )
                found.append(digest)
                weights.update(_opened(path, name))
        _fill(module, weights, self.files)
        together = hashlib.sha256("".join(found).encode()).hexdigest()
        return module, found[0] if len(found) == 1 else together

    def _built(self) -> torch.nn.Module:
        if isinstance(self.model, torch.nn.Module):
            return copy.deepcopy(self.model)
        module = self.model()
        if not isinstance(module, torch.nn.Module):
            raise WorkloadError(f"base gave {shown(module)}, not a torch.nn.Module; return one")
        return module


class _Loaded:
    """The one copy of a base on a device."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.is_spoiled = False  # somebody has changed it
        self._module = module.requires_grad_(requires_grad=False)
        self._sums = checksums(module.parameters())
        held = [(parameter.data_ptr(), parameter.numel()) for parameter in module.parameters()]
        self._sum_of = dict(zip(held, self._sums, strict=True))
        self.places = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def copied(self) -> torch.nn.Module:
        """Copy everything but the parameters' numbers."""
        memo: dict[int, Any] = {}
        for parameter in self._module.parameters():
            same = torch.nn.Parameter(parameter.detach(), requires_grad=False)
            memo[id(parameter)] = same
        for buffer in self._module.buffers():
            memo[id(buffer)] = made = buffer.clone()
            _originals[made] = buffer
        return copy.deepcopy(self._module, memo)

    def is_intact(self) -> bool:
        """Whether its parameters are as they were loaded."""
        return checksums(self._module.parameters()) == self._sums

    def has_kept(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is as it was loaded, or none of these."""
        told = self._sum_of.get((parameter.data_ptr(), parameter.numel()))
        return told is None or checksums([parameter]) == [told]


_HOST = torch.device("cpu")
#: Threads load one after the other: random numbers that fill a base belong to the process.
_loading = threading.Lock()
#: What is loaded in this process, as long as some workload uses it.
_held: weakref.WeakValueDictionary[tuple[str, str, torch.device], _Loaded]
_held = weakref.WeakValueDictionary()
#: That of a shared copy, by each buffer that is a copy of it.
_originals = WeakTensorKeyDictionary()


@short_traceback
def as_base(given: Any) -> Base | None:
    """Return what is given as ``base`` as a `Base`."""
    return given if given is None or isinstance(given, Base) else Base(given)


def own_what_trains(module: torch.nn.Module, base: Base | None) -> None:
    """Copy the parameters that train out of the shared copy; raise if none trains."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        what = "model(config)" if base is None else "model(config, base)"
        raise WorkloadError(
            f"nothing trains: every parameter that {what} returns has requires_grad=False; call "
            "requires_grad_(True) on the modules that are to train, or add some"
        )
    shared = [] if base is None else [it for it in trained if base.holds(it)]
    if base is not None and not all(map(base.has_kept, shared)):
        base.forget()
        raise WorkloadError(
            "model(config, base) has written into weights of the base, which all trials of a "
            "process share: make a new layer in the place of one that is to begin anew, as by "
            "base.head = torch.nn.Linear(...), or give it numbers of its own first, by "
            "weight.data = weight.data.clone()"
        )
    for parameter in shared:
        parameter.data = parameter.data.clone()


class _Form(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes an object without the numbers of its tensors."""

    def persistent_id(self, obj: Any) -> Any:
        return ("tensor", obj.dtype, obj.shape) if isinstance(obj, torch.Tensor) else None


def _form_of(model: Any) -> str:
    with io.BytesIO() as file:
        try:
            _Form(file).dump(model)
        except Exception:  # noqa: BLE001 - what cannot be sent shares with nothing
            return uuid.uuid4().hex
        return hashlib.sha256(file.getvalue()).hexdigest()


def _digest_of(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor):
            held = value.detach().cpu().contiguous()
            digest.update(f"{name} {held.dtype} {tuple(held.shape)}\n".encode())
            digest.update(held.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _local(file: str) -> Iterator[tuple[str, str]]:
    """Give the path of a file on this machine and its digest; what was fetched is then removed.

    What is mapped into memory stays readable after its file was removed, so nothing is left behind
    by a process that is killed.
    """
    try:
        fs, place = fsspec.core.url_to_fs(file)
        with fs.open(place, "rb") as source:
            if isinstance(fs, LocalFileSystem):
                yield place, _hash(source, None)
                return
            with tempfile.NamedTemporaryFile(prefix="dagsel-base-") as fetched:
                digest = _hash(source, fetched)
                fetched.flush()
                yield fetched.name, digest
    except (DagselError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - those of stores are of many kinds
        # Such an error becomes part of the run's record.
        raise WorkloadError(
            f"the base's file {without_credentials(file)} cannot be read here: "
            f"{said_of(file, error)}; each worker must reach it"
        ) from None


def _hash(source: Any, to: IO[bytes] | None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if to is not None:
            to.write(chunk)
    return digest.hexdigest()


def _opened(path: str, name: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise WorkloadError(
            f"the base's file {name} is no safetensors file: {error}; write it by "
            "safetensors.torch.save_model(module, path)"
        ) from error
    return weights


def _fill(module: torch.nn.Module, weights: dict[str, torch.Tensor], files: Sequence[str]) -> None:
    """Let a module's parameters and buffers be those of some files, which are not copied."""
    unused, there = set(weights), ", ".join(map(without_credentials, files))
    tensors: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (tensor, []))[1].append(name)
    for tensor, names in tensors.values():
        found = [name for name in names if name in weights]
        if not found:
            raise WorkloadError(
                f"the base's module has {names[0]!r}, and its files ({there}) have not: let "
                "model() build the module whose weights they hold"
            )
        weight = weights[found[0]]
        if weight.shape != tensor.shape:
            raise WorkloadError(
                f"{found[0]!r} of the base is {tuple(tensor.shape)} in its module and "
                f"{tuple(weight.shape)} in its files ({there}): let model() build the module whose "
                "weights they hold"
            )
        unused -= set(found)
        tensor.data = weight.to(tensor.dtype)
    if unused:
        raise WorkloadError(
            f"the base's files ({there}) have {min(unused)!r}, and its module has not: let model() "
            "build the module whose weights they hold"
        )
