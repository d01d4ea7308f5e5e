"""`gcore run` and `gcore submit`: create a job, follow it, and record its events.

`run` starts a local cluster if none is up and stops it at the end. Meanwhile it brings back etcd and daemons that have died. The same command after an interruption continues the job. The
first Ctrl-C (or SIGTERM) ends in good order what this command started, the second one at once. A cluster that was up before
stays up; so does one that other commands or newer jobs use. For that, each `run` holds a shared lock on the home. The command that
stops the cluster takes the lock alone: a `run` that comes meanwhile waits and starts another cluster.

`submit` may be repeated with the same request id, which finds the same job. Ctrl-C ends the following, not the job.

`events.jsonl` in the run's folder gets each event once, one JSON object a line, each line by one append. A line that a crash cut
off is removed when the file is opened again. Events that the folder does not take wait in memory; they never end a run. Beside the
stream of events, the API is polled for what the job waits for; a failed poll is shown and changes nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import shlex
import signal
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from controllers.cli.options import (
    DEFAULT_CONTROLLERS,
    DEFAULT_HOME,
    DEFAULT_SLOTS,
    INTERRUPTED,
    RUN,
    Address,
    Controllers,
    Format,
    Home,
    New,
    Plain,
    Set,
    SglangPython,
    Slots,
    SpecFile,
    call_cluster,
    command,
    find_addresses,
    find_cluster,
)
from controllers.cli.output import (
    Output,
    job_snapshot,
    job_tree,
    pairs_table,
    program_name,
    stdout_console,
    with_program_name,
)
from controllers.cli.view.screens import JsonScreen, Screen, choose_screen
from controllers.cli.view.state import ENDED_STATES, JobSnapshot
from gcore.errors import GcoreError, JobFailed, UsageError, explain_os_errors
from gcore.observability.events import JobEvent
from gcore.system.clock import Clock, SystemClock

if TYPE_CHECKING:
    from controllers.cli.view.state import ViewState
    from controllers.cli.view.summary import AuditVerdict, Summary
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.contexts import ClusterAddress
    from gcore.client.jobs import JobsClient
    from gcore.config.spec import JobSpec


@command(
    "submit",
    RUN,
    "gcore submit examples/arithmetic/grpo.yaml",
    "gcore submit grpo.yaml --set train.learning_rate=1e-4 --set flow.steps=200 --follow",
    "[dim]Check it, and submit nothing:[/dim]  gcore submit grpo.yaml --dry-run",
    "[dim]From a script, which may repeat it safely:[/dim]  gcore submit grpo.yaml --request-id nightly-17 --wait -o json",
)
def submit(
    spec: SpecFile,
    set_: Set = None,
    new: New = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job until it has ended.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the job has ended, and show nothing until then.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the spec and all it names, as a controller would; submit nothing.")
    ] = False,
    request_id: Annotated[str | None, typer.Option(help="Names the request: repeating it finds the same job.")] = None,
    plain: Plain = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Hand a job to a cluster that is up. With [bold]--follow[/bold] or [bold]--wait[/bold] the exit code is the job's.

    With -o json the answer is the job, or with --follow its events, one a line.
    """

    from controllers.cli.commands.specs import warn_of_trust
    from gcore.config.load import load_spec

    if follow and wait:
        raise UsageError("--follow and --wait both wait for the job's end", fix="Give one of them")
    loaded = load_spec(spec, set_ or ())
    warn_of_trust(loaded.model)
    if dry_run:
        _check(loaded, home, output)
        return
    submission = _Submission(
        loaded, request_id or uuid.uuid4().hex, new=new, follow=follow, wait=wait, plain=plain, output=output
    )
    try:
        call_cluster(submission.run, address, home)
    except KeyboardInterrupt:
        if not submission.uid:
            raise
        uid = submission.uid
        come_back = f"`gcore events {uid} --follow` goes on watching, `gcore describe {uid}` shows how it stands, "
        hint = f"{come_back}`gcore cancel {uid}` ends it."
        typer.echo(with_program_name(f"No longer watching; job {loaded.name} goes on. {hint}"), err=True)
        raise typer.Exit(INTERRUPTED) from None


