"""`python -m gcore.emulated.rank`: a train rank without computation, under a real supervisor.

Everything around a step is the real rank's code (`gcore.train.rank.main`): the service, accepted and refused batches,
receipts, progress, the exit. Instead of computing, the rank waits for a time that the timing model (`law`) defines from
its number of tokens. Rank 0 stages a folder for engines and writes complete checkpoints without weights (they contain
`emulated.json`, and no model can be exported from them). Ranks do not communicate with each other, so a rank that dies
does not end the others.

It reports no loss, because an invented value could be mistaken for a real one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from gcore.engines.emulated.launch import SAID
from gcore.engines.emulated.law import ReplicaTiming, read_timing_model
from gcore.errors import DataError
from gcore.ledger.records.chain import SealedGroup
from gcore.models.layout import (
    EMULATED_FILE,
    EXP_AVG_FILE,
    EXP_AVG_SQ_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    FileEntry,
    Manifest,
    copy_companions,
    file_entry,
    sweep_unfinished,
    verify_checkpoint,
    weights_folder,
)
from gcore.rollout.api import FolderUpdate
from gcore.system.clock import Clock
from gcore.system.files import replace_folder
from gcore.train.checkpoint.run_files import CHECKPOINT, BackgroundWriter, ReceiptWriter, RetryingWriter, WriteCallback
from gcore.train.rank.feed import StepInput, StepPartInput, remaining_parts
from gcore.train.rank.launch import RankLaunch, StepResult
from gcore.train.rank.main import RendezvousCalls
from gcore.types import Version

TELL_S = 1.0
"""Real seconds between two progress reports."""

STAGED = 3
"""Number of newest versions of staged weights that are kept."""

Tell = Callable[[str], None]


class EmulatedTrainer:
    """Trainer of an emulated rank: applies steps by waiting. Blocks; belongs to one thread."""

    def __init__(self, launch: RankLaunch, timing: ReplicaTiming, writer: BackgroundWriter, clock: Clock) -> None:
        self._launch = launch
        self._timing = timing
        self._clock = clock
        self._start_s = 0.0
        self._writer = writer
        self._receipts = ReceiptWriter(launch.run_path, launch.world, launch.rank, writer.folder)
        self._insisting = RetryingWriter(writer.hindered, launch.spec.train.watchdog_s)
        self._writes = launch.rank == 0
        self._updates = 0
        self._accumulated = 0.0
        """Emulated seconds that the parts of the next step have taken so far."""
        self.released: frozenset[str] = frozenset()
        """Names of the memory that counts as released. Nothing is really released."""

    def load(self, tell: Tell) -> None:
        """Wait for the loading time, verify the checkpoint to start from as a real rank does, and stage its weights.

        `tell`: reports progress. Raises CheckpointDamaged.
        """
        launch, began = self._launch, self._clock.monotonic()
        if launch.checkpoint_path is not None and self._writes:
            self._updates = verify_checkpoint(launch.checkpoint_path).updates
        self._take(self._timing.load(), "loading", tell)
        if self._writes:
            sweep_unfinished(launch.run_path, launch.lineage)
            self._stage(Version(launch.lineage, launch.start.step), lambda: tell("loading"))
        self._start_s = self._clock.monotonic() - began

    def run(self, work: StepInput, tell: Tell) -> StepResult:
        """Apply one step: wait for its training time, stage weights, and write a checkpoint if one is due and the
        receipt.

        Raises WriteRefused, DataError.
        """
        self.released = frozenset()
        self._check_arrays(work)
        launch, seal = self._launch, work.seal
        updating = saving = 0.0
        if seal.groups:
            for part in remaining_parts(work):
                self.accumulate(part, tell)
            self._compute(self._timing.train(0 if seal.parts else _tokens(work)), tell)
            updating, self._accumulated = self._accumulated, 0.0
            self._updates += launch.spec.train.epochs * launch.spec.train.mini_batches
        tell("saving")
        version = Version(launch.lineage, seal.step)
        if self._writes:
            saving = self._timing.save()
            self._take(saving, "saving", tell)
            self._stage(version, lambda: tell("saving"))
            last = seal.last or seal.step == launch.spec.flow.steps
            if launch.spec.checkpoints_after(seal.step, last=last, asked=seal.checkpoint):
                self._checkpoint(version, last=last, tell=tell)
        self._insist(
            f"a receipt of step {seal.step}",
            self._receipts.file.parent,
            partial(self._receipts.write, work, None),
            lambda: tell("saving"),
        )
        speedup = self._timing.law.speedup  # reports are in real seconds, like all others of a step
        metrics = {
            "emulated": 1.0,
            "update_seconds": updating / speedup,
            "saving_seconds": saving / speedup,
            "start_seconds": self._start_s,  # from which placement takes the cost of another train world
        }
        folder = weights_folder(launch.run_path, version).relative_to(launch.run_path)
        return StepResult(metrics, FolderUpdate(version, str(folder)))

    def accumulate(self, part: StepPartInput, tell: Tell) -> None:
        """Apply one part of the next, streamed step: wait for its training time."""
        self._check_arrays(part.work)
        self._compute(self._timing.accumulate(_tokens(part.work)), tell)

    def rest(self, what: Collection[str], tell: Tell) -> None:
        """Note that the memory in `what` is released and all other memory restored. Takes no time."""
        tell("restoring" if self.released - set(what) else "releasing")
        self.released = frozenset(what)

    def leave(self) -> None:
        """Do nothing: ranks do not communicate."""

    def _check_arrays(self, work: StepInput) -> None:
        """Check that the states of generated pictures are in this world's folder, as a real rank maps them. Raises DataError."""
        blobs = self._launch.blobs
        for slot in work.layout.of_rank(work.rank) if blobs is not None else ():
            group = work.groups.get(work.seal.groups[slot.group].digest)
            for medium in () if group is None else group.samples[slot.sample].media:
                assert blobs is not None
                file = Path(blobs.folder) / medium.sha256
                wanted = 4 * math.prod(medium.shape) if medium.dtype == "float32" else medium.size
                if not file.is_file() or file.stat().st_size != wanted:
                    raise DataError(f"{medium.kind} {medium.sha256} is not there with {wanted} bytes", where=str(file))

    def _compute(self, seconds: float, tell: Tell) -> None:
        self._accumulated += seconds
        self._take(seconds, "update", tell)

    def _take(self, emulated_s: float, phase: str, tell: Tell) -> None:
        left = emulated_s / self._timing.law.speedup
        tell(phase)
        while left > 0:
            part = min(left, TELL_S)
            threading.Event().wait(part)  # used only to sleep; never set
            left -= part
            tell(phase)

    def _insist(self, what: str, where: Path, attempt: Callable[[], None], tell: Callable[[], None]) -> None:
        """Retry the write `attempt` until it succeeds, as a real rank does, but without the other ranks."""
        self._insisting.until_taken(what, where, attempt, list, tell)

    def _stage(self, version: Version, tell: Callable[[], None]) -> None:
        target = weights_folder(self._launch.run_path, version)
        self._insist(f"the weights of step {version.step}", target.parent, lambda: self._stage_once(target), tell)

    def _stage_once(self, target: Path) -> None:
        launch = self._launch
        self._writer.folder.check()
        with replace_folder(target, owner=launch.world, durable=False) as folder:
            copy_companions(launch.model_path, folder)
            _mark(folder)
        versions = sorted(
            Version(*map(int, path.name.split("-"))) for path in target.parent.glob("[0-9]*-[0-9]*") if path.is_dir()
        )
        for old in versions[:-STAGED]:
            shutil.rmtree(weights_folder(launch.run_path, old), ignore_errors=True)

    def _checkpoint(self, version: Version, *, last: bool, tell: Tell) -> None:
        launch, updates = self._launch, self._updates
        while not self._writer.wait(TELL_S):
            tell(CHECKPOINT)

        def fill(folder: Path, tick: WriteCallback) -> None:
            copy_companions(launch.model_path, folder)
            _mark(folder)
            for name in (MODEL_FILE, EXP_AVG_FILE, EXP_AVG_SQ_FILE):
                (folder / name).write_bytes(_no_tensors())
                tick(len(_no_tensors()))
            files: dict[str, FileEntry] = {
                path.relative_to(folder).as_posix(): file_entry(path)
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
            manifest = Manifest(
                job_uid=launch.job_uid,
                world=launch.world,
                lineage=version.lineage,
                step=version.step,
                updates=updates,
                files=files,
            )
            (folder / MANIFEST_FILE).write_bytes(manifest.encode())

        self._writer.begin(version, 3 * len(_no_tensors()), fill, insist=last)


def _tokens(work: StepInput) -> int:
    """Return the number of prompt and response tokens of a step that the rank computes, or of the image tokens of its trained
    denoising steps."""
    share = work.layout.of_rank(work.rank)
    return (
        sum(_sample_tokens(work.seal.groups[slot.group], slot.sample) for slot in share)
        // work.layout.sequence_parallel
    )


def _sample_tokens(group: SealedGroup, sample: int) -> int:
    length = group.response_tokens[sample]
    return length * group.step_tokens if group.step_tokens else group.prompt_tokens + length


def load_emulated_rank(
    launch: RankLaunch, meet: RendezvousCalls, clock: Clock, tell: Tell, writer: BackgroundWriter
) -> EmulatedTrainer:
    """Create and load an emulated trainer; used in place of `gcore.train.rank.main.load_rank`.

    Raises UsageError, CheckpointDamaged.
    """
    timing = ReplicaTiming(read_timing_model(os.environ), f"{launch.world} rank {launch.rank}")
    trainer = EmulatedTrainer(launch, timing, writer, clock)
    trainer.load(tell)
    return trainer


def _mark(folder: Path) -> None:
    (folder / EMULATED_FILE).write_text(json.dumps({"emulated": SAID}) + "\n", encoding="utf-8")


def _no_tensors() -> bytes:
    """Return the bytes of a safetensors file without tensors, whose metadata says that it is emulated."""
    header = json.dumps({"__metadata__": {"emulated": SAID}}).encode()
    return struct.pack("<Q", len(header)) + header
