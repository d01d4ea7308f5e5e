"""`gcore run`, `gcore demo` and `gcore submit`: create a job, follow it, and record its events.

`run` starts a local cluster if none is running and stops it at the end. Meanwhile it restarts etcd and daemons that have died. After an
interruption, the same command continues the job. The first Ctrl-C (or SIGTERM) stops what this command started in an orderly way, the
second kills it. `run` does not stop a cluster that ran before, or that other commands or newer jobs use. For this, each `run` holds a
shared lock on the home folder. To stop the cluster, a `run` takes the lock exclusively. A `run` that starts meanwhile waits, then starts
a new cluster.

`submit` is idempotent with the same request id. Ctrl-C stops following, not the job.

In addition to the event stream, `run` polls the API for wait reports; it shows a failed poll and continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import re
import shlex
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import FrameType
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
    VllmPython,
    call_cluster,
    command,
)
from controllers.cli.output import Output, job_snapshot, job_tree
from controllers.cli.terminal import display, list_commands, program_name, say, stdout_console
from controllers.cli.view.event_file import EventFile
from controllers.cli.view.screens import JsonScreen, Screen, choose_screen
from controllers.cli.view.state import ENDED_STATES, JobSnapshot, ViewState
from gcore.errors import GcoreError, JobFailed, UsageError, explain_os_errors
from gcore.system.clock import Clock, SystemClock

if TYPE_CHECKING:
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
    "[dim]Only check the spec:[/dim]  gcore submit grpo.yaml --dry-run",
    "[dim]From a script, safe to repeat:[/dim]  gcore submit grpo.yaml --request-id nightly-17 --wait -o json",
)
def submit(
    spec: SpecFile,
    set_: Set = None,
    new: New = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job until it ends.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait silently until the job ends.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only check the spec and its files, as a controller would. Submit nothing."),
    ] = False,
    request_id: Annotated[
        str | None, typer.Option(help="Request ID. Repeating the command with the same ID returns the same job.")
    ] = None,
    plain: Plain = False,
    home: Home = DEFAULT_HOME,
    address: Address = None,
    output: Format = Output.TABLE,
) -> None:
    """Submit a job to a running cluster. With [bold]--follow[/bold] or [bold]--wait[/bold] the exit code is that of the job.

    With -o json it prints the job; with --follow, its events, one a line.
    """

    from controllers.cli.commands.specs import warn_of_trust
    from gcore.config.load import load_spec

    if follow and wait:
        raise UsageError("--follow and --wait exclude each other", fix="Give only one of them")
    loaded = load_spec(spec, set_ or ())
    warn_of_trust(loaded.model)
    if dry_run:
        _check(loaded, home, output)
        return
    submission = _Submission(
        loaded,
        request_id or uuid.uuid4().hex,
        home=home if address is None else None,
        address=address,
        new=new,
        follow=follow,
        wait=wait,
        plain=plain,
        output=output,
    )
    try:
        call_cluster(submission.run, address, home)
    except KeyboardInterrupt:
        if not submission.uid:
            raise
        uid = submission.uid
        come_back = f"`gcore events {uid} --follow` follows it again, `gcore describe {uid}` shows its state, "
        hint = f"{come_back}`gcore cancel {uid}` cancels it."
        say(f"Stopped following; job {loaded.name} continues. {hint}", err=True)
        raise typer.Exit(INTERRUPTED) from None


class _Submission:
    """Submits the job of one `gcore submit` and, if asked, follows it or waits for it.

    `uid`: that of the job; empty until it is created. `home`: home folder of a local cluster that may run the job;
    None: a remote cluster.
    """

    def __init__(
        self,
        spec: JobSpec,
        request: str,
        *,
        home: Path | None,
        address: str | None,
        new: bool,
        follow: bool,
        wait: bool,
        plain: bool,
        output: Output,
    ) -> None:
        self.uid = ""
        self._home = home
        self._address = address
        self._spec = spec
        self._request = request
        self._new = new
        self._follow = follow
        self._wait = wait
        self._plain = plain
        self._output = output

    async def run(self, client: JobsClient) -> None:
        """Submit the job. Raises JobFailed if the command waits for the job and the job failed or was cancelled."""
        job = await begin_job(client, self._spec, request_id=self._request, new=self._new)
        self.uid = job.uid
        if self._output is Output.TABLE:
            found = job_snapshot(job)
            paused = f" `{program_name()} resume {found.name}` continues it." if found.state == "PAUSED" else ""
            say(f"Job {found.name} ({found.uid}) is {found.state}; its run folder is {found.run_dir}.{paused}")
            if self._home is not None:
                show_page(self._home, found.uid)
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
        if self._output is Output.TABLE:
            _show_summary(ended, self._spec, self._home, self._address)
        if ended.state != "SUCCEEDED":
            raise JobFailed(f"job {ended.job} is {ended.state}: {ended.reason}", fix="See `gcore describe`")

    def _tell(self, job: pb.Job) -> None:
        found = job_snapshot(job)
        if self._output.is_for_programs:
            typer.echo(self._output.text(job_tree(found)))
        elif self._wait:
            say(f"Job {found.name} ({found.uid}) is {found.state}: {found.reason}.")
        if self._wait and found.state != "SUCCEEDED":
            raise JobFailed(f"job {found.name} is {found.state}: {found.reason}", fix="See `gcore describe`")


def _check(spec: JobSpec, home: Home, output: Output) -> None:
    """Check a spec and its files as a controller would, and print the result (`gcore submit --dry-run`). Raises
    GcoreError."""
    from controllers.cli.commands.specs import check_files

    checked = check_files(spec, home, None)
    if output.is_for_programs:
        typer.echo(output.text(spec.model_dump(mode="json")))
    else:
        say(f"The spec of job {spec.name} is valid ({checked.prompts.prompts} prompts). Nothing was submitted.")


ASK_INTERVAL_S = 1.0


async def follow_job(
    client: JobsClient, job: JobSnapshot, screen: Screen, clock: Clock, *, run_dir: Path | None
) -> JobSnapshot:
    """Show `job` until it ends, and return its final snapshot.

    `run_dir`: folder for `events.jsonl`; None: do not write it. If the store loses the job meanwhile, its state is FAILED. Raises GcoreError.
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
    """The FAILED snapshot of a job that the store no longer has. `error`: response of the controller; `step`: last step that was seen."""
    from gcore.models.layout import checkpoints_in

    found = checkpoints_in(Path(job.run_dir)) if Path(job.run_dir).is_dir() else {}
    newest = str(found[max(found)]) if found else ""
    start = (
        f"; to start it from the old weights, set model.path to a copy of {newest} without exp_avg* files"
        if newest
        else ""
    )
    why = f"the store no longer has the job: {error}. The data of etcd were deleted, or another etcd is running there"
    reason = f"{why}. The same command creates a new job{start}"
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
    """Show `job` until it ends, and summarize it. Events and summary are written to the run folder if this machine can access it.

    `begun`: start of the command, by the monotonic clock. Raises GcoreError.
    """
    from controllers.cli.view.summary import summarize, write_summary

    run_dir = _visible_here(Path(job.run_dir))
    ended = await follow_job(client, job, screen, clock, run_dir=run_dir)
    summary = summarize(screen.state, ended, await audit_job(client, ended.uid), clock.monotonic() - begun)
    if run_dir is not None:
        write_summary(summary, run_dir)
    return summary


