"""Runs of one fault: a small job on a fresh cluster, the fault at its moments, the audit after each, and the job's end.

The job is real in every part and small in every size: a random model of a few thousand weights, two responses of four
tokens to sixteen prompts a step, a checkpoint every third step. Sixteen shards and sixteen groups a step, so that no step
can be sealed without every shard: a controller's death is felt at once. Scoring takes a fiftieth of a second a response, so
that a step takes half a second, and faults come while the job runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from booked_run import check_sums
from chaos_cluster import CLOCK, ChaosCluster, ChaosFailed, NobodyHit
from chaos_faults import Act, Fault

from gcore.ledger.records.job import JobPhase
from gcore.ledger.records.slot_accounting import read_lines
from gcore.testing.models import make_tiny_model
from gcore.testing.pipelines import write_pipeline
from gcore.testing.vision_models import make_picture, make_tiny_vision_model

NAME = "chaos"
SHARDS = 16
PROMPTS, PICTURES = 480, 60
DEMO = Path(__file__).parents[2] / "examples" / "arithmetic" / "grpo.yaml"
END_S = 240.0
"""From a fault's end to the next steps, and from one step to the next: several worlds may die one after the other on a slow machine."""
MOST_STEPS_BETWEEN, STEPS_AFTER, LAST_STEPS = 3, 2, 6
REWARD = """
import pathlib
import time
from gcore.reward import RewardResult

SLOW = pathlib.Path(__file__).parent / "slow"
SECONDS = 0.02

def score(response, fields, spec):
    time.sleep(SECONDS * (100 if SLOW.exists() else 1))
    return RewardResult(1.0 / (1 + len(response.strip())))

def red(response, fields):
    from PIL import Image

    with Image.open(response.picture) as picture:
        return picture.resize((1, 1)).getpixel((0, 0))[0] / 255
"""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a fault begins: `delay_s` after so many `more_steps` were committed (0: at once, or after the job's creation)."""

    more_steps: int
    delay_s: float

    @classmethod
    def drawn(cls, rng: random.Random) -> Moment:
        """From a rolling job, or one that begins: in a quarter of all cases before the next step."""
        more = rng.choice((0, *range(1, MOST_STEPS_BETWEEN + 1)))
        return cls(more, round(rng.uniform(0.0, 8.0 if more == 0 else 1.0), 2))


def prepare(folder: Path) -> None:
    """Model, data and reward that all runs share."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "model.safetensors").exists():
        make_tiny_model(folder / "model", seed=5)
    info = folder / "packages" / "chaos_reward-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos-reward\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gcore.rewards]\nchaos = chaos_reward:score\nred = chaos_reward:red\n")
    (folder / "packages" / "chaos_reward.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)}) for n in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def prepare_pictures(folder: Path) -> None:
    """A vision-language model, and prompts of which each has one or two pictures of several sizes."""
    pictures = folder / "pictures"
    if pictures.is_dir():
        return
    make_tiny_vision_model(folder / "vision-model", seed=5)
    pictures.mkdir()
    for number in range(PICTURES):
        height, width = ((32, 32), (64, 48), (96, 64))[number % 3]
        (pictures / f"{number}.png").write_bytes(make_picture(height, width, seed=number))
    lines = []
    for n in range(PROMPTS):
        names = [f"pictures/{(n + more) % PICTURES}.png" for more in range(1 + n % 2)]
        lines.append(json.dumps({"prompt": "<image>" * len(names) + f"{n % 10}?", "images": names, "answer": "1"}))
    (folder / "pictures.jsonl").write_text("\n".join(lines) + "\n")


def prepare_pipeline(folder: Path) -> None:
    """A pipeline that generates pictures of 16 x 16 pixels, and prompts for it."""
    if not (folder / "pipeline").is_dir():
        write_pipeline(folder / "pipeline", seed=5)
    colours = ("red", "green", "blue")
    lines = [json.dumps({"prompt": f"a {colours[n % 3]} square", "answer": "1"}) for n in range(PROMPTS)]
    (folder / "drawn.jsonl").write_text("\n".join(lines) + "\n")


def spec_file(folder: Path, steps: int, *, pictures: bool = False, generates: str = "") -> Path:
    """The job."""
    spec: dict[str, Any] = {
        "name": NAME,
        "seed": 11,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl"), "shards": SHARDS},
        "flow": {"steps": steps, "groups_per_step": SHARDS, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4, "deterministic": True},
        "reward": {"name": "chaos"},
        "train": {"learning_rate": 1e-3, "watchdog_s": 10.0},
        "checkpoint": {"every": 3},
    }
    if pictures:
        spec["model"] = {"path": str(folder / "vision-model")}
        spec["data"] |= {"path": str(folder / "pictures.jsonl"), "images": "images"}
    if generates:
        spec["model"] = {"path": str(folder / "pipeline")}
        spec["data"] |= {"path": str(folder / "drawn.jsonl")}
        spec["flow"] |= {"name": generates}
        spec["rollout"] = {"diffusion": {"steps": 4, "height": 16, "width": 16}}
        spec["reward"] = {"name": "red"}
    file = folder / f"chaos-{steps}{'-pictures' * pictures}{'-' * bool(generates)}{generates}.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


async def one_job(fault: Fault, seeds: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """The runs of these seeds on one cluster and one job, one fault after the other; what became of each.

    After each fault two more steps must be committed, and the audit of the job as it runs be clean; after the last the job must
    end with all its steps, and be audited once more. If the job ended before a seed's turn, that one is not among the results.
    """
    begun = CLOCK.monotonic()
    place = folder / f"{fault.name}-{seeds[0]}"
    shutil.rmtree(place, ignore_errors=True)
    prepare(folder)
    if fault.pictures:
        prepare_pictures(folder)
    if fault.generates:
        prepare_pipeline(folder)
    results: list[dict[str, Any]] = []
    try:
        if fault.whole is not None:
            results.append(_blank(fault, seeds[0]))
            rng = random.Random(f"{fault.name} {seeds[0]}")
            results[0] |= await fault.whole(place, DEMO if fault.demo else spec_file(folder, fault.steps), rng)
        else:
            await _on_one_cluster(fault, seeds, folder, place, results)
    except (ChaosFailed, OSError) as failure:
        results = results or [_blank(fault, seeds[0])]
        results[-1]["why"] = str(failure)
    for result in results:
        result["ok"] = not result.get("audit") and not result.get("why")
    if not all(result["ok"] for result in results):
        results = [result for result in results if not result["ok"]]  # the others rest on a job that did not end well
    else:
        shutil.rmtree(place, ignore_errors=True)
    for result in results:
        result["job_seconds"] = round(CLOCK.monotonic() - begun, 1)
    return results


class _TooLate(Exception):
    """The job ended before the fault's moment came, or before it met anybody."""


def _blank(fault: Fault, seed: int) -> dict[str, Any]:
    return {"fault": fault.name, "seed": seed, "ok": False, "after_step": 0, "delay_s": 0.0}


async def _on_one_cluster(
    fault: Fault, seeds: Sequence[int], folder: Path, place: Path, results: list[dict[str, Any]]
) -> None:
    steps = fault.steps * len(seeds) + LAST_STEPS
    spec = spec_file(folder, steps, pictures=fault.pictures, generates=fault.generates)
    with _disk(place / "runs", fault.disk_mb):
        async with ChaosCluster.running(place, fault.shape, random.Random(fault.name)) as cluster:
            try:
                for seed in seeds:
                    if cluster.ended:
                        break
                    results.append(_blank(fault, seed))
                    try:
                        await _one_fault(cluster, fault, seed, spec, results[-1])
                    except _TooLate:
                        results.pop()
                if not results:
                    raise ChaosFailed(f"the job ended before {fault.name} met anybody: its {steps} steps are too few")
                while not cluster.ended:  # a slow machine may take long for all steps, but not for one
                    what, goal = "next step, or the end of the job", cluster.seen.step + 1
                    await cluster.until(what, partial(_is_at, cluster, goal), END_S)
                if results:
                    await _end(cluster, steps, results[-1])
            finally:
                with contextlib.suppress(OSError):
                    _keep_logs(cluster, place)


async def _one_fault(cluster: ChaosCluster, fault: Fault, seed: int, spec: Path, result: dict[str, Any]) -> None:
    assert fault.act is not None
    begun = CLOCK.monotonic()
    cluster.rng, cluster.number = random.Random(f"{fault.name} {seed}"), seed
    moment = Moment(0, 0.0) if fault.at_start else Moment.drawn(cluster.rng)
    if cluster.history is None and fault.at_start:
        acting = asyncio.create_task(fault.act(cluster))
        await CLOCK.sleep(0.0)
        await cluster.submit(spec, *fault.settings)
        result |= await acting
        rollbacks = 0
    else:
        if cluster.history is None:
            await cluster.submit(spec, *fault.settings)
        rollbacks = await _until_it_met_somebody(cluster, fault.act, moment, result)
    goal = cluster.seen.step + STEPS_AFTER
    await cluster.until(f"step {goal}", partial(_is_at, cluster, goal), END_S)
    result["rollbacks"] = cluster.seen.rollbacks - rollbacks
    result["audit"] = [*await cluster.audit(), *cluster.seen.broken]
    result["seconds"] = round(CLOCK.monotonic() - begun, 1)


async def _until_it_met_somebody(cluster: ChaosCluster, act: Act, moment: Moment, result: dict[str, Any]) -> int:
    """Inject the fault at its moment, and at another one as often as it affected no process, for as long as the job lasts.

    Returns the number of rollbacks before it. Raises _TooLate.
    """
    while True:
        goal = cluster.seen.step + moment.more_steps
        await cluster.until(f"step {goal}", partial(_is_at, cluster, goal), END_S)
        await CLOCK.sleep(moment.delay_s)
        if cluster.ended:
            raise _TooLate
        result |= {"after_step": cluster.seen.step, "delay_s": moment.delay_s}
        rollbacks = cluster.seen.rollbacks
        try:
            result |= await act(cluster)
        except NobodyHit:
            moment = Moment.drawn(cluster.rng)
        else:
            return rollbacks


def _is_at(cluster: ChaosCluster, step: int) -> bool:
    """Whether the job has come to a step, or has ended."""
    return cluster.ended or cluster.seen.step >= step


async def _end(cluster: ChaosCluster, steps: int, result: dict[str, Any]) -> None:
    """Of the job: all its steps are there, and the audit of the whole of it is clean."""
    await cluster.serve()
    seen = cluster.seen
    assert seen.mirror.status is not None
    status = seen.mirror.status.record
    result["audit"] = [*await cluster.audit(), *seen.broken]
    for root in {cluster.run_root(node) for node in cluster.addresses}:
        for run in root.glob(f"{NAME}-*"):
            try:
                check_sums(list(read_lines(run)))
            except AssertionError as error:
                raise ChaosFailed(f"slot accounting in {run} does not sum: {error}") from error
    if status.phase is not JobPhase.SUCCEEDED or seen.step != steps:
        result["why"] = f"{status.phase} at step {seen.step} of {steps}: {status.reason}"


def _keep_logs(cluster: ChaosCluster, place: Path) -> None:
    """Workers' logs stand on the runs' disk, which is about to go."""
    for log in cluster.runs.glob("*/logs/*"):
        shutil.copy(log, place / "logs" / log.name)


@contextlib.contextmanager
def _disk(folder: Path, size_mb: int | None) -> Iterator[None]:
    """A disk of that size at `folder`; None: whatever is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if size_mb is None:
        yield
        return
    if os.geteuid() != 0:
        raise ChaosFailed("a small disk is a tmpfs, which needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
