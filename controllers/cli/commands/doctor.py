"""`gcore doctor`: inspect this machine, the hubs and the cluster in the home, and print one table of checks with advice.

The functions here collect facts; `view/doctor_checks` judges them. torch and DeepSpeed are inspected in a process of their own.
What is started, such as an etcd on a fresh folder, is ended and removed. In the home, one file is written and removed at once; a
home that is absent is not created.
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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.options import DEFAULT_HOME, DEFAULT_SLOTS, Format, Home, SglangPython, Slots, examples
from controllers.cli.output import Output, rows_table, stdout_console
from controllers.cli.view import doctor_checks
from gcore.errors import GcoreError
from gcore.system.clock import Clock, SystemClock
from gcore.system.process import thread_environment

if TYPE_CHECKING:
    from controllers.cli.view.doctor_checks import (
        Check,
        EtcdTry,
        HomeFacts,
        MachineFacts,
        PackageFacts,
        Probe,
        RequestedSlots,
        RunningCluster,
        ServerProbe,
    )
    from gcore.config.local_cluster import LocalCluster
    from gcore.store.etcd import EtcdBinary

PROBE_LIMIT_S = 90.0
SYNCS = 5
_HERE = Path(__file__).resolve().parents[3]


def read_packages() -> tuple[PackageFacts, ...]:
    """What gcore asks for, and what is installed. Pins only where gcore runs from a checkout."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    from controllers.cli.view.doctor_checks import PackageFacts

    pins = _pins(_HERE / "constraints")
    found = {}
    for line in importlib.metadata.requires("gcore") or ():
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        extra = ""
        if requirement.marker is not None:
            extra = next((e for e in _extras() if requirement.marker.evaluate({"extra": e})), "")
            if not extra:
                continue
        if name in found:
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        found[name] = PackageFacts(
            name=name,
            installed=installed,
            wanted=str(requirement.specifier),
            fits=installed is None or requirement.specifier.contains(installed, prereleases=True),
            # A build's own mark (2.13.0+cpu) is no other version.
            pinned=_like(installed, pins.get(name)),
            needed_for=extra,
        )
    return tuple(found.values())


async def run_probe(*, devices: bool) -> Probe:
    """torch and DeepSpeed. `devices` False: GPUs are not looked for."""
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
        err += f"\nno end after {PROBE_LIMIT_S:.0f} s".encode()
    return parse_probe(out.decode(errors="replace"), err.decode(errors="replace"), process.returncode or 0)


def parse_probe(out: str, err: str, code: int) -> Probe:
    """What the probe's process told. Lines that are no JSON are its libraries' chatter."""
    from controllers.cli.view.doctor_checks import Probe

    told: dict[str, object] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            told |= message if isinstance(message, dict) else {}
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"ended with {code}")
    started = "deepspeed" in told
    devices = told.get("devices")
    return Probe(
        torch=_text(told.get("torch")),
        cuda=_text(told.get("cuda")),
        devices=tuple(map(str, devices)) if isinstance(devices, list) else (),
        deepspeed=_text(told.get("deepspeed")),
        started=started,
        error="" if started else last[:200],
    )


async def try_etcd(clock: Clock) -> EtcdTry:
    """Find an etcd, start it on a fresh folder, and end it."""
    from controllers.cli.view.doctor_checks import EtcdTry
    from gcore.store.etcd import ExternalEtcd, find_etcd

    try:
        binary = find_etcd()
    except GcoreError as error:
        return EtcdTry(error=error.what)
    if isinstance(binary, ExternalEtcd):  # cannot be: no endpoints were named
        return EtcdTry(error="no etcd is to be started here")
    path = str(binary.path)
    try:
        version = await asyncio.to_thread(binary.version)
    except GcoreError as error:
        return EtcdTry(path=path, error=error.what)
    with tempfile.TemporaryDirectory(prefix="gcore-doctor-", ignore_cleanup_errors=True) as folder:
        return await _start_etcd(binary, version, Path(folder), clock)


async def _start_etcd(binary: EtcdBinary, version: str, folder: Path, clock: Clock) -> EtcdTry:
    from controllers.cli.view.doctor_checks import EtcdTry
    from gcore.store.etcd import LocalEtcd

    begun = clock.monotonic()
    try:
        etcd = await LocalEtcd.start(folder / "data", log_file=folder / "log", clock=clock, binary=binary)
    except GcoreError as error:
        return EtcdTry(str(binary.path), version, error=f"{error.what}: {error.fix}")
    answered = clock.monotonic() - begun
    await etcd.stop(grace_s=2.0)
    return EtcdTry(str(binary.path), version, answered_s=answered)


