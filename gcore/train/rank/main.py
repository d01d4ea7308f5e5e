"""The process of a train rank: control line to the supervisor, gRPC server, training thread, and shutdown.

The training thread does all work with torch, in sequence. Another thread writes checkpoints, and the main thread
serves. A failure while loading or training ends the process: it reports the error to its supervisor and to watchers
(controllers that stream its status), and exits with 1. A rank that is stopped while idle leaves its process group
first; during a step it exits at once. A checkpoint that is being written at that time is given up, because a stopped
job already has its last one or does not need it.

An idle rank that still writes a checkpoint is in phase `checkpoint` instead of `waiting`, so that the watchdog detects
a hanging disk like any other hang.

The process always ends with `os._exit`, because gloo's threads can abort the interpreter during a normal exit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from gcore.api.rpc import NodesOnlyInterceptor, VersionGate, server_credentials
from gcore.api.tls import Connector, ReloadingFiles
from gcore.api.v1 import train_pb2_grpc
from gcore.config.train import STORED
from gcore.errors import DataError, GcoreError, explain_os_errors
from gcore.ledger.balance import content_sha256
from gcore.models.adapter_checks import BaseFiles, check_same_base
from gcore.models.layout import BASE_FILE, Manifest, file_entry, has_critic, read_manifest, verify_checkpoint
from gcore.system.clock import Clock
from gcore.system.control_line import ControlLine
from gcore.system.daemon import set_up_logging
from gcore.system.network import join_host_port
from gcore.train.checkpoint.run_files import CHECKPOINT, BackgroundWriter
from gcore.train.rank.feed import FeedState, StepInput, StepPartInput, WorldName
from gcore.train.rank.launch import CannotOffload, PhaseMeter, PhaseTotals, RankLaunch, StepResult
from gcore.train.rank.service import RankStatus, TrainRankService
from gcore.types import Version

if TYPE_CHECKING:
    from gcore.train.backends.distributed import Collective
    from gcore.train.models import Fill, RankModels
    from gcore.train.rank.blobs import BlobFetcher


@dataclass(frozen=True, slots=True)
class RendezvousCalls:
    """How a rank finds the others: rank 0 calls `publish` with the address of its store; the others call `find`, which
    blocks.

    Rank 0 opens its store before the slow imports and the others look for it after them, so that no rank waits for
    another's imports.
    """

    publish: Callable[[str], None]
    find: Callable[[], str]


class RankTrainer(Protocol):
    """A rank that can train: `gcore.train.step.StepTrainer`, or the emulated one.

    All methods except `released` run in the thread that loaded it.
    """

    @property
    def released(self) -> frozenset[str]:
        """The released parts of the rank's memory: `optimizer`, `weights`, or both. Thread-safe."""
        ...

    def run(self, work: StepInput, tell: Callable[[str], None]) -> StepResult:
        """Train a sealed step and return its report. `tell` is called with the phase at every progress."""
        ...

    def accumulate(self, part: StepPartInput, tell: Callable[[str], None]) -> None:
        """Add the gradients of one part of the next streamed step, without an update."""
        ...

    def rest(self, what: Collection[str], tell: Callable[[str], None]) -> None:
        """Release the memory parts in `what` and restore all others. Raises CannotOffload."""
        ...

    def leave(self) -> None:
        """Leave the process group."""
        ...


