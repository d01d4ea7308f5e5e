"""The processes of the memory benchmark: a host that has imported everything, and a fork of it for each engine or train rank.

Imports are most of a small process's memory and take longest, so they are made once, and what a fork takes beyond them is exactly
its own. A fork runs what the process of a job runs: `serve` of the torch engine, which is asked over HTTP, or `load_models` and
`StepTrainer` of a rank, in a world over gloo. What a process took at most the kernel remembers (`VmHWM`), and forgets when
it is told to; so each phase has a figure of its own.

The host answers on descriptor 3, a line of JSON each, to lines of JSON on its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import send_parent
from benchmarks.ranks import GROUP, PROMPT, Batch, rank_spec, ready_step
from gcore.engines.launch import EngineLaunch
from gcore.engines.torch.main import serve_engine

# The host imports what its forks use: see above.
from gcore.system.clock import SystemClock
from gcore.testing.models import rank_launch
from gcore.train.backends.distributed import Collective, Rendezvous, find_store, open_store
from gcore.train.checkpoint.writer import CheckpointWriter, UpdateCounts
from gcore.train.models import load_models
from gcore.train.step import StepTrainer

Told = dict[str, Any]


# What the kernel says ---------------------------------------------------------------------------------------------------


def figure(name: str, pid: int | str = "self") -> int:
    """`VmRSS` (now) or `VmHWM` (at most) of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"the kernel does not say {name}")


def forget_peak(pid: int | str = "self") -> None:
    """Begin to count anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


# A rank -----------------------------------------------------------------------------------------------------------------


def batch_of(samples: int, response: int, vocabulary: int) -> Batch:
    """Samples of one length, behind prompts of `PROMPT` tokens."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocabulary, (samples // GROUP, PROMPT)).repeat(GROUP, axis=0).astype(np.int32)
    responses = [rng.integers(0, vocabulary, response).astype(np.int32) for _ in range(samples)]
    logprobs = [np.full(response, -np.log(vocabulary), np.float32) for _ in range(samples)]
    return Batch(prompts, responses, logprobs, rng.integers(0, 2, samples).astype(np.float32))


def train(told: Told, rank: int, meet: Callable[[str | None], str]) -> Told:
    """A rank: loads, and trains a step. `meet` gives rank 0's address to the others."""
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
    trainer = StepTrainer(
        launch, world, models, CheckpointWriter(launch, models.policy, models.critic), SystemClock(), UpdateCounts(0, 0)
    )
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


# An engine --------------------------------------------------------------------------------------------------------------


def engine(told: Told) -> list[Told]:
    """An engine that serves, and answers one batch of requests."""
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


def main() -> None:
    """What it is told, until its input ends."""
    torch.set_num_threads(1)
    send_parent(ready=True, imported=figure("VmRSS"))
    for line in sys.stdin:
        told = json.loads(line)
        send_parent(found=world(told) if told["what"] == "rank" else engine(told))


if __name__ == "__main__":
    main()
