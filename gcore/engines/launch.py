"""Launch documents of the torch engine and of the SGLang worker, and the torch engine's command line. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from gcore.api.tls import ServingTls
from gcore.errors import DataError, UsageError


class ServerLaunch(BaseModel):
    """What both engines are told: what to serve, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="folder of a Hugging Face model")
    task: Literal["generate", "classify"] = Field(
        "generate", description="what the model does: write, or say one number of a question"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, lt=65536, description="port to listen on; 0: any free one")
    batch_slots: PositiveInt = Field(256, description="sequences decoded at once, at most")
    threads: PositiveInt = Field(1, description="CPU threads of the model")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="the weights' type")
    weight_version: str = Field("0.0", description="what the folder's weights are called")
    context_length: PositiveInt | None = Field(None, description="longest prompt and response; default: the model's")
    cache_tokens: PositiveInt | None = Field(
        None, description="tokens that the cache holds, at most; default: as many as fit a part of the free memory"
    )
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="tokens of waiting prompts read between two decode steps"
    )
    trust_remote_code: bool = Field(False, description="run Python code that the model's folder brings")
    api_key: str | None = Field(None, repr=False, description="key that every route asks for; default: none")
    tls: ServingTls | None = Field(None, description="certificate to serve with; default: plain HTTP")


class EngineLaunch(ServerLaunch):
    """Launch document of the torch engine."""

    kind: Literal["engine"] = "engine"
    device: str | None = Field(None, description="cpu or cuda; default: cuda where there is one")
    deterministic: bool = Field(False, description="decode so that a sample's tokens do not depend on its neighbours")
    admin_api_key: str | None = Field(None, repr=False, description="key that changing routes ask for; default: none")


class SglangLaunch(ServerLaunch):
    """Launch document of the SGLang worker."""

    kind: Literal["sglang"] = "sglang"
    python: str = Field(description="the Python that has SGLang")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    gpus: PositiveInt = Field(1, description="GPUs that one copy of the model is spread over (tensor parallel)")
    first_gpu: int = Field(0, ge=0, description="the first of them, among those that the process sees")
    engine_args: tuple[str, ...] = Field((), description="further arguments of SGLang's server, word by word")


Launch = TypeVar("Launch", bound=ServerLaunch)


def check_folder(model: str) -> None:
    """Whether it is a model folder at all, before anything heavy is imported. Raises DataError."""
    if not (Path(model) / "config.json").is_file():
        raise DataError(
            "this is no model folder, for it has no config.json",
            where=model,
            fix="Name the folder of a Hugging Face model",
        )


def parse_engine_launch(document: Mapping[str, Any]) -> EngineLaunch:
    """The supervisor's document. Raises UsageError."""
    return _checked(EngineLaunch, dict(document), "launch document")


def parse_sglang_launch(document: Mapping[str, Any]) -> SglangLaunch:
    """The supervisor's document. Raises UsageError."""
    return _checked(SglangLaunch, dict(document), "launch document")


def parse_engine_arguments(arguments: Sequence[str]) -> EngineLaunch:
    """The command line. Raises UsageError for a value that does not fit; argparse ends the process for the rest."""
    parser = argparse.ArgumentParser("python -m gcore.engines.torch", description="Serve a model on SGLang's routes.")
    for name, field in EngineLaunch.model_fields.items():
        if name not in ("kind", "tls"):
            parser.add_argument(f"--{name.replace('_', '-')}", required=field.is_required(), help=field.description)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    return _checked(EngineLaunch, given, "command line")


def _checked(kind: type[Launch], values: dict[str, Any], where: str) -> Launch:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: {first['msg'].lower()}, not {first['input']!r}", where=where) from error