def load_rank(
    launch: RankLaunch, meet: RendezvousCalls, clock: Clock, tell: Callable[[str], None], writer: BackgroundWriter
) -> RankTrainer:
    """Prepare everything before serving: join the process group, load the models, stage the first weights for the
    engines.

    The state comes from the initial model, a checkpoint or in-memory replicas. `tell` is called with the phase at
    progress; `writer` writes the checkpoints. Runs in the thread that does all work with torch, because CUDA's current
    device belongs to a thread. Raises GcoreError.
    """
    began = clock.monotonic()
    # Before the checkpoint's base is compared with these files, so that a later change is found.
    base = BaseFiles.of(launch.model_path) if _reads_model(launch) else None
    manifest = _manifest(launch, tell)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import torch

    from gcore.train.backends import distributed as meeting_place

    tell("loading")
    torch.set_num_threads(launch.threads)
    torch.set_num_interop_threads(1)  # operators never run concurrently here
    meeting = meeting_place.Rendezvous(launch.rank, launch.world_size, launch.host)
    if launch.rank == 0:
        opened = meeting_place.open_store(meeting)
        meet.publish(opened.address)
        _import_the_rest(launch.spec.train.backend, tell)
        store = opened.store
    else:
        _import_the_rest(launch.spec.train.backend, tell)
        store = meeting_place.find_store(meet.find(), meeting)
    collective = meeting_place.Collective.join(meeting, store)
    tell("loading")

    from gcore.train.checkpoint.replicas import ReplicaRestore, StateReplicator
    from gcore.train.checkpoint.writer import (
        CheckpointWriter,
        FolderPublisher,
        UpdateCounts,
        restore_critic,
        restore_optimizer,
    )
    from gcore.train.step import StepTrainer

    def loading() -> None:
        tell("loading")

    sample = "" if base is None else agreed_sample(collective, base, launch.model_path)
    base_sample = "" if launch.spec.train.lora is None else sample
    state = launch.start.state
    copies = None if state is None else ReplicaRestore(launch, state, collective, loading, base_sample)
    models = _models(launch, collective, tell, None if copies is None else copies.fill)
    progress = UpdateCounts(0, 0)
    folder = launch.checkpoint_path
    if copies is not None:
        copies.restore(models)
        progress = copies.progress
    if manifest is not None and folder is not None:
        restore_optimizer(models.policy, folder, manifest)
        if models.critic is not None:
            restore_critic(models.critic, folder, manifest)
        progress = UpdateCounts.of(manifest)
    elif copies is None:
        log.info("training starts from %s; Adam's moments are zero", launch.model_path)
    saver = CheckpointWriter(launch, models.policy, models.critic, writer, base, models.frozen, models.follower)
    publisher = FolderPublisher(
        launch, models.policy, saver.writer, saver.insisting, collective.max, base, models.frozen, models.follower
    )
    publisher.stage(Version(launch.lineage, launch.start.step), loading)
    loading()
    copier = StateReplicator(launch, collective, models, base_sample)
    if launch.resumes:
        copier.keep(launch.start.step, 0, progress, loading)
    start_s = clock.monotonic() - began
    return StepTrainer(launch, collective, models, saver, publisher, clock, progress, copier, start_s=start_s)


def _reads_model(launch: RankLaunch) -> bool:
    """Whether the ranks load weights of the initial model: to train them or adapters of them, or as the reference."""
    train = launch.spec.train
    return train.lora is not None or train.kl_coef > 0 or not launch.resumes


def agreed_sample(collective: Collective, files: BaseFiles, folder: Path) -> str:
    """Return the sample of the files (`BaseFiles.sample`). A collective. Raises WorldDiverged unless it is that of all ranks,
    because each reads the model in `folder` on its own node and keeps a part of it, and DataError if a file cannot be read.
    """
    with explain_os_errors("cannot read the model", DataError, where=folder, fix="Restore the model on this node"):
        sample = files.sample()
    what = f"the configuration and weights of the model in {folder}, which must be the same files on all nodes"
    collective.agree(what, [int(sample[:15], 16)])
    return sample


def _models(launch: RankLaunch, collective: Collective, tell: Callable[[str], None], fill: Fill | None) -> RankModels:
    """Load all models that the spec needs.

    `fill`: replaces the loaded weights by those of in-memory replicas; None: they stay.
    """
    import torch

    from gcore.train.denoising.models import load_denoising_models
    from gcore.train.hf_models import STATE_REMEDIES, explain_memory_error
    from gcore.train.models import load_models

    with explain_memory_error("loading the model", launch.spec.train, STATE_REMEDIES):
        group = collective.form_sequence_groups(launch.spec.train.sequence_parallel)
        loading = partial(tell, "loading")
        if launch.spec.rollout.diffusion is not None:
            models = load_denoising_models(launch, collective.device, loading, fill)
        else:
            models = load_models(launch, collective.device, collective.max, loading, fill, group)
    if collective.device.type == "cuda":
        torch.cuda.empty_cache()
    return models


