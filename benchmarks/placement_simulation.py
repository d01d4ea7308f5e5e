"""Placement without a cluster: policies in the simulator, lending within a step, and the cost of a decision.

**Policies** (`placement`): every scenario of `benchmarks/scenarios`, seeds that were not used for tuning, five switch costs. `dynamic` was tuned
on seeds from 1000 on. Results of seeds 0 to 9 were known before its last tuning, so the table begins at seed 10; intermediate
tables showed 10 to 23, too. The summary of seeds that no earlier table showed comes from
`--first 110 --seeds 14 --out benchmarks/results/placement_unseen.json`. An interrupted run resumes if the
simulator, the policies and the scenarios are unchanged: .cache/placement has the finished rows.

**Lending** (`placement-within`): random batches of small jobs on three replicas. The best schedule is found by trying all loans
at the moments at which the rule decides, so there are few moments and few replicas. The rule knows the true lengths of the batch, as it does
for the best split for each step. The figure is the time of a batch, without training. The rows are each of the splits, and the best split, which
differs for each way of lending.

**Decisions** (`placement-decisions`): the time that a decision of `dynamic` takes a controller: all work between two steps, from the
records to the places on slots. The job has eight responses a slot, judges and known model sizes, on nodes of eight H100. The newest
step is read from its seal and the nodes' slot accounting, the feasible splits are listed, the policy proposes one, and it is laid on
slots. Steps are simulated; the records are those of a real store. The figure is processor time, which does not depend on other load, and
its part on the event loop, while the rest runs in threads.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from builders import ME, running_job, stored
from placement_bounds import COSTS, LendingTimes, compare_lending, compare_policies, lower_bound
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from told_nodes import H100, QWEN

from benchmarks.harness import ROOT, Benchmark, Result
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
from placement.request import PlacementRequest
from placement.simulator.job import SimulatedJob, draw_workload, replica_pace, true_knowledge
from placement.simulator.run import best_each_step, play_policy, switch_costs
from placement.simulator.scenario import Scenario, read_scenario
from placement.slots import NodeSlots, Snapshot, Split, even_split, feasible

SCENARIOS = ROOT / "benchmarks" / "scenarios"
CACHE = ROOT / ".cache" / "placement"
FIRST = 10
"""The first seed."""


def decisive_modules() -> list[Path]:
    """The modules of `placement` that a result depends on: those that the simulator loads in a new process."""
    program = (
        f"import sys, {play_policy.__module__}\n"
        "print(*(module.__file__ for name, module in sorted(sys.modules.items()) "
        "if name.startswith('placement.') and not hasattr(module, '__path__')), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.split()]


def fingerprint() -> str:
    """Of all that a result depends on."""
    files = [*decisive_modules(), *sorted(SCENARIOS.rglob("*.yaml"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def measure_policies(arguments: argparse.Namespace, taken: Result) -> Result:
    """Play what is not done yet, and sum up the seeds that are whole."""
    names = arguments.only.split(",") if arguments.only else sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
    path = CACHE / f"{fingerprint()}.jsonl"
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if not arguments.done:
        play(path, [(name, seed) for seed in seeds for name in names], arguments.processes)
    rows = [row for row in read(path) if row["scenario"] in names and row["seed"] in seeds]
    count = Counter(row["seed"] for row in rows)
    rows = [row for row in rows if count[row["seed"]] == len(names)]
    return {**taken, "fingerprint": path.stem, "first_seed": arguments.first, **summary(rows)}


def policy_options(parser: argparse.ArgumentParser) -> None:
    """Seeds and scenarios."""
    parser.add_argument("--first", type=int, default=FIRST, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--only", default="", help="scenarios, with commas; also of a folder, such as pictures/judge-slow"
    )
    parser.add_argument("--done", action="store_true", help="only sum up what is done of the seeds that are whole")


def play(path: Path, wanted: list[tuple[str, int]], processes: int) -> None:
    """Those of `wanted` that are not in the file yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["scenario"], row["seed"]) for row in read(path)}
    left = [one for one in wanted if one not in done]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with path.open("a") as file, Pool(processes) as pool, Progress(*columns) as progress:
        bar = progress.add_task("simulated jobs", total=len(wanted), completed=len(wanted) - len(left))
        for row in pool.imap_unordered(one_job, left):
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            progress.advance(bar)