def _visible_here(run_dir: Path) -> Path | None:
    """The run folder, or None if this machine has no access to it; a remote cluster may use other storage."""
    if run_dir.parent.is_dir():
        return run_dir
    say(f"The run folder {run_dir} is not on this machine; events and summary are not written.", err=True)
    return None


async def audit_job(client: JobsClient, job: str) -> AuditVerdict:
    """Audit an ended job. A failed audit counts as a violation."""
    from controllers.cli.view.summary import AuditVerdict

    try:
        report = await client.audit_job(job)
    except GcoreError as error:
        return AuditVerdict(violations=(f"the audit failed: {error}",))
    violations = tuple(report.violations) or (() if report.clean else ("the audit is not clean",))
    return AuditVerdict(violations, tuple(sorted(report.groups_by_node.items())))


async def _ask(client: JobsClient, uid: str, screen: Screen, clock: Clock) -> None:
    cut_off: set[str] = set()
    while True:
        await clock.sleep(ASK_INTERVAL_S)
        try:
            job = job_snapshot(await client.get_job(uid))
            screen.observe(job)
            # Events are in the store, so no event can report that the store is unavailable.
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
"""Timeout of a request after Ctrl-C, when the user waits."""


class HomeUser:
    """A `gcore run` that uses the cluster in a home folder, beside others.

    `lock`: file descriptor of the home folder's lock, which each such command holds as shared.
    """

    def __init__(self, lock: int, clock: Clock) -> None:
        self._lock = lock
        self._clock = clock
        self._began = clock.wall()

    def is_alone(self) -> bool:
        """Whether no other command uses the home folder: try to make the lock exclusive. If true, no other command can
        start before this one ends."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def others(self, home: Path, own: str, runner: asyncio.Runner) -> tuple[str, ...]:
        """Names of unfinished jobs that were submitted since this command started, except job `own`.

        Empty if no controller responds: then no job can run. `runner`: the runner of earlier requests, because gRPC uses a single
        event loop per process and delivers late responses to the loop that sent the request.
        """
        try:
            return runner.run(self._others(home, own))
        except GcoreError:
            return ()

    async def _others(self, home: Path, own: str) -> tuple[str, ...]:
        from gcore.client.calls import WaitPolicy
        from gcore.client.jobs import JobsClient
        from gcore.config.local_cluster import LocalClusterState

        cluster = LocalClusterState.load(home)
        if cluster is None:
            return ()
        patience = WaitPolicy(call_s=ANSWER_TIMEOUT_S)
        async with JobsClient(cluster.addresses, clock=self._clock, patience=patience) as client:
            jobs = [job_snapshot(job) for job in await client.list_jobs()]
        return tuple(j.name for j in jobs if j.created > self._began and j.uid != own and j.state not in ENDED_STATES)


@contextlib.contextmanager
def register_command(home: Path, clock: Clock, *, say: Callable[[str], None]) -> Iterator[HomeUser]:
    """Hold the shared lock on `home` while the block runs, so that no other `gcore run` stops its cluster.

    `say`: called with a message before a wait. Raises UsageError if the folder is not writable.
    """
    with explain_os_errors("the folder is not writable", UsageError, where=home, fix="Choose another --home"):
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / LOCK).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting: another `gcore run` is stopping its cluster in {home} ...")
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield HomeUser(lock.fileno(), clock)


QUIET_S = 3.0
"""Seconds of job creation after which `NOTICE` is printed."""

CHECKPOINT_S, RESUME_WAIT_S = 10.0, 5.0
"""How long an interrupted run waits for a checkpoint of the current step, and then for the response to `resume_job`."""

NOTICE = (
    "The controller is checking the data before it creates the job. The first time, this takes minutes for large data."
)


async def begin_job(client: JobsClient, spec: JobSpec, *, request_id: str, new: bool) -> pb.Job:
    """Create the job, or continue an unfinished one of that name. If a finished job has the name, print whether that
    one continues with more steps or a new job was created.

    `request_id`: a repeated call with the same ID returns the same job. `new`: always create a new job.
    """
    from gcore.config.load import dump_explicit

    old = None if new else await find_finished(client, spec)
    job = await create_job(client, dump_explicit(spec), request_id=request_id, new=new)
    if old is not None and old.uid == job.uid and job_snapshot(job).state not in ENDED_STATES:
        goal = f"{spec.flow.steps} steps" if spec.flow.steps is not None else f"{spec.flow.epochs} data epochs"
        say(
            f"Job {old.full_name} ({old.uid}) finished {old.step} steps before and continues from its last checkpoint up to {goal}. "
            "Use --new for a new job.",
            err=True,
        )
    elif old is not None and old.uid != job.uid and not job.step:
        say(
            f"Job {old.full_name} ({old.uid}) has finished all its steps ({old.step}), so this is a new job. To continue the finished job "
            "from its last checkpoint, raise flow.steps or flow.epochs and change nothing else. To start a new job with its weights: "
            f"`gcore export {old.uid} --to DIR`, then --set model.path=DIR.",
            err=True,
        )
    return job


async def find_finished(client: JobsClient, spec: JobSpec) -> JobSnapshot | None:
    """Find the newest succeeded job with the name in the spec; None if there is none, or if the request fails."""
    from gcore.api.v1 import jobs_pb2 as pb

    with contextlib.suppress(GcoreError):  # It is only needed for a message.
        finished = await client.list_jobs(
            namespace=spec.namespace, states=(pb.JOB_STATE_SUCCEEDED,), name_prefix=spec.name, limit=20
        )
        ended = (one for one in finished if one.name == spec.name and one.state == pb.JOB_STATE_SUCCEEDED)
        return next(map(job_snapshot, ended), None)
    return None


def show_page(home: Path, uid: str) -> None:
    """Print the address of a job's web page, if a local cluster runs in `home`."""
    if page := page_address(home, uid):
        say(f"Page: {page}", err=True)


