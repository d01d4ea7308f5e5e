"""Request and response bodies of the engine's routes: the fields of SGLang that gcore's engines support.

`/generate` is checked in three steps, as in SGLang: first the types of the fields; then the names and types of the
sampling parameters, where an unknown name is an error; then the values. A field of SGLang that these engines do not
support (adapters, images, grammars, penalties, ...) is refused unless it is null or has its default, so that a client
never samples from another distribution than it expects. A name unknown to SGLang is ignored. Administrative bodies are
parsed leniently: unknown fields are ignored, and fields about devices and loaders have no effect, except `load_format`,
because another loader would mean other weights.

Nothing here depends on the model: the request handlers check token IDs and lengths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gcore.engines.detokenizer import Detokenizer, cut_before
from gcore.engines.request import Finish, GenerationRequest, PauseMode, RequestOutput, RequestSampling, Top
from gcore.engines.serving.http import BodyRefused, ParamsRefused, validation_sentence
from gcore.errors import EngineError

GREEDY_BELOW = 1e-6
"""A lower temperature counts as greedy, as in SGLang, because dividing by it would overflow."""

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
"""SGLang's parameters that this engine does not support, and the values with which they have no effect (as null)."""


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Which log-probabilities a client requests.

    `output`: those of the sampled tokens. `prompt_from`: those of the prompt from this position on; None: none. `top`:
    number of most likely tokens per position. `text`: whether entries contain the token's text.
    """

    output: bool = False
    prompt_from: int | None = None
    top: int = 0
    text: bool = False
    named: tuple[int, ...] = ()
    """Tokens whose log-probabilities are requested at each position, likely or not."""


class SamplingFields(BaseModel):
    """Fields with the same names in SGLang's and OpenAI's bodies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False


class SamplingBody(SamplingFields):
    """`sampling_params` of one prompt. Null means the default, except for `max_new_tokens`, where it means no limit."""

    model_config = ConfigDict(strict=True)

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    sampling_seed: int | None = None
    stream_interval: int = 1

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None or k == "max_new_tokens" or k not in cls.model_fields}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings of `stop`, as a tuple; may be empty."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def makes_tokens(self) -> bool:
        """Whether any token is requested; if not, only the prompt is processed."""
        return self.max_new_tokens != 0

    def check(self) -> None:
        """Raise EngineError if a value is out of range."""
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
        return None if all(self.stop_strings) else "stop contains an empty string, which would end every sample at once"

    def sampling(
        self,
        *,
        index: int,
        drawn_seed: int,
        end_tokens: Sequence[int],
        room: int,
        vocabulary: int,
        asked: LogprobRequest,
    ) -> RequestSampling:
        """Convert to the engine's parameters for sample number `index` of `n`.

        `drawn_seed`: used without a `sampling_seed`. `end_tokens`: of the model. `room`: remaining tokens of the
        context, the limit without `max_new_tokens`. If no token is requested, one is generated but not reported. Raises
        EngineError for a named token outside the vocabulary.
        """
        strange = [token for token in asked.named if not 0 <= token < vocabulary]
        if strange:
            raise EngineError(f"token_ids_logprob contains {strange[0]}, but the vocabulary has {vocabulary} tokens")
        seed = drawn_seed if self.sampling_seed is None else self.sampling_seed % 2**64 + (index << 64)
        # As in SGLang, ignore_eos ignores all end tokens and stop tokens.
        stops = () if self.ignore_eos else {*end_tokens, *(self.stop_token_ids or ())}
        most = room if self.max_new_tokens is None else self.max_new_tokens
        return RequestSampling(
            max_new_tokens=max(1, most),
            seed=seed,
            # Without max_new_tokens, min_new_tokens may be any number, beyond the context and beyond 64 bits.
            min_new_tokens=min(self.min_new_tokens, max(1, most)),
            temperature=self.temperature if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 or self.top_k >= vocabulary else self.top_k,
            min_p=self.min_p,
            stop=self.stop_strings,
            # Tokens outside the vocabulary are never sampled.
            stop_token_ids=tuple(sorted(token for token in stops if 0 <= token < vocabulary)),
            top_logprobs=asked.top,
            named_tokens=asked.named,
            prompt_logprobs_from=asked.prompt_from,
        )


