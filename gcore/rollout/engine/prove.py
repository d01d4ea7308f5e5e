"""The proof, at start, that the engine's cache and attention serve this model.

Two short prompts of different length are continued greedily by the engine's own loop, and the log-probabilities of what
came out are compared with one plain forward pass of the same module. A model whose positions, attention or states the
loop does not honour gives other numbers, and is refused; so no table of supported models has to be kept. What shows only
in long contexts (a sliding window) `model` finds in the configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gcore.errors import DataError
from gcore.rollout.engine.attention import UnsupportedAttention
from gcore.rollout.engine.decoder import Decoder
from gcore.rollout.engine.model import Model, use_own_attention
from gcore.rollout.engine.tasks import Sampling, Task, Work

LENGTHS = (3, 6)
CONTINUED = 4
FIX = "Serve it with SGLang instead"


def prove(model: Model, folder: Path) -> None:
    """Raises DataError for a model that cannot be served; afterwards the module attends in the engine's way."""
    if model.context < max(LENGTHS) + CONTINUED:
        raise DataError(f"its context of {model.context} tokens is too short to serve", where=str(folder))
    works = []
    for number, length in enumerate(LENGTHS):
        prompt = tuple((7 * number + 5 * i + 1) % model.vocabulary for i in range(length))
        sampling = Sampling(CONTINUED, seed=0, temperature=0.0)
        works.append(Work(Task(number, "proof", prompt, sampling)))
    use_own_attention(model)
    decoder = Decoder(model, len(works))
    try:
        decoder.join(works)
        for _ in range(CONTINUED - 1):
            decoder.step()
        done = decoder.leave(range(len(works)))
        model.module.set_attn_implementation("eager")
        error = max(_error(model, work) for work in done)
    except (UnsupportedAttention, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as problem:
        reason = " ".join(str(problem).split())[:300]
        raise DataError(f"the torch engine cannot serve this model: {reason}", where=str(folder), fix=FIX) from problem
    use_own_attention(model)
    allowed = 1e-3 if model.shape.dtype == torch.float32 else 0.25
    if not error <= allowed:
        raise DataError(
            f"the torch engine cannot serve this model: its log-probabilities come out {error:.3g} off",
            where=str(folder),
            fix=FIX,
        )


@torch.inference_mode()
def _error(model: Model, work: Work) -> float:
    """The largest difference between the work's log-probabilities and a plain forward pass."""
    ids = torch.tensor([[*work.task.prompt, *work.tokens]], device=model.shape.device)
    logits: Any = model.module(input_ids=ids, use_cache=False).logits
    begin = len(work.task.prompt) - 1
    plain = torch.log_softmax(logits[0, begin:-1].float(), dim=-1).gather(-1, ids[0, begin + 1 :, None])[:, 0]
    return float((plain.cpu() - torch.tensor(work.logprobs)).abs().max())
