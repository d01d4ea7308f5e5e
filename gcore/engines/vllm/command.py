"""vLLM's settings for a launch document, as words of its command line.

The job's `rollout.engine_args` come last. argparse uses the last value of an option, so a user can override each option
set here, except those that gcore depends on (`OURS`). Does not import vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gcore.engines.launch import VllmLaunch
from gcore.errors import UsageError

CPU_CACHE_TOKENS = 65536
"""Minimum size in tokens of a CPU engine's KV cache if none is set. vLLM's default is nine tenths of all memory."""

CUDA_MEMORY_SHARE = "0.5"
"""Share of GPU memory for weights and cache together: a train rank on the same GPU needs the rest."""

OURS = (
    *("--model", "--tokenizer", "--skip-tokenizer-init", "--no-skip-tokenizer-init"),
    *("--async-scheduling", "--no-async-scheduling", "--logprobs-mode", "--max-logprobs", "--generation-config"),
    *("--worker-cls", "--worker-extension-cls", "--executor-backend", "--distributed-executor-backend"),
    *("--logits-processors", "--speculative-config"),
    *("--enable-sleep-mode", "--no-enable-sleep-mode", "--config"),
    # The spec's batch_slots, cache_tokens and slots_per_engine decide these.
    *("--max-num-seqs", "--num-gpu-blocks-override", "-tp", "--tensor-parallel-size"),
    *("-pp", "--pipeline-parallel-size", "-dp", "--data-parallel-size", "-pcp", "--prefill-context-parallel-size"),
    # An engine is on one node.
    *("-n", "--nnodes", "-r", "--node-rank"),
)

ENVIRONMENT = {
    # vLLM's core runs in this process: gcore steps it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The sampler is replaced; the second model runner has another one.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # By itself vLLM binds its threads to the first cores, and so would every engine of a machine. The daemon binds them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Environment variables of vLLM, set before it is imported."""


ROWS = "gcore.engines.vllm.sampling:SeededRows"
"""Class by which the sampler knows the requests of a batch."""


def engine_words(launch: VllmLaunch) -> tuple[str, ...]:
    """Return vLLM's command line for a launch document. Raises UsageError for engine_args that gcore sets."""
    check_engine_args(launch.engine_args)
    words = ["--model", launch.model, "--skip-tokenizer-init", "--dtype", launch.dtype]
    words += ["--max-num-seqs", str(launch.batch_slots)]
    # vLLM's limit is of a whole step, which decodes a token of each sequence too.
    words += ["--max-num-batched-tokens", str(launch.prefill_chunk_tokens + launch.batch_slots)]
    words += ["--no-async-scheduling", "--logprobs-mode", "raw_logprobs", "--max-logprobs", "-1"]
    words += ["--generation-config", "vllm", "--disable-log-stats", "--logits-processors", ROWS]
    if launch.context_length is not None:
        words += ["--max-model-len", str(launch.context_length)]
    if launch.trust_remote_code:
        words.append("--trust-remote-code")
    words += _on_cpu() if launch.device == "cpu" else _on_cuda(launch)
    return (*words, *launch.engine_args)


def _on_cpu() -> list[str]:
    # Weights change every step and a group's common prefix is short, so a prefix cache gains little.
    return ["--enforce-eager", "--no-enable-prefix-caching"]


def _on_cuda(launch: VllmLaunch) -> list[str]:
    words = ["--tensor-parallel-size", str(launch.gpus), "--gpu-memory-utilization", CUDA_MEMORY_SHARE]
    return [*words, "--enable-sleep-mode", "--enable-prefix-caching"]


def check_engine_args(engine_args: Sequence[str], where: str = "rollout.engine_args") -> None:
    """Raise UsageError if `engine_args` contain an option that only gcore may set (`OURS`). `where`: their field of the spec."""
    for word in engine_args:
        name = word.partition("=")[0].replace("_", "-")
        # argparse accepts the beginning of an option as the whole option, also -t for -tp.
        if name.strip("-") and any(option.startswith(name) for option in OURS):
            raise UsageError(f"{name} is set by gcore", where=where, fix=f"Remove {name} from {where}")


def program() -> str:
    """Return the path of the engine's program. vLLM's Python runs it by its path, because gcore is not installed there."""
    return os.path.join(Path(__file__).parent, "__main__.py")