def sampling_params(bodies: list[dict[str, Any]]) -> list[SamplingBody]:
    """Parse `sampling_params` objects. Raises ParamsRefused, and EngineError for parameters that are not supported."""
    found = []
    for body in bodies:
        unserved = UNSERVED_PARAMS.keys() & body.keys()
        for name in sorted(unserved):
            if body[name] is not None and body[name] not in UNSERVED_PARAMS[name]:
                raise EngineError(f"{name} is not supported by this engine", fix="Remove it, or use an SGLang server")
        try:
            found.append(SamplingBody.model_validate({k: v for k, v in body.items() if k not in unserved}))
        except ValidationError as error:
            raise ParamsRefused(f"sampling_params: {validation_sentence(error)}") from error
    return found


MOST_SAMPLES = 65_536
"""Maximum number of samples of one request. Queueing this many takes a second, during which the engine handles no other
message.
"""

Id = Annotated[int, Field(ge=-INT64, lt=INT64)]

Ids = Annotated[list[Id], Field(fail_fast=True)]
"""A list of token IDs. Only the first wrong item is reported: errors about a million items would take gigabytes."""

IdLists = Annotated[list[Ids], Field(fail_fast=True)]
OneOrEach = Id | Ids
Texts = Annotated[list[str], Field(fail_fast=True)]

Picture = str | dict[str, Any]
"""A picture of a request: base64, a data URL, the path of a blob, or `{"blob": "sha256:HEX"}`."""

ImageData = Picture | list[Picture] | list[list[Picture]] | None
"""The field `image_data` of a request. In a batch it has a list for each prompt."""