def page_address(home: Path, uid: str) -> str:
    """The address of a job's web page on the local cluster in `home`; empty if no cluster is running there."""
    from gcore.config.local_cluster import LocalClusterState

    with contextlib.suppress(GcoreError):
        if (local := LocalClusterState.load(home)) is not None:
            return f"{local.page}#{uid}"
    return ""


async def resume_if_paused(client: JobsClient, job: pb.Job) -> pb.Job:
    """Resume the job if it is paused: by a user, or by an interrupted command that could not resume it."""
    from gcore.api.v1 import jobs_pb2 as pb

    if job.state != pb.JOB_STATE_PAUSED:
        return job
    say(f"Job {job.name} ({job.uid}) was paused; resuming it.", err=True)
    return await client.resume_job(job.uid)


async def create_job(client: JobsClient, spec_json: str, *, request_id: str, new: bool) -> pb.Job:
    """Call `JobsClient.create_job`. Prints a notice on standard error if it takes long. Raises GcoreError."""
    from gcore.api.v1 import jobs_pb2 as pb

    mode = pb.START_MODE_NEW if new else pb.START_MODE_RESUME
    creating = asyncio.ensure_future(client.create_job(spec_json, request_id=request_id, mode=mode))
    try:
        done, _ = await asyncio.wait({creating}, timeout=QUIET_S)
        if not done:
            say(NOTICE, err=True)
        return await creating
    finally:
        creating.cancel()


