"""What scoring takes in processes of its own, beside scoring where it is called.

For the rule `numeric`, 8 responses a group: calls a second with everything asked for at once, milliseconds for one group by
itself, and what a call takes of the controller's own processor time. For `code`: programs a second, one test each, and the
milliseconds that proving the box takes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.harness import Benchmark, Result, spread
from gcore.config.reward import RewardSpec, ScoringSpec
from gcore.reward.api import Response
from gcore.reward.code import code
from gcore.reward.pool import DirectScorer, FunctionScorer, RewardPool
from gcore.system.clock import SystemClock
from gcore.worker.sandbox.box import ProgramSandbox

RULE = RewardSpec()
ENTRY = {"prompt": "What is 20 + 26?", "answer": "46"}
GROUP = [Response("20 + 26 = 46", 9), Response("47", 2)] * 4
GROUPS, ALONE = 1000, 200
PROGRAM = "```python\ndef double(n):\n    return 2 * n\n```"
PROGRAMS = 20


async def scored(scorer: FunctionScorer) -> dict[str, float]:
    """All groups at once, then some by themselves."""
    processor, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(scorer.score(RULE, ENTRY, GROUP) for _ in range(GROUPS)))
    calls = GROUPS * len(GROUP)
    at_once = time.perf_counter() - began
    own = time.process_time() - processor
    began = time.perf_counter()
    for _ in range(ALONE):
        await scorer.score(RULE, ENTRY, GROUP)
    alone = time.perf_counter() - began
    return {
        "calls_per_second": calls / at_once,
        "controller_us_per_call": own / calls * 1e6,
        "group_alone_ms": alone / ALONE * 1e3,
    }


async def rounds(count: int) -> dict[str, list[dict[str, float]]]:
    """Each way in turn, `count` times."""
    pools = {n: RewardPool({"data": RULE}, ScoringSpec(workers=n), SystemClock()) for n in (1, 2)}
    ways: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {"direct": partial(scored, DirectScorer())}
    ways |= {f"{n} process{'es' if n > 1 else ''}": partial(scored, pool) for n, pool in pools.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    try:
        for pool in pools.values():
            await pool.warm()
        for _ in range(count + 1):
            for name, way in ways.items():
                found[name].append(await way())
    finally:
        for pool in pools.values():
            await pool.close()
    return {name: results[1:] for name, results in found.items()}  # the first round warms everything up


def programs() -> dict[str, float]:
    """Programs a second in this process's box, and what a proof takes."""
    began = time.perf_counter()
    ProgramSandbox(512).prove()
    proof = time.perf_counter() - began
    spec = RewardSpec(name="code")
    code.start(spec)
    began = time.perf_counter()
    for _ in range(PROGRAMS):
        assert code(PROGRAM, {"answer": "assert double(2) == 4"}, spec).value == 1.0
    return {"programs_per_second": PROGRAMS / (time.perf_counter() - began), "proof_ms": proof * 1e3}


def measure(arguments: argparse.Namespace, taken: Result) -> Result:
    """Rules, then programs."""
    rules = asyncio.run(rounds(arguments.pairs))
    ran = [programs() for _ in range(arguments.pairs)]
    return taken | {
        "rule": {way: {key: spread([one[key] for one in runs]) for key in runs[0]} for way, runs in rules.items()},
        "code": {key: spread([one[key] for one in ran]) for key in ran[0]},
    }


BENCHMARKS = (Benchmark("rewards", "rewards", measure, pairs=5),)