UNSERVED_FIELDS = frozenset(
    [
        "input_embeds",
        "video_data",
        "audio_data",
        "mm_hashes",
        "mm_content_hashes",
        "session_params",
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
"""SGLang's fields of /generate that this engine does not support."""


class _GenerateFields(BaseModel):
    """Fields of the body of `/generate` with their types: step one of the check."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    text: str | Texts | None = None
    input_ids: Ids | IdLists | None = None
    sampling_params: dict[str, Any] | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    rid: str | Texts | None = None
    return_logprob: bool | Annotated[list[bool], Field(fail_fast=True)] | None = None
    logprob_start_len: OneOrEach | None = None
    top_logprobs_num: OneOrEach | None = None
    token_ids_logprob: Ids | IdLists | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    lora_path: str | Annotated[list[str | None], Field(fail_fast=True)] | None = None
    image_data: ImageData = None
    return_prompt_token_ids: bool | None = None


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked request to `/generate`. `prompts`, `params`, `asked`, `rids` and `adapters` have one entry per prompt.

    Raises EngineError for more than `MOST_SAMPLES` samples.
    """

    prompts: tuple[str | list[int], ...]
    params: tuple[SamplingBody, ...]
    asked: tuple[LogprobRequest, ...]
    rids: tuple[str, ...] | None
    """Request IDs that the client gave; None: it gave none."""
    stream: bool
    is_list: bool
    """Whether the response is a list, even with one sample."""
    adapters: tuple[str | None, ...]
    """Names of adapters; None: the policy."""
    pictures: tuple[tuple[Picture, ...], ...] = ()
    """The pictures of each prompt; empty: no prompt has any."""
    returns_prompt: bool = False
    """Whether each body has the prompt's tokens, with all placeholders of pictures."""

    def __post_init__(self) -> None:
        if (count := sum(params.n for params in self.params)) > MOST_SAMPLES:
            raise EngineError(
                f"the request asks for {count} samples; the maximum is {MOST_SAMPLES}", fix="Send several requests"
            )

    def asked_by(self, index: int) -> LogprobRequest:
        """Return which log-probabilities are requested for the sample at `index` of the response."""
        return self.asked[index // self.params[0].n]

    def adapter_numbers(self, known: Mapping[str, int]) -> list[int]:
        """Return the number of each prompt's adapter; 0: the policy. `known`: the engine's. Raises EngineError."""
        unknown = [name for name in self.adapters if name is not None and name not in known]
        if unknown:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise EngineError(f"lora_path names the adapter {unknown[0]!r}, which this engine does not have ({there})")
        return [0 if name is None else known[name] for name in self.adapters]


def generate_body(value: Any) -> GenerateCall:
    """Check the parsed JSON body of `/generate`. Raises BodyRefused, ParamsRefused, EngineError."""
    body = _fields(value)
    given = body.input_ids if body.text is None else body.text
    bodies = body.sampling_params
    params = sampling_params(bodies if isinstance(bodies, list) else [bodies or {}])
    if given is None or (body.text is not None and body.input_ids is not None):
        raise EngineError("give exactly one of text and input_ids")
    if given == [] and body.text is None:
        raise EngineError("input_ids cannot be empty")
    refuse_fields(body, UNSERVED_FIELDS)
    is_batch = isinstance(given, list) and (body.text is not None or isinstance(given[0], list))
    prompts: list[Any] = list(given) if is_batch else [given]
    if isinstance(bodies, list) and (len(bodies) != len(prompts) or not is_batch):
        raise EngineError(f"sampling_params is a list of {len(bodies)} for {_count(is_batch, prompts)}")
    params = params if isinstance(bodies, list) else params * len(prompts)
    for one in {id(p): p for p in params}.values():
        one.check()
    if len({p.n for p in params}) > 1:
        raise EngineError("n must be the same for all prompts")
    several = bool(params) and params[0].n > 1
    return GenerateCall(
        prompts=tuple(prompts),
        params=tuple(params),
        asked=_asked(body, prompts, is_batch=is_batch, several=several),
        rids=request_names(body.rid, prompts, "prompts", is_batch=is_batch, is_list=is_batch or several),
        stream=bool(body.stream),
        is_list=is_batch or several,
        adapters=_adapters(body, prompts, is_batch=is_batch),
        pictures=request_pictures(body.image_data, prompts, is_batch=is_batch),
        returns_prompt=bool(body.return_prompt_token_ids),
    )


def _adapters(body: _GenerateFields, prompts: Sequence[object], *, is_batch: bool) -> tuple[str | None, ...]:
    """Return the name of each prompt's adapter; empty means none."""
    given = body.lora_path
    each = given if isinstance(given, list) else [given] * len(prompts)
    if len(each) != len(prompts) or (isinstance(given, list) and not is_batch):
        raise EngineError(f"lora_path has {len(each)} entries for {_count(is_batch, prompts)}")
    return tuple(name or None for name in each)


def request_pictures(
    given: ImageData, prompts: Sequence[object], *, is_batch: bool, noun: str = "prompt"
) -> tuple[tuple[Picture, ...], ...]:
    """Return the pictures of each prompt from `image_data`; empty if none has any. Raises EngineError."""
    if not given:
        return ()
    if not is_batch:
        listed = given if isinstance(given, list) else [given]
        if any(isinstance(one, list) for one in listed):
            listed = [one for inner in listed for one in inner]
        return (tuple(listed),)  # type: ignore[arg-type]
    if not isinstance(given, list) or len(given) != len(prompts) or not all(isinstance(one, list) for one in given):
        raise EngineError(f"image_data of a batch is not a list with one list for each {noun}")
    return tuple(tuple(one) for one in given)


def refuse_fields(body: BaseModel, unserved: frozenset[str]) -> None:
    """Raise EngineError if `body` has one of the fields `unserved` with a value other than null, false or empty."""
    for name, value in sorted((body.model_extra or {}).items()):
        if value and name in unserved:
            raise EngineError(f"{name} is not supported by this engine", fix="Remove it, or use an SGLang server")


def _fields(value: Any) -> _GenerateFields:
    try:
        return _GenerateFields.model_validate(value)
    except ValidationError as error:
        try:
            _GenerateFields.model_validate(value, strict=False)
        except ValidationError:
            raise BodyRefused(validation_sentence(error)) from error
        # For example "yes" for true: SGLang's first check accepts it, and its second one refuses it.
        raise ParamsRefused(validation_sentence(error)) from error


def _asked(
    body: _GenerateFields, prompts: Sequence[str | list[int]], *, is_batch: bool, several: bool
) -> tuple[LogprobRequest, ...]:
    def each(name: str, default: Any) -> list[Any]:
        value = getattr(body, name)
        if not isinstance(value, list):
            return [default if value is None else value] * len(prompts)
        if not is_batch or len(value) != len(prompts):
            raise EngineError(f"{name} has {len(value)} entries for {_count(is_batch, prompts)}")
        if several:
            raise EngineError(f"{name} cannot be a list when n is more than 1")
        return value

    wanted, starts, tops = each("return_logprob", False), each("logprob_start_len", -1), each("top_logprobs_num", 0)
    names = _named(body, prompts, is_batch=is_batch, several=several)
    found = []
    for want, start, top, named in zip(wanted, starts, tops, names, strict=True):
        if start < -1:
            raise EngineError(f"logprob_start_len must be at least -1, not {start}")
        prompt_from = None if start == -1 else start
        text = bool(body.return_text_in_logprobs)
        found.append(LogprobRequest(True, prompt_from, max(0, top), text, named) if want else LogprobRequest())
    return tuple(found)


def _named(body: _GenerateFields, prompts: Sequence[object], *, is_batch: bool, several: bool) -> list[tuple[int, ...]]:
    """Return `token_ids_logprob` by prompt: one list for all prompts, or in a batch a list of lists."""
    given: list[Any] = body.token_ids_logprob or []
    if not given or isinstance(given[0], int):
        return [tuple(given)] * len(prompts)
    if not is_batch or len(given) != len(prompts):
        raise EngineError(f"token_ids_logprob has {len(given)} lists for {_count(is_batch, prompts)}")
    if several:
        raise EngineError("token_ids_logprob cannot be a list of lists when n is more than 1")
    return [tuple(tokens) for tokens in given]


def request_names(
    rid: str | list[str] | None, asked: Sequence[object], what: str, *, is_batch: bool, is_list: bool
) -> tuple[str, ...] | None:
    """Return the request ID of each entry of a request, as SGLang names them; None if the client gave none.

    A list of IDs must have one unique ID per entry. A single ID is numbered through a batch: "ID_0", "ID_1", ....
    `asked`: the entries. `what`: plural noun for them in errors. Raises EngineError.
    """
    if rid is None:
        return None
    if isinstance(rid, str):
        return tuple(f"{rid}_{i}" for i in range(len(asked))) if is_batch else (rid,)
    if len(rid) != len(asked) or not is_list:
        raise EngineError(f"rid has {len(rid)} entries for {_count(is_batch, asked, what)}")
    if len(set(rid)) < len(rid):
        raise EngineError(f"rid has the same name for two {what}")
    return tuple(rid)


def _count(is_batch: bool, asked: Sequence[object], what: str = "prompts") -> str:
    return f"{len(asked)} {what}" if is_batch else f"a single {what.removesuffix('s')}"


NUMBERED = re.compile(r"(_[0-9]+){0,2}")
"""Suffix of a sample's request ID after that of the request: the prompt's number in a batch, the sample's number in
`n`.
"""

Tag = Literal["weights", "kv_cache", "cuda_graph"]

LOADED = (None, "auto", "safetensors")
"""Accepted values of `load_format`: those that mean loading safetensors, as this engine does."""


class RequestBody(BaseModel):
    """Base class of the bodies of administrative routes: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class AbortBody(RequestBody):
    """POST /abort_request. Ends the request `rid` with all of its samples, or all requests."""

    rid: str | None = None
    abort_all: bool = False

    def names(self, rid: str) -> bool:
        """Whether this body means the sample with request ID `rid`: that of the body, or a numbered one below it."""
        mine, rest = self.rid or "", rid.removeprefix(self.rid or "")
        return bool(mine) and rid.startswith(mine) and NUMBERED.fullmatch(rest) is not None


class _ChangeBody(RequestBody):
    """Fields of all routes that change weights."""

    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True

    @field_validator("load_format")
    @classmethod
    def _is_loaded(cls, value: str | None) -> str | None:
        if value not in LOADED:
            raise ValueError(f"{value!r} is not a load format of this engine; remove load_format")
        return value


class UpdateFromDiskBody(_ChangeBody):
    """POST /update_weights_from_disk."""

    model_path: str


class UpdateDistributedBody(_ChangeBody):
    """POST /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    selector: Literal["target", "draft", "all"] = "all"


class InitGroupBody(RequestBody):
    """POST /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class GroupBody(RequestBody):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class BeginBody(RequestBody):
    """POST /begin_weight_update."""

    selector: Literal["target", "draft", "all"] = "all"


class EmptyBody(RequestBody):
    """POST /end_weight_update, /continue_generation: an object."""


class UpdateVersionBody(RequestBody):
    """POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class WeightsByNameBody(RequestBody):
    """GET or POST /get_weights_by_name."""

    name: str
    truncate_size: int = 100


class PauseBody(RequestBody):
    """POST /pause_generation."""

    mode: PauseMode = "abort"


class MemoryBody(RequestBody):
    """POST /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Tag] | None = None

    @property
    def wanted(self) -> frozenset[str]:
        """The named memory; "weights" and "kv_cache" if none is named. These engines have no CUDA graphs."""
        return frozenset(self.tags or ("weights", "kv_cache")) - {"cuda_graph"}


TextOf = Callable[[int], str]


def json_number(value: Any) -> Any:
    """Replace infinities and NaN in a number or in nested lists of numbers by None, which JSON can express."""
    if isinstance(value, list):
        return [json_number(one) for one in value]
    return value if value is None or math.isfinite(value) else None


def count_entries(delivery: RequestOutput, asked: LogprobRequest) -> int:
    """Return about how many list entries a sample's response body will have, to decide where to encode it."""
    of_prompt = delivery.prompt_logprobs
    positions = len(delivery.tokens) + (0 if of_prompt is None else len(of_prompt.values))
    return positions * (1 + asked.top + len(asked.named))


def count_answer_entries(answer: Mapping[str, Any], asked: LogprobRequest) -> int:
    """Return about how many list entries a composed response body has."""
    positions = len(answer["output_ids"]) + len(answer["meta_info"].get("input_token_logprobs", ()))
    return positions * (1 + asked.top + len(asked.named))


def sample_answer(
    delivery: RequestOutput,
    *,
    rid: str,
    text: str,
    prompt: Sequence[int],
    asked: LogprobRequest,
    text_of: TextOf,
    latency_s: float,
) -> dict[str, Any]:
    """Return the response body for one sample, in SGLang's format.

    `text_of`: returns the text of a token, for clients that request it with the log-probabilities. `latency_s`: seconds
    since the request arrived.
    """
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


def word_sample(
    delivery: RequestOutput,
    task: GenerationRequest,
    params: SamplingBody,
    asked: LogprobRequest,
    *,
    text: Detokenizer | None,
    latency_s: float,
) -> dict[str, Any]:
    """Decode an output and return the response body for its sample, in SGLang's format.

    `text`: the tokenizer; None: the model folder has none, and texts are empty.
    """
    if not params.makes_tokens:
        delivery = without_tokens(delivery)
    return sample_answer(
        delivery,
        rid=task.rid,
        text="" if text is None else _response_text(text, params, delivery),
        prompt=task.prompt,
        asked=asked,
        text_of=lambda token: "" if text is None else text.decode([token], skip_special_tokens=False),
        latency_s=latency_s,
    )


def _response_text(text: Detokenizer, params: SamplingBody, delivery: RequestOutput) -> str:
    """Return the text of an output, without the stop token or string that ended it unless `no_stop_trim` is set."""
    matched = None if delivery.ending is None or params.no_stop_trim else delivery.ending.matched
    tokens = delivery.tokens[:-1] if isinstance(matched, int) else delivery.tokens
    response = text.decode(tokens, skip_special_tokens=params.skip_special_tokens)
    return cut_before(response, matched) if isinstance(matched, str) else response


def _logprobs(
    delivery: RequestOutput, prompt: Sequence[int], asked: LogprobRequest, text_of: TextOf | None
) -> dict[str, Any]:
    def entry(logprob: float | None, token: int) -> list[Any]:
        return [json_number(logprob), token, None if text_of is None else text_of(token)]

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
        # As in SGLang the first token has no value, even if one is known.
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


def _finish_reason(ending: Finish | None, length: int) -> dict[str, Any] | None:
    if ending is None:
        return None
    if ending.kind == "length":
        return {"type": "length", "length": length}
    if ending.kind == "stop":
        return {"type": "stop", "matched": ending.matched}
    return {"type": "abort", "message": ending.message, "status_code": None, "err_type": None}


def without_tokens(delivery: RequestOutput) -> RequestOutput:
    """Remove the token of an output for a client that requested none: the engine always generates at least one."""
    ending = delivery.ending if delivery.ending is not None and delivery.ending.kind == "abort" else Finish("length")
    spans = (replace(delivery.spans[0], start=0, end=0),)
    return replace(delivery, tokens=(), logprobs=(), tops=(), spans=spans, ending=ending)
