"""The torch engine beside `transformers.generate`: same model, same requests, same process, same threads.

Each case is run in pairs, engine and `generate` in turn, who begins changing from pair to pair; the ratio of a pair is
the seconds of `generate` over those of the engine. `generate` gets the requests in batches of `SLOTS`, in order of
arrival, prompts padded on the left, and has to wait for the longest of each batch; the engine gets them all at once and
has as many rows. A second ratio leaves out what other processes took of the cores (`own_ratio`). Both sample at temperature 1 from the whole vocabulary; only the engine also returns log-probabilities,
and these are compared with a full forward pass in the same run.

`run adapters` compares the torch engine with itself: with adapters at run time (`judges[].adapter`), and without them.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Result, Stopwatch, slowed, spread

SLOTS = 64
SMALL_VOCABULARY = 49
LARGE_VOCABULARY = 151_936
"""As the Qwen 2 and 3 families have it."""
WARM_TOKENS = 4
"""Of each request of `generate` before it is measured."""


@dataclass(frozen=True)
class Case:
    """Requests: prompt lengths and the numbers of new tokens."""

    name: str
    what: str
    vocabulary: int
    prompts: tuple[int, ...]
    limits: tuple[int, ...]
    goal: float | None

    def first(self, count: int) -> Case:
        """The first requests of it."""
        return replace(self, prompts=self.prompts[:count], limits=self.limits[:count])


def cases() -> list[Case]:
    """The workloads; their random lengths are always the same."""
    generator = np.random.default_rng(7)
    tail = np.minimum(256, np.maximum(1, np.round(np.exp(generator.normal(math.log(31), 0.9, 256))))).astype(int)
    tail[17] = 256
    mixed = np.round(np.exp(generator.uniform(math.log(8), math.log(512), 128))).astype(int)
    few = np.minimum(256, np.maximum(1, np.round(np.exp(generator.normal(math.log(31), 0.9, 128))))).astype(int)
    return [
        Case("equal", "64 prompts of 8 tokens, 64 new tokens each", SMALL_VOCABULARY, (8,) * 64, (64,) * 64, 1.1),
        Case(
            "tail",
            "256 prompts of 8 tokens, a long tail of lengths (median 31, at most 256)",
            SMALL_VOCABULARY,
            (8,) * 256,
            tuple(tail.tolist()),
            2.5,
        ),
        Case(
            "mixed",
            "128 prompts of 8 to 512 tokens, a long tail of lengths",
            SMALL_VOCABULARY,
            tuple(mixed.tolist()),
            tuple(few.tolist()),
            None,
        ),
        Case(
            "vocabulary",
            "64 prompts of 8 tokens, 16 new tokens each, a vocabulary of 151,936",
            LARGE_VOCABULARY,
            (8,) * 64,
            (16,) * 64,
            None,
        ),
        Case(
            "vocabulary-tail",
            "64 prompts of 8 to 512 tokens, lengths from 1 to 48, a vocabulary of 151,936",
            LARGE_VOCABULARY,
            tuple(mixed[:64].tolist()),
            tuple(np.minimum(48, few[:64]).tolist()),
            None,
        ),
    ]


def make_model(folder: Path, vocabulary: int) -> Path:
    """A random qwen3 of 4 layers x 128 (1.0M parameters and the embedding), ending nowhere."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=128**-0.5)
    model.save_pretrained(folder)
    return folder


