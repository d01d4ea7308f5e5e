"""What a decision of `dynamic` takes a controller: all of what is done between two steps, from the records to the places on slots.

A job of eight responses a slot, judges and the sizes of its models known, on nodes of eight H100: the newest step is taken in from its
seal and the nodes' books, it is seen which splits fit, the policy is asked, what it wants is laid on slots and told. Steps are made up; the records are those that a store would hold. Processor time, which does not depend on what
else the machine does, and of it what the event loop was held up for, while the rest is done in threads.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from builders import ME, running_job, stored
from told_nodes import H100, QWEN

from benchmarks.harness import Benchmark, Result
from controllers.planning.history import StepHistory, engine_rows
from controllers.planning.planner import SplitDecider
from controllers.rules.view import JobView
from gcore.config import JobSpec, parse_spec
from gcore.ledger.records.chain import Checkpoint, Checkpoints, LogEntry, Seal, SealedGroup, SealState
from gcore.ledger.records.cluster import ModelConfigs, NodeFacts, SlotFacts
from gcore.ledger.records.job import JobRecord, Moves, NodeRecord, Plan
from gcore.ledger.records.slot_accounting import EngineSums, NodeAccounts, StepAccount
from gcore.types import PromptRef, Version
from placement.assign import assign_split, split_of
from placement.moves import DecisionContext, MoveProposal, split_from
from placement.placer import find_bounds, movable_request, place_split, slot_bounds
from placement.policies.base import SwitchCosts
from placement.policies.simple import even_split
from placement.request import PlacementRequest
from placement.slots import NodeSlots, Snapshot, Split, feasible

NODE_SLOTS = 8
SAMPLES = 8
COSTS = SwitchCosts(5.0, 60.0)
STRETCH = 16
"""Steps after which judgements become longer, or short again, so that there is something to move."""
SHORT, LONG = 64, 512
"""Tokens of a judgement."""
TOKEN_S = 0.002
"""Of an engine that is full."""
WARM = 4
"""Decisions that are not counted: in the first everything is imported, and caches are empty."""
CASES = ((16, 1), (1024, 1), (1024, 4))
"""Slots, and how many of them an engine spans."""


def decisions(count: int = 100) -> dict[str, Any]:
    """Of each case."""
    return {f"{slots} slots, engines of {size}": asyncio.run(_measured(slots, size, count)) for slots, size in CASES}


@dataclass
class _Job:
    """A job whose steps are made up. `view`: after the newest."""

    slots: int
    size: int
    draw: np.random.Generator
    spec: JobSpec = field(init=False)
    view: JobView = field(init=False)
    snapshot: Snapshot = field(init=False)
    moving: PlacementRequest = field(init=False)
    names: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [f"node-{number:03}" for number in range(self.slots // NODE_SLOTS)]
        self.spec = _spec(self.slots, self.size)
        nodes = {name: _node(name) for name in self.names}
        self.snapshot = Snapshot(tuple(NodeSlots(name, one.slots, one.facts) for name, one in nodes.items()))
        models = ModelConfigs(policy=QWEN, judges={"tutor": QWEN})
        self.moving = movable_request(self.spec, models)
        first = even_split(slot_bounds(self.snapshot, self.moving))
        plan = assign_split(first, None, self.snapshot, ("tutor",), world="w", generation=1, sizes=self.moving.sizes)
        assert plan is not None, f"{first} cannot be placed"
        view = running_job()
        record = JobRecord(uid="u", name="j", spec={}, run_dir="/r", created=0.0, prompts=40, models=models)
        mirror = replace(view.mirror, plan=stored(plan), job=stored(record), movings={"": stored(Moves())})
        self.view = replace(view, spec=self.spec, nodes=nodes, mirror=mirror)

    @property
    def plan(self) -> Plan:
        """Of the newest step."""
        assert self.view.mirror.plan is not None
        return self.view.mirror.plan.record

    def step(self, history: StepHistory, step: int) -> None:
        """One more is committed and booked."""
        before, split = self.view.mirror, split_of(self.plan)
        lengths = np.ceil(np.exp(self.draw.normal(6.0, 0.8, (self.slots, SAMPLES)))).astype(int)
        judgement = LONG if step // STRETCH % 2 else SHORT
        works = [lengths.sum() / split.rollout, lengths.size * judgement / split.reward]
        off = np.exp(self.draw.normal(0.0, 0.05, 2))
        collect_s = 10.0 + TOKEN_S * self.size * float(max(works) * off[0])
        train_s = 2.0 + 0.01 * float(lengths.sum() / split.train * off[1])
        stats = {
            "seconds": collect_s + train_s + 1.0,
            "collect_s": collect_s,
            "train_s": train_s,
            "exchange_s": 0.5,
            "publish_s": 0.5,
            "tokens": float(lengths.sum()),
            "samples": float(lengths.size),
        }
        entry = LogEntry(
            kind="train", step=step, lineage=0, seq=step, parent=step - 1, world="w", nonce="n", stats=stats
        )
        assert before.head is not None
        head = before.head.record.model_copy(update={"step": step, "seq": step})
        sealed = replace(before, seals={step: stored(_seal(step, lengths))})
        tokens = {"rollout": int(lengths.sum()), "reward": lengths.size * judgement}
        books = {name: stored(self._booked(name, step, split, tokens)) for name in self.names}
        saved = Checkpoints(
            entries=(Checkpoint(lineage=0, step=step, seq=step, file=f"checkpoints/0-{step}", digest="d"),)
        )
        after = replace(
            before, head=stored(head), log={**before.log, step: stored(entry)}, books=books, checkpoints=stored(saved)
        )
        history.note(sealed, after, lambda: self.snapshot)
        self.view = replace(self.view, mirror=after)

    def moved(self, proposal: MoveProposal) -> None:
        """What was wanted is so; a train world of another size is placed anew, as a rollback does it."""
        plan = proposal.plan or place_split(
            self.snapshot,
            self.moving,
            world=f"w{proposal.move.generation}",
            generation=proposal.move.generation,
            current=self.plan,
            wanted=split_from(proposal.move.after),
        )
        assert plan is not None
        self.view = replace(self.view, mirror=replace(self.view.mirror, plan=stored(plan)))

    def _booked(self, name: str, step: int, split: Split, tokens: Mapping[str, int]) -> NodeAccounts:
        each = NODE_SLOTS / self.slots
        pools = {"rollout": split.rollout * each, "reward": split.reward * each}
        loads = {
            pool: tuple(
                EngineSums(active_s=20.0, running_s=20.0 * load, tokens=round(20.0 * load / (0.02 + 0.001 * load)))
                for load in (1.5, 6.0, 24.0)
            )
            for pool in pools
        }
        share, requests = NODE_SLOTS / self.slots, NODE_SLOTS * SAMPLES
        sums = {
            pool: EngineSums(active_s=60.0, running_s=630.0, tokens=round(tokens[pool] * share), requests=requests)
            for pool in pools
        }
        booked = {f"busy {pool}": 60.0 * slots for pool, slots in {**pools, "train": split.train * each / 2}.items()}
        book = StepAccount(
            version=Version(0, step),
            began=0.0,
            seconds=121.0,
            slots=NODE_SLOTS,
            booked=booked,
            engines=sums,
            loads=loads,
        )
        known = self.view.mirror.books.get(name)
        return (NodeAccounts(node=name) if known is None else known.record).plus(book)


async def _measured(slots: int, size: int, count: int) -> dict[str, Any]:
    job = _Job(slots, size, np.random.default_rng(slots))
    history = StepHistory.of(job.spec.served_judges)
    next_split = SplitDecider(job.spec, job.moving, engine_rows(job.spec), history)
    clock, computing, held_up, moves = [], [], [], 0
    for step in range(1, count + WARM + 1):
        job.step(history, step)
        at = DecisionContext(step, step, "node-000", 0.0)
        began, computed, loop = time.perf_counter(), time.process_time(), time.thread_time()
        wish = await next_split.propose(job.view, COSTS, at)
        clock.append(time.perf_counter() - began)
        computing.append(time.process_time() - computed)
        held_up.append(time.thread_time() - loop)
        assert wish.trouble == "", wish
        if wish.proposal is not None:
            job.moved(wish.proposal)
            moves += 1
    bounds = find_bounds(job.snapshot, job.moving, now=len(job.plan.ranks))
    return {
        "cpu_p50_ms": _ms(computing, 0.5),
        "cpu_p99_ms": _ms(computing, 0.99),
        "cpu_most_ms": _ms(computing, 1.0),
        "loop_p50_ms": _ms(held_up, 0.5),
        "loop_p99_ms": _ms(held_up, 0.99),
        "p50_ms": _ms(clock, 0.5),
        "p99_ms": _ms(clock, 0.99),
        "splits": sum(1 for _ in feasible(bounds)),
        "moves": moves,
        "decisions": count,
    }


def _ms(seconds: Sequence[float], quantile: float) -> float:
    return round(1000 * float(np.quantile(seconds[WARM:], quantile)), 1)


def _spec(slots: int, size: int) -> JobSpec:
    engine = {"engine": "sglang", "slots_per_engine": size}
    judge = {
        "name": "tutor",
        "model": {"path": "m"},
        "template": "{{ prompt }}{{ response }}",
        "max_new_tokens": 64,
        "verdict": {"parser": "number"},
        "serving": engine,
    }
    return parse_spec(
        {
            "name": "j",
            "model": {"path": "m"},
            "data": {"path": "d", "shards": 4, "window": 8},
            "flow": {"steps": 10_000, "groups_per_step": slots, "samples_per_prompt": SAMPLES},
            "rollout": {"max_new_tokens": 4096, **engine},
            "judges": [judge],
            "reward": {"judge": "tutor"},
            "placement": {"policy": "dynamic"},
        }
    )


def _node(name: str) -> NodeRecord:
    slots = tuple(f"cuda:{number}" for number in range(NODE_SLOTS))
    facts = tuple(SlotFacts(slot=slot, memory_gib=79.6, device=H100) for slot in slots)
    return NodeRecord(
        name=name,
        incarnation=ME if name == "node-000" else f"{name}.x",
        address="",
        slots=slots,
        pid=1,
        facts=NodeFacts(host_memory_gib=1800.0, slots=facts),
    )


def _seal(step: int, lengths: np.ndarray[Any, Any]) -> Seal:
    groups = tuple(
        SealedGroup(
            ref=PromptRef(0, 0, number),
            digest=f"d{number}",
            prompt_tokens=100,
            response_tokens=tuple(one),
            versions=(Version(0, step - 1),),
            holder=ME,
        )
        for number, one in enumerate(lengths.tolist())
    )
    return Seal(
        lineage=0,
        step=step,
        attempt=1,
        state=SealState.READY,
        world="w",
        world_size=1,
        mini_batches=1,
        groups=groups,
    )


def measure(_: argparse.Namespace, taken: Result) -> Result:
    """All cases."""
    return {**taken, "cases": decisions()}


BENCHMARKS = (Benchmark("placement-decisions", "placement_decisions", measure, ("numpy", "numba")),)
