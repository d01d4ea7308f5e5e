"""Requests and answers of the engine's HTTP interface: SGLang's native one, as far as this engine has it.

Requests are checked strictly: a field that is unknown here, or of another type, is an error that names it. Fields that
SGLang knows and this engine does not (penalties, grammars, adapters, ...) are errors too, so that nobody samples from
another distribution than they think. Does not know the model; what depends on it (`admit`) is given as `Limits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gcore.rollout.engine.tasks import Delivery, Ending, Sampling

GREEDY_BELOW = 1e-6
"""A lower temperature is greedy, as in SGLang: dividing by it would leave no finite numbers."""

Tag = Literal["weights", "kv_cache"]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Body(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    http_worker_ipc: str | None = None


class SamplingBody(BaseModel):
    """`sampling_params`, for one prompt."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> SamplingBody:
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or -1 for the whole vocabulary")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) is more than max_new_tokens ({self.max_new_tokens})"
            )
        if not all(self.stop_strings):
            raise ValueError("stop holds an empty string")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, *, index: int, drawn_seed: int, end_tokens: Sequence[int]) -> Sampling:
        """Sample `index` of `n`. Without a `sampling_seed` the engine's own `drawn_seed` serves."""
        seed = drawn_seed if self.sampling_seed is None else self.sampling_seed % 2**64 + (index << 64)
        # As in SGLang, ignoring the end ignores every token that would be one.
        stop_ids = () if self.ignore_eos else tuple(sorted({*end_tokens, *(self.stop_token_ids or ())}))
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            seed=seed,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,
            stop=self.stop_strings,
            stop_token_ids=stop_ids,
        )


class GenerateBody(Body):
    """POST /generate."""

    text: str | Annotated[list[str], Field(min_length=1)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1)] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Literal[-1] | list[Literal[-1]] | None = None
    top_logprobs_num: Literal[0] | list[Literal[0]] | None = None
    return_text_in_logprobs: Literal[False] = False
    stream: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of text and input_ids")
        for name in ("sampling_params", "rid", "return_logprob"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != self.batch_size:
                raise ValueError(f"{name} has {len(value)} entries for {self.batch_size} prompts")
        return self

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list, even of one prompt."""
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, list) and not isinstance(given[0], int)

    @property
    def batch_size(self) -> int:
        """How many prompts."""
        given = self.input_ids if self.text is None else self.text
        assert given is not None
        return len(given) if self.is_batch else 1

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or as token ids."""
        given: Any = self.input_ids if self.text is None else self.text
        return given if self.is_batch else [given]

    @property
    def params(self) -> list[SamplingBody]:
        """Sampling parameters, prompt by prompt."""
        one = self.sampling_params
        return one if isinstance(one, list) else [one or SamplingBody()] * self.batch_size

    @property
    def logprobs(self) -> list[bool]:
        """Whether log-probabilities are asked for, prompt by prompt."""
        one = self.return_logprob
        return one if isinstance(one, list) else [bool(one)] * self.batch_size


class AbortBody(Body):
    """POST /abort_request. Ends the request `rid`, or the samples that were numbered under it."""

    rid: str = ""
    abort_all: bool = False
    abort_message: str | None = None

    def names(self, rid: str) -> bool:
        """Whether the sample called `rid` is meant."""
        return rid == self.rid or (self.rid != "" and rid.startswith(self.rid + "_"))


class UpdateFromDiskBody(Body):
    """POST /update_weights_from_disk. Fields about devices and loaders are taken and mean nothing here."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: bool = True


class UpdateVersionBody(Body):
    """POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class PauseBody(Body):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(Body):
    """POST /continue_generation."""

    torch_empty_cache: bool = True


class MemoryBody(Body):
    """POST /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Tag] | None = None

    @property
    def wanted(self) -> frozenset[str]:
        """The tags; both when none is named."""
        return frozenset(self.tags if self.tags is not None else ("weights", "kv_cache"))


def answer(
    delivery: Delivery, *, rid: str, text: str, prompt_tokens: int, with_logprobs: bool, latency_s: float
) -> dict[str, Any]:
    """One sample, as SGLang words it."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": _finish_reason(delivery.ending, len(delivery.tokens)),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(delivery.tokens),
        "cached_tokens": delivery.cached_tokens,
        "weight_version": delivery.spans[-1].version,
        "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in delivery.spans],
        "e2e_latency": latency_s,
    }
    if with_logprobs:
        pairs = zip(delivery.logprobs, delivery.tokens, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["output_token_logprobs_length"] = len(delivery.tokens)
        meta["input_token_logprobs"] = []
    return {"text": text, "output_ids": list(delivery.tokens), "meta_info": meta}


def _finish_reason(ending: Ending | None, length: int) -> dict[str, Any] | None:
    if ending is None:
        return None
    if ending.kind == "length":
        return {"type": "length", "length": length}
    if ending.kind == "stop":
        return {"type": "stop", "matched": ending.matched}
    return {"type": "abort", "message": ending.message}