def run_requests(
    core: Any, first: int, prompts: list[list[int]], limits: tuple[int, ...], adapters: int = 1
) -> list[Any]:
    """Run requests on an engine's core; deliveries in their order. `first`: number of the first request, which no earlier one had.

    `adapters`: request number n names adapter n modulo this.
    """
    from gcore.engines.request import GenerationRequest, RequestSampling

    core.submit(
        [
            GenerationRequest(
                first + i, f"r{i}", tuple(ids), RequestSampling(limit, seed=first + i), adapter=i % adapters
            )
            for i, (ids, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
    )
    done: dict[int, Any] = {}
    while core.can_work:
        core.cycle()
        done.update((d.number, d) for d in core.outbox)
        core.outbox.clear()
    return [done[first + i] for i in range(len(prompts))]


class Pair:
    """One model, as the engine has it and as `generate` does."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from gcore.engines.launch import EngineLaunch
        from gcore.engines.torch.server import start_engine

        self.plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.core = start_engine(EngineLaunch(model=str(folder), batch_slots=SLOTS, device="cpu"), None)
        self.parameters = sum(p.numel() for p in self.plain.parameters())
        self._number = 0

    def slow_down(self) -> None:
        """Have the engine take twice as long."""
        self.core.cycle = slowed(self.core.cycle)  # type: ignore[method-assign]

    def engine(self, prompts: list[list[int]], limits: tuple[int, ...]) -> list[Any]:
        """All requests; deliveries in their order."""
        first = self._number
        self._number += len(prompts)
        return run_requests(self.core, first, prompts, limits)

    def generate(self, prompts: list[list[int]], limits: tuple[int, ...]) -> None:
        """All requests, batch by batch."""
        import torch

        for begin in range(0, len(prompts), SLOTS):
            batch, limit = prompts[begin : begin + SLOTS], max(limits[begin : begin + SLOTS])
            width = max(len(ids) for ids in batch)
            ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in batch])
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch])
            out = self.plain.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=True, top_k=0, top_p=1.0
            )
            assert out.shape[1] == width + limit

    def error(self, prompts: list[list[int]], deliveries: list[Any]) -> float:
        """Largest difference of the engine's log-probabilities from those of a full forward pass."""
        import torch

        worst = 0.0
        with torch.inference_mode():
            for ids, delivery in zip(prompts, deliveries, strict=True):
                whole = torch.tensor([[*ids, *delivery.tokens]])
                kept = torch.arange(len(ids) - 1, whole.shape[1] - 1)
                logits = self.plain(whole, logits_to_keep=kept).logits[0]
                expected = torch.log_softmax(logits, -1).gather(-1, whole[0, len(ids) :, None])[:, 0]
                worst = max(worst, float((expected - torch.tensor(delivery.logprobs)).abs().max()))
        return worst


def compare(case: Case, pair: Pair, pairs: int) -> Result:
    """Warm up, then run the pairs."""
    generator = np.random.default_rng(11)
    prompts = [generator.integers(3, case.vocabulary, length).tolist() for length in case.prompts]
    deliveries = pair.engine(prompts, case.limits)
    error = pair.error(prompts, deliveries)
    pair.generate(prompts[:SLOTS], (WARM_TOKENS,) * SLOTS)
    spent: dict[str, list[dict[str, float]]] = {"engine": [], "generate": []}
    for number in range(pairs):
        sides = ("engine", "generate") if number % 2 == 0 else ("generate", "engine")
        for side in sides:
            watch = Stopwatch()
            getattr(pair, side)(prompts, case.limits)
            spent[side].append(watch.spent())
    engine, plain = ([round(one["seconds"], 4) for one in spent[side]] for side in ("engine", "generate"))
    own = [b["own_seconds"] / a["own_seconds"] for a, b in zip(spent["engine"], spent["generate"], strict=True)]
    tokens = sum(case.limits)
    return {
        "case": case.name,
        "what": case.what,
        "parameters": pair.parameters,
        "requests": len(prompts),
        "new_tokens": tokens,
        "ratio": spread([b / a for a, b in zip(engine, plain, strict=True)]),
        "own_ratio": spread(own),
        "goal_ratio": case.goal,
        "engine_tokens_per_second": spread([tokens / s for s in engine], 0),
        "generate_tokens_per_second": spread([tokens / s for s in plain], 0),
        "largest_logprob_error": error,
        "pairs": [[round(b, 4), round(a, 4)] for a, b in zip(engine, plain, strict=True)],
    }


def measure(arguments: argparse.Namespace, taken: Result) -> Result:
    """All cases."""
    # Before torch is imported.
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(arguments.threads)
    results: list[Result] = []
    models: dict[int, Pair] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in (one.first(arguments.requests) for one in cases()):
            if arguments.case and case.name not in arguments.case:
                continue
            if case.vocabulary not in models:
                models[case.vocabulary] = Pair(make_model(Path(folder) / str(case.vocabulary), case.vocabulary))
                if arguments.slowed:
                    models[case.vocabulary].slow_down()
            results.append(compare(case, models[case.vocabulary], arguments.pairs))
            print(f"{case.name}: ratio {results[-1]['ratio']}", flush=True)
    return taken | {
        "what": "the torch engine beside transformers.generate; a ratio is generate's seconds over the engine's in one pair",
        "threads": arguments.threads,
        "wait_policy": "PASSIVE",
        "slots": SLOTS,
        "pairs_are": "seconds of generate, seconds of the engine",
        "cases": results,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Threads, cases, and for the check of bounds their size."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", action="append", help="only this one (may be given several times)")
    parser.add_argument("--requests", type=int, default=10**6, help="at most so many of each case")
    parser.add_argument(
        "--slowed", action="store_true", help="the engine takes twice as long, to see that its bounds notice"
    )


RANK = 8
"""Of the adapters of all linear layers."""

ADAPTED = {
    "no row has an adapter": (False, 1),
    "all rows have the policy's": (True, 1),
    "every other row has the judge's, the others the policy's": (True, 2),
}
"""Cases: whether the policy has an adapter, and how many adapters the requests name in turn."""


def write_adapter(base: Path, folder: Path, seed: int) -> Path:
    """A random adapter of all linear layers of the model in `base`."""
    import torch
    from safetensors.torch import save_file

    from gcore.models.adapter_checks import DOWN, UP
    from gcore.models.adapters import AdapterConfig, stored_shapes
    from gcore.models.hubs import ADAPTER_CONFIG
    from gcore.models.layout import ADAPTER_FILE, ADAPTER_PREFIX

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, one in stored_shapes(base).items():
        if name.endswith("_proj.weight"):
            stem, (outer, inner) = f"{ADAPTER_PREFIX}{name.removesuffix('.weight')}", one.shape
            tensors[stem + DOWN] = torch.randn(RANK, inner, generator=generator) * inner**-0.5
            tensors[stem + UP] = torch.randn(outer, RANK, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / ADAPTER_FILE, {"format": "pt"})
    (folder / ADAPTER_CONFIG).write_bytes(AdapterConfig(str(base), RANK, 2.0 * RANK, ("all-linear",)).encode())
    return folder


def measure_adapters(arguments: argparse.Namespace, taken: Result) -> Result:
    """The requests of the case "tail" by one engine without adapters and one with a judge's, in pairs."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    import torch

    from gcore.engines.launch import EngineLaunch
    from gcore.engines.torch.server import start_engine

    torch.set_num_threads(1)
    case = next(one for one in cases() if one.name == "tail")
    generator = np.random.default_rng(11)
    prompts = [generator.integers(3, case.vocabulary, length).tolist() for length in case.prompts]
    tokens, results = sum(case.limits), []
    with tempfile.TemporaryDirectory() as name:
        base = make_model(Path(name) / "base", case.vocabulary)
        policy, judge = (write_adapter(base, Path(name) / one, seed) for seed, one in enumerate(("policy", "judge")))
        launch = EngineLaunch(model=str(base), batch_slots=SLOTS, device="cpu")
        plain = start_engine(launch, None)
        adapted = start_engine(launch.model_copy(update={"adapters": {"judge": str(judge)}}), None)
        for what, (has_own, adapters) in ADAPTED.items():
            staged = adapted.stage_weights(policy if has_own else base)
            adapted.change_weights(staged, None, flush=True, abort=False)
            sides = {"plain": (plain, 1), "adapted": (adapted, adapters)}
            spent: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(-1, arguments.pairs):  # the first pair warms up
                for side in sorted(sides, reverse=number % 2 == 0):
                    core, named = sides[side]
                    core.model.attention.register()  # a process has one engine's attention at a time
                    watch = Stopwatch()
                    run_requests(core, 10**6 * (number + 2), prompts, case.limits, named)
                    spent[side].append(watch.spent()["seconds"])
            own, other = (spent[side][1:] for side in ("adapted", "plain"))
            results.append(
                {
                    "case": what,
                    "ratio": spread([a / b for a, b in zip(own, other, strict=True)]),
                    "tokens_per_second": spread([tokens / s for s in own], 0),
                    "plain_tokens_per_second": spread([tokens / s for s in other], 0),
                }
            )
            print(f"{what}: ratio {results[-1]['ratio']}", flush=True)
    return taken | {
        "what": "seconds of the torch engine with adapters at run time, over those without; one thread",
        "requests": case.what,
        "rank": RANK,
        "cases": results,
    }


BENCHMARKS = (
    Benchmark("engine", "engine", measure, ("torch", "transformers"), 7, options),
    Benchmark("adapters", "adapters", measure_adapters, ("torch", "transformers"), 7),
)