def read_machine(clock: Clock) -> MachineFacts:
    """This machine, as this process may use it."""
    from controllers.cli.view.doctor_checks import MachineFacts
    from gcore.system.memory import group_limits, host_memory

    memory, quota = host_memory(), group_limits().cores
    cores = os.cpu_count() or 1
    usable = float(len(os.sched_getaffinity(0)))
    try:
        shared = os.statvfs("/dev/shm")
        shared_bytes = shared.f_frsize * shared.f_blocks
    except OSError:
        shared_bytes = None
    return MachineFacts(
        cpus=min(usable, quota) if quota is not None else usable,
        cores=cores,
        memory=memory.total,
        available=memory.available,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        loopback=_loopback(),
        shared=shared_bytes,
        wall=clock.wall(),
    )


def read_home(folder: Path, clock: Clock) -> HomeFacts:
    """A cluster's folder, or the nearest folder above it that is there."""
    from controllers.cli.view.doctor_checks import HomeFacts

    path = folder
    try:
        path = folder.absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        status = os.statvfs(there)
        times, apart = _write_in(there, clock)
    except OSError as error:
        return HomeFacts(path, error=error.strerror or str(error))
    return HomeFacts(path, status.f_frsize * status.f_bavail, sync_ms=statistics.median(times), clock_apart_s=apart)


def _write_in(folder: Path, clock: Clock) -> tuple[list[float], float]:
    """Milliseconds of a few small synced writes, and how far the new file's date is from now. Raises OSError."""
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


def _pins(folder: Path) -> dict[str, str]:
    from packaging.utils import canonicalize_name

    try:
        lines = (folder / "cpu.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def _like(installed: str | None, pinned: str | None) -> str | None:
    return installed if installed and pinned and installed.split("+")[0] == pinned else pinned


def _extras() -> Sequence[str]:
    return [e for e in importlib.metadata.metadata("gcore").get_all("Provides-Extra") or () if e != "dev"]


def _text(value: object) -> str | None:
    return str(value) if value else None


DOCTOR_EXAMPLES = examples(
    "gcore doctor",
    "[dim]Before a job on four GPUs with a model from a hub:[/dim]  gcore doctor --slots cuda:4 --online",
    "[dim]For a script; ends with 1 if anything fails:[/dim]  gcore doctor -o json",
)

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    home: Home = DEFAULT_HOME,
    slots: Slots = DEFAULT_SLOTS,
    online: Annotated[bool, typer.Option("--online", help="Ask the hubs of models, too.")] = False,
    sglang_python: SglangPython = None,
    output: Format = Output.TABLE,
) -> None:
    """Look at this machine and at what is up on it: what works, what does not, and what to do. Changes nothing.

    Ends with 1 if anything fails.
    """

    from rich.text import Text

    from controllers.cli.local import deal_slots
    from controllers.cli.view.doctor_checks import CheckState, RequestedSlots

    wanted = RequestedSlots(slots.partition(":")[0], len(deal_slots(slots, 1)[0]))
    if output is Output.TABLE:
        typer.echo("Looking; torch and etcd are started for a moment, which takes some seconds ...", err=True)
    checks = asyncio.run(_look(home, wanted, online=online, sglang_python=sglang_python))
    if output.is_for_programs:
        rows = [{"check": c.name, "state": c.state.value, "seen": c.seen, "fix": c.fix} for c in checks]
        typer.echo(output.text({"checks": rows, "failed": sum(c.state is CheckState.FAIL for c in checks)}))
    else:
        headings = ("CHECK", "STATE", "SEEN", "WHAT TO DO")
        found = (
            (check.name, Text(check.state.value, style=_COLOURS[check.state.value]), check.seen, check.fix)
            for check in checks
        )
        stdout_console().print(rows_table(headings, found, whole=headings[:2], fold=headings))
    if any(check.state is CheckState.FAIL for check in checks):
        raise typer.Exit(1)


