"""What `POST /generate` takes: SGLang's fields, as far as this engine has them.

Three steps, as there: the fields' types; the sampling parameters, where an unknown name is an error; then what the values
mean. A field of SGLang's that this engine does not have (adapters, images, grammars, penalties, ...) is refused unless it is
null or says the default, so that nobody samples from another distribution than they think; a name that SGLang does not
know either is ignored, as it ignores it. Does not know the model: what depends on it is the desk's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gcore.errors import EngineError
from gcore.rollout.engine.bodies import sentence
from gcore.rollout.engine.refusals import BodyRefused, ParamsRefused
from gcore.rollout.engine.tasks import Sampling

GREEDY_BELOW = 1e-6
"""A lower temperature is greedy, as in SGLang: dividing by it would leave no finite numbers."""
MOST_STOP_STRINGS = 32
WHOLE_VOCABULARY = 1 << 30
"""SGLang's own word for a top_k that cuts nothing off; -1 is another."""
INT64 = 2**63

Id = Annotated[int, Field(ge=-INT64, lt=INT64)]
OneOrEach = Annotated[int, Field(ge=-INT64, lt=INT64)] | list[Id]

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
UNSERVED_FIELDS = frozenset(
    [
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "mm_hashes",
        "mm_content_hashes",
        "session_params",
        "lora_path",
        "lora_id",
        "custom_logit_processor",
        "positional_embed_overrides",
        "bootstrap_room",
        "max_thinking_tokens",
        "multi_item_delimiter_indices",
        "token_indices_to_pool",
        "return_hidden_states",
        "return_routed_experts",
        "return_indexer_topk",
        "return_sampling_mask",
        "sampling_logprobs_mode",
        "return_flat_raw_top_logprobs",
        "return_flat_raw_output_top_logprobs",
        "watermark",
        "kv_hints",
        "return_bytes",
        "return_entropy",
        "background",
    ]
)
"""SGLang's fields of /generate that this engine does not have."""


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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
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
        """
        seed = drawn_seed if self.sampling_seed is None else self.sampling_seed % 2**64 + (index << 64)
        # As in SGLang, ignoring the end ignores every token that would be one.
        stops = () if self.ignore_eos else {*end_tokens, *(self.stop_token_ids or ())}
        most = room if self.max_new_tokens is None else self.max_new_tokens
        return Sampling(
            max_new_tokens=max(1, most),
            seed=seed,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 or self.top_k >= vocabulary else self.top_k,
            min_p=self.min_p,
            stop=self.stop_strings,
            # A token that is not in the vocabulary is never drawn.
            stop_token_ids=tuple(sorted(token for token in stops if 0 <= token < vocabulary)),
            top_logprobs=asked.top,
            prompt_logprobs_from=asked.prompt_from,
        )


class _GenerateFields(BaseModel):
    """The body's fields and their types."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    text: str | list[str] | None = None
    input_ids: list[Id] | list[list[Id]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: OneOrEach | None = None
    top_logprobs_num: OneOrEach | None = None
    token_ids_logprob: list[Id] | list[list[Id]] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """Which log-probabilities are asked for. `prompt_from`: from which of the prompt's tokens on; None: of none."""

    output: bool = False
    prompt_from: int | None = None
    top: int = 0
    text: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """A checked request: one entry of each list a prompt."""

    prompts: tuple[str | list[int], ...]
    params: tuple[SamplingBody, ...]
    asked: tuple[Asked, ...]
    rids: tuple[str, ...] | None
    """None: the client gave no names."""
    stream: bool
    is_list: bool
    """Whether the answer is a list, even of one sample."""


def generate_body(value: Any) -> Generate:
    """Check a body of `/generate`. Raises BodyRefused, ParamsRefused, EngineError."""
    body = _fields(value)
    given = body.input_ids if body.text is None else body.text
    bodies = body.sampling_params
    params = _params(bodies if isinstance(bodies, list) else [bodies or {}])
    if given is None or (body.text is not None and body.input_ids is not None):
        raise EngineError("give exactly one of text and input_ids")
    if given == [] and body.text is None:
        raise EngineError("input_ids cannot be empty")
    for name in sorted(UNSERVED_FIELDS & (body.model_extra or {}).keys()):
        if (body.model_extra or {})[name]:
            raise EngineError(f"{name} is not served by this engine", fix="Leave it out, or ask an SGLang server")
    is_batch = isinstance(given, list) and (body.text is not None or isinstance(given[0], list))
    prompts: list[Any] = list(given) if is_batch else [given]
    if isinstance(bodies, list) and (len(bodies) != len(prompts) or not is_batch):
        raise EngineError(f"sampling_params is a list of {len(bodies)}, and there are {_count(is_batch, prompts)}")
    params = params if isinstance(bodies, list) else params * len(prompts)
    for one in {id(p): p for p in params}.values():
        one.check()
    if len({p.n for p in params}) > 1:
        raise EngineError("n must be the same for all prompts")
    several = bool(params) and params[0].n > 1
    return Generate(
        prompts=tuple(prompts),
        params=tuple(params),
        asked=_asked(body, prompts, is_batch=is_batch, several=several),
        rids=_rids(body.rid, prompts, is_batch=is_batch, several=several),
        stream=bool(body.stream),
        is_list=is_batch or several,
    )


def _fields(value: Any) -> _GenerateFields:
    try:
        return _GenerateFields.model_validate(value)
    except ValidationError as error:
        try:
            _GenerateFields.model_validate(value, strict=False)
        except ValidationError:
            raise BodyRefused(sentence(error)) from error
        # Something like "yes" for true: SGLang's first check lets it pass, and its second one refuses it.
        raise ParamsRefused(sentence(error)) from error


def _params(bodies: list[dict[str, Any]]) -> list[SamplingBody]:
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


def _asked(
    body: _GenerateFields, prompts: Sequence[str | list[int]], *, is_batch: bool, several: bool
) -> tuple[Asked, ...]:
    def each(name: str, default: Any) -> list[Any]:
        value = getattr(body, name)
        if not isinstance(value, list):
            return [default if value is None else value] * len(prompts)
        if not is_batch or len(value) != len(prompts):
            raise EngineError(f"{name} has {len(value)} entries for {_count(is_batch, prompts)}")
        if several:
            raise EngineError(f"{name} cannot be a list when n is more than 1")
        return value

    if body.token_ids_logprob:
        raise EngineError("token_ids_logprob is not served by this engine", fix="Ask for top_logprobs_num instead")
    wanted, starts, tops = each("return_logprob", False), each("logprob_start_len", -1), each("top_logprobs_num", 0)
    found = []
    for want, start, top in zip(wanted, starts, tops, strict=True):
        if start < -1:
            raise EngineError(f"logprob_start_len must be at least -1, not {start}")
        prompt_from = None if start == -1 else start
        text = bool(body.return_text_in_logprobs)
        found.append(Asked(True, prompt_from, max(0, top), text) if want else Asked())
    return tuple(found)


def _rids(
    rid: str | list[str] | None, prompts: Sequence[object], *, is_batch: bool, several: bool
) -> tuple[str, ...] | None:
    """As SGLang names them: a list as it is, one name numbered through a batch."""
    if rid is None:
        return None
    if isinstance(rid, str):
        return tuple(f"{rid}_{i}" for i in range(len(prompts))) if is_batch else (rid,)
    if len(rid) != len(prompts) or not (is_batch or several):
        raise EngineError(f"rid has {len(rid)} entries for {_count(is_batch, prompts)}")
    if len(set(rid)) < len(rid):
        raise EngineError("rid names two prompts alike")
    return tuple(rid)


def _count(is_batch: bool, prompts: Sequence[object]) -> str:
    return f"{len(prompts)} prompts" if is_batch else "a single prompt"
