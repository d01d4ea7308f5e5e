"""What the first placement estimates of memory, beside what real engines and real train ranks take.

Models are made from configurations, with weights drawn at random. An engine is the torch engine, serving over HTTP; a rank is one of a
world over gloo that trains one step, at ZeRO stages 1 to 3, by one rank or two. Measured is the most of resident memory that the
kernel saw, less what the same process takes with next to no model. Estimated is what `placement.mapping.memory` says of the same,
from the configuration alone. No time is measured.

The processes are forks of `memory_host`. This module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from benchmarks.harness import MB, Benchmark, Child, Result, spread
from gcore.config import parse_spec
from gcore.testing.models import save_tokenizer
from placement.mapping.memory import engine_memory, rank_needs
from placement.mapping.workload import JobShapes, MeanLengths, ModelShape, Workload, make_workload, read_shape

CONTEXT = 1024


@dataclass(frozen=True)
class Size:
    """A qwen3 with tied embeddings; half as many heads of keys as of queries."""

    width: int
    layers: int
    inner: int
    heads: int
    vocabulary: int

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.width // self.heads,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "dtype": "float32",
        }


SIZES = {
    "tiny": Size(64, 1, 64, 2, 256),
    "1M": Size(128, 4, 512, 4, 512),
    "8M": Size(256, 8, 704, 4, 8192),
    "30M": Size(512, 8, 1408, 8, 8192),
    "100M": Size(768, 12, 2048, 12, 16384),
}
BASE = "tiny"
"""What a process takes that has next to no model is taken off the others of its kind, stage and world."""


@dataclass(frozen=True)
class Case:
    """One process of each kind. `samples` of `prompt` and `response` tokens in a step, or so many requests at once."""

    what: Literal["rank", "engine"]
    model: str
    size: int = 1
    samples: int = 8
    prompt: int = 5
    response: int = 8
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def alike(self) -> tuple[str, int, int]:
        """What it has in common with the case that is taken off it."""
        return self.what, self.size, self.train.get("zero_stage", 1)

    def told(self, models: Path, run: Path) -> dict[str, Any]:
        """As `memory_host` reads it."""
        launch = {"batch_slots": self.samples, "cache_tokens": 1 << 20}
        more = {"model": str(models / self.model), "run": str(run), "requests": self.samples, "launch": launch}
        return asdict(self) | more


def _ranks(model: str, size: int) -> list[Case]:
    return [Case("rank", model, size, train={"zero_stage": stage}) for stage in (1, 2, 3)]


CASES = [
    *_ranks(BASE, 1),
    *_ranks(BASE, 2),
    *_ranks("30M", 1),
    *_ranks("30M", 2),
    Case("rank", "8M", response=120),
    Case("rank", "8M", response=120, train={"activation_checkpointing": True}),
    Case("rank", "30M", train={"dtype": "bf16"}),
    Case("rank", "30M", train={"kl_coef": 0.1}),
    Case("rank", "30M", train={"advantage": "gae", "critic": {}}),
    Case("engine", BASE),
    Case("engine", "30M"),
    Case("engine", "8M", samples=32, response=120),
    *_ranks("1M", 2),
    *_ranks("100M", 2),
    Case("engine", "100M"),
    Case("rank", "100M"),
]


def make_models(folder: Path, names: Iterable[str] = SIZES) -> None:
    """Weights drawn at random, in folders that transformers loads."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(SIZES[name].config))
        save_file(_weights(SIZES[name]), folder / name / "model.safetensors", {"format": "pt"})
        save_tokenizer(folder / name, ends=False)