class _Submission:
    """One command's. `uid`: of the job, once there is one."""

    def __init__(
        self, spec: JobSpec, request: str, *, new: bool, follow: bool, wait: bool, plain: bool, output: Output
    ) -> None:
        self.uid = ""
        self._spec = spec
        self._request = request
        self._new = new
        self._follow = follow
        self._wait = wait
        self._plain = plain
        self._output = output

    async def run(self, client: JobsClient) -> None:
        """Raises JobFailed if the job was waited for, and failed or was cancelled."""
        job = await begin_job(client, self._spec, request_id=self._request, new=self._new)
        self.uid = job.uid
        if self._output is Output.TABLE:
            found = job_snapshot(job)
            typer.echo(f"Job {found.name} ({found.uid}) is {found.state}; its folder is {found.run_dir}.")
        if self._follow:
            await self._watch(client, job)
        else:
            if self._wait:
                async for _ in client.follow(job.uid):
                    pass
                job = await client.get_job(job.uid)
            self._tell(job)

    async def _watch(self, client: JobsClient, job: pb.Job) -> None:
        clock = SystemClock()
        screen: Screen = choose_screen(stdout_console(), clock, plain=self._plain)
        if self._output.is_for_programs:
            screen = JsonScreen(stdout_console(), self._output)
        ended = await record_job(client, job_snapshot(job), screen, clock, begun=clock.monotonic())
        if ended.state != "SUCCEEDED":
            raise JobFailed(f"job {ended.job} is {ended.state}: {ended.reason}", fix="See `gcore describe`")

    def _tell(self, job: pb.Job) -> None:
        found = job_snapshot(job)
        if self._output.is_for_programs:
            typer.echo(self._output.text(job_tree(found)))
        elif self._wait:
            typer.echo(f"Job {found.name} ({found.uid}) is {found.state}: {found.reason}.")
        if self._wait and found.state != "SUCCEEDED":
            raise JobFailed(f"job {found.name} is {found.state}: {found.reason}", fix="See `gcore describe`")


def _check(spec: JobSpec, home: Home, output: Output) -> None:
    """What a controller would refuse is refused here. Raises GcoreError."""
    from controllers.cli.commands.specs import check_files

    checked = check_files(spec, home, None)
    if output.is_for_programs:
        typer.echo(output.text(spec.model_dump(mode="json")))
    else:
        typer.echo(
            f"The spec of job {spec.name} is valid, with {checked.prompts.prompts} prompts. Nothing was submitted."
        )


FILE_NAME = "events.jsonl"

MOST_WAITING = 10_000
"""Events that could not be written and wait for room; when there are more, the oldest are left out."""


class EventFile:
    """The file, open for appending. Use it as a context manager."""

    def __init__(self, run_dir: Path) -> None:
        """Make the folder if it is absent, and repair the file's end. Raises GcoreError."""
        self.path = run_dir / FILE_NAME
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._explained(error) from error
        self.last = self._repair()
        """The greatest sequence number in the file; 0 if it is empty."""
        self._waiting: deque[JobEvent] = deque(maxlen=MOST_WAITING)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def offer(self, event: JobEvent) -> str:
        """Write the event down, after those that could not be before. Why that cannot be done, or nothing."""
        self._waiting.append(event)
        try:
            while self._waiting:
                self.append(self._waiting[0])
                self._waiting.popleft()
        except GcoreError as error:
            return str(error)
        return ""

    def append(self, event: JobEvent) -> None:
        """Write the event down, unless it is there. Raises GcoreError."""
        if event.sequence <= self.last:
            return
        data = (event.to_line() + "\n").encode()
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise self._explained(error) from error
        if written < len(data):  # the disk is full: leave no half line behind
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise GcoreError("cannot write the events (no space left)", where=str(self.path), fix="Make room")
        self.last = event.sequence

    def _repair(self) -> int:
        last, good = 0, 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                last = max(last, JobEvent.from_line(line.decode()).sequence)
            except ValueError:
                break
            good += len(line)
        os.ftruncate(self._fd, good)
        return last

    def _explained(self, error: OSError) -> GcoreError:
        return GcoreError(
            f"cannot write the events ({error.strerror or error})",
            where=str(self.path),
            fix="Make the run's folder writable from here",
        )


