"""SGLang's command lines and environment variables, for texts and for pictures, and a head bias that SGLang needs.

The job's `rollout.engine_args` come last. argparse uses the last value of an option, so a user can override each option
set here, except those that the worker depends on (`OURS`, `OURS_FOR_PICTURES`) and those that control access (`GUARDS`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore.engines.launch import SglangDiffusionLaunch, SglangLaunch
from gcore.errors import DataError, UsageError
from gcore.media.model_files import media_token_ids
from gcore.models.checks import read_config
from gcore.models.diffusion.files import PipelineFiles
from gcore.models.diffusion.settings import DDIM
from gcore.models.hubs import INDEX
from gcore.system.network import bypass_proxies, free_ports
from gcore.system.process import thread_environment

CPU_CACHE_TOKENS = 65536
"""Minimum size in tokens of a CPU server's KV cache if none is set. SGLang's default is 30 % of all memory per server.
"""

CUDA_MEM_FRACTION = "0.5"
"""Share of GPU memory for weights and cache together: a train rank on the same GPU needs the rest."""

CPU_ARGUMENTS = (
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--mem-fraction-static", "0.3"),
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    # Weights change every step and a group's common prefix is short, so a prefix cache gains little. Without it only
    # memory limits the batch.
    "--disable-radix-cache",
)

NEVER = -1e9
"""Bias of the logits of media tokens: they are never sampled at any temperature, and no log-probability includes them.
JSON has no infinity."""

NO_URLS = ("--allowed-media-domains", "none.invalid")
"""The only domain from which the server would download pictures. The name can never exist."""

OURS = (
    *("--model-path", "--model", "--host", "--port", "--weight-version"),
    *("--preferred-sampling-params", "--allowed-media-domains"),
)

GUARDS = (
    "--api-key",
    "--admin-api-key",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--ssl-ca-certs",
    "--ssl-keyfile-password",
    "--config",
)
"""Options that control access to the server, which only gcore may set; and a file of arguments, which could contain any
of them.
"""

DROPPED = (
    *("SGLANG_USE_CPU_ENGINE", "SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_CACHE_DIT_ENABLED"),
    *("GCORE_CONTROL_FD", "PYTHONPATH", "PYTHONHOME"),
)
"""Environment variables that are not passed to the server. The first three would change the meaning of log-probabilities;
the others are meant for gcore's own processes.
"""

NO_COMPILER = {"TORCH_COMPILE_DISABLE": "1"}
"""On a CPU the first request with a picture would otherwise wait for a C++ compiler, at each start of a server. Variables
of the worker have priority."""

NO_FEATURE_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
"""SGLang keeps the features of pictures after a weight update, even if it flushes its caches. Without the cache, each
batch computes the features of each picture once."""


def server_command(launch: SglangLaunch, port: int) -> tuple[str, ...]:
    """Return the command line that starts the server on `port`. Raises UsageError for engine_args that gcore sets."""
    check_engine_args(launch.engine_args)
    words = [launch.python, "-m", "sglang.launch_server"]
    words += ["--model-path", launch.model, "--host", launch.host, "--port", str(port)]
    words += ["--weight-version", launch.weight_version, "--dtype", launch.dtype]
    words += ["--max-running-requests", str(launch.batch_slots)]
    words += ["--chunked-prefill-size", str(launch.prefill_chunk_tokens)]
    if launch.context_length is not None:
        words += ["--context-length", str(launch.context_length)]
    if launch.trust_remote_code:
        words.append("--trust-remote-code")
    if launch.task == "classify":
        words.append("--is-embedding")  # SGLang's option for all models that do not generate
    # Without --sleep-on-idle the scheduler spins on a whole core while it is idle.
    words += ["--enable-metrics", "--sleep-on-idle", "--log-level-http", "warning"]
    # The warm-up is an English sentence, which a custom tokenizer may not be able to encode. The health check generates
    # a token.
    words.append("--skip-server-warmup")
    if launch.api_key is not None:
        words += ["--api-key", launch.api_key]
    if launch.tls is not None:
        words += ["--ssl-certfile", launch.tls.cert, "--ssl-keyfile", launch.tls.key, "--enable-ssl-refresh"]
    if media := media_token_ids(read_config(Path(launch.model))):
        words += ["--preferred-sampling-params", json.dumps({"logit_bias": dict.fromkeys(map(str, media), NEVER)})]
        words += NO_URLS
    words += _on_cpu(launch) if launch.device == "cpu" else _on_cuda(launch)
    return (*words, *launch.engine_args)


def _on_cpu(launch: SglangLaunch) -> list[str]:
    tokens = launch.cache_tokens or max(CPU_CACHE_TOKENS, launch.context_length or 0)
    return ["--device", "cpu", *CPU_ARGUMENTS, "--max-total-tokens", str(tokens)]


def _on_cuda(launch: SglangLaunch) -> list[str]:
    words = ["--device", "cuda", "--base-gpu-id", str(launch.first_gpu), "--tp-size", str(launch.gpus)]
    words += ["--mem-fraction-static", CUDA_MEM_FRACTION, "--enable-memory-saver"]
    if launch.cache_tokens is not None:
        words += ["--max-total-tokens", str(launch.cache_tokens)]
    return words


@dataclass(frozen=True, slots=True)
class DiffusionPorts:
    """The ports of a diffusion server on the loopback interface. `http`: its routes; it also takes the next port."""

    http: int
    scheduler: int
    master: int

    @staticmethod
    def free() -> DiffusionPorts:
        """Ports at which a server can listen. Raises CannotListen."""
        return DiffusionPorts(*free_ports(1, adjacent=2), *free_ports(2))


def diffusion_command(launch: SglangDiffusionLaunch, kind: str, ports: DiffusionPorts) -> tuple[str, ...]:
    """Return the command line that starts SGLang's diffusion server for a pipeline of the class `kind`. It has no API keys and no
    TLS, and runs code that it is sent at its ports, so it listens on the loopback interface alone. Raises UsageError.
    """
    check_picture_engine_args(launch.engine_args)
    if launch.dtype != "float32":
        raise UsageError(
            f"SGLang rounds states to the network's type, {launch.dtype}, after it has computed their log-probabilities",
            where="--dtype",
            fix="Use float32",
        )
    name, encoders = DIFFUSION_MODELS[kind]
    words = [launch.python, "-m", "sglang.multimodal_gen.runtime.launch_server"]
    # Without a name SGLang serves a folder with diffusers' own pipeline, which has no rollouts.
    words += ["--model-path", launch.model, "--backend", "sglang", "--model-id", name]
    words += ["--host", "127.0.0.1", "--port", str(ports.http), "--strict-ports"]
    words += ["--scheduler-port", str(ports.scheduler), "--master-port", str(ports.master)]
    words += ["--num-gpus", "1", "--batching-max-size", "1", "--dit-precision", "fp32", "--allow-cudnn-tf32", "false"]
    if launch.device == "cpu":
        words += ["--vae-precision", "fp32", "--text-encoder-precisions", *["fp32"] * encoders]
    if launch.trust_remote_code:
        words.append("--trust-remote-code")
    if kind == "FluxPipeline":
        # A Flux network that takes the guidance as an input gets the server's, and not that of a request.
        words += ["--embedded-cfg-scale", str(launch.guidance)]
    words += ["--vae-tiling", "false", "--warmup-mode", "off", "--sleep-on-idle", "--output-path", ""]
    words += ["--uvicorn-access-log-exclude-prefixes", "/health"]
    return (*words, *launch.engine_args)


DIFFUSION_MODELS: Mapping[str, tuple[str, int]] = {
    "QwenImagePipeline": ("Qwen-Image", 1),
    "StableDiffusion3Pipeline": ("stable-diffusion-3.5-medium-diffusers", 3),
    "FluxPipeline": ("FLUX.1-dev", 2),
}
"""By class of a pipeline: the name of SGLang's implementation, and the number of its text encoders."""