def _weights(size: Size) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    width, dim = size.width, size.width // size.heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocabulary, width),
        "model.norm.weight": (width,),
    }
    for layer in range(size.layers):
        of = {
            "self_attn.q_proj": (size.heads * dim, width),
            "self_attn.k_proj": (size.heads // 2 * dim, width),
            "self_attn.v_proj": (size.heads // 2 * dim, width),
            "self_attn.o_proj": (width, size.heads * dim),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (size.inner, width),
            "mlp.up_proj": (size.inner, width),
            "mlp.down_proj": (width, size.inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of.items()}
    return {
        name: rng.standard_normal(shape, np.float32) * 0.02 if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in shapes.items()
    }


def shape(model: str) -> ModelShape:
    """As its configuration says."""
    size = SIZES[model]
    return read_shape(size.config, where=model)


def workload(case: Case) -> Workload:
    """What the case does, as a job would say it."""
    spec = parse_spec(
        {
            "name": "bench",
            "model": {"path": "m"},
            "data": {"path": "d", "max_prompt_tokens": case.prompt},
            "flow": {"steps": 1, "groups_per_step": max(1, case.samples // 8), "samples_per_prompt": 8},
            "rollout": {"max_new_tokens": case.response, "batch_slots": case.samples},
            "train": {"old_logprobs": "engine"} | case.train,
        }
    )
    return make_workload(spec, JobShapes(shape(case.model), None, {}), MeanLengths(case.prompt, case.response))


def estimated(case: Case) -> int:
    """Bytes of one process, at most."""
    said = workload(case)
    if case.what == "engine":
        need = engine_memory(said.rollout, size=1, rows=case.samples, gpu=False)
        return need.stays(need.wanted) + need.works
    needs = rank_needs(said.training, case.size, gpu=False)
    return sum(need.stays for need in needs) + max(need.works for need in needs)


def row(case: Case, processes: Sequence[Mapping[str, int]], base: Mapping[str, int]) -> dict[str, Any]:
    """A case's figures. The largest process of a case counts: it is the one that must fit."""
    most = max(max(one["loading"], one["working"]) - base["working"] for one in processes)
    of, guess, empty = (
        shape(case.model),
        estimated(case),
        estimated(Case(case.what, BASE, case.size, train={"zero_stage": case.alike[2]})),
    )
    guess -= empty
    return {
        "case": words(case),
        "what": case.what,
        "parameters": of.parameters,
        "measured_mb": round(most / MB, 1),
        "of_each_process_mb": [
            round((max(one["loading"], one["working"]) - base["working"]) / MB, 1) for one in processes
        ],
        "after_loading_mb": [round((one["loaded"] - base["loaded"]) / MB, 1) for one in processes],
        "estimated_mb": round(guess / MB, 1),
        "error": round(guess / most - 1, 4),
    }


def words(case: Case) -> str:
    """`30M: ZeRO 2, 2 ranks`."""
    if case.what == "engine":
        return f"{case.model}: engine, {case.samples} requests of {case.prompt} + {case.response} tokens"
    more = {key: value for key, value in case.train.items() if key not in ("zero_stage", "critic")}
    said = [f"ZeRO {case.train.get('zero_stage', 1)}", f"{case.size} rank{'s' * (case.size > 1)}"]
    said += [f"{case.samples * (case.prompt + case.response)} tokens"]
    said += [f"{key}: {json.dumps(value).strip(chr(34))}" for key, value in more.items()]
    return f"{case.model}: {', '.join(said)}"


def measured(cases: Sequence[Case]) -> list[tuple[Case, list[dict[str, int]]]]:
    """Each case's processes, in bytes by phase."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, sorted({case.model for case in cases}))
        host, found = Child("memory_host"), []
        try:
            assert host.answer()["ready"]
            for number, case in enumerate(cases):
                host.send(**case.told(folder, folder / f"run-{number}"))
                found.append((case, host.answer()["found"]))
                print(f"{words(case)}: measured", flush=True)
        finally:
            host.end()
    return found


def rows(found: Sequence[tuple[Case, list[dict[str, int]]]]) -> list[dict[str, Any]]:
    """Of all cases but those that are taken off the others."""
    base: dict[tuple[str, int, int], dict[str, int]] = {}
    for case, processes in found:
        if case.model == BASE:
            base[case.alike] = {key: max(one[key] for one in processes) for key in processes[0]}
    return [row(case, processes, base[case.alike]) for case, processes in found if case.model != BASE]


def measure(arguments: argparse.Namespace, taken: Result) -> Result:
    """All cases, or those of some models."""
    made = rows(measured([case for case in CASES if case.model == BASE or case.model in arguments.only]))
    return taken | {
        "what": "What the first placement estimates of memory, beside what real engines and real train ranks take.",
        "models": f"qwen3 with tied embeddings, context {CONTEXT}, float32 weights drawn at random",
        "errors": spread([one["error"] for one in made]),
        "cases": made,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Which models."""
    parser.add_argument("--only", nargs="*", default=list(SIZES), help="models, by name")


BENCHMARKS = (Benchmark("memory", "memory", measure, ("torch", "transformers", "deepspeed"), options=options),)
