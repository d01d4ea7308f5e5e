"""How a sample is worded: SGLang's answer to `/generate`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gcore.rollout.engine.protocol import Asked
from gcore.rollout.engine.tasks import Delivery, Ending, Top

TextOf = Callable[[int], str]


def finite(value: Any) -> Any:
    """A number, or numbers in lists, with null for what JSON cannot say: an infinite one, or none at all (NaN)."""
    if isinstance(value, list):
        return [finite(one) for one in value]
    return value if value is None or math.isfinite(value) else None


def cost(delivery: Delivery, asked: Asked) -> int:
    """How many entries the lists of its answer have, about."""
    of_prompt = delivery.prompt_logprobs
    positions = len(delivery.tokens) + (0 if of_prompt is None else len(of_prompt.values))
    return positions * (1 + asked.top + len(asked.named))


def told_cost(answer: Mapping[str, Any], asked: Asked) -> int:
    """The same, once it has been put together."""
    positions = len(answer["output_ids"]) + len(answer["meta_info"].get("input_token_logprobs", ()))
    return positions * (1 + asked.top + len(asked.named))


def answer(
    delivery: Delivery, *, rid: str, text: str, prompt: Sequence[int], asked: Asked, text_of: TextOf, latency_s: float
) -> dict[str, Any]:
    """One sample. `text_of`: a token's own text, for those who ask for it beside the log-probabilities."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": _finish_reason(delivery.ending, len(delivery.tokens)),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(delivery.tokens),
        "reasoning_tokens": 0,
        "cached_tokens": delivery.cached_tokens,
        "num_retractions": delivery.retractions,
        "weight_version": delivery.spans[-1].version,
        "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in delivery.spans],
        "e2e_latency": latency_s,
    }
    if asked.output:
        meta |= _logprobs(delivery, prompt, asked, text_of if asked.text else None)
    return {"text": text, "output_ids": list(delivery.tokens), "meta_info": meta}


def _logprobs(delivery: Delivery, prompt: Sequence[int], asked: Asked, text_of: TextOf | None) -> dict[str, Any]:
    def entry(logprob: float | None, token: int) -> list[Any]:
        return [finite(logprob), token, None if text_of is None else text_of(token)]

    def entries(tops: Sequence[Top | None]) -> list[list[Any] | None]:
        return [None if top is None else [entry(*pair) for pair in top] for top in tops]

    output = zip(delivery.logprobs, delivery.tokens, strict=True)
    found: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": [entry(logprob, token) for logprob, token in output],
        "output_token_logprobs_length": len(delivery.tokens),
    }
    of_prompt = delivery.prompt_logprobs
    if of_prompt is not None:
        # As in SGLang the first of them stands without a number, even where one is known.
        values = [None, *of_prompt.values[1:]]
        tokens = prompt[of_prompt.start : of_prompt.start + len(values)]
        found["input_token_logprobs"] = [entry(v, t) for v, t in zip(values, tokens, strict=True)]
    if asked.top:
        found["input_top_logprobs"] = [] if of_prompt is None else entries([None, *of_prompt.tops[1:]])
        found["output_top_logprobs"] = entries(delivery.tops)
    if asked.named:

        def of_names(rows: Sequence[Sequence[float] | None]) -> list[list[Any] | None]:
            return [None if row is None else [entry(*p) for p in zip(row, asked.named, strict=True)] for row in rows]

        found["input_token_ids_logprobs"] = [] if of_prompt is None else of_names([None, *of_prompt.named[1:]])
        found["output_token_ids_logprobs"] = of_names(delivery.named[: len(delivery.tokens)])
    return found


def _finish_reason(ending: Ending | None, length: int) -> dict[str, Any] | None:
    if ending is None:
        return None
    if ending.kind == "length":
        return {"type": "length", "length": length}
    if ending.kind == "stop":
        return {"type": "stop", "matched": ending.matched}
    return {"type": "abort", "message": ending.message, "status_code": None, "err_type": None}


def emptied(delivery: Delivery) -> Delivery:
    """No tokens were asked for: the one that was made is not told."""
    ending = delivery.ending if delivery.ending is not None and delivery.ending.kind == "abort" else Ending("length")
    spans = (replace(delivery.spans[0], start=0, end=0),)
    return replace(delivery, tokens=(), logprobs=(), tops=(), spans=spans, ending=ending)
