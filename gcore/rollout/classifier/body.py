"""What `POST /classify` takes: SGLang's fields, as far as a classifier has them. Does not know the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gcore.errors import EngineError
from gcore.rollout.engine.bodies import sentence
from gcore.rollout.engine.protocol import IdLists, Ids, Texts
from gcore.rollout.engine.refusals import BodyRefused

UNSERVED_FIELDS = frozenset(
    [
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "embed_overrides",
        "is_cross_encoder_request",
        "lora_path",
        "dimensions",
        "return_pooled_hidden_states",
        "multi_item_delimiter_indices",
        "token_indices_to_pool",
    ]
)
"""SGLang's fields of /classify that this engine does not have."""


class _ClassifyFields(BaseModel):
    """The body's fields and their types."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    text: str | Texts | None = None
    input_ids: Ids | IdLists | None = None
    rid: str | Texts | None = None


@dataclass(frozen=True, slots=True)
class Classify:
    """A request for scores. `is_list`: whether the answer is one."""

    questions: tuple[str | list[int], ...]
    rids: tuple[str, ...] | None
    is_list: bool


def classify_body(value: Any) -> Classify:
    """A request, from its parsed JSON. Raises BodyRefused, EngineError."""
    try:
        body = _ClassifyFields.model_validate(value)
    except ValidationError as error:
        raise BodyRefused(sentence(error)) from error
    if (body.text is None) == (body.input_ids is None):
        raise EngineError("give exactly one of text and input_ids")
    for name in sorted(UNSERVED_FIELDS & (body.model_extra or {}).keys()):
        if (body.model_extra or {})[name]:
            raise EngineError(f"{name} is not served by this engine", fix="Leave it out, or ask an SGLang server")
    given: Any = body.input_ids if body.text is None else body.text
    if given == [] and body.text is None:
        raise EngineError("input_ids cannot be empty")
    is_list = isinstance(given, list) and (body.text is not None or isinstance(given[0], list))
    questions: list[Any] = list(given) if is_list else [given]
    return Classify(tuple(questions), _rids(body.rid, questions, is_list=is_list), is_list)


def _rids(rid: str | list[str] | None, questions: Sequence[object], *, is_list: bool) -> tuple[str, ...] | None:
    """As SGLang names them: a list as it is, one name numbered through a batch."""
    if rid is None:
        return None
    if isinstance(rid, str):
        return tuple(f"{rid}_{i}" for i in range(len(questions))) if is_list else (rid,)
    if len(rid) != len(questions) or not is_list:
        raise EngineError(f"rid has {len(rid)} entries for {len(questions)} questions")
    if len(set(rid)) < len(rid):
        raise EngineError("rid names two questions alike")
    return tuple(rid)
