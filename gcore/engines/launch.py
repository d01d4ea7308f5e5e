"""Settings with which an engine process starts: launch documents of all engines, and of the SGLang worker.

A launch document is JSON that the supervisor (`gcore.worker`) passes to the process. All but the SGLang worker may also
be started by hand, with the same settings as command-line options: `serve_launch` is what their programs do. Does not
import torch, which reads environment variables at import.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from gcore.api.tls import ServingTls
from gcore.errors import DataError, GcoreError, UsageError
from gcore.system.control_line import ControlLine
from gcore.system.daemon import set_up_logging
from gcore.system.process import thread_environment


class ServerLaunch(BaseModel):
    """Fields of the launch documents of all engines: which model to serve, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="folder of a Hugging Face model")
    task: Literal["generate", "classify"] = Field(
        "generate", description="what the model does: generate text, or score a question with one number"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, lt=65536, description="port to listen on; 0: any free one")
    batch_slots: PositiveInt = Field(256, description="maximum number of sequences decoded at once")
    threads: PositiveInt = Field(1, description="CPU threads of the model")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="the weights' type")
    weight_version: str = Field("0.0", description="version of the weights in the folder")
    context_length: PositiveInt | None = Field(
        None, description="maximum tokens of prompt and response together; default: the model's"
    )
    cache_tokens: PositiveInt | None = Field(
        None, description="maximum tokens in the cache; default: as many as fit into a part of the free memory"
    )
    prefill_chunk_tokens: PositiveInt = Field(512, description="prompt tokens prefilled between two decode steps")
    trust_remote_code: bool = Field(False, description="run Python code from the model's folder")
    api_key: str | None = Field(None, repr=False, description="key required by every route; default: none")
    tls: ServingTls | None = Field(None, description="certificate to serve with; default: plain HTTP")


class FrontEndLaunch(ServerLaunch):
    """Fields of the launch documents of engines behind gcore's own HTTP front end."""

    admin_api_key: str | None = Field(
        None, repr=False, description="key required by routes that change the engine; default: none"
    )


def _named_folders(given: Any) -> Any:
    """Convert NAME=FOLDER,... of a command line. Raises ValueError."""
    if not isinstance(given, str):
        return given
    pairs = [item.partition("=") for item in given.split(",")]
    if not all(name and folder for name, _, folder in pairs):
        raise ValueError("write NAME=FOLDER, several with commas between them")
    folders = {name: folder for name, _, folder in pairs}
    if len(folders) < len(pairs):
        raise ValueError("two adapters have the same name")
    return folders


class EngineLaunch(FrontEndLaunch):
    """Launch document of the torch engine and of the Hugging Face engine."""

    kind: Literal["engine"] = "engine"
    device: str | None = Field(None, description="cpu or cuda; default: cuda if available")
    deterministic: bool = Field(
        False, description="decode so that a sample's tokens do not depend on the rest of the batch"
    )
    adapters: Annotated[dict[str, str], BeforeValidator(_named_folders)] = Field(
        {}, description="NAME=FOLDER,...: adapters that requests may name (torch engine)"
    )
    adapter_digests: Annotated[dict[str, str], BeforeValidator(_named_folders)] = Field(
        {}, description="NAME=SHA256,...: digests that the adapters must have; default: not checked"
    )
    blobs: str = Field("", description="folder of pictures that requests may name; default: none")


class DenoisingLaunch(FrontEndLaunch):
    """Fields of the launch documents of engines that generate pictures by denoising."""

    guidance: float = Field(1.0, ge=0, description="guidance with which pictures are sampled; up to 1: none")
    height: PositiveInt | None = Field(None, description="height of pictures in pixels; default: the pipeline's")
    width: PositiveInt | None = Field(None, description="width of pictures in pixels; default: the pipeline's")
    blob_store: str = Field("", description="base URL of the blob store for arrays; default: arrays are in answers")
    blob_key: str = Field("", repr=False, description="key of the job for that store")
    job_uid: str = Field("", description="the job whose arrays they are")


class DiffusersLaunch(DenoisingLaunch):
    """Launch document of the diffusers engine."""

    kind: Literal["diffusers"] = "diffusers"
    device: str | None = Field(None, description="cpu or cuda; default: cuda if available")
    average: bool = Field(False, description="hold an average of the weights beside them, which requests may name")