def _manifest(launch: RankLaunch, tell: Callable[[str], None]) -> Manifest | None:
    """The manifest of the checkpoint from which the world starts; None if it starts from something else.

    Rank 0 verifies every byte of the checkpoint, and of the base model of adapters; if that fails, the whole world ends.
    Raises GcoreError if the checkpoint belongs to another step or job, lacks the critic that the job trains, or has
    adapters of another base model.
    """
    folder = launch.checkpoint_path
    if folder is None:
        return None

    def tick(_: int) -> None:
        tell("loading")

    manifest = verify_checkpoint(folder, tick) if launch.rank == 0 else read_manifest(folder)
    if launch.rank == 0 and launch.spec.train.lora is not None and BASE_FILE in manifest.files:
        fix = "Restore the model in model.path: the checkpoint has adapters of the model that was there"
        check_same_base(launch.model_path, folder, fix, tick)
        _check_same_config(launch.model_path, manifest, fix)
    if manifest.step != launch.start.step or manifest.job_uid != launch.job_uid:
        raise GcoreError(
            f"the checkpoint belongs to step {manifest.step} of job {manifest.job_uid}, "
            f"not to step {launch.start.step} of job {launch.job_uid}",
            where=str(folder),
        )
    if launch.spec.train.critic is not None and not has_critic(manifest):
        raise GcoreError(
            "the checkpoint has no critic, but this job trains one (train.advantage: gae)",
            where=str(folder),
            fix="Use a checkpoint of a job with a critic, or start from the model with a new critic",
        )
    return manifest


def _check_same_config(base: Path, manifest: Manifest, fix: str) -> None:
    """Raise DataError if the configuration of the adapters' base model is not that of the checkpoint: the same weights compute
    something else with another one."""
    written = manifest.files.get("config.json")
    if written is not None and file_entry(base / "config.json") != written:
        raise DataError(
            "the configuration of the adapters' base model changed since the checkpoint was written",
            where=str(base / "config.json"),
            fix=fix,
        )


def _import_the_rest(backend: str, tell: Callable[[str], None]) -> None:
    """Import transformers, and DeepSpeed if it is the backend: seconds. Raises DataError."""
    from gcore.system.torch_imports import compute_float32_exactly, leave_compiler_out

    leave_compiler_out()
    compute_float32_exactly()
    from gcore.train.models import import_backend

    tell("loading")
    import_backend(backend)
    tell("loading")


log = logging.getLogger("gcore.train")

SHOW_S = 0.5
"""Minimum interval in seconds of progress messages within one phase."""

FAREWELL_S = 2.0
"""Maximum seconds, at the end of the process, to inform watchers, to leave the process group, or to stop the writer."""

MESSAGE_BYTES = 8 << 20
"""Maximum message size. An Apply contains a whole seal, at most 1.5 MiB; a chunk is at most 1 MiB."""

Loader = Callable[[RankLaunch, RendezvousCalls, Clock, Callable[[str], None], BackgroundWriter], RankTrainer]
"""The signature of `load_rank`: prepares a rank before it serves, in the training thread."""

LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "Broken pipe")
"""Parts of the error messages of gloo and NCCL when another rank has ended. The log has the whole message."""


class ControlListener:
    """Receives the supervisor's commands in a thread: the address of rank 0's store, and the command to stop.

    `stop` is called, in that thread, when the command to stop arrives.
    """

    def __init__(self, control: ControlLine, stop: Callable[[], None]) -> None:
        self._control = control
        self._stop = stop
        self._rendezvous: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def rendezvous(self) -> str:
        """Return the address of rank 0's store; blocks until the supervisor has sent it."""
        return self._rendezvous.get()

    def _listen(self) -> None:
        while True:
            message: dict[str, Any] = self._control.commands.get()
            if message.get("command") == "rendezvous":
                self._rendezvous.put(str(message["address"]))
            elif message.get("command") == "stop":
                self._stop()


class ProgressReporter:
    """Reports the rank's progress to the supervisor and to watchers: each new phase, and every `SHOW_S` within one.

    Thread-safe. `show` gets the phase and the progress counter, for watchers.
    """

    def __init__(self, control: ControlLine, clock: Clock, show: Callable[[str, int], None]) -> None:
        self._control = control
        self._clock = clock
        self._show = show
        self._phase = ""
        self._progress = 0
        self._shown = 0.0
        self._phases = PhaseMeter("loading", clock.monotonic())

    def tell(self, phase: str) -> None:
        """Count one progress in `phase`, and report it if it is due. Called from one thread at a time."""
        self._progress += 1
        now = self._clock.monotonic()
        self._phases.tell(phase, now)
        if phase == self._phase and now - self._shown < SHOW_S:
            return
        self._phase, self._shown = phase, now
        self._control.report_progress(phase, self._progress)
        self._show(phase, self._progress)

    def totals(self) -> PhaseTotals:
        """Seconds that the rank has spent in each phase until now."""
        return self._phases.read(self._clock.monotonic())