def check_pipeline(files: PipelineFiles, guidance: float) -> None:
    """Raise DataError for a pipeline whose rollouts SGLang does not compute as ranks replay them."""
    why = ""
    if files.scheduler == DDIM:
        why = f"SGLang has rollouts only of flow matching, and this pipeline has a {DDIM}"
    elif files.kind not in DIFFUSION_MODELS:
        why = f"SGLang has no rollouts of a {files.kind}, but of {', '.join(sorted(DIFFUSION_MODELS))}"
    elif files.kind == "QwenImagePipeline" and files.is_distilled:
        why = "SGLang does not pass the guidance to a Qwen-Image network that takes it as an input"
    elif files.kind == "FluxPipeline" and not files.is_distilled and guidance > 1:
        why = f"SGLang's guidance of Flux networks without guidance as an input is not proved, and it is {guidance:g}"
    if why:
        raise DataError(why, where=str(files.folder), fix="Use rollout.engine: diffusers")


OURS_FOR_PICTURES = (
    *("--model-path", "--backend", "--config", "--pipeline-config-path"),
    *("--host", "--port", "--strict-ports", "--scheduler-port", "--master-port"),
    *("--num-gpus", "--gpu-ids", "--base-gpu-id", "--tp-size", "--dp-size", "--data-parallel-size", "--sp-degree"),
    *("--nnodes", "--disagg-role", "--batching-max-size", "--batching-mode", "--batching-config", "--dit-precision"),
    *("--scheduler-class-override", "--flow-shift", "--transformer-weights-path", "--lora-path", "--quantization"),
    *("--embedded-cfg-scale", "--enable-svdquant", "--cache-dit-config"),
)
"""Options of the diffusion server that the engine depends on, or that change what its network computes."""