def one_job(what: tuple[str, int]) -> dict[str, Any]:
    """Every policy at every cost on one job."""
    name, seed = what
    job = SimulatedJob(read_scenario(SCENARIOS / f"{name}.yaml"), seed)
    found = {str(cost): {row.policy: [row.seconds, row.moves] for row in compare_policies(job, cost)} for cost in COSTS}
    return {"scenario": name, "seed": seed, "bound": round(lower_bound(job), 3), "costs": found}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """What is done; a line that was cut off is not."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Regret beside the oracle and the best static split, in percent: of each scenario, cost and policy, and of all."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    cells: dict[tuple[str, str, str], list[tuple[float, float, int]]] = {}
    for row in rows:
        for cost, found in row["costs"].items():
            best, fixed = found["best each step"][0], found["best static"][0]
            for policy, (seconds, moves) in found.items():
                regret, behind = 100 * (seconds / best - 1), 100 * (seconds / fixed - 1)
                cells.setdefault((row["scenario"], cost, policy), []).append((regret, behind, moves))
                where = f"{row['scenario']}, seed {row['seed']}, {cost} s"
                points.setdefault(policy, []).append((regret, behind, where))
    return {
        "seeds": len({row["seed"] for row in rows}),
        "jobs": len(rows),
        "overall": {policy: overall(found) for policy, found in points.items()},
        "above_bound": above_bound(rows),
        "cells": [
            {"scenario": name, "cost": float(cost), "policy": policy, **cell(found)}
            for (name, cost, policy), found in sorted(cells.items())
        ],
    }


def overall(found: list[tuple[float, float, str]]) -> dict[str, Any]:
    """Of all runs of a policy, with the worst of them."""
    regret, behind = np.array([one[0] for one in found]), np.array([one[1] for one in found])
    return {
        "runs": len(found),
        "regret": quantiles(regret, 0.5, 0.95, 0.99, 1.0),
        "regret_worst": found[int(regret.argmax())][2],
        "behind_static": quantiles(behind, 0.5, 0.95, 0.99, 1.0),
        "behind_static_worst": found[int(behind.argmax())][2],
    }


def cell(found: list[tuple[float, float, int]]) -> dict[str, Any]:
    """Of a policy's runs in one scenario at one cost."""
    regret, behind, moves = np.array(found).T
    return {
        "regret": quantiles(regret, 0.05, 0.5, 0.95, 1.0),
        "behind_static": quantiles(behind, 0.5, 0.99, 1.0),
        "moves": float(np.median(moves)),
    }


def quantiles(values: np.ndarray[Any, Any], *which: float) -> dict[str, float]:
    """By name: p50, p95, most."""
    return {"most" if q == 1.0 else f"p{q * 100:g}": round(float(np.quantile(values, q)), 2) for q in which}


def above_bound(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How far the oracle without switch costs is above the fluid bound, percent, by scenario: the median."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["scenario"], []).append(
            100 * (row["costs"]["0.0"]["best each step"][0] / row["bound"] - 1)
        )
    return {name: round(float(np.median(values)), 1) for name, values in sorted(found.items())}


# Lending --------------------------------------------------------------------------------------------------------------

REPLICAS, MOMENTS = 3, 5
WITHIN_COSTS = (0.0, 0.5, 2.0)
"""Seconds in which a replica that changes pools serves no request."""