ASK_INTERVAL_S = 1.0


async def follow_job(
    client: JobsClient, job: JobSnapshot, screen: Screen, clock: Clock, *, run_dir: Path | None
) -> JobSnapshot:
    """Show `job` until it has ended, and return how it then stands.

    `run_dir`: where `events.jsonl` is written; None: nowhere. A job that the store has lost meanwhile is FAILED. Raises GcoreError.
    """
    try:
        return await _follow_to_end(client, job, screen, clock, run_dir)
    except UsageError as error:
        if error.refusal is None or error.refusal.reason != JOB_NOT_FOUND:
            raise
        ended = lost_job(job, str(error), screen.state.step)
        screen.observe(ended)
        return ended


JOB_NOT_FOUND = "JOB_NOT_FOUND"


def lost_job(job: JobSnapshot, error: str, step: int) -> JobSnapshot:
    """How a job stands that was there, and that the store does not have any more. `error`: the controller's answer; `step`: the last
    that was heard of."""
    from gcore.models.layout import checkpoints_in

    found = checkpoints_in(Path(job.run_dir)) if Path(job.run_dir).is_dir() else {}
    newest = str(found[max(found)]) if found else ""
    start = f"; it can start from a copy of {newest} without exp_avg* files (model.path)" if newest else ""
    why = f"the store has lost the job, which it had: {error}. Its data were deleted, or another etcd answers there"
    reason = f"{why}. The same command begins a new job{start}"
    return dataclasses.replace(job, state="FAILED", reason=reason, step=step, checkpoint=newest)


async def _follow_to_end(
    client: JobsClient, job: JobSnapshot, screen: Screen, clock: Clock, run_dir: Path | None
) -> JobSnapshot:
    screen.observe(job)
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(EventFile(run_dir)) if run_dir is not None else None
        stack.enter_context(screen.open())
        asking = asyncio.create_task(_ask(client, job.uid, screen, clock))
        try:
            async with aclosing(client.follow(job.uid)) as events:
                async for event in events:
                    if record is not None:
                        screen.trouble("the record", record.offer(event), clock.wall())
                    screen.show(event)
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        ended = job_snapshot(await client.get_job(job.uid))
        screen.observe(ended)
    return ended


async def record_job(client: JobsClient, job: JobSnapshot, screen: Screen, clock: Clock, *, begun: float) -> Summary:
    """Show `job` until it has ended, and sum it up; its events and the summary are written to its folder, where that is on this machine.

    `begun`: when the command began, by the monotonic clock. Raises GcoreError.
    """
    from controllers.cli.view.summary import summarize, write_summary

    run_dir = _visible_here(Path(job.run_dir))
    ended = await follow_job(client, job, screen, clock, run_dir=run_dir)
    summary = summarize(screen.state, ended, await audit_job(client, ended.uid), clock.monotonic() - begun)
    if run_dir is not None:
        write_summary(summary, run_dir)
    return summary


def _visible_here(run_dir: Path) -> Path | None:
    """The run's folder, if this machine sees the storage that it is on; a cluster elsewhere may have its own."""
    if run_dir.parent.is_dir():
        return run_dir
    typer.echo(f"{run_dir} is not on this machine, so no events and no summary are written.", err=True)
    return None


async def audit_job(client: JobsClient, job: str) -> AuditVerdict:
    """The audit's verdict on a job that has ended; that it could not be made is a violation too."""
    from controllers.cli.view.summary import AuditVerdict

    try:
        report = await client.audit_job(job)
    except GcoreError as error:
        return AuditVerdict(violations=(f"the audit could not be made: {error}",))
    violations = tuple(report.violations) or (() if report.clean else ("the audit is not clean",))
    return AuditVerdict(violations, tuple(sorted(report.groups_by_node.items())))


