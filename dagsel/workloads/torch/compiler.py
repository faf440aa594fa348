"""PyTorch's compiler, imported when something is compiled and not before.

Its import takes as long as PyTorch's own, and every optimizer imports it: when it is made, to say
that its methods are not to be compiled, and at each step, to say where compiled code has to end.
Where nothing is compiled both say nothing. A `DistributedDataParallel` asks in which way it is to
be compiled. So a module stands in for it that bears these three calls, and that makes way for the
compiler as soon as anybody asks for anything else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
#: Where PyTorch keeps what the compiler has made of a function that is not to be compiled.
_KEPT = "__dynamo_disable"


class _Deferred(ModuleType):
    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__spec__ = importlib.util.find_spec(_NAME)
        self.__file__ = None if self.__spec__ is None else self.__spec__.origin
        self._told: list[Any] = []  # functions that are not to be compiled

    def graph_break(self, *about: Any, **more: Any) -> None:
        """Nothing is compiled, so there is nothing to end; unless the compiler is here by now."""
        if sys.modules.get(_NAME) is not self:
            self.load().graph_break(*about, **more)

    def disable(self, fn: Any = None, *about: Any, **more: Any) -> Callable[..., Any]:
        """Return a function that PyTorch itself does not want compiled, as it is."""
        is_pytorchs = fn is not None and more == {"wrapping": False}
        if not is_pytorchs or sys.modules.get(_NAME) is not self:
            return self.load().disable(fn, *about, **more)  # type: ignore[no-any-return]
        self._told.append(fn)
        return fn  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # who looks through all modules does not ask for this one
        is_here = sys.modules.get(_NAME) is self
        return _Utils(self) if name == "utils" and is_here else getattr(self.load(), name)

    def load(self) -> Any:
        """Import the compiler in this module's place, unless it is here, and return it."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        if vars(torch).get("_dynamo") is self:
            del torch._dynamo
        compiler = importlib.import_module(_NAME)
        while self._told:  # by the next call PyTorch tells the compiler
            vars(self._told.pop()).pop(_KEPT, None)
        return compiler


class _Utils:
    def __init__(self, deferred: _Deferred) -> None:
        self._deferred = deferred

    def get_optimize_ddp_mode(self) -> str:
        """Return PyTorch's default: who sets another one asks for the compiler's settings."""
        if sys.modules.get(_NAME) is self._deferred:
            return "ddp_optimizer"
        return self._deferred.load().utils.get_optimize_ddp_mode()  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._deferred.load().utils, name)


def defer() -> None:
    """Put the compiler's import off, unless it is imported already."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = torch._dynamo = _Deferred()
