"""1,000 calls of CreateJob from 50 clients, a tenth of them repeated request ids, against three daemons and an etcd of three members;
and as many bare guarded puts into the same etcd from as many clients, in the same run. Writes benchmarks/results/submit.json.

The jobs want more slots than there are, so all of them wait and nothing else runs. Puts are made before and after the calls, in two
halves, so that what else the machine does meets both.

    make bench-submit                     ends with 1 if a job is missing or doubled, or CreateJob's p99 is over 20 times a put's
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from measured import circumstances, write
from three_nodes import CLOCK, Nodes, three_nodes

from gcore.api.v1 import jobs_pb2 as pb
from gcore.store.client import EtcdStore
from gcore.store.types import Compare, Put
from gcore.testing.tiny_model import make_tiny_model

MOST_TIMES = 20.0
PUT_BYTES = 4096
"""About what a job's record takes."""


def spec_of(folder: Path, name: str) -> str:
    """A job that waits for ever."""
    return json.dumps(
        {
            "name": name,
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "train.jsonl")},
            "flow": {"steps": 10},
            "rollout": {"max_new_tokens": 8},
            "scheduling": {"slots_min": 1000},
        }
    )


async def put_all(endpoints: list[str], clients: int, calls: int) -> list[float]:
    """Seconds of each guarded put of a new key."""
    took: list[float] = []

    async def one(count: int) -> None:
        store = await EtcdStore.connect(endpoints, clock=CLOCK)
        for _ in range(count):
            key = f"/bench/{uuid.uuid4().hex}"
            begun = time.perf_counter()
            result = await store.transact((Compare(key, 0),), (Put(key, b"x" * PUT_BYTES),))
            took.append(time.perf_counter() - begun)
            assert result.won
        await store.close()

    await asyncio.gather(*(one(calls // clients) for _ in range(clients)))
    return took


async def create_all(nodes: Nodes, folder: Path, clients: int, calls: int) -> tuple[list[float], dict[str, set[str]]]:
    """Seconds of each call, and by request id the uids that it was answered with."""
    took: list[float] = []
    answered: dict[str, set[str]] = {}
    names = list(nodes.addresses)

    async def one(number: int, count: int) -> None:
        mine = names[number % len(names) :] + names[: number % len(names)]
        async with nodes.client(*mine) as client:
            for call in range(count):
                # Each tenth is the one before it once more.
                at = call - 1 if call % 10 == 9 else call
                request = f"bench-{number}-{at}"
                begun = time.perf_counter()
                spec = spec_of(folder, request)
                job = await client.create_job(spec, request_id=request, mode=pb.START_MODE_RESUME)
                took.append(time.perf_counter() - begun)
                answered.setdefault(request, set()).add(job.uid)

    await asyncio.gather(*(one(number, calls // clients) for number in range(clients)))
    return took, answered


def quantile(values: list[float], share: float) -> float:
    """The value below which so much of them lies, in milliseconds."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def figures(values: list[float]) -> dict[str, float]:
    """For the file."""
    return {name: quantile(values, share) for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))}


async def measure(folder: Path, clients: int, calls: int) -> dict[str, Any]:
    """All of it."""
    make_tiny_model(folder / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(20)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    async with three_nodes(folder / "cluster", slots=1) as nodes:
        await create_all(nodes, folder, 3, 3)  # what only the first job of a daemon costs
        puts = await put_all(nodes.endpoints, clients, calls // 2)
        begun = time.perf_counter()
        took, answered = await create_all(nodes, folder, clients, calls)
        seconds = time.perf_counter() - begun
        puts += await put_all(nodes.endpoints, clients, calls // 2)
        async with nodes.client() as client:
            listed = [job.uid for job in await client.list_jobs(name_prefix="bench-")]
    distinct = {uid for uids in answered.values() for uid in uids}
    missing, doubled = len(distinct - set(listed)), sum(len(uids) > 1 for uids in answered.values())
    create, put = figures(took), figures(puts)
    return {
        "calls": len(took),
        "clients": clients,
        "distinct_request_ids": len(answered),
        "jobs": len(distinct),
        "missing": missing,
        "doubled": doubled,
        "calls_per_second": round(len(took) / seconds, 1),
        "create_job": create,
        "guarded_put": put,
        "p99_times_a_put": round(create["p99_ms"] / put["p99_ms"], 2),
        "limit": MOST_TIMES,
    }


def main() -> None:
    """Ends with 1 if it is not as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--calls", type=int, default=1000)
    asked = parser.parse_args()
    begun = circumstances("grpcio")
    with tempfile.TemporaryDirectory(prefix="gcore-submit-") as folder:
        found = begun | asyncio.run(measure(Path(folder), asked.clients, asked.calls))
    write("submit", found)
    print(json.dumps(found, indent=2))
    exact = found["missing"] == found["doubled"] == 0 and found["jobs"] == found["distinct_request_ids"]
    sys.exit(0 if exact and found["p99_times_a_put"] <= MOST_TIMES else 1)


if __name__ == "__main__":
    main()
