"""Sampling parameters of `POST /generate`, and which log-probabilities are asked for.

A name that SGLang does not know is an error, and so is one that this engine does not have, unless it says the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gcore.errors import EngineError
from gcore.rollout.engine.bodies import sentence
from gcore.rollout.engine.refusals import ParamsRefused
from gcore.rollout.engine.tasks import Sampling

GREEDY_BELOW = 1e-6
"""A lower temperature is greedy, as in SGLang: dividing by it would leave no finite numbers."""
MOST_STOP_STRINGS = 32
INT64 = 2**63
UNSERVED_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "beam_width": (1,),
    "stop_regex": ([],),
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "logit_bias": ({},),
    "custom_params": ({},),
    "choice": ([],),
    "watermark": (),
}
"""SGLang's parameters that this engine does not have, and the values with which they change nothing (as does null)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which log-probabilities are asked for. `prompt_from`: from which of the prompt's tokens on; None: of none."""

    output: bool = False
    prompt_from: int | None = None
    top: int = 0
    text: bool = False
    named: tuple[int, ...] = ()
    """Tokens whose log-probabilities are asked for at each position."""


class SamplingBody(BaseModel):
    """`sampling_params`, for one prompt. Null is the default, but for `max_new_tokens`: there it is no limit."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None or k == "max_new_tokens" or k not in cls.model_fields}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def makes_tokens(self) -> bool:
        """Whether any token is asked for; without, only the prompt is looked at."""
        return self.max_new_tokens != 0

    def check(self) -> None:
        """Raises EngineError for a value that cannot be."""
        wrong = self._wrong_number() or self._wrong_stop()
        if wrong is not None:
            raise EngineError(wrong)

    def _wrong_number(self) -> str | None:
        most = math.inf if self.max_new_tokens is None else self.max_new_tokens
        table = (
            (0 <= self.temperature < math.inf, "temperature must be a finite number, at least 0", self.temperature),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p),
            (
                self.top_k >= 1 or self.top_k == -1,
                "top_k must be at least 1, or -1 for the whole vocabulary",
                self.top_k,
            ),
            (most >= 0, "max_new_tokens must be at least 0", self.max_new_tokens),
            (0 <= self.min_new_tokens <= most, f"min_new_tokens must be in [0, {most}]", self.min_new_tokens),
            (self.n >= 1, "n must be at least 1", self.n),
            (-INT64 <= (self.sampling_seed or 0) < INT64, "sampling_seed must fit in 64 bits", self.sampling_seed),
        )
        return next((f"{words}, not {value}" for fits, words, value in table if not fits), None)

    def _wrong_stop(self) -> str | None:
        if len(self.stop_strings) > MOST_STOP_STRINGS:
            return f"stop has {len(self.stop_strings)} strings; at most {MOST_STOP_STRINGS} are allowed"
        return None if all(self.stop_strings) else "stop holds an empty string, which would end every sample at once"

    def sampling(
        self, *, index: int, drawn_seed: int, end_tokens: Sequence[int], room: int, vocabulary: int, asked: Asked
    ) -> Sampling:
        """Sample `index` of `n`. Without a `sampling_seed` the engine's own `drawn_seed` serves.

        `room`: tokens that the context has left. A sample of no tokens is made as one of one token, which is not told.
        Raises EngineError for a token named that the vocabulary has not.
        """
        strange = [token for token in asked.named if not 0 <= token < vocabulary]
        if strange:
            raise EngineError(f"token_ids_logprob has {strange[0]}, and the vocabulary has {vocabulary} tokens")
        seed = drawn_seed if self.sampling_seed is None else self.sampling_seed % 2**64 + (index << 64)
        # As in SGLang, ignoring the end ignores every token that would be one.
        stops = () if self.ignore_eos else {*end_tokens, *(self.stop_token_ids or ())}
        most = room if self.max_new_tokens is None else self.max_new_tokens
        return Sampling(
            max_new_tokens=max(1, most),
            seed=seed,
            # Without a max_new_tokens it may be any number, beyond the context and beyond 64 bits.
            min_new_tokens=min(self.min_new_tokens, max(1, most)),
            temperature=self.temperature if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 or self.top_k >= vocabulary else self.top_k,
            min_p=self.min_p,
            stop=self.stop_strings,
            # A token that is not in the vocabulary is never drawn.
            stop_token_ids=tuple(sorted(token for token in stops if 0 <= token < vocabulary)),
            top_logprobs=asked.top,
            named_tokens=asked.named,
            prompt_logprobs_from=asked.prompt_from,
        )


def sampling_params(bodies: list[dict[str, Any]]) -> list[SamplingBody]:
    """The bodies' types. Raises ParamsRefused, and EngineError for what this engine does not have."""
    found = []
    for body in bodies:
        unserved = UNSERVED_PARAMS.keys() & body.keys()
        for name in sorted(unserved):
            if body[name] is not None and body[name] not in UNSERVED_PARAMS[name]:
                raise EngineError(f"{name} is not served by this engine", fix="Leave it out, or ask an SGLang server")
        try:
            found.append(SamplingBody.model_validate({k: v for k, v in body.items() if k not in unserved}))
        except ValidationError as error:
            raise ParamsRefused(f"sampling_params: {sentence(error)}") from error
    return found