class RepeatedSignals:
    """Records SIGINT and SIGTERM from construction on. After `heed`, each signal raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._pressed = self._heeded = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    @property
    def pressed(self) -> bool:
        """Whether a signal was recorded."""
        return self._pressed

    def heed(self) -> None:
        """From now on let signals interrupt: raise KeyboardInterrupt if one was recorded, and later at each signal."""
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
    "[dim]A new job with another learning rate:[/dim]  gcore run grpo.yaml --new --set train.learning_rate=1e-4",
    "[dim]Three controllers on three cores, with output to a log file:[/dim]  gcore run grpo.yaml --controllers 3 --slots cpu:3 --plain > run.log",
    "[dim]On a remote cluster:[/dim]  gcore run grpo.yaml --address 10.0.0.7:7700",
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
    vllm_python: VllmPython = None,
    address: Address = None,
) -> None:
    """Run a job until it ends. Starts a local cluster if none is running, and stops it at the end.

    Shows the job and prints a summary. If the job of that name was interrupted, it continues. If it has ended, a new job is created; if it
    succeeded and only flow.steps or flow.epochs was raised, it continues. Ctrl-C stops the cluster in an orderly way, a second Ctrl-C kills it.
    """

    from controllers.cli import local
    from controllers.cli.commands.specs import warn_of_trust
    from gcore.client.contexts import find_cluster
    from gcore.config.load import load_spec
    from gcore.engines.environments import SGLANG, VLLM

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
                pythons = (SGLANG.find(sglang_python), VLLM.find(vllm_python))
                request = local.UpRequest(home, controllers, slots, None, None, *pythons)
                share = stack.enter_context(register_command(home, clock, say=say))
                result = runner.run(local.start_cluster(request, clock=clock, say=say))
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
        # After a signal, `_is_shared` was already evaluated above.
        if started and (further is not None or not _is_shared(share, home, screen, runner)):
            _down(home, further)
        stack.close()

    _show_summary(summary, loaded, local_home, address)
    if address is None and not started:
        say(f"The cluster in {home} was running before and keeps running; `gcore down` stops it.", err=True)
    if not summary.succeeded:
        raise typer.Exit(1)


@command("demo", RUN, "gcore demo", "[dim]A shorter one:[/dim]  gcore demo --steps 10 --home /tmp/gcore-demo")
def demo(
    steps: Annotated[int, typer.Option(help="Steps to train.", min=1)] = 40,
    home: Home = DEFAULT_HOME,
    plain: Plain = False,
) -> None:
    """Train a small model to add numbers, on two controllers of this machine. Data and model are made first, in half a minute.

    The same command continues an interrupted demo, and trains further with more steps.
    """
    from gcore.quickstart.__main__ import EXAMPLES
    from gcore.store.etcd import find_etcd

    find_etcd()  # before the model is made
    folder = home / "demo"
    say(f"Preparing the example in {folder} ...")
    EXAMPLES["arithmetic"](folder, 0)
    spec = folder / "grpo.yaml"
    with explain_os_errors("cannot write the spec", GcoreError, where=spec, fix="Choose another --home"):
        spec.write_text(demo_spec(), encoding="utf-8")
    run(spec, set_=[f"flow.steps={steps}"], home=home, plain=plain)


def demo_spec() -> str:
    """The text of the arithmetic example's spec, with the paths of data and model relative to the spec's own folder."""
    import gcore.quickstart

    installed = Path(gcore.quickstart.__file__).with_name(
        "arithmetic.yaml"
    )  # in a wheel; a clone has the example itself
    clone = installed.parents[2] / "examples" / "arithmetic" / "grpo.yaml"
    file = installed if installed.exists() else clone
    with explain_os_errors("cannot read the demo's spec", GcoreError, where=file, fix="Reinstall gcore"):
        text = file.read_text(encoding="utf-8")
    return re.sub(r"\.\./\.\./\.cache/examples/arithmetic/", "", text)


async def _submit_and_follow(
    spec: JobSpec, screen: Screen, cluster: ClusterAddress, *, home: Path | None, new: bool, begun: float
) -> Summary:
    """Submit the job and follow it to its end. `home`: that of the local cluster; None: a remote cluster, which keeps its own processes."""
    from gcore.client.jobs import JobsClient

    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        if home is not None:
            await stack.enter_async_context(keep_processes(home, screen, clock))
        client = await stack.enter_async_context(
            JobsClient(cluster.addresses, clock=clock, connector=cluster.connector, owner_key=cluster.owner_key)
        )
        job = await resume_if_paused(client, await begin_job(client, spec, request_id=uuid.uuid4().hex, new=new))
        if home is not None:
            show_page(home, job.uid)
        return await record_job(client, job_snapshot(job), screen, clock, begun=begun)


@contextlib.asynccontextmanager
async def keep_processes(home: Path, screen: Screen, clock: Clock) -> AsyncIterator[None]:
    """While the block runs, restart etcd and daemons of the local cluster that have died. Daemons do this for each other, but all of them may
    have died. Shows an error if a restart fails."""
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
    """Pause the job, so that it commits the current step with a checkpoint; resume it when the checkpoint is registered.

    Gives up after `CHECKPOINT_S` seconds or at a further signal.
    """
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

    with contextlib.suppress(GcoreError):  # The job may end meanwhile. Steps without a checkpoint are trained again.
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
    """Whether the job's newest commit has a registered checkpoint."""
    return Path(job.checkpoint).name == f"{job.lineage}-{job.step}"