async def _ask(client: JobsClient, uid: str, screen: Screen, clock: Clock) -> None:
    cut_off: set[str] = set()
    while True:
        await clock.sleep(ASK_INTERVAL_S)
        try:
            job = job_snapshot(await client.get_job(uid))
            screen.observe(job)
            # No event can tell of it: events are written to the store.
            found = {wait.who: wait.what for wait in job.waiting if wait.cause == "store"}
            for who in sorted(cut_off | found.keys()):
                screen.trouble(who, found.get(who, ""), clock.wall())
            cut_off = set(found)
        except GcoreError as error:
            screen.trouble("the cluster", str(error), clock.wall())
        else:
            screen.trouble("the cluster", "", clock.wall())


LOCK = "followers.lock"

ANSWER_TIMEOUT_S = 1.5
"""For an answer: somebody has pressed a key and waits."""


class HomeUser:
    """A command that is at work in a home, since `began` (seconds since the epoch)."""

    def __init__(self, lock: int, clock: Clock) -> None:
        self._lock = lock
        self._clock = clock
        self._began = clock.wall()

    def is_alone(self) -> bool:
        """Whether no other command is at work there. If so, none begins before this one has ended."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def others(self, home: Path, own: str, runner: asyncio.Runner) -> tuple[str, ...]:
        """The names of jobs that were handed in since this began and have not ended, but for job `own`.

        Nothing if no controller answers: then none works on them either. `runner`: the one that called controllers before, if
        any did, for gRPC is in one loop of a process only: what comes late of a call goes to the loop that made it.
        """
        try:
            return runner.run(self._others(home, own))
        except GcoreError:
            return ()

    async def _others(self, home: Path, own: str) -> tuple[str, ...]:
        from gcore.client.calls import WaitPolicy
        from gcore.client.jobs import JobsClient

        patience = WaitPolicy(call_s=ANSWER_TIMEOUT_S)
        async with JobsClient(find_addresses(None, home), clock=self._clock, patience=patience) as client:
            jobs = [job_snapshot(job) for job in await client.list_jobs()]
        return tuple(j.name for j in jobs if j.created > self._began and j.uid != own and j.state not in ENDED_STATES)


@contextlib.contextmanager
def register_command(home: Path, clock: Clock, *, say: Callable[[str], None]) -> Iterator[HomeUser]:
    """For as long as a command is at work in `home`. Raises UsageError."""
    with explain_os_errors("cannot write there", UsageError, where=home, fix="Choose another --home"):
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / LOCK).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another `gcore run` is stopping its cluster in {home}; waiting for that ...")
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield HomeUser(lock.fileno(), clock)


QUIET_S = 3.0
"""So long nothing is said."""

CHECKPOINT_S, RESUME_WAIT_S = 10.0, 5.0
"""How long an interrupted run waits for a checkpoint of the step under way, and then for the answer to `resume_job`."""

NOTICE = "The controller reads and checks the data before it creates the job; the first time, large data take minutes."


async def begin_job(client: JobsClient, spec: JobSpec, *, request_id: str, new: bool) -> pb.Job:
    """`create_job`. If the job of that name had finished, says on standard error whether it goes on, or this is a new one."""
    from gcore.config.load import dump_explicit

    old = None if new else await find_finished(client, spec)
    job = await create_job(client, dump_explicit(spec), request_id=request_id, new=new)
    if old is not None and old.uid == job.uid and job_snapshot(job).state not in ENDED_STATES:
        goal = f"{spec.flow.steps} steps" if spec.flow.steps is not None else f"{spec.flow.epochs} data epochs"
        typer.echo(
            f"Job {old.full_name} ({old.uid}) has finished {old.step} steps and goes on from its last checkpoint, to {goal}. "
            "--new would begin a new one.",
            err=True,
        )
    elif old is not None and old.uid != job.uid and not job.step:
        typer.echo(
            f"Job {old.full_name} ({old.uid}) has finished all its steps ({old.step}), so this is a new one. With a higher flow.steps or "
            "flow.epochs, and no other change, the finished one goes on from its last checkpoint. To begin a new one with its weights: "
            f"`{program_name()} export {old.uid} --to DIR`, and --set model.path=DIR.",
            err=True,
        )
    return job


async def find_finished(client: JobsClient, spec: JobSpec) -> JobSnapshot | None:
    """The newest job of the spec's name that has succeeded; None if there is none, or the cluster does not say."""
    from gcore.api.v1 import jobs_pb2 as pb

    with contextlib.suppress(GcoreError):  # only a sentence rests on it
        finished = await client.list_jobs(
            namespace=spec.namespace, states=(pb.JOB_STATE_SUCCEEDED,), name_prefix=spec.name, limit=20
        )
        ended = (one for one in finished if one.name == spec.name and one.state == pb.JOB_STATE_SUCCEEDED)
        return next(map(job_snapshot, ended), None)
    return None


