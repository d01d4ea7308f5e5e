"""What running out of memory is called, and which field of the spec to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gcore.config.spec import TrainSpec
from gcore.errors import GcoreError

WORDS = ("out of memory", "not enough memory", "DefaultCPUAllocator", "can't allocate memory")
"""What torch's own errors say of it, besides having a type of their own for it on GPUs."""

REMEDIES = ("micro_batch_tokens", "activation_checkpointing", "zero_stage", "offload_reference")
"""Fields that help against too little memory in a micro-batch, in this order."""


class OutOfMemory(GcoreError):
    """A rank's memory does not hold what the spec makes it compute."""


@contextlib.contextmanager
def explained(doing: str, train: TrainSpec, fields: tuple[str, ...]) -> Iterator[None]:
    """Turn running out of memory in the block into OutOfMemory. `fields`: of `remedies`, those that would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        known = remedies(train)
        fix = ", or ".join(known[name] for name in fields if name in known)
        raise OutOfMemory(
            f"out of memory while {doing} ({_first_line(error)})",
            fix=f"{fix[0].upper()}{fix[1:]}" if fix else "Use more train ranks, or larger ones",
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what torch or Python raise when there is no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def remedies(train: TrainSpec) -> dict[str, str]:
    """What can still be changed in the spec, by field, in the order in which to try."""
    found = {"micro_batch_tokens": f"lower train.micro_batch_tokens (now {train.micro_batch_tokens})"}
    if not train.activation_checkpointing:
        found["activation_checkpointing"] = "set train.activation_checkpointing: true"
    if train.zero_stage < 3:
        found["zero_stage"] = f"raise train.zero_stage (now {train.zero_stage}) with more train ranks"
    if train.kl_coef > 0 and not train.offload_reference:
        found["offload_reference"] = "set train.offload_reference: true"
    return found


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
