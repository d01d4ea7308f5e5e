"""What `POST /generate` takes: SGLang's fields, as far as this engine has them.

Three steps, as there: the fields' types; the sampling parameters, where an unknown name is an error; then what the values
mean. A field of SGLang's that this engine does not have (adapters, images, grammars, penalties, ...) is refused unless it is
null or says the default, so that nobody samples from another distribution than they think; a name that SGLang does not
know either is ignored, as it ignores it. Does not know the model: what depends on it is the desk's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gcore.errors import EngineError
from gcore.rollout.engine.bodies import sentence
from gcore.rollout.engine.params import INT64, Asked, SamplingBody, sampling_params
from gcore.rollout.engine.refusals import BodyRefused, ParamsRefused

__all__ = ["Asked", "Generate", "SamplingBody", "generate_body"]


MOST_SAMPLES = 65_536
"""Of one request: so many are entered in a second, in which the engine hears nobody else."""
Id = Annotated[int, Field(ge=-INT64, lt=INT64)]
Ids = Annotated[list[Id], Field(fail_fast=True)]
"""The first wrong one is told; the complaints about a million of them would take gigabytes."""
IdLists = Annotated[list[Ids], Field(fail_fast=True)]
OneOrEach = Id | Ids
Texts = Annotated[list[str], Field(fail_fast=True)]

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


class _GenerateFields(BaseModel):
    """The body's fields and their types."""

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


@dataclass(frozen=True, slots=True)
class Generate:
    """A checked request: one entry of each list a prompt. Raises EngineError where there are too many samples."""

    prompts: tuple[str | list[int], ...]
    params: tuple[SamplingBody, ...]
    asked: tuple[Asked, ...]
    rids: tuple[str, ...] | None
    """None: the client gave no names."""
    stream: bool
    is_list: bool
    """Whether the answer is a list, even of one sample."""

    def __post_init__(self) -> None:
        if (count := sum(params.n for params in self.params)) > MOST_SAMPLES:
            raise EngineError(
                f"the request asks for {count} samples, and {MOST_SAMPLES} are the most", fix="Send several requests"
            )

    def asked_by(self, index: int) -> Asked:
        """What sample `index` of the answer asks for."""
        return self.asked[index // self.params[0].n]


def generate_body(value: Any) -> Generate:
    """Check a body of `/generate`. Raises BodyRefused, ParamsRefused, EngineError."""
    body = _fields(value)
    given = body.input_ids if body.text is None else body.text
    bodies = body.sampling_params
    params = sampling_params(bodies if isinstance(bodies, list) else [bodies or {}])
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

    wanted, starts, tops = each("return_logprob", False), each("logprob_start_len", -1), each("top_logprobs_num", 0)
    names = _named(body, prompts, is_batch=is_batch, several=several)
    found = []
    for want, start, top, named in zip(wanted, starts, tops, names, strict=True):
        if start < -1:
            raise EngineError(f"logprob_start_len must be at least -1, not {start}")
        prompt_from = None if start == -1 else start
        text = bool(body.return_text_in_logprobs)
        found.append(Asked(True, prompt_from, max(0, top), text, named) if want else Asked())
    return tuple(found)


def _named(body: _GenerateFields, prompts: Sequence[object], *, is_batch: bool, several: bool) -> list[tuple[int, ...]]:
    """`token_ids_logprob`, prompt by prompt: one list for all, or in a batch a list of lists."""
    given: list[Any] = body.token_ids_logprob or []
    if not given or isinstance(given[0], int):
        return [tuple(given)] * len(prompts)
    if not is_batch or len(given) != len(prompts):
        raise EngineError(f"token_ids_logprob has {len(given)} lists for {_count(is_batch, prompts)}")
    if several:
        raise EngineError("token_ids_logprob cannot be a list of lists when n is more than 1")
    return [tuple(tokens) for tokens in given]


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
