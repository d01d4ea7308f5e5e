"""What `gcore doctor` asks of others: the hubs, the SGLang environment, and a cluster that is up in the home."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import httpx

from controllers.cli.doctor_checks import Check
from controllers.cli.doctor_checks import sglang as judged_sglang
from controllers.cli.doctor_seen import Answer, Cluster
from gcore.client import JobsClient, Patience
from gcore.clock import Clock
from gcore.config.cluster import LocalCluster
from gcore.errors import GcoreError
from gcore.rollout.sglang.environment import find_python

ANSWER_S = 5.0
VERSION_S = 20.0


async def hubs() -> tuple[Answer, ...]:
    """Whether the hubs of models answer at all."""
    hugging = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    scope = os.environ.get("MODELSCOPE_ENDPOINT") or "https://www.modelscope.cn"
    return await asyncio.gather(
        _hub("Hugging Face hub", hugging, "Check the network, or set HF_ENDPOINT to a mirror"),
        _hub("ModelScope", scope, "Check the network, or set MODELSCOPE_ENDPOINT"),
    )


async def _hub(name: str, endpoint: str, fix: str) -> Answer:
    try:
        async with httpx.AsyncClient(timeout=ANSWER_S, follow_redirects=True) as http:
            answer = await http.get(endpoint)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Answer(name, endpoint, f"{endpoint} does not answer ({error or type(error).__name__})", fix)
    problem = f"{endpoint} answers with {answer.status_code}" if answer.status_code >= 500 else ""
    return Answer(name, endpoint, problem, fix if problem else "")


async def sglang(named: Path | None) -> Check:
    """The environment of SGLang, if there is one."""
    try:
        python = find_python(named)
    except GcoreError as error:
        return judged_sglang(None, None, str(error.what))
    if python is None:
        return judged_sglang(None, None)
    program = "import importlib.metadata as m; print(m.version('sglang'))"
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-c", program), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), VERSION_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        out = b""
    return judged_sglang(str(python), out.decode(errors="replace").strip() or None)


async def cluster(home: Path, clock: Clock) -> Cluster | None:
    """What is up in `home`; None if nothing is."""
    try:
        known = LocalCluster.load(home)
    except GcoreError as error:
        return Cluster((Answer("cluster", str(home), f"{error.where}: {error.what}", error.fix or ""),))
    if known is None:
        return None
    patience = Patience(probe_s=ANSWER_S, call_s=ANSWER_S)
    async with JobsClient(known.addresses, clock=clock, patience=patience) as client:
        serving = await asyncio.gather(*(client.is_serving(c.address) for c in known.controllers))
        workers = {}
        if any(serving):
            with contextlib.suppress(GcoreError):
                workers = {worker.instance: worker.state for worker in (await client.list_nodes()).workers}
    answers = [await _etcd(known)]
    for one, serves in zip(known.controllers, serving, strict=True):
        log = home / "logs" / f"{one.name}.log"
        problem = "" if serves else f"does not answer at {one.address}"
        answers.append(Answer(one.name, one.address, problem, "" if serves else f"Its last words are in {log}"))
    return Cluster(tuple(answers), workers)


async def _etcd(known: LocalCluster) -> Answer:
    where, fix = known.etcd.endpoint, f"Its last words are in {Path(known.home) / 'logs' / 'etcd.log'}"
    try:
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
            health = (await http.get(f"http://{where}/health")).json().get("health")
    except (httpx.HTTPError, ValueError) as error:
        return Answer("cluster's etcd", where, f"does not answer at {where} ({error or type(error).__name__})", fix)
    return Answer("cluster's etcd", where) if str(health) == "true" else Answer("cluster's etcd", where, "is ill", fix)