class SglangLaunch(ServerLaunch):
    """Launch document of the SGLang worker."""

    kind: Literal["sglang"] = "sglang"
    python: str = Field(description="path of a Python with SGLang")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    gpus: PositiveInt = Field(1, description="GPUs of one copy of the model (tensor parallel)")
    first_gpu: int = Field(0, ge=0, description="index of the first GPU, among those visible to the process")
    engine_args: tuple[str, ...] = Field((), description="more arguments for SGLang's server, as a list")


class SglangDiffusionLaunch(DenoisingLaunch):
    """Launch document of SGLang's diffusion server behind gcore's routes."""

    kind: Literal["sglang-diffusion"] = "sglang-diffusion"
    python: str = Field(description="path of a Python with SGLang and the packages of its diffusion server")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    engine_args: tuple[str, ...] = Field((), description="more arguments for SGLang's server, as a list")


class VllmLaunch(FrontEndLaunch):
    """Launch document of the vLLM engine."""

    kind: Literal["vllm"] = "vllm"
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    gpus: PositiveInt = Field(1, description="GPUs of one copy of the model (tensor parallel)")
    engine_args: tuple[str, ...] = Field((), description="more arguments for vLLM's engine, as a list")


Launch = TypeVar("Launch", bound=ServerLaunch)


def check_folder(model: str) -> None:
    """Raise DataError unless the folder `model` has a config.json, or is a pipeline of diffusers. Cheap: call it before
    torch is imported."""
    if not any((Path(model) / name).is_file() for name in ("config.json", "model_index.json")):
        raise DataError(
            "the folder has no config.json, so it is not a model folder",
            where=model,
            fix="Name the folder of a Hugging Face model",
        )


def parse_launch(kind: type[Launch], document: Mapping[str, Any]) -> Launch:
    """Parse a launch document of this kind. Raises UsageError."""
    return _checked(kind, dict(document), "launch document")


def parse_arguments(kind: type[Launch], program: str, arguments: Sequence[str]) -> Launch:
    """Parse the command line of `program`, with the settings of this kind of launch document.

    Raises UsageError for an invalid value; for other mistakes argparse ends the process.
    """
    parser = argparse.ArgumentParser(program, description="Serve a model on SGLang's routes.")
    for name, field in kind.model_fields.items():
        if name not in ("kind", "tls", "engine_args"):
            parser.add_argument(f"--{name.replace('_', '-')}", required=field.is_required(), help=field.description)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    return _checked(kind, given, "command line")


def _checked(kind: type[Launch], values: dict[str, Any], where: str) -> Launch:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: {first['msg'].lower()}, not {first['input']!r}", where=where) from error


INTERRUPTED_EXIT = 130


def run_engine(program: str, server: str, kind: type[FrontEndLaunch] = EngineLaunch) -> None:
    """Run an engine that starts with this Python, and end the process with its exit code. The arguments are those of
    `serve_program`."""
    end_process(serve_program(program, server, kind))


def serve_program(program: str, server: str, kind: type[FrontEndLaunch] = EngineLaunch) -> int:
    """Serve with an engine that starts with this Python, and return the exit code.

    `program`: module that was started, for the usage message. `server`: module whose `serve_engine` serves; it is
    imported only after the environment is set up. `kind`: of its launch document.
    """
    # No other frameworks, no spinning threads.
    os.environ.setdefault("USE_TORCH", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def serve(launch: FrontEndLaunch, control: ControlLine | None) -> None:
        from gcore.system.torch_imports import compute_float32_exactly, leave_compiler_out

        leave_compiler_out()
        compute_float32_exactly()
        importlib.import_module(server).serve_engine(launch, control)

    return serve_launch(kind, f"python -m {program}", serve)


def serve_launch(kind: type[Launch], program: str, serve: Callable[[Launch, ControlLine | None], None]) -> int:
    """Parse the launch document or the command line, serve without access to model hubs, and return the exit code.

    `program`: as in the usage message.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    control = ControlLine.inherit()
    set_up_logging(level="WARNING")
    try:
        launch = parse_arguments(kind, program, sys.argv[1:]) if control is None else parse_launch(kind, control.launch)
        check_folder(launch.model)
        for name, value in thread_environment(launch.threads).items():
            os.environ.setdefault(name, value)
        serve(launch, control)
    except GcoreError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        if control is not None:
            control.send("failed", reason=str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    return 0


def end_process(code: int) -> None:
    """End the process with an exit code. Everything must be closed."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter shutdown: with torch's threads it is slow and may abort.
    os._exit(code)