def check_engine_args(
    engine_args: Sequence[str], where: str = "rollout.engine_args", ours: Sequence[str] = (*OURS, *GUARDS)
) -> None:
    """Raise UsageError if `engine_args` contain an option that only gcore may set (`ours`). `where`: their field of the spec."""
    for word in engine_args:
        # argparse accepts the beginning of an option as the whole option, and SGLang's diffusion server also underscores.
        name = word.partition("=")[0].replace("_", "-")
        if len(name) > 2 and any(option.startswith(name) for option in ours):
            raise UsageError(f"{name} is set by gcore", where=where, fix=f"Remove {name} from {where}")


def check_picture_engine_args(engine_args: Sequence[str], where: str = "rollout.engine_args") -> None:
    """Raise UsageError if arguments of the diffusion server contain an option that only gcore may set."""
    check_engine_args(engine_args, where, OURS_FOR_PICTURES)


def server_environment(
    launch: SglangLaunch | SglangDiffusionLaunch, base: Mapping[str, str], scratch: Path
) -> dict[str, str]:
    """Return the server's environment variables: those of `base`, with changes.

    `scratch`: folder for temporary files, which include sockets, so its path must be short.
    """
    kept = {name: value for name, value in base.items() if name not in DROPPED}
    return (
        (NO_COMPILER if launch.device == "cpu" else {})
        | kept
        | {
            **thread_environment(launch.threads),
            **bypass_proxies(base, launch.host, "127.0.0.1", "localhost"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            # Longer than the client keeps idle connections, so that the server never closes one that is about to be reused.
            "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
            **NO_FEATURE_CACHE,
            "TMPDIR": str(scratch),
        }
    )


BIASED = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
NAME = "score.bias"
FILE = "gcore-head-bias.safetensors"


def prepare_head_bias(launch: SglangLaunch, scratch: Path) -> SglangLaunch:
    """Work around a fault of SGLang 0.5.23 with classifiers of Qwen2 and Qwen3. Returns the launch to use instead.

    SGLang builds the heads of these classifiers with a bias. transformers has none, so no weights file contains one,
    and its random initial value remains: every server would add another number to all its scores. Such a model is
    served from a folder in `scratch` with links to its files, and one more file that sets the bias to 0. Other launches
    are returned unchanged. Does not need torch; does not change the model's own folder.
    """
    folder = Path(launch.model)
    if launch.task != "classify" or not set(BIASED) & set(read_config(folder).get("architectures") or ()):
        return launch
    files = sorted(folder.glob("*.safetensors"))
    if any(NAME in read_header(file) for file in files):
        return launch
    shown = scratch / "model"
    shown.mkdir()
    for file in folder.iterdir():
        (shown / file.name).symlink_to(file.resolve())
    (shown / FILE).write_bytes(zero_bias_file())
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_bytes())
        index["weight_map"][NAME] = FILE
        (shown / INDEX).unlink()
        (shown / INDEX).write_text(json.dumps(index))
    return launch.model_copy(update={"model": str(shown)})


def read_header(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: dtype, shape and offsets by tensor name.

    Empty if the file cannot be read: the server reports that error itself.
    """
    try:
        with file.open("rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            found = json.loads(raw.read(length))
    except (OSError, ValueError, struct.error):
        return {}
    return found if isinstance(found, dict) else {}


def zero_bias_file() -> bytes:
    """Return the bytes of a safetensors file that contains only the head's bias, a single 0."""
    header = json.dumps({NAME: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + bytes(4)
