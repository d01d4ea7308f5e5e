"""The JSON of SGLang's native API, as far as a client writes and reads it: how responses are drawn, and what they are. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gcore.types import FinishReason, Sample, Version, VersionSpan

if TYPE_CHECKING:
    from gcore.rollout.client import SamplingParams


def sampling_body(params: SamplingParams, seed: int) -> dict[str, Any]:
    """How one response is drawn, with its seed."""
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": -1 if params.top_k is None else params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "stop": list(params.stop),
        "sampling_seed": seed,
    }
    # What is as if it were not there is not sent: a server of another version may not know it.
    if params.min_p > 0:
        body["min_p"] = params.min_p
    if params.min_new_tokens > 0:
        body["min_new_tokens"] = params.min_new_tokens
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    return body


def sample_of(answer: Mapping[str, Any]) -> Sample:
    """What an answer tells of one response; of one that still grows the finish reason is "abort".

    Raises KeyError, TypeError, ValueError, IndexError for what is no such answer.
    """
    meta = answer["meta_info"]
    triples = meta["output_token_logprobs"]
    tokens = tuple(int(token) for token in answer["output_ids"])
    count = len(tokens)
    if len(triples) != count:
        raise ValueError(f"{count} tokens came with {len(triples)} log-probabilities")
    logprobs = _as_float32([triple[0] for triple in triples])
    ending = meta["finish_reason"]  # of one that still grows there is none
    reason: FinishReason = "abort" if ending is None else ending["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    return Sample(tokens, logprobs, str(answer["text"]), reason, _spans(meta, count))


def score_of(answer: Mapping[str, Any]) -> float | None:
    """What an answer of a classifier tells: one number; None: it was told to give up.

    Raises KeyError, TypeError, ValueError for what is no such answer.
    """
    ending = answer["meta_info"].get("finish_reason") or {}
    if ending.get("type") == "abort":
        return None
    numbers = answer["embedding"]
    if not isinstance(numbers, list) or len(numbers) != 1:
        count = len(numbers) if isinstance(numbers, list) else "no list of"
        raise ValueError(f"a classifier gave {count} numbers, and a score is one")
    (score,) = _as_float32(numbers, "a score")
    return score


def is_growing(answer: Any) -> bool:
    """Whether more words on this response are to come."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    return isinstance(meta, dict) and meta.get("finish_reason", "") is None


def failure_of(answer: Any) -> tuple[int, str] | None:
    """The HTTP status and the sentence of a response that the engine could not serve, once its stream had begun with status 200.

    One that was aborted on request has no status.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    ending = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(ending, dict) or ending.get("type") != "abort":
        return None
    status = ending.get("status_code")
    return (status, words_of(ending)) if isinstance(status, int) and status >= 400 else None


def _as_float32(numbers: Sequence[float], what: str = "a log-probability") -> tuple[float, ...]:
    """Raises ValueError for what no rank takes: a group with such a number would be fed, and refused, for ever."""
    form = f"<{len(numbers)}f"
    try:
        rounded = struct.unpack(form, struct.pack(form, *numbers))
    except (struct.error, OverflowError) as error:  # null is what SGLang's JSON makes of NaN
        raise ValueError(f"{what} is no number ({error})") from error
    if not all(map(math.isfinite, rounded)):
        raise ValueError(f"{what} is not finite")
    return rounded


def _spans(meta: Mapping[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """Which version made which tokens; an engine that tells no spans made all with the one it names."""
    told = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    return tuple(VersionSpan(Version.parse(str(s["version"])), int(s["start"]), int(s["end"])) for s in told)


def words_of(answer: Any) -> str:
    """The engine's own sentence, in whichever of its shapes."""
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer.get("detail", answer)))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return str(answer)[:300]