def _clear_half_started(home: Path) -> None:
    """Stop a partly started cluster. `start_cluster` normally does this itself, but a second signal may have interrupted it."""
    from controllers.cli import local
    from gcore.config.local_cluster import LocalClusterState

    with contextlib.suppress(GcoreError):
        if LocalClusterState.load(home) is None:
            local.stop_cluster(home, clock=SystemClock(), grace_s=0)


def _is_shared(share: HomeUser | None, home: Path, screen: Screen, runner: asyncio.Runner) -> bool:
    """Whether others use the cluster that this command started. If so, print that the cluster keeps running."""
    jobs = share.others(home, screen.state.uid, runner) if share is not None else ()
    if share is None or (not jobs and share.is_alone()):
        return False
    who = f"job {', '.join(map(repr, jobs))} runs on it" if jobs else "another `gcore run` uses it"
    say(f"The cluster keeps running, because {who}; `gcore down` stops it.", err=True)
    return True


def _may_lose_steps(state: ViewState) -> bool:
    """Whether a step was committed that may have no checkpoint."""
    return state.step > 0 and not state.ended


def _say_interrupted(screen: Screen, *, started: bool) -> None:
    state = screen.state
    where = f" at step {state.step} of {state.steps}" if state.steps else ""
    if started:
        after = f" after a checkpoint, or after {CHECKPOINT_S:.0f} s without one" if _may_lose_steps(state) else ""
        say(f"Interrupted{where}; stopping the cluster{after} (press Ctrl-C again to kill it).", err=True)
        say(f"To continue the job, run the same command again: `{_again()}`", err=True)
    elif state.uid:
        say(
            f"Stopped following{where}; the job continues, because its cluster keeps running. "
            f"The same command follows it again, `gcore cancel {state.uid}` cancels it.",
            err=True,
        )
    else:
        say("Interrupted; nothing was started.", err=True)


