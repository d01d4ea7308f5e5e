"""What the first placement estimates of memory, beside what real engines and real train ranks take.

Models are made from configurations, with weights drawn at random. An engine is the torch engine, serving over HTTP; a rank is one of a
world over gloo that trains one step, at ZeRO stages 1 to 3, by one rank or two. Measured is the most of resident memory that the
kernel saw, less what the same process takes with next to no model. Estimated is what `placement.mapping.memory` says of the same,
from the configuration alone. No time is measured.

The processes are forks of a host (`python -m benchmarks.memory`); only they import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from benchmarks.harness import MB, Benchmark, Child, Result, send_parent, spread
from benchmarks.trainer import GROUP, PROMPT, Batch, rank_spec, ready_step
from gcore.config import parse_spec
from gcore.testing.models import rank_launch, save_tokenizer
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
"""The memory of a process with an almost empty model is subtracted from the others of its kind, stage and world."""


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
        """The key that the case shares with its baseline."""
        return self.what, self.size, self.train.get("zero_stage", 1)

    def told(self, models: Path, run: Path) -> dict[str, Any]:
        """As the host reads it."""
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
    """The settings of the case, as in a job's spec."""
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
        host, found = Child("memory"), []
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


# The host -------------------------------------------------------------------------------------------------------------

Told = dict[str, Any]
"""A case as a line to the host, and what it answers of a process."""


def figure(name: str, pid: int | str = "self") -> int:
    """`VmRSS` (now) or `VmHWM` (at most) of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"the kernel does not say {name}")


def forget_peak(pid: int | str = "self") -> None:
    """Restart the count."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def batch_of(samples: int, response: int, vocabulary: int) -> Batch:
    """Samples of one length, behind prompts of `PROMPT` tokens."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocabulary, (samples // GROUP, PROMPT)).repeat(GROUP, axis=0).astype(np.int32)
    responses = [rng.integers(0, vocabulary, response).astype(np.int32) for _ in range(samples)]
    logprobs = [np.full(response, -np.log(vocabulary), np.float32) for _ in range(samples)]
    return Batch(prompts, responses, logprobs, rng.integers(0, 2, samples).astype(np.float32))


def train(told: Told, rank: int, meet: Callable[[str | None], str]) -> Told:
    """A rank: loads, and trains a step. `meet` gives rank 0's address to the others."""
    from gcore.system.clock import SystemClock
    from gcore.train.backends.distributed import Collective, Rendezvous, find_store, open_store
    from gcore.train.checkpoint.writer import CheckpointWriter, FolderPublisher, UpdateCounts
    from gcore.train.models import load_models
    from gcore.train.step import StepTrainer

    size = told["size"]
    meeting = Rendezvous(rank, size, "127.0.0.1")
    if rank == 0:
        opened = open_store(meeting)
        meet(opened.address)
        store = opened.store
    else:
        store = find_store(meet(None), meeting)
    world = Collective.join(meeting, store)
    spec = rank_spec(told["model"], told["samples"], told["response"], told["train"])
    launch = rank_launch(spec, Path(told["run"]), rank=rank, world_size=size)
    forget_peak()
    models = load_models(launch, world.device, world.max, lambda: None)
    found = {"loading": figure("VmHWM"), "loaded": figure("VmRSS")}
    saver = CheckpointWriter(launch, models.policy, models.critic)
    publisher = FolderPublisher(launch, models.policy, saver.writer, saver.insisting, world.max)
    trainer = StepTrainer(launch, world, models, saver, publisher, SystemClock(), UpdateCounts(0, 0))
    vocabulary = json.loads((Path(told["model"]) / "config.json").read_text())["vocab_size"]
    batch = batch_of(told["samples"], told["response"], vocabulary)
    forget_peak()
    trainer.run(ready_step(batch, step=1, rank=rank, size=size, weight=24_576), lambda _: None)
    return found | {"working": figure("VmHWM")}


def world(told: Told) -> list[Told]:
    """All ranks, each a fork."""
    addresses = os.pipe()
    answers = []
    for rank in range(told["size"]):

        def meet(address: str | None) -> str:
            if address is None:
                return os.read(addresses[0], 100).decode().partition("\n")[0]
            os.write(addresses[1], f"{address}\n".encode() * (told["size"] - 1))
            return address

        answers.append(forked(lambda rank=rank, meet=meet: train(told, rank, meet)))  # type: ignore[misc]
    found = [answer() for answer in answers]
    for end in addresses:
        os.close(end)
    return found


def forked(run: Callable[[], Told]) -> Callable[[], Told]:
    """Start it in a fork; what gives its answer."""
    out, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(theirs, json.dumps(run()).encode())
        except BaseException:  # noqa: BLE001  (a fork must not go on as its parent)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(theirs)

    def answer() -> Told:
        with os.fdopen(out) as file:
            text = file.read()
        os.waitpid(pid, 0)
        if not text:
            raise SystemExit("a process ended; its error stands above")
        found: Told = json.loads(text)
        return found

    return answer


def engine(told: Told) -> list[Told]:
    """An engine that serves, and answers one batch of requests."""
    from gcore.engines.launch import EngineLaunch
    from gcore.engines.torch.server import serve_engine

    out, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs, 1)
        try:
            forget_peak()
            serve_engine(EngineLaunch(model=told["model"], device="cpu", **told["launch"]), None)
        except BaseException:  # noqa: BLE001  (a fork must not go on as its parent)
            traceback.print_exc()
        os._exit(1)
    os.close(theirs)
    try:
        with os.fdopen(out) as file:
            address = file.readline().removeprefix("serving on ").strip()
            if not address:
                raise SystemExit("the engine ended; its error stands above")
            found = {"loading": figure("VmHWM", pid), "loaded": figure("VmRSS", pid)}
            forget_peak(pid)
            ask(address, told)
            found["working"] = figure("VmHWM", pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [found]


def ask(address: str, told: Mapping[str, Any]) -> None:
    """So many prompts at once, each answered to the last token."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 200, (told["requests"], told["prompt"])).tolist()
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": told["response"], "ignore_eos": True},
        "return_logprob": True,
    }
    request = urllib.request.Request(
        f"http://{address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        if len(json.loads(answer.read())) != told["requests"]:
            raise SystemExit("the engine left requests unanswered")


def host_main() -> None:
    """Serve requests until the input ends. The imports for the forks are done before; see above."""
    import torch

    import gcore.engines.torch.server
    import gcore.train.models
    import gcore.train.step  # noqa: F401

    torch.set_num_threads(1)
    send_parent(ready=True, imported=figure("VmRSS"))
    for line in sys.stdin:
        told = json.loads(line)
        send_parent(found=world(told) if told["what"] == "rank" else engine(told))


BENCHMARKS = (Benchmark("memory", "memory", measure, ("torch", "transformers", "deepspeed"), options=options),)

if __name__ == "__main__":
    host_main()