def one_case(seed: int) -> list[dict[float, LendingTimes]]:
    """A batch on each split, at each cost."""
    draw = np.random.default_rng((seed, 7))
    scenario = Scenario.model_validate(
        {
            "name": "small",
            "what": "one batch",
            "slots": REPLICAS + 1,
            "steps": 1,
            "groups": int(draw.integers(4, 13)),
            "samples": 2,
            "lengths": {"mean": float(draw.uniform(200, 800)), "spread": float(draw.uniform(0.5, 1.3))},
            "judging": {"tokens": float(np.exp(draw.uniform(np.log(30), np.log(600))))},
            "rollout": {"running": int(draw.integers(4, 17))},
            "reward": {"running": int(draw.integers(4, 17))},
        }
    )
    work, pace = draw_workload(scenario, seed, 0), replica_pace(scenario, seed)[:REPLICAS]
    engines = scenario.rollout, scenario.reward
    laws = np.array([[one.token_s, one.sequence_s] for one in engines])
    most, told = np.array([one.running for one in engines]), true_knowledge(0, scenario, work)
    return [
        {
            cost: compare_lending(
                work.lengths, work.judged, pace, rollout, laws, most, told=told, cost_s=cost, moments=MOMENTS
            )
            for cost in WITHIN_COSTS
        }
        for rollout in range(1, REPLICAS)
    ]


def lending_summary(found: list[list[LendingTimes]]) -> dict[str, Any]:
    """What each way takes longer than the best lending, percent."""
    every = [one for case in found for one in case]
    best = np.array([min(one.best.seconds for one in case) for case in found])
    known = np.array([min(one.known for one in case) for case in found])
    return {
        "seconds": round(float(np.median(best)), 2),
        "best split": quantiles_and_mean(100 * (known / best - 1)),
        "rule": quantiles_and_mean(np.array([100 * (one.by_rule / one.best.seconds - 1) for one in every])),
        "nothing lent": quantiles_and_mean(np.array([100 * (one.never / one.best.seconds - 1) for one in every])),
    }


def quantiles_and_mean(values: Any) -> dict[str, float]:
    """Median, 95th percentile, mean and most."""
    told = {
        "p50": np.quantile(values, 0.5),
        "p95": np.quantile(values, 0.95),
        "mean": values.mean(),
        "most": values.max(),
    }
    return {name: round(float(value), 2) for name, value in told.items()}


def measure_lending(arguments: argparse.Namespace, taken: Result) -> Result:
    """All cases, at each cost."""
    with Pool(arguments.processes) as pool:
        found = pool.map(one_case, range(arguments.cases), chunksize=4)
    costs = {f"{cost:g}": lending_summary([[split[cost] for split in case] for case in found]) for cost in WITHIN_COSTS}
    shape = {"cases": arguments.cases, "replicas": REPLICAS, "moments": MOMENTS}
    return {**taken, **shape, "costs": costs}


def lending_options(parser: argparse.ArgumentParser) -> None:
    """How many."""
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)


# Decisions ------------------------------------------------------------------------------------------------------------

NODE_SLOTS = 8
SAMPLES = 8
MOVE_COSTS = SwitchCosts(5.0, 60.0)
STRETCH = 16
"""Steps after which judgements become longer, or short again, so that there is something to move."""
SHORT, LONG = 64, 512
"""Tokens of a judgement."""
TOKEN_S = 0.002
"""Of an engine that is full."""
WARM = 4
"""Decisions that are not counted: in the first everything is imported, and caches are empty."""
SIZES = ((16, 1), (1024, 1), (1024, 4))
"""Slots, and how many of them an engine spans."""


def decisions(count: int = 100) -> dict[str, Any]:
    """Of each case."""
    return {f"{slots} slots, engines of {size}": asyncio.run(_measured(slots, size, count)) for slots, size in SIZES}


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
        """Apply a decision; a train world of another size is placed from scratch, as in a rollback."""
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
    history = StepHistory.of(job.spec)
    next_split = SplitDecider(job.spec, job.moving, engine_rows(job.spec), history)
    clock, computing, held_up, moves = [], [], [], 0
    for step in range(1, count + WARM + 1):
        job.step(history, step)
        at = DecisionContext(step, step, "node-000", 0.0)
        began, computed, loop = time.perf_counter(), time.process_time(), time.thread_time()
        wish = await next_split.propose(job.view, MOVE_COSTS, at)
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


