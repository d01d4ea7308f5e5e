"""Keeps torch's compiler, and what only sharded tensors need, out of a worker until something asks for them.

transformers decorates functions for `torch.compile` and imports DTensor as it is loaded, and an optimizer's first step
imports the compiler to tell it where to stop. gcore compiles nothing and shards through DeepSpeed, so for its workers that
is 1.5 s of a core and 70 MB each, at every start. `leave_compiler_out`, called before transformers is imported, puts a
stand-in in the compiler's place: what marks a function for the compiler leaves the function as it is, and anything else
loads the real one, which then stays. transformers is told that torch has no distributed part; the ranks' own use of it
(`gcore.train.backends.distributed`, DeepSpeed) does not go through transformers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"

_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
"""The one submodule that transformers takes a name from while it is loaded."""


def leave_compiler_out() -> None:
    """Once, before transformers is imported. Does nothing if the compiler is there already."""
    if _COMPILER not in sys.modules:
        spec = importlib.util.find_spec(_COMPILER)
        stand_in = _Compiler(_COMPILER)
        stand_in.__spec__, stand_in.__file__ = spec, spec.origin if spec else None
        sys.modules[_COMPILER] = stand_in
        sys.modules[_MASKS] = _Masks(_MASKS)
        vars(torch)["_dynamo"] = stand_in
    _say_there_is_no_distributed()


def _say_there_is_no_distributed() -> None:
    """transformers asks once and remembers the answer."""
    import torch.distributed as dist
    from transformers.utils import import_utils

    asked, dist.is_available = dist.is_available, lambda: False
    try:
        import_utils.is_torch_distributed_available()
    finally:
        dist.is_available = asked


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _unmarked


class _Compiler(ModuleType):
    """In the place of `torch._dynamo`."""

    disable = staticmethod(_unmarked)
    allow_in_graph = staticmethod(_unmarked)
    assume_constant_result = staticmethod(_unmarked)

    @staticmethod
    def graph_break(*_: Any) -> None:
        """Nothing is traced here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Who imports a submodule has it set on the package that was there when the import began.
        real = sys.modules.get(_COMPILER)
        target = self if real is None or isinstance(real, _Compiler) else real
        ModuleType.__setattr__(target, name, value)


class _Masks(ModuleType):
    """In the place of the submodule."""

    class TransformGetItemToIndex:
        """Becomes the real one when it is made."""

        def __new__(cls) -> Any:
            _real()
            return importlib.import_module(_MASKS).TransformGetItemToIndex()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks whether this is a package
            raise AttributeError(name)
        _real()
        return getattr(importlib.import_module(_MASKS), name)


def _real() -> ModuleType:
    """Load the compiler after all."""
    if isinstance(sys.modules.get(_COMPILER), _Compiler):
        del sys.modules[_COMPILER]
        sys.modules.pop(_MASKS, None)
        vars(torch).pop("_dynamo", None)
    return importlib.import_module(_COMPILER)
