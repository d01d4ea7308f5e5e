"""The job's model as it was, for the KL to it: in memory only while it is used, and whole only where it fits.

Under ZeRO stages 1 and 2 every rank has all of it: in host memory, and on its GPU during the step's reference phase alone
(`train.offload_reference`). Under stage 3, where not even the policy fits on one, it is partitioned over the ranks like
the policy, and gathered layer by layer; offloaded, its part lies in host memory all the time. Where there is no GPU,
host memory is where it is used.

It is scored without gradients and never changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from torch import nn

from gcore.config.spec import TrainSpec
from gcore.train.batch import LogitsOf
from gcore.train.module import cast_parameters, logits_of
from gcore.train.trained import quieten


class Reference:
    """A frozen model. `awake` is a collective under stage 3, as is every use of what it gives."""

    def __init__(self, module: nn.Module, train: TrainSpec, device: torch.device) -> None:
        cast_parameters(module, torch.bfloat16 if train.dtype == "bf16" else torch.float32)
        module.requires_grad_(False).eval()
        self._module = module
        self._device = device
        self._moves = train.offload_reference and train.zero_stage < 3 and device.type != "cpu"
        if train.zero_stage == 3:
            self._logits_of = logits_of(_partitioned(module, train))
            return
        if not self._moves:
            module.to(device)
        self._logits_of = logits_of(module)

    @property
    def module(self) -> nn.Module:
        """What computes forward, wherever it is."""
        return self._module

    @contextlib.contextmanager
    def awake(self) -> Iterator[LogitsOf]:
        """Its logits, in the block."""
        if not self._moves:
            yield self._logits_of
            return
        self._module.to(self._device, non_blocking=True)
        try:
            yield self._logits_of
        finally:
            self._module.to("cpu")
            torch.cuda.empty_cache()


def _partitioned(module: nn.Module, train: TrainSpec) -> Any:
    quieten()
    buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
    zero: dict[str, Any] = {"stage": 3}
    if train.offload_reference and torch.cuda.is_available():
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    engine, *_ = deepspeed.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "bf16": {"enabled": train.dtype == "bf16"},
            "steps_per_print": None,
        },
    )
    engine.eval()
    for name, buffer in module.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
    return engine
