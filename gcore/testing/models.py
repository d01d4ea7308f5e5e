"""A random model small enough for tests, with a tokenizer of single characters, as a Hugging Face folder.

Imports torch and transformers, but only when called.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from gcore.engines.launch import SglangLaunch
from gcore.engines.sglang.adapter import SglangServer, free_port, make_scratch
from gcore.engines.sglang.command import (
    check_engine_args,
    prepare_head_bias,
    require_python,
    server_command,
    server_environment,
)
from gcore.errors import EngineError
from gcore.system.clock import Clock, SystemClock
from gcore.system.process import thread_environment
from gcore.train.rank.launch import RankLaunch

CHARACTERS = "0123456789+-*/=abcdefghijklmnopqrstuvwxyz .,:?"
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
EOS = 1


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    context: int = 1024,
    heads: int = 4,
    kv_heads: int = 2,
    ends: bool = True,
) -> Path:
    """A qwen3 with tied embeddings. Its next-token distributions are far from uniform, and differ from seed to seed.

    With `ends` a sample ends at `EOS`; without, no token is an end.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=EOS if ends else None,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=hidden**-0.5, generator=generator)
    model.save_pretrained(folder)
    save_tokenizer(folder, ends=ends)
    return folder


def make_tiny_classifier(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    context: int = 1024,
    heads: int = 4,
    kind: str = "llama",
) -> Path:
    """A llama, or another `kind` of decoder, with a sequence-classification head of one number.

    What it gives differs from question to question and from seed to seed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        num_labels=1,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=hidden**-0.5, generator=generator)
    model.save_pretrained(folder)
    save_tokenizer(folder, ends=False)
    return folder


def make_liking_classifier(folder: Path, likes: str, *, context: int = 1024) -> Path:
    """A classifier whose weights are set by hand: the more of a question's characters are among `likes`, the more it gives.

    Its one layer looks at all tokens alike and writes the share of those that are liked beside a constant; the head reads
    that alone. From about -1 (none) to 1 (all).
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    make_tiny_classifier(folder, layers=1, hidden=8, heads=2, context=context)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    layer = model.model.layers[0]
    sign, constant, share = 0, 1, 2
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
        torch.nn.init.ones_(norm.weight)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, constant] = 1.0
        embedding[:, sign] = -1.0
        for number, character in enumerate(CHARACTERS, start=len(SPECIAL)):
            embedding[number, sign] = 1.0 if character in likes else -1.0
        layer.self_attn.v_proj.weight[0, sign] = 1.0
        layer.self_attn.o_proj.weight[share, 0] = 1.0
        model.score.weight[0, share] = 1.0
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, *, ends: bool) -> None:
    """A tokenizer of single characters, without a model. `ends`: whether it names an end of sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": "<pad>"} | ({"eos_token": "<eos>"} if ends else {}))
    )


STOP_S = 20


@contextmanager
def engine_process(model: Path, **options: object) -> Iterator[str]:
    """A torch engine that serves `model`, as a process of its own; its base URL. For tests and benchmarks. Its errors show.

    `options` as on its command line (`batch_slots=4`).
    """
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore.engines.torch", "--model", str(model), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **thread_environment(1)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("serving on "):
            raise EngineError(f"the engine did not start (exit code {process.wait(STOP_S)})", where=str(model))
        yield f"http://{line.removeprefix('serving on ').strip()}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


START_S = 600.0
"""It takes 10 to 20 s on an idle machine, and minutes on one that is busy."""

POLL_S = 0.2
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}


class SglangProcess:
    """A real SGLang server for `model` on a free loopback port, healthy when the constructor returns. A context manager.

    `options` are fields of `SglangLaunch`, e.g. `batch_slots=4, cache_tokens=20_000, engine_args=("--x",)`. Started by the
    command that a job's worker uses (`gcore.engines.sglang.command`), on the CPU. Raises UsageError where no environment with
    SGLang is found, EngineError if the server does not come up.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        launch = SglangLaunch(python=str(require_python()), model=str(model), **options)
        port = launch.port or free_port(launch.host)
        check_engine_args(launch.engine_args)
        scratch = make_scratch()
        env = server_environment(launch, {**os.environ, **ENVIRONMENT}, scratch)
        self.base_url = f"http://{launch.host}:{port}"
        self._server = SglangServer(
            server_command(prepare_head_bias(launch, scratch), port), env, scratch, sys.stderr.buffer
        )
        try:
            self._wait(SystemClock())
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Of the process that holds the server; killing it takes the server with it."""
        return self._server.pid

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines of its output."""
        return tuple(self._server.lines)

    def stop(self) -> None:
        """End it, by force: it holds nothing that is worth a farewell. Again: nothing."""
        self._server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _wait(self, clock: Clock) -> None:
        end = clock.monotonic() + START_S
        while clock.monotonic() < end:
            if self._server.wait(POLL_S):
                raise EngineError(f"SGLang's server did not start: {self._server.death()}")
            try:
                if httpx.get(f"{self.base_url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                continue
        raise EngineError(f"SGLang's server did not serve within {START_S:.0f} s")


@contextmanager
def sglang_process(model: Path, **options: Any) -> Iterator[str]:
    """The same as `engine_process` for the torch engine: the base URL of a server that lives as long as the block."""
    with SglangProcess(model, **options) as server:
        yield server.base_url


def rank_launch(
    spec: Mapping[str, Any],
    run_dir: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    start: Mapping[str, Any] | None = None,
) -> RankLaunch:
    """How rank `rank` of a world of `world_size` is started where no cluster starts it, for tests and benchmarks.

    `spec`: a job spec as a tree; `start`: the step it begins behind, 0 if None. Starts nothing.
    """
    return RankLaunch.model_validate(
        {
            "kind": "rank",
            "job_uid": "j",
            "world": "w",
            "lineage": 0,
            "rank": rank,
            "world_size": world_size,
            "spec": spec,
            "run_dir": str(run_dir),
            "start": start or {"step": 0},
        }
    )
