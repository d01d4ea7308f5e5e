"""A model in vLLM: vLLM's engine core in this process, and requests in its form. Imports vLLM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor

from gcore.data.tokenizer import end_tokens
from gcore.engines.detokenizer import Detokenizer
from gcore.engines.launch import VllmLaunch
from gcore.engines.request import GenerationRequest, RequestSampling
from gcore.engines.torch.kv_cache import CacheShape
from gcore.engines.torch.model import DTYPES, check_vocabulary
from gcore.engines.vllm.command import CPU_CACHE_TOKENS, engine_words
from gcore.engines.vllm.core import ServedModel, VllmCore, VllmLimits
from gcore.engines.vllm.sampling import SAMPLING, install_sampler
from gcore.errors import DataError, EngineError, UsageError, one_line
from gcore.models.adapter_checks import BaseFiles
from gcore.models.adapters import meta_tensors
from gcore.models.checks import check_code, require_config


def request_of(name: str, task: GenerationRequest) -> EngineCoreRequest:
    """Turn a request into vLLM's, under `name`."""
    sampling = task.sampling
    asks_prompt = sampling.prompt_logprobs_from is not None
    params = SamplingParams(
        max_tokens=sampling.max_new_tokens,
        # The model's end tokens are among them; the sampler keeps them back below the minimum length.
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=sampling.top_logprobs,
        # vLLM has no log-probabilities of named tokens for prompts: all tokens are requested, and those selected.
        prompt_logprobs=(-1 if sampling.named_tokens else sampling.top_logprobs) if asks_prompt else None,
        detokenize=False,
        extra_args={SAMPLING: sampling},
    )
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(task.prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, which reports mistakes as exceptions."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"vLLM does not accept its arguments: {message}", where="engine_args")


def parse_engine_args(launch: VllmLaunch) -> EngineArgs:
    """Return vLLM's settings for a launch document. Raises UsageError for arguments that vLLM does not accept."""
    parser = _Parser(add_help=False)
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(_namespace(parser, launch))


def _namespace(parser: FlexibleArgumentParser, launch: VllmLaunch) -> argparse.Namespace:
    found: argparse.Namespace = parser.parse_args(list(engine_words(launch)))
    return found


def start_vllm(launch: VllmLaunch, text: Detokenizer | None) -> VllmCore:
    """Create the core: load the model in vLLM. Opens no port and starts no thread.

    Raises UsageError, DataError or EngineError if the model cannot be served.
    """
    folder = Path(launch.model)
    if launch.task != "generate":
        raise UsageError("vLLM serves no classifiers here", where="task", fix="Use the torch engine or SGLang")
    config = require_config(folder)
    check_code(config, trusted=launch.trust_remote_code, where=launch.model)
    try:
        settings = parse_engine_args(launch).create_engine_config()
        if launch.cache_tokens is not None and launch.cache_tokens < settings.model_config.max_model_len:
            # vLLM does not start if its cache does not hold one context; the torch engine limits requests instead.
            launch = launch.model_copy(update={"context_length": launch.cache_tokens})
            settings = parse_engine_args(launch).create_engine_config()
    except (ValueError, NotImplementedError) as error:
        raise UsageError(
            f"vLLM does not accept its settings: {one_line(error)}",
            where=launch.model,
            fix="Change the model or engine_args",
        ) from error
    if launch.device == "cpu":
        limit_cache(settings, launch.cache_tokens or max(CPU_CACHE_TOKENS, settings.model_config.max_model_len))
    elif launch.cache_tokens is not None:
        limit_cache(settings, launch.cache_tokens)
    vocabulary = int(settings.model_config.get_vocab_size())
    check_vocabulary(text, vocabulary, folder)
    base = BaseFiles.found(folder)
    try:
        client = InprocClient(settings, Executor.get_class(settings), log_stats=False)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise EngineError(
            f"vLLM cannot load the model ({one_line(error)})", where=launch.model, fix="See its log"
        ) from error
    client.collective_rpc(install_sampler)
    cache = settings.cache_config
    model = ServedModel(
        folder,
        meta_tensors(folder),
        vocabulary,
        int(settings.model_config.max_model_len),
        end_tokens(folder, config, lambda token: None if text is None else text.token_id(token)),
        settings.model_config.hf_config,
        CacheShape((), DTYPES[launch.dtype], torch.device(launch.device)),
        base,
    )
    limits = VllmLimits(
        launch.batch_slots,
        int(cache.num_gpu_blocks) * int(cache.block_size),
        shares_prefixes=bool(cache.enable_prefix_caching),
        sleeps=bool(settings.model_config.enable_sleep_mode),
    )
    core = VllmCore(client, model, text, limits, version=launch.weight_version, request_of=request_of)
    try_model(core, folder)
    return core


def try_model(core: VllmCore, folder: Path) -> None:
    """Generate one token. Raises DataError if vLLM's kernels cannot run the model, which it notices only then."""
    core.submit([GenerationRequest(-1, "trial", (0,), RequestSampling(max_new_tokens=1, seed=0, temperature=0.0))])
    try:
        while not core.outbox:
            core.cycle()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise DataError(
            f"vLLM cannot run this model: {one_line(error)}",
            where=str(folder),
            fix="Serve it with the torch engine or SGLang",
        ) from error
    core.outbox = []
    core.generated_tokens = 0


def limit_cache(settings: Any, tokens: int) -> None:
    """Set the size of vLLM's KV cache to `tokens`, in whole blocks."""
    model, cache, parallel = settings.model_config, settings.cache_config, settings.parallel_config
    blocks = -(-tokens // cache.block_size) + 1  # vLLM keeps one for itself
    numbers = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.get_num_layers(parallel)
    cache.num_gpu_blocks_override = blocks
    cache.kv_cache_memory_bytes = blocks * cache.block_size * numbers * model.dtype.itemsize
