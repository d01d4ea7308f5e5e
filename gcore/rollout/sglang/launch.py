"""How an SGLang worker is told what to serve: the launch document from its supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from gcore.errors import UsageError
from gcore.tls.serving_http import ServingTls


class SglangLaunch(BaseModel):
    """What to serve, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["sglang"] = "sglang"
    python: str = Field(description="the Python that has SGLang")
    model: str = Field(description="folder of a Hugging Face model")
    task: Literal["generate", "classify"] = Field(
        "generate", description="what the model does: write, or say one number of a question"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, lt=65536, description="port to listen on; 0: any free one")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    gpus: PositiveInt = Field(1, description="GPUs that one copy of the model is spread over (tensor parallel)")
    first_gpu: int = Field(0, ge=0, description="the first of them, among those that the process sees")
    batch_slots: PositiveInt = Field(256, description="sequences decoded at once, at most")
    cache_tokens: PositiveInt | None = Field(None, description="tokens that the cache holds; default: from free memory")
    prefill_chunk_tokens: PositiveInt = Field(512, description="prompt tokens taken in between two decode steps")
    context_length: PositiveInt | None = Field(None, description="longest prompt and response; default: the model's")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="the weights' type")
    weight_version: str = Field("0.0", description="what the folder's weights are called")
    threads: PositiveInt = Field(1, description="CPU threads of the model")
    trust_remote_code: bool = Field(False, description="run Python code that the model's folder brings")
    api_key: str | None = Field(None, repr=False, description="key that every route asks for; default: none")
    tls: ServingTls | None = Field(None, description="certificate to serve with; default: plain HTTP")
    engine_args: tuple[str, ...] = Field((), description="further arguments of SGLang's server, word by word")


def from_document(document: Mapping[str, Any]) -> SglangLaunch:
    """The supervisor's document. Raises UsageError."""
    try:
        return SglangLaunch.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: {first['msg'].lower()}, not {first['input']!r}", where="launch document") from error