async def _look(home: Path, wanted: RequestedSlots, *, online: bool, sglang_python: Path | None) -> list[Check]:
    """Everything at once, for most of it is waiting; in the order in which a person wants to read it."""
    clock = SystemClock()
    probe, etcd, place, sglang, hubs, cluster = await asyncio.gather(
        run_probe(devices=wanted.kind == "cuda"),
        try_etcd(clock),
        asyncio.to_thread(read_home, home, clock),
        inspect_sglang(sglang_python),
        ask_hubs() if online else _nothing(),
        find_running_cluster(home, clock),
    )
    machine = read_machine(clock)
    return [
        doctor_checks.check_python(sys.version_info[:3]),
        *doctor_checks.check_packages(read_packages()),
        *doctor_checks.check_torch(probe, wanted),
        doctor_checks.check_deepspeed(probe),
        *doctor_checks.check_etcd(etcd),
        *doctor_checks.check_home(place),
        doctor_checks.check_clock(machine, place),
        doctor_checks.check_cores(machine, wanted),
        doctor_checks.check_memory(machine, wanted),
        *doctor_checks.check_limits(machine, wanted),
        doctor_checks.check_threads(os.environ, machine.cpus),
        sglang,
        *doctor_checks.check_hubs(hubs),
        *doctor_checks.check_cluster(cluster),
    ]


async def _nothing() -> tuple[()]:
    return ()


ANSWER_S = 5.0
VERSION_S = 20.0


async def ask_hubs() -> tuple[ServerProbe, ...]:
    """Whether the hubs of models answer at all."""
    hugging = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    scope = os.environ.get("MODELSCOPE_ENDPOINT") or "https://www.modelscope.cn"
    return await asyncio.gather(
        _hub("Hugging Face hub", hugging, "Check the network, or set HF_ENDPOINT to a mirror"),
        _hub("ModelScope", scope, "Check the network, or set MODELSCOPE_ENDPOINT"),
    )


async def _hub(name: str, endpoint: str, fix: str) -> ServerProbe:
    import httpx

    from controllers.cli.view.doctor_checks import ServerProbe

    try:
        async with httpx.AsyncClient(timeout=ANSWER_S, follow_redirects=True) as http:
            answer = await http.get(endpoint)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return ServerProbe(name, endpoint, f"{endpoint} does not answer ({error or type(error).__name__})", fix)
    problem = f"{endpoint} answers with {answer.status_code}" if answer.status_code >= 500 else ""
    return ServerProbe(name, endpoint, problem, fix if problem else "")


async def inspect_sglang(named: Path | None) -> Check:
    """The environment of SGLang, if there is one."""
    from controllers.cli.view.doctor_checks import check_sglang
    from gcore.engines.sglang.command import find_python

    try:
        python = find_python(named)
    except GcoreError as error:
        return check_sglang(None, None, str(error.what))
    if python is None:
        return check_sglang(None, None)
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
    return check_sglang(str(python), out.decode(errors="replace").strip() or None)


async def find_running_cluster(home: Path, clock: Clock) -> RunningCluster | None:
    """What is up in `home`; None if nothing is."""
    from controllers.cli.view.doctor_checks import RunningCluster, ServerProbe
    from gcore.client.calls import WaitPolicy
    from gcore.client.jobs import JobsClient
    from gcore.config.local_cluster import LocalCluster

    try:
        known = LocalCluster.load(home)
    except GcoreError as error:
        return RunningCluster((ServerProbe("cluster", str(home), f"{error.where}: {error.what}", error.fix or ""),))
    if known is None:
        return None
    patience = WaitPolicy(probe_s=ANSWER_S, call_s=ANSWER_S)
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
        answers.append(ServerProbe(one.name, one.address, problem, "" if serves else f"Its last words are in {log}"))
    return RunningCluster(tuple(answers), workers)


async def _etcd(known: LocalCluster) -> ServerProbe:
    import httpx

    from controllers.cli.view.doctor_checks import ServerProbe

    where, fix = known.etcd.endpoint, f"Its last words are in {Path(known.home) / 'logs' / 'etcd.log'}"
    try:
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
            health = (await http.get(f"http://{where}/health")).json().get("health")
    except (httpx.HTTPError, ValueError) as error:
        return ServerProbe(
            "cluster's etcd", where, f"does not answer at {where} ({error or type(error).__name__})", fix
        )
    return (
        ServerProbe("cluster's etcd", where)
        if str(health) == "true"
        else ServerProbe("cluster's etcd", where, "is ill", fix)
    )