async def resume_if_paused(client: JobsClient, job: pb.Job) -> pb.Job:
    """A job that is to run to its end does not stay paused: somebody has paused it, or an interrupted command could not resume it."""
    from gcore.api.v1 import jobs_pb2 as pb

    if job.state != pb.JOB_STATE_PAUSED:
        return job
    typer.echo(f"Job {job.name} ({job.uid}) was paused and is resumed.", err=True)
    return await client.resume_job(job.uid)


async def create_job(client: JobsClient, spec_json: str, *, request_id: str, new: bool) -> pb.Job:
    """`JobsClient.create_job`, with a sentence on standard error when it takes long. Raises GcoreError."""
    from gcore.api.v1 import jobs_pb2 as pb

    mode = pb.START_MODE_NEW if new else pb.START_MODE_RESUME
    creating = asyncio.ensure_future(client.create_job(spec_json, request_id=request_id, mode=mode))
    try:
        done, _ = await asyncio.wait({creating}, timeout=QUIET_S)
        if not done:
            typer.echo(NOTICE, err=True)
        return await creating
    finally:
        creating.cancel()


class RepeatedSignals:
    """From its making on, SIGINT and SIGTERM are remembered; from `heed` on, each is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self._pressed = self._heeded = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    @property
    def pressed(self) -> bool:
        """Whether one was remembered."""
        return self._pressed

    def heed(self) -> None:
        """Raises KeyboardInterrupt now if one was remembered, and wherever the caller is at the next."""
        self._heeded = True
        if self._pressed:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        if self._heeded:
            raise KeyboardInterrupt


@command(
    "run",
    RUN,
    "gcore run examples/arithmetic/grpo.yaml",
    "[dim]Afresh, and with another learning rate:[/dim]  gcore run grpo.yaml --new --set train.learning_rate=1e-4",
    "[dim]Three controllers on three cores, into a log:[/dim]  gcore run grpo.yaml --controllers 3 --slots cpu:3 --plain > run.log",
    "[dim]On a cluster that is up elsewhere:[/dim]  gcore run grpo.yaml --address 10.0.0.7:7700",
)
def run(
    spec: SpecFile,
    set_: Set = None,
    new: New = False,
    home: Home = DEFAULT_HOME,
    controllers: Controllers = DEFAULT_CONTROLLERS,
    slots: Slots = DEFAULT_SLOTS,
    plain: Plain = False,
    sglang_python: SglangPython = None,
    address: Address = None,
) -> None:
    """Run a job to its end: start the local cluster if none is up, submit, watch, sum up, and stop what was started.

    An interrupted job goes on; a finished one is run anew, or goes on if only flow.steps or flow.epochs is higher. Ctrl-C stops in good order, a second one at once.
    """

    from controllers.cli import local
    from controllers.cli.commands.specs import warn_of_trust
    from controllers.cli.view.summary import summary_rows
    from gcore.config.load import load_spec
    from gcore.engines.sglang.command import find_python

    clock = SystemClock()
    begun = clock.monotonic()
    loaded = load_spec(spec, set_ or ())
    warn_of_trust(loaded.model)
    console = stdout_console()
    screen = choose_screen(console, clock, plain=plain)
    started, further, share = False, None, None
    local_home = home if address is None else None
    stack = contextlib.ExitStack()
    runner = stack.enter_context(asyncio.Runner())
    try:
        try:
            if address is None:
                python = find_python(sglang_python)
                request = local.UpRequest(home, controllers, slots, sglang_python=python)
                share = stack.enter_context(register_command(home, clock, say=typer.echo))
                result = runner.run(local.start_cluster(request, clock=clock, say=typer.echo))
                started = result.started
            cluster = find_cluster(address, home)
            summary = runner.run(_submit_and_follow(loaded, screen, cluster, home=local_home, new=new, begun=begun))
        except KeyboardInterrupt:
            further = RepeatedSignals()
            if address is None and not started:
                _clear_half_started(home)
            started = started and not _is_shared(share, home, screen, runner)
            _say_interrupted(screen, started=started)
            if started and _may_lose_steps(screen.state):
                with contextlib.suppress(GcoreError):
                    runner.run(save_progress(find_cluster(address, home), screen.state.uid, further))
            raise typer.Exit(INTERRUPTED) from None
    finally:
        # After a key press that was asked already.
        if started and (further is not None or not _is_shared(share, home, screen, runner)):
            _down(home, further)
        stack.close()

    console.print()
    console.print(pairs_table(summary_rows(summary, again=_again())))
    if address is None and not started:
        typer.echo(f"The cluster in {home} was up before, so it stays up; `{program_name()} down` ends it.", err=True)
    if not summary.succeeded:
        raise typer.Exit(1)


async def _submit_and_follow(
    spec: JobSpec, screen: Screen, cluster: ClusterAddress, *, home: Path | None, new: bool, begun: float
) -> Summary:
    """`home`: of the local cluster; None: it is elsewhere, and others look after its processes."""
    from gcore.client.jobs import JobsClient

    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        if home is not None:
            await stack.enter_async_context(keep_processes(home, screen, clock))
        client = await stack.enter_async_context(
            JobsClient(cluster.addresses, clock=clock, connector=cluster.connector, owner_key=cluster.owner_key)
        )
        job = await resume_if_paused(client, await begin_job(client, spec, request_id=uuid.uuid4().hex, new=new))
        return await record_job(client, job_snapshot(job), screen, clock, begun=begun)


@contextlib.asynccontextmanager
async def keep_processes(home: Path, screen: Screen, clock: Clock) -> AsyncIterator[None]:
    """While the block runs, bring back etcd and daemons of the local cluster that have died, as each daemon does for the others: all of
    them may be gone. What cannot be brought back is shown."""
    from controllers.cli.local import real_path
    from controllers.daemon.keeper import LOOK_S, ProcessKeeper
    from gcore.config.local_cluster import LocalClusterState
    from gcore.store.reference import StoreRef, connect_store

    cluster = LocalClusterState.load(home)
    if cluster is None:
        yield
        return
    store = await connect_store(StoreRef(endpoints=(cluster.etcd.endpoint,)), clock)
    keeper = ProcessKeeper(real_path(home), "", store, clock)

    async def keep() -> None:
        while True:
            await clock.sleep(LOOK_S)
            await keeper.look()
            screen.trouble("the cluster's processes", keeper.trouble, clock.wall())

    keeping = asyncio.create_task(keep(), name="keeper")
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await store.close()


async def save_progress(cluster: ClusterAddress, uid: str, further: RepeatedSignals) -> None:
    """Pause the job, which commits the step under way with a checkpoint, and resume it when the checkpoint is registered: for `CHECKPOINT_S` at
    most, and not after a further signal."""
    clock = SystemClock()
    over = clock.monotonic() + CHECKPOINT_S
    saving = asyncio.create_task(_pause_for_checkpoint(cluster, uid, clock))
    while not saving.done() and not further.pressed and clock.monotonic() < over:
        await asyncio.wait((saving,), timeout=0.1)
    saving.cancel()
    await asyncio.wait((saving,), timeout=RESUME_WAIT_S)


async def _pause_for_checkpoint(cluster: ClusterAddress, uid: str, clock: Clock) -> None:
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.client.jobs import JobsClient
    from gcore.ledger.records.cluster import PAUSES

    def is_training(job: pb.Job) -> bool:
        return job.state == pb.JOB_STATE_RUNNING and not _is_saved(job)

    with contextlib.suppress(GcoreError):  # it may end meanwhile; and what is not saved is trained again
        async with JobsClient(cluster.addresses, clock=clock, connector=cluster.connector) as client:
            job = await client.get_job(uid)
            if not is_training(job) or job.reason.startswith(PAUSES):
                return
            await client.pause_job(uid)
            try:
                while is_training(job):
                    await clock.sleep(0.1)
                    job = await client.get_job(uid)
            finally:
                await client.resume_job(uid)


def _is_saved(job: pb.Job) -> bool:
    """Whether its newest commit has a registered checkpoint."""
    return Path(job.checkpoint).name == f"{job.lineage}-{job.step}"


def _clear_half_started(home: Path) -> None:
    """`up` cleans up behind itself; this is for a second key press that interrupted that too."""
    from controllers.cli import local
    from gcore.config.local_cluster import LocalClusterState

    with contextlib.suppress(GcoreError):
        if LocalClusterState.load(home) is None:
            local.stop_cluster(home, clock=SystemClock(), grace_s=0)


def _is_shared(share: HomeUser | None, home: Path, screen: Screen, runner: asyncio.Runner) -> bool:
    """Whether others use the cluster that this has started. Says so: it stays up for them."""
    jobs = share.others(home, screen.state.uid, runner) if share is not None else ()
    if share is None or (not jobs and share.is_alone()):
        return False
    who = f"job {', '.join(map(repr, jobs))} runs on it" if jobs else "another `gcore run` uses it"
    typer.echo(f"The cluster stays up, for {who}; `{program_name()} down` ends it.", err=True)
    return True


def _may_lose_steps(state: ViewState) -> bool:
    """Whether a commit was seen that a checkpoint may lack."""
    return state.step > 0 and not state.ended


def _say_interrupted(screen: Screen, *, started: bool) -> None:
    state = screen.state
    where = f" at step {state.step} of {state.steps}" if state.steps else ""
    if started:
        after = f", after a checkpoint if that takes less than {CHECKPOINT_S:.0f} s" if _may_lose_steps(state) else ""
        typer.echo(f"Interrupted{where}; the cluster is being stopped{after} (once more to kill it).", err=True)
        typer.echo(f"The same command goes on from there: {_again()}", err=True)
    elif state.uid:
        typer.echo(
            f"No longer watching{where}; the job goes on, because its cluster stays up. "
            f"The same command watches again, `{program_name()} cancel {state.uid}` ends it.",
            err=True,
        )
    else:
        typer.echo("Interrupted; nothing was started.", err=True)


def _down(home: Path, further: RepeatedSignals | None) -> None:
    """End the cluster; a further key press, also one since the first, kills it."""
    from controllers.cli import local

    try:
        if further is not None:
            further.heed()
        local.stop_cluster(home, clock=SystemClock())
    except KeyboardInterrupt:
        local.stop_cluster(home, clock=SystemClock(), grace_s=0)
        raise typer.Exit(INTERRUPTED) from None
    except GcoreError as error:
        # What the run itself has to say matters more; but this must not go unsaid.
        typer.echo(f"gcore: {error}", err=True)


def _again() -> str:
    """The command as it was given, without --new: that would not go on, but begin afresh."""
    return f"{program_name()} {shlex.join(word for word in sys.argv[1:] if word != '--new')}"
