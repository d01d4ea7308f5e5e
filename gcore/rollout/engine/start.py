"""From a launch to a core that serves: load the model, find its lane, bound its cache. Opens no port and starts no thread."""

from __future__ import annotations

from pathlib import Path

import torch

from gcore.errors import UsageError
from gcore.rollout.engine.core import Core, Limits
from gcore.rollout.engine.launch import EngineLaunch
from gcore.rollout.engine.memory import default_cache_tokens, free_bytes, memory_error_explained
from gcore.rollout.engine.model import load
from gcore.rollout.engine.prove import choose_lane
from gcore.rollout.engine.shared import SharedLane
from gcore.rollout.engine.text import Text

SHORTEST = 2
"""Tokens of a request: one of the prompt, one of the response."""
TOO_BIG = "Serve a smaller model, free memory on this machine, or set dtype bfloat16"


def start(launch: EngineLaunch, text: Text | None) -> Core:
    """Raises UsageError, DataError and EngineError, each in one sentence, for what cannot be served here."""
    device = device_of(launch)
    with memory_error_explained("while it loaded the model", TOO_BIG):
        model = load(
            Path(launch.model),
            dtype=launch.dtype,
            device=device,
            context=launch.context_length,
            text=text,
            trust_remote_code=launch.trust_remote_code,
        )
        lane = choose_lane(model, deterministic=launch.deterministic, chunk=launch.prefill_chunk_tokens)
    budget = launch.cache_tokens or default_cache_tokens(model.shape, free_bytes(model.shape.device))
    if isinstance(lane, SharedLane):
        lane = SharedLane(model, slots=launch.batch_slots, budget=budget)
    limits = Limits(launch.batch_slots, budget, launch.prefill_chunk_tokens)
    core = Core(model, text, lane, limits, version=launch.weight_version)
    if core.longest < SHORTEST:
        raise UsageError(
            f"a cache of {budget} tokens holds no request, not even one of {SHORTEST} tokens",
            where="--cache-tokens",
            fix="Raise rollout.cache_tokens, or leave it out and let the engine see what there is",
        )
    return core


def device_of(launch: EngineLaunch) -> str:
    """Where the model runs. Raises UsageError if that is not there."""
    device = launch.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device {device!r} is not there", where="--device", fix="Use --device cpu")
    return device