def _down(home: Path, further: RepeatedSignals | None) -> None:
    """Stop the local cluster. A second signal kills it, also one that arrived since the first.

    `further`: records signals since the first one; None: there was none.
    """
    from controllers.cli import local

    try:
        if further is not None:
            further.heed()
        local.stop_cluster(home, clock=SystemClock())
    except KeyboardInterrupt:
        local.stop_cluster(home, clock=SystemClock(), grace_s=0)
        raise typer.Exit(INTERRUPTED) from None
    except GcoreError as error:
        # Print the error instead of raising it: the result of the run matters more.
        say(f"gcore: {error}", err=True, indent="  ")


def _show_summary(summary: Summary, spec: JobSpec, home: Path | None, address: str | None) -> None:
    """Print the result of a run and the commands that the user may need next.

    `home`: home folder of a local cluster, which may have been stopped; None: a remote cluster.
    """
    from controllers.cli.view.summary import longer_command, next_commands, summary_table

    options = ["--address", address] if address is not None else []
    if home is not None and home != DEFAULT_HOME:
        options = ["--home", str(home)]
    typer.echo()
    display(summary_table(summary, page_address(home, summary.uid) if home is not None else ""))
    typer.echo("\nNext:")
    list_commands(next_commands(summary, _again(), longer_command(sys.argv[1:], spec), options))


def _again() -> str:
    """The command line as given, without --new, which would create a new job."""
    return f"{program_name()} {shlex.join(word for word in sys.argv[1:] if word != '--new')}"
