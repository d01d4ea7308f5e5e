"""Chaos over several restarts of a whole cluster: the same losses and the same accuracy, with any number of controllers.

Each restart is a cluster on the same folders, with its own number of nodes; all processes are killed between two of them. These
are rows of `make chaos` like the others, and take longer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chaos_cluster import CLOCK, ChaosCluster, ChaosFailed, History, Shape

from gcore.ledger.records.chain import LogEntry
from gcore.ledger.records.job import JobPhase

Told = dict[str, Any]
RANKS = 2
STEPS = 18
SETTINGS = (f"flow.steps={STEPS}", f"train.ranks={RANKS}", "checkpoint.every=2")
ALIKE = 1e-6
"""How far apart the losses of two runs may be, relatively: their sums are made in the same order, on the same ranks."""
CLOSE = 1e-4
"""How far apart they may be, absolutely, if the sums are made in another order."""
DEMO_STEPS, DEMO_KILLS = 40, 10
DEMO_ACCURACY = 0.9
LIFE_S = 300.0


@dataclass(frozen=True, slots=True)
class Life:
    """One start of the cluster: with so many nodes of so many slots, killed after so many more steps; None: to the end."""

    nodes: int
    slots: int
    until_step: int | None
    settings: tuple[str, ...] = ()
    """Further settings with which the job is submitted."""


async def uninterrupted(folder: Path, spec: Path, rng: random.Random) -> dict[int, float]:
    """The losses of the same job without faults."""
    return (await _lived(folder, spec, rng, [Life(2, 1, None)]))[1]


async def losses_equal(folder: Path, spec: Path, rng: random.Random) -> Told:
    """Everything is killed at three random moments, and the losses equal those of an undisturbed run."""
    return await _equal(folder, spec, rng, [2, 2, 2, 2])


async def losses_equal_elsewhere(folder: Path, spec: Path, rng: random.Random) -> Told:
    """The same, continued with another number of controllers each time."""
    return await _equal(folder, spec, rng, rng.choice([[2, 1, 3], [1, 3, 2], [3, 2, 1]]))


async def _equal(folder: Path, spec: Path, rng: random.Random, nodes: Sequence[int]) -> Told:
    told, losses = await _lived(folder / "killed", spec, rng, _lives(rng, nodes))
    expected = await uninterrupted(folder / "whole", spec, rng)
    if losses.keys() != expected.keys():
        raise ChaosFailed(f"steps {sorted(losses)} were trained, not {sorted(expected)}")
    apart = max(abs(losses[step] - expected[step]) / max(abs(expected[step]), 1e-9) for step in expected)
    told |= {"losses_apart": apart, "losses_identical": losses == expected}
    if apart > ALIKE:
        worst = next(s for s in sorted(expected) if abs(losses[s] - expected[s]) > ALIKE * max(abs(expected[s]), 1e-9))
        raise ChaosFailed(
            f"the loss of step {worst} is {losses[worst]!r}, undisturbed it is {expected[worst]!r}; {told}"
        )
    return told


async def four_one_three(folder: Path, spec: Path, rng: random.Random) -> Told:
    """Started with 4 controllers, continued with 1, then with 3."""
    return (await _lived(folder, spec, rng, _lives(rng, [4, 1, 3])))[0]


async def another_trainer(folder: Path, spec: Path, rng: random.Random) -> Told:
    """Started with DeepSpeed on two ranks, continued with FSDP2 on one, then with DeepSpeed on two: the losses continue."""
    first, second = sorted(rng.sample(range(2, STEPS - 2), 2))
    ranks = "train.ranks=null"  # one on each controller
    lives = [
        Life(2, 1, first, (ranks,)),
        Life(1, 2, second, (ranks, "train.backend=fsdp2")),
        Life(2, 1, None, (ranks,)),
    ]
    told, losses = await _lived(folder / "killed", spec, rng, lives)
    expected = await uninterrupted(folder / "whole", spec, rng)
    told["target"] = f"DeepSpeed on 2 ranks to step {first}, FSDP2 on 1 to {second}, DeepSpeed on 2"
    if losses.keys() != expected.keys():
        raise ChaosFailed(f"steps {sorted(losses)} were trained, not {sorted(expected)}")
    apart = {step: round(losses[step] - expected[step], 9) for step in sorted(expected)}
    if max(map(abs, apart.values())) > CLOSE:
        raise ChaosFailed(f"losses differ from those of an undisturbed run: {apart}")
    return told | {"losses_apart": apart}


def _lives(rng: random.Random, nodes: Sequence[int]) -> list[Life]:
    ends = sorted(rng.sample(range(1, STEPS - 1), len(nodes) - 1))
    return [Life(n, -(-RANKS // n), end) for n, end in zip(nodes, [*ends, None], strict=True)]


async def _lived(folder: Path, spec: Path, rng: random.Random, lives: Sequence[Life]) -> tuple[Told, dict[int, float]]:
    """Run all lives, one after the other; return their description and the losses along the final chain."""
    known: dict[int, LogEntry] = {}
    told: Told = {"target": " then ".join(f"{life.nodes} controllers" for life in lives)}
    audits: list[str] = []
    for life in lives:
        async with ChaosCluster.running(folder, Shape(nodes=life.nodes, slots=life.slots), rng) as cluster:
            await cluster.submit(spec, *SETTINGS, *life.settings)
            until = life.until_step
            await cluster.until(
                f"step {until}" if until else "end of the job",
                partial(_is_at, cluster, until),
                LIFE_S,
            )
            if until is not None:
                await CLOCK.sleep(rng.uniform(0.0, 1.0))
                audits += await cluster.audit()  # of the job as it runs
            else:
                await cluster.serve()
                audits += await cluster.audit()
                told |= _outcome(cluster.seen, STEPS)
            known |= {seen.entry.seq: seen.entry for seen in cluster.seen.entries}
            audits += cluster.seen.broken
            head = cluster.seen.mirror.head
    assert head is not None
    losses = {e.step: e.stats["loss"] for e in _chain(head.record.seq, known) if e.kind == "train"}
    return told | {"audit": audits, "rollbacks": sum(e.kind == "rollback" for e in known.values())}, losses


def _is_at(cluster: ChaosCluster, step: int | None) -> bool:
    """Whether the job has come to a step, if one is given, or has ended."""
    return cluster.ended or (step is not None and cluster.seen.step >= step)


def _outcome(seen: History, steps: int) -> Told:
    assert seen.mirror.status is not None
    status = seen.mirror.status.record
    if status.phase is not JobPhase.SUCCEEDED or seen.step != steps:
        raise ChaosFailed(f"{status.phase} at step {seen.step} of {steps}: {status.reason}")
    return {"phase": str(status.phase), "step": seen.step}


def _chain(seq: int | None, known: Mapping[int, LogEntry]) -> list[LogEntry]:
    """The entries from the base to `seq`."""
    chain = []
    while seq is not None:
        chain.append(known[seq])
        seq = known[seq].parent
    return chain[::-1]


async def demo_survives(folder: Path, spec: Path, rng: random.Random) -> Told:
    """The demo, everything killed at ten random moments: it resumes and ends at its accuracy."""
    moments: list[str] = []
    async with ChaosCluster.running(folder, Shape(), rng) as cluster:
        await cluster.submit(spec)
        # Of the whole job but its end, so that it is not over before the last of them; after each, the chain goes on
        # from its newest checkpoint and comes to the next once more.
        for goal in sorted(rng.choices(range(DEMO_STEPS - 5), k=DEMO_KILLS)):
            delay = rng.uniform(0.0, 8.0 if goal == 0 else 2.0)
            await cluster.until(f"step {goal}", partial(_is_at, cluster, goal), LIFE_S)
            await CLOCK.sleep(delay)
            if cluster.ended:
                raise ChaosFailed(f"the demo ended after {len(moments)} kills; {DEMO_KILLS} were to come")
            moments.append(f"{cluster.seen.step}+{delay:.1f}")
            cluster.kill_all()
            await cluster.serve()
        await cluster.until("end of the job", lambda: cluster.ended, LIFE_S)
        await cluster.serve()
        seen = cluster.seen
        assert seen.mirror.head is not None
        told: Told = {"target": f"everything, at {', '.join(moments)}", "rollbacks": seen.rollbacks}
        told |= _outcome(seen, DEMO_STEPS)
        told["audit"] = [*await cluster.audit(), *seen.broken]
        version = str(seen.mirror.head.record.version)
        told["accuracy"] = round(seen.mirror.evaluations[version].record.accuracy, 4)
        if told["accuracy"] < DEMO_ACCURACY:
            raise ChaosFailed(f"the demo ends with {told['accuracy']:.1%} right, less than {DEMO_ACCURACY:.0%}; {told}")
        return told