class RankProcess:
    """Runs one rank in the event loop: loads it in the training thread, serves its calls, and ends with an exit
    code.
    """

    def __init__(self, launch: RankLaunch, control: ControlLine, clock: Clock, loader: Loader = load_rank) -> None:
        self._launch = launch
        self._loader = loader
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._end: asyncio.Future[int] = self._loop.create_future()
        name = WorldName(launch.job_uid, launch.world, launch.lineage)
        train = launch.spec.train
        state = FeedState(
            name,
            launch.rank,
            launch.world_size,
            launch.start.step,
            sequence_parallel=train.sequence_parallel,
            streams=train.stream,
        )
        self._pulse = ProgressReporter(control, clock, self._note_soon)
        self._board = RankStatus(state, clock, self._pulse.totals)
        self._orders = ControlListener(control, self._stop_soon)
        self._server = grpc.aio.server(
            interceptors=[*([NodesOnlyInterceptor()] if launch.tls else []), VersionGate()],
            options=[("grpc.max_receive_message_length", MESSAGE_BYTES)],
        )
        self._fetcher: BlobFetcher | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._loaded: RankTrainer | None = None
        self._writer = BackgroundWriter(launch.run_path, launch.world, self._wrote_soon)
        self._busy = asyncio.create_task(self._load())
        self._busy.add_done_callback(self._finished)

    async def run(self) -> int:
        """Run until the rank is stopped or has failed. Returns the exit code: 0 or 1."""
        code = await self._end
        await asyncio.to_thread(self._writer.give_up, FAREWELL_S)
        if code == 0 and self._loaded is not None and self._busy.done():
            leaving = self._loop.run_in_executor(self._thread, self._loaded.leave)
            await asyncio.wait({leaving}, timeout=FAREWELL_S)
        await self._server.stop(None)
        # Let cancelled calls end in the next loop iteration; otherwise the log would show them as errors.
        await self._clock.sleep(0.0)
        return code

    async def _load(self) -> None:
        meet = RendezvousCalls(lambda address: self._control.send("store", address=address), self._orders.rendezvous)
        self._loaded = await self._loop.run_in_executor(
            self._thread, self._loader, self._launch, meet, self._clock, self._pulse.tell, self._writer
        )
        train_pb2_grpc.add_TrainRankServicer_to_server(
            TrainRankService(self._board, self._begin, self._begin_part, self._rest, self._look_for_blobs), self._server
        )
        self._start_fetching()
        port = self._listen(join_host_port(self._launch.host, 0))
        await self._server.start()
        log.info("rank %d of %s serves", self._launch.rank, self._board.state.name)
        self._control.send("serving", address=join_host_port(self._launch.host, port))
        self._pulse.tell("waiting")

    def _start_fetching(self) -> None:
        """Begin to fetch the blobs of samples, if the job has any."""
        blobs = self._launch.blobs
        if blobs is None:
            return
        # Imported here, because ranks of text models need no HTTP client.
        from gcore.media.client import BlobClient, open_blob_http
        from gcore.train.rank.blobs import BlobFetcher

        http = open_blob_http(Connector(None if self._launch.tls is None else self._launch.tls.material))
        client = BlobClient(blobs.store, self._launch.job_uid, blobs.key, http)
        self._fetcher = BlobFetcher(client, Path(blobs.folder), self._board, self._clock)
        self._fetching = asyncio.create_task(self._fetcher.run(), name="blobs")
        self._fetching.add_done_callback(self._finished)

    def _look_for_blobs(self) -> None:
        if self._fetcher is not None:
            self._fetcher.look()

    def _listen(self, address: str) -> int:
        tls = self._launch.tls
        if tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, server_credentials(ReloadingFiles(tls.material), mutual=True))

    def _begin(self, work: StepInput) -> None:
        self._busy = asyncio.create_task(self._apply(work))
        self._busy.add_done_callback(self._finished)

    def _begin_part(self, part: StepPartInput) -> None:
        # One thread does all work, so tasks run in the order in which they are created.
        self._busy = asyncio.create_task(self._accumulate(part))
        self._busy.add_done_callback(self._finished)

    async def _rest(self, what: Collection[str]) -> None:
        """Have the training thread release the memory parts in `what` and restore all others.

        Raises CannotOffload; any other error ends the process.
        """
        task = self._busy = asyncio.create_task(self._go_to_rest(what))
        task.add_done_callback(self._rested)
        await asyncio.shield(task)  # it continues even if the caller is cancelled

    async def _go_to_rest(self, what: Collection[str]) -> None:
        assert self._loaded is not None
        try:
            await self._loop.run_in_executor(self._thread, self._loaded.rest, what, self._pulse.tell)
        finally:
            self._board.released = self._loaded.released
            if self._busy is asyncio.current_task():
                self._pulse.tell(self._resting)

    def _rested(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a release or restore.

        A lack of room is reported to the caller only and the rank continues unchanged; any other error ends the
        process.
        """
        if task.cancelled() or not isinstance(task.exception(), CannotOffload):
            self._finished(task)

    async def _accumulate(self, part: StepPartInput) -> None:
        assert self._loaded is not None
        await self._loop.run_in_executor(self._thread, self._loaded.accumulate, part, self._pulse.tell)
        if self._busy is asyncio.current_task():  # otherwise the thread already reports later work
            self._pulse.tell(self._resting)

    async def _apply(self, work: StepInput) -> None:
        assert self._loaded is not None
        result: StepResult = await self._loop.run_in_executor(self._thread, self._loaded.run, work, self._pulse.tell)
        self._pulse.tell(self._resting)
        self._board.reported(result, content_sha256(work.seal))
        self._look_for_blobs()  # deletes those of the step

    @property
    def _resting(self) -> str:
        """The phase of an idle rank: `checkpoint` while the writer is active, `waiting` while it is idle or waits for a
        retry.
        """
        writing = self._writer.writing
        return CHECKPOINT if self._writer.busy and writing is not None and not writing.error else "waiting"

    def _wrote_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._wrote)

    def _wrote(self) -> None:
        """Show the writer's progress or result to watchers. An error that is not a disk error ends the process."""
        defect = self._writer.defect()
        if defect is not None:
            self._failed(defect)
            return
        board, earlier = self._board, self._board.checkpointing
        board.saved, board.writing, board.trouble = self._writer.saved, self._writer.writing, self._writer.trouble
        if self._busy.done() and not self._end.done():
            self._pulse.tell(self._resting)
        if board.checkpointing != earlier:  # a change of bytes only is shown with the next progress
            board.show()

    def _finished(self, task: asyncio.Task[None]) -> None:
        """Handle the end of loading or of a step: a failure ends the process."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if not self._end.done() and not self._board.error:
            log.error("rank %d fails in phase %s", self._launch.rank, self._board.phase, exc_info=error)
            self._board.failed(failure_reason(error, self._board.phase))
            self._busy = asyncio.create_task(self._fail())

    async def _fail(self) -> None:
        self._control.send("failed", reason=self._board.error)
        await self._server.stop(FAREWELL_S)  # returns when watchers have received the error
        if not self._end.done():
            self._end.set_result(1)

    def _stop_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if not self._end.done():
            self._end.set_result(0)

    def _note_soon(self, phase: str, progress: int) -> None:
        self._loop.call_soon_threadsafe(self._note, phase, progress)

    def _note(self, phase: str, progress: int) -> None:
        self._board.phase, self._board.progress = phase, progress
        if self._loaded is not None:
            self._board.released = self._loaded.released
        self._board.show()


def failure_reason(error: BaseException, phase: str) -> str:
    """Describe in one sentence why the rank failed in `phase`, for the supervisor and watchers."""
    if isinstance(error, GcoreError):
        return str(error)
    if isinstance(error, RuntimeError) and any(word in str(error) for word in LOST_RANK):
        return f"lost another rank of the world in phase {phase}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__} in phase {phase}" + (f": {lines[0]}" if lines else "")


def main(clock: Clock, loader: Loader = load_rank) -> None:
    """Run the rank whose launch document arrives on the control line; ends the process. `loader`: `load_rank`, or an
    emulation.
    """
    set_up_logging()
    control = ControlLine.inherit()
    if control is None:
        sys.exit("gcore.train is started by gcore-worker, with a launch document; to train, use gcore run")
    launch = RankLaunch.model_validate(control.launch, context=STORED)

    async def live() -> int:
        return await RankProcess(launch, control, clock, loader).run()

    code = asyncio.run(live())
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
