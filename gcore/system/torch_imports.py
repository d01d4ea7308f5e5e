"""How a worker sets torch up: without the compiler and DTensor until something needs them, and with float32 that is float32.

transformers decorates functions for `torch.compile` and imports DTensor at load, a process group clears the compiler's caches, activation
checkpointing reads a setting of it, and an optimizer's first step imports it to mark graph breaks. gcore compiles nothing and shards with
DeepSpeed, so this would cost each worker 1.5 s of CPU time and 70 MB at every start. `leave_compiler_out`, called before transformers is
imported, replaces the compiler by a stub. Decorators for the compiler return functions unchanged; any other access loads the real compiler,
which then stays. transformers sees a torch without a distributed package. The ranks' own
use of it (`gcore.train.backends.distributed`, DeepSpeed) does not go through transformers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"

_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
"""The only submodule from which transformers imports a name at load."""


def leave_compiler_out() -> None:
    """Install the stub, once, before transformers is imported. Does nothing if the compiler is already loaded."""
    if _COMPILER not in sys.modules:
        spec = importlib.util.find_spec(_COMPILER)
        stand_in = _Compiler(_COMPILER)
        stand_in.__spec__, stand_in.__file__ = spec, spec.origin if spec else None
        sys.modules[_COMPILER] = stand_in
        sys.modules[_MASKS] = _Masks(_MASKS)
        vars(torch)["_dynamo"] = stand_in
    _say_there_is_no_distributed()


def compute_float32_exactly() -> None:
    """Keep convolutions in float32 from rounding their inputs to TF32 on GPUs, as torch does by default. Matrix products do not.

    Engines and ranks must have the same log-probabilities, and the patch embedding of a vision tower is a convolution.
    """
    torch.backends.cudnn.allow_tf32 = False


def _say_there_is_no_distributed() -> None:
    """Make transformers conclude that torch has no distributed package: it calls `dist.is_available` once and caches the result."""
    import torch.distributed as dist
    from transformers.utils import import_utils

    asked, dist.is_available = dist.is_available, lambda: False
    try:
        import_utils.is_torch_distributed_available()
    finally:
        dist.is_available = asked


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _unmarked


class _Part:
    """The stub for a module of the compiler: what torch uses of it outside the compiler."""

    def __init__(self, name: str, **used: Any) -> None:
        vars(self).update(used, _name=name)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_real(), self._name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(_real(), self._name), name, value)


class _Compiler(ModuleType):
    """The stub for `torch._dynamo`."""

    config = _Part("config", error_on_nested_fx_trace=True)  # activation checkpointing uses it only while it is traced
    trace_rules = _Part("trace_rules", clear_lru_cache=lambda: None)  # nothing was cached

    disable = staticmethod(_unmarked)
    allow_in_graph = staticmethod(_unmarked)
    assume_constant_result = staticmethod(_unmarked)

    @staticmethod
    def graph_break(*_: Any) -> None:
        """No-op, because nothing is traced."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets a submodule on the package object that existed when the import began.
        real = sys.modules.get(_COMPILER)
        target = self if real is None or isinstance(real, _Compiler) else real
        ModuleType.__setattr__(target, name, value)


class _Masks(ModuleType):
    """The stub for `_MASKS`. An access to a name loads the real compiler and then the real submodule."""

    class TransformGetItemToIndex:
        """Stands for the class of the same name in torch; creating an instance loads the real compiler."""

        def __new__(cls) -> Any:
            _real()
            return importlib.import_module(_MASKS).TransformGetItemToIndex()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system checks whether this is a package
            raise AttributeError(name)
        _real()
        return getattr(importlib.import_module(_MASKS), name)


def _real() -> ModuleType:
    """Remove the stubs, and return the real module `torch._dynamo`."""
    if isinstance(sys.modules.get(_COMPILER), _Compiler):
        del sys.modules[_COMPILER]
        sys.modules.pop(_MASKS, None)
        vars(torch).pop("_dynamo", None)
    return importlib.import_module(_COMPILER)