def measure_decisions(_: argparse.Namespace, taken: Result) -> Result:
    """All cases."""
    return {**taken, "cases": decisions()}


# Plots ----------------------------------------------------------------------------------------------------------------

REGRETS, RUN = ROOT / "docs" / "images" / "placement-regret.svg", ROOT / "docs" / "images" / "placement-run.svg"
SHOWN = ("best static", "dynamic", "threshold", "hill_climb")
POLICY_COLOURS = {"best static": "#555555", "dynamic": "#0072b2", "threshold": "#e69f00", "hill_climb": "#d55e00"}
PLAYED, SEED, COST_S = "judge-slow-apart", 0, 5.0


def plot_placement(result: Result) -> None:
    """Both plots of docs/develop/placement-simulation.md (they need the packages of `gcore[simulate]`). The run is played again."""
    import matplotlib

    matplotlib.rcParams |= {"svg.hashsalt": "gcore", "font.size": 9}
    plot_regrets(result)
    plot_run()


def plot_regrets(result: dict[str, Any]) -> None:
    """Median and 5th to 95th percentile of each policy's regret in each scenario, at one cost."""
    from matplotlib import pyplot

    cells = {(c["scenario"], c["policy"]): c["regret"] for c in result["cells"] if c["cost"] == COST_S}
    names = sorted({name for name, _ in cells}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(7.5, 5.2), layout="constrained")
    for number, policy in enumerate(SHOWN):
        at = np.arange(len(names)) + 0.27 - 0.18 * number
        found = [cells[name, policy] for name in names]
        middle = np.array([one["p50"] for one in found])
        reach = np.array([[one["p50"] - one["p5"] for one in found], [one["p95"] - one["p50"] for one in found]])
        axes.errorbar(middle, at, xerr=reach, fmt="o", ms=4, lw=1.2, color=POLICY_COLOURS[policy], label=policy)
    axes.set_yticks(np.arange(len(names)), names)
    axes.set_xlabel(f"percent behind the best split for each step; a change costs {COST_S:g} s")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(REGRETS, metadata={"Date": None})
    pyplot.close(figure)


def plot_run() -> None:
    """Seconds of each step of one run, the mean over five."""
    from matplotlib import pyplot

    job = SimulatedJob(read_scenario(SCENARIOS / f"{PLAYED}.yaml"), SEED)
    runs = {policy: play_policy(job, policy, COST_S) for policy in ("dynamic", "hill_climb")}
    best = best_each_step(job, switch_costs(job.scenario, SEED, COST_S), runs.values())
    figure, axes = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained")
    axes.plot(smooth(best.step_s), color="black", lw=1, label="best split for each step")
    for policy, run in runs.items():
        axes.plot(smooth(run.step_s), color=POLICY_COLOURS[policy], lw=1.2, label=policy)
        if policy == "dynamic":
            for move in run.moves[1:]:
                axes.axvline(move.step, color=POLICY_COLOURS[policy], lw=0.8, ls=":")
    axes.set_xlabel(f"step of {PLAYED}, seed {SEED}; dotted: a move of dynamic")
    axes.set_ylabel("seconds a step, without moves")
    axes.legend()
    figure.savefig(RUN, metadata={"Date": None})
    pyplot.close(figure)


def smooth(values: Iterable[float], width: int = 5) -> Any:
    """The mean over `width` steps."""
    return np.convolve(np.array(list(values)), np.ones(width) / width, mode="valid")


BENCHMARKS = (
    Benchmark(
        "placement",
        "placement",
        measure_policies,
        ("numpy", "numba"),
        options=policy_options,
        pictures=plot_placement,
    ),
    Benchmark("placement-within", "placement_within", measure_lending, ("numpy", "numba"), options=lending_options),
    Benchmark("placement-decisions", "placement_decisions", measure_decisions, ("numpy", "numba")),
)
