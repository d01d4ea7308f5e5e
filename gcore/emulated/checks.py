"""What an emulated engine knows of its model, and whether it can serve what it is asked for, as the torch engine's desk checks it."""

from __future__ import annotations

from dataclasses import dataclass

from gcore.emulated.responses import Verdict, Vocabulary
from gcore.errors import EngineError
from gcore.rollout.engine.params import SamplingBody
from gcore.rollout.engine.protocol import Asked
from gcore.rollout.engine.text import Text

UNTOLD = "an emulated engine computes nothing, and cannot tell {}"


@dataclass(frozen=True, slots=True)
class Model:
    """What all emulated engines of a process share of the model's folder."""

    path: str
    words: Vocabulary
    text: Text | None
    longest: int | None = None
    """Tokens of the longest response that the job asks it for."""
    verdict: Verdict | None = None
    """Of a judge."""


def tokens_of(model: Model, prompt: str | list[int], params: SamplingBody, asked: Asked) -> tuple[int, ...]:
    """The prompt's. Raises EngineError for what the model cannot take, and for what an emulated engine cannot tell."""
    words, text = model.words, model.text
    tokens: tuple[int, ...]
    if isinstance(prompt, str):
        if text is None:
            raise EngineError("the model folder has no tokenizer.json", fix="Send input_ids")
        tokens = text.encode(prompt)
    else:
        tokens = tuple(prompt)
    if not tokens:
        raise EngineError("the prompt has no tokens")
    wrong = next((token for token in (min(tokens), max(tokens)) if not 0 <= token < words.size), None)
    if wrong is not None:
        raise EngineError(f"token id {wrong} is not in the vocabulary of {words.size}")
    if len(tokens) + (params.max_new_tokens or 0) > words.context or len(tokens) >= words.context:
        raise EngineError(
            f"a prompt of {len(tokens)} tokens and max_new_tokens {params.max_new_tokens} exceed "
            f"the context of {words.context} tokens",
            fix="Shorten the prompt or lower max_new_tokens",
        )
    if params.stop_strings:
        raise EngineError(UNTOLD.format("where a stop string would come up"), fix="Use stop_token_ids")
    if asked.top or asked.named or (asked.prompt_from is not None and asked.prompt_from < len(tokens)):
        raise EngineError(UNTOLD.format("log-probabilities of anything but the response"))
    return tokens
