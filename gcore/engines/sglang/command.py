"""SGLang's command line and environment, the search for a Python that has SGLang, and a head bias that SGLang needs.

What a job says in `rollout.engine_args` comes last, and argparse lets the last value of an option win, so that a user can
overrule each choice made here, except for host, port and model: the worker would look elsewhere.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore.engines.launch import SglangLaunch
from gcore.errors import UsageError
from gcore.models.checks import read_config
from gcore.models.hubs import INDEX
from gcore.system.network import bypass_proxies
from gcore.system.process import thread_environment

CPU_CACHE_TOKENS = 65536
"""The cache of a CPU server for which none was said: SGLang would take 30 % of all memory for it, per server."""

CUDA_MEM_FRACTION = "0.5"
"""Of a GPU's memory, for weights and cache together: a train rank on the same GPU needs the rest."""

CPU_ARGUMENTS = (
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--mem-fraction-static", "0.3"),
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    # Weights change every step, and the prefix that a group shares is short: without it, memory is all that is bounded.
    "--disable-radix-cache",
)

OURS = ("--model-path", "--model", "--host", "--port", "--weight-version")

GUARDS = (
    "--api-key",
    "--admin-api-key",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--ssl-ca-certs",
    "--ssl-keyfile-password",
    "--config",
)
"""Who may ask the server is the cluster's to say; and a file of arguments could hold any of them."""

DROPPED = ("SGLANG_USE_CPU_ENGINE", "SGLANG_RETURN_ORIGINAL_LOGPROB", "GCORE_CONTROL_FD", "PYTHONPATH", "PYTHONHOME")
"""Of the worker's environment. The first two would change what log-probabilities mean; the rest is gcore's own."""


def server_command(launch: SglangLaunch, port: int) -> tuple[str, ...]:
    """The words that start the server on `port`. Raises UsageError for engine_args that are gcore's to say."""
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
        words.append("--is-embedding")  # SGLang's word for all that writes nothing
    # Without --sleep-on-idle the scheduler spins on a whole core while it has nothing to do.
    words += ["--enable-metrics", "--sleep-on-idle", "--log-level-http", "warning"]
    # The warm-up is an English sentence, and a tokenizer of its own need not know the letters. Health makes a token.
    words.append("--skip-server-warmup")
    if launch.api_key is not None:
        words += ["--api-key", launch.api_key]
    if launch.tls is not None:
        words += ["--ssl-certfile", launch.tls.cert, "--ssl-keyfile", launch.tls.key, "--enable-ssl-refresh"]
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


def check_engine_args(engine_args: Sequence[str]) -> None:
    """Raises UsageError for an argument that gcore itself must choose."""
    for word in engine_args:
        name = word.partition("=")[0]
        # argparse takes the beginning of an option for all of it.
        if len(name) > 2 and any(option.startswith(name) for option in (*OURS, *GUARDS)):
            raise UsageError(
                f"{name} is chosen by gcore",
                where="rollout.engine_args",
                fix=f"Leave {name} out of rollout.engine_args",
            )


def server_environment(launch: SglangLaunch, base: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The server's whole environment. `scratch`: its folder for temporary files, sockets among them (so: a short path)."""
    kept = {name: value for name, value in base.items() if name not in DROPPED}
    return kept | {
        **thread_environment(launch.threads),
        **bypass_proxies(base, launch.host, "127.0.0.1", "localhost"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Longer than the client keeps an idle connection: none is closed in the moment in which it is used again.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        "TMPDIR": str(scratch),
    }


VARIABLE = "GCORE_SGLANG_PYTHON"
FOLDER = ".venv-sglang"
HOW = "Run 'make sglang-setup' for a CPU environment, or name the Python of one that has SGLang in GCORE_SGLANG_PYTHON"


def find_python(named: Path | str | None = None, *, environ: Mapping[str, str] | None = None) -> Path | None:
    """The Python that has SGLang; None where there is none. Starts nothing, imports nothing of SGLang's.

    In this order: what the caller names; GCORE_SGLANG_PYTHON; `.venv-sglang/bin/python` beside gcore's checkout or in
    the current folder. A folder may be named instead of a Python: then its bin/python is meant. Raises UsageError if the
    one that was named has no SGLang.
    """
    environ = os.environ if environ is None else environ
    told = environ.get(VARIABLE)
    for given, where in ((named, f"--sglang-python or {VARIABLE}"), (told, VARIABLE)):
        if given:
            return _checked(Path(given), where)
    checkout = Path(__file__).parents[3]
    for folder in (checkout / FOLDER, Path(FOLDER)):
        if has_sglang(folder / "bin" / "python"):
            return folder.absolute() / "bin" / "python"  # only now: the folder that we are in may have been removed
    return None


def has_sglang(python: Path) -> bool:
    """Whether `python` is there and SGLang is installed beside it; without starting it, which would take a second."""
    if not (python.is_file() and os.access(python, os.X_OK)):
        return False
    return any(python.parent.parent.glob("lib*/python3*/*-packages/sglang/launch_server.py"))


def _checked(given: Path, where: str) -> Path:
    # Not resolved: a virtual environment's Python is a link, and what it links to knows nothing of the environment.
    python = Path(os.path.abspath(given / "bin" / "python" if given.is_dir() else given))
    if not has_sglang(python):
        what = "SGLang is not installed beside this Python" if python.is_file() else "there is no such Python"
        raise UsageError(f"{what}: {python}", where=where, fix=HOW)
    return python


BIASED = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
NAME = "score.bias"
FILE = "gcore-head-bias.safetensors"


def prepare_head_bias(launch: SglangLaunch, scratch: Path) -> SglangLaunch:
    """The launch, of a folder in `scratch` where the model needs one so that SGLang gives the numbers that its weights give.

    SGLang 0.5.23 builds the heads of Qwen2 and Qwen3 with a bias. transformers has none there, so no weights hold
    one, and its random initial value stays: every server would add another number to all its scores. Such a model is
    served from a folder of links to its files, with one file more, in which the bias is 0. Needs no torch; leaves the
    model's own folder as it is.
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
    """A safetensors file's tensors, by name; none of a file that cannot be read (the server says more)."""
    try:
        with file.open("rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            found = json.loads(raw.read(length))
    except (OSError, ValueError, struct.error):
        return {}
    return found if isinstance(found, dict) else {}


def zero_bias_file() -> bytes:
    """A safetensors file that holds the bias of one number, 0."""
    told = json.dumps({NAME: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    told += b" " * (-len(told) % 8)
    return struct.pack("<Q", len(told)) + told + bytes(4)
