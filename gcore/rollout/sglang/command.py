"""SGLang's command line and environment, from what is to be served. Pure.

What a job says in `rollout.engine_args` comes last, and argparse lets the last word of an option stand, so that a user
can overrule each choice made here. Only host, port and model are not theirs: the worker would look elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gcore.errors import UsageError
from gcore.rollout.sglang.launch import SglangLaunch
from gcore.worker.threads import thread_environment

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
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Longer than the client keeps an idle connection: none is closed in the moment in which it is used again.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        "TMPDIR": str(scratch),
    }
