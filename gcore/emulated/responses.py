"""What an emulated engine answers: tokens by the request's seed, lengths by the law, log-probabilities as if drawn. Pure.

The same request is answered alike whenever and wherever it is made, as by a real engine that heeds seeds: a response is a
function of seed and prompt. A greedy one is a function of the prompt and of the weights' name. The tokens are ordinary ones
of the model's vocabulary and mean nothing; a response that does not come to its longest length ends with an end token, if
there is one. Log-probabilities are those of a token drawn from a distribution of a few nats of entropy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gcore.emulated.law import Law, generator
from gcore.errors import DataError
from gcore.rollout.engine.tasks import Ending, Sampling
from gcore.rollout.engine.text import Text

MOST_ORDINARY = 4096
"""Tokens that responses are made of, at most: the first of the vocabulary that have a text."""
MEAN_LOGPROB = -0.8


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What of a model's vocabulary matters here: its size, tokens that have a text, tokens that end a response."""

    size: int
    ordinary: tuple[int, ...]
    end_tokens: tuple[int, ...]
    context: int

    @classmethod
    def load(cls, folder: Path, text: Text | None) -> Vocabulary:
        """Of a model's folder. Raises DataError."""
        config = _json(folder / "config.json")
        size = config.get("vocab_size")
        if not isinstance(size, int):
            raise DataError("the model's configuration has no vocab_size", where=str(folder / "config.json"))
        ends = _end_tokens(folder, config, text)
        ordinary: list[int] = []
        for token in range(size):
            if token not in ends and (text is None or text.decode([token], skip_special_tokens=True)):
                ordinary.append(token)
            if len(ordinary) == MOST_ORDINARY:
                break
        if not ordinary:
            raise DataError("no token of the model's vocabulary has a text", where=str(folder))
        context = config.get("max_position_embeddings")
        return cls(size, tuple(ordinary), ends, int(context) if isinstance(context, int) else 32_768)


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response, with how it ends."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ending: Ending


def respond(law: Law, words: Vocabulary, prompt_key: bytes, sampling: Sampling, version: str) -> Response:
    """The response that `sampling` gets to the prompt. `version`: the weights' name, which greedy responses follow."""
    about = prompt_key.hex()
    greedy = sampling.temperature == 0.0
    draws = generator("greedy", about, version) if greedy else generator("sample", sampling.seed, about)
    ends = tuple(token for token in sampling.stop_token_ids if 0 <= token < words.size)
    length = _length(law, about, draws)
    most = sampling.max_new_tokens
    stops = bool(ends) and max(length, sampling.min_new_tokens) < most
    count = min(max(length, sampling.min_new_tokens, 1), most) if ends else most
    tokens = [words.ordinary[i] for i in draws.integers(len(words.ordinary), size=count)]
    if stops:
        tokens[-1] = ends[0]
    spread = -MEAN_LOGPROB * draws.standard_exponential(count, dtype=np.float32)
    logprobs = tuple(float(-value) for value in spread)
    ending = Ending("stop", matched=tokens[-1]) if stops else Ending("length")
    return Response(tuple(tokens), logprobs, ending)


def _length(law: Law, about: str, draws: np.random.Generator) -> int:
    """Log-normal; the responses to one prompt have a part of it in common."""
    common = float(generator("length", law.seed, about).standard_normal())
    own = float(draws.standard_normal())
    likeness = law.response_likeness
    deviation = math.sqrt(likeness) * common + math.sqrt(1.0 - likeness) * own
    return max(1, round(law.response_tokens * math.exp(law.response_spread * deviation)))


def _end_tokens(folder: Path, config: dict[str, object], text: Text | None) -> tuple[int, ...]:
    """Those that the model's configuration names, or its tokenizer's."""
    generation = folder / "generation_config.json"
    for named in (_json(generation) if generation.is_file() else {}, config):
        value = named.get("eos_token_id")
        found: Sequence[object] = value if isinstance(value, list) else [value]
        ends = tuple(token for token in found if isinstance(token, int))
        if ends:
            return ends
    settings = folder / "tokenizer_config.json"
    name = _json(settings).get("eos_token") if settings.is_file() else None
    name = name.get("content") if isinstance(name, dict) else name
    token = text.token_id(name) if text is not None and isinstance(name, str) else None
    return () if token is None else (token,)


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the model's configuration cannot be read ({error})", where=str(path)) from error
    if not isinstance(value, dict):
        raise DataError("the model's configuration holds no JSON object", where=str(path))
    return value
