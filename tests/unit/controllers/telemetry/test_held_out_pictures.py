"""Held-out pictures in the run folder: which are kept, how many, and who draws the contact sheet."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from controllers.changes import ChangeSignal
from controllers.telemetry import run_recorder
from controllers.telemetry.run_recorder import HeldOutPictures, SampleWriter
from gcore.config import parse_spec
from gcore.data.order import Cursors
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Head, Lineage, Member
from gcore.ledger.records.job import EvalPart, EvalSample, Evaluation, KeptPicture
from gcore.ledger.transactions import Versioned
from gcore.media.pictures import encode_png
from gcore.observability.contact_sheet import SHEET_FILE, read_stamp
from gcore.observability.samples import find_evaluation_picture
from gcore.store.keys import JobKeys
from gcore.system.clock import SystemClock
from gcore.types import Version

ME = "n0.a"
SPEC: dict[str, Any] = {
    "name": "colours",
    "model": {"path": "m"},
    "data": {"path": "d"},
    "flow": {"steps": 9},
    "rollout": {"engine": "diffusers", "diffusion": {}},
    "train": {"clip_low": 1e-4, "clip_high": 1e-4},
    "eval": {"path": "e", "show": 8},
    "reward": {"name": "rules.py:red"},
}
STARTED = Version(0, 0)


class Bench:
    """Controllers that share a run folder, each with its own blobs."""

    def __init__(self, folder: Path, spec: dict[str, Any] | None = None) -> None:
        self.run_dir, self._folder = folder / "run", folder
        self.run_dir.mkdir()
        self.spec = parse_spec({**SPEC, **(spec or {})})
        self.warned: list[str] = []
        self.changes = ChangeSignal()
        self._evaluations: dict[str, Versioned[Evaluation]] = {}
        self._parts: dict[str, Versioned[EvalPart]] = {}
        self._members: tuple[str, ...] = (ME,)
        self.lineages = (Lineage(number=0, base_step=0),)
        self.mirror = self._fold()

    def controller(self, me: str = ME) -> HeldOutPictures:
        samples = SampleWriter(me, self._warn)
        stream: Any = SimpleNamespace()
        samples.open(self.spec, stream, self.run_dir, self.blobs(me))
        self._members = tuple(sorted({*self._members, me}))
        self.mirror = self._fold()
        return HeldOutPictures(me, lambda: self.mirror, self.changes, samples, self._warn, SystemClock())

    def blobs(self, me: str = ME) -> Path:
        return self._folder / "blobs" / me

    def picture(self, number: int, me: str = ME, size: int = 0) -> KeptPicture:
        """A picture in the blob store of a controller. `size`: bytes; 0: as many as it needs."""
        data = encode_png(np.full((8, 8, 3), number % 256, np.uint8)) + number.to_bytes(4, "big")
        data += bytes(max(size - len(data), 0))
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.blobs(me) / sha256[:2] / sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return KeptPicture(sha256=sha256, size=len(data), height=8, width=8)

    def part(self, version: Version, pictures: Sequence[KeptPicture], *, first: int = 0) -> None:
        part = EvalPart(
            version=version,
            number=first,
            parts=9,
            source="colours",
            first=first,
            samples=1,
            correct=(1,) * len(pictures),
            reward=1.0,
            shown=tuple(map(shown, pictures)),
        )
        self._parts = {**self._parts, f"{version}/{first}": Versioned(part, 1)}
        self._change()

    def evaluation(self, version: Version, pictures: Sequence[KeptPicture], accuracy: float = 0.5) -> None:
        """Record an evaluation, which replaces its parts."""
        made = Evaluation(version=version, accuracy=accuracy, count=len(pictures), samples=tuple(map(shown, pictures)))
        self._evaluations = {**self._evaluations, str(version): Versioned(made, len(self._evaluations) + 2)}
        self._parts = {}
        self._change()

    def _change(self) -> None:
        self.mirror = self._fold()
        self.changes.notify()

    def _fold(self) -> JobMirror:
        steps = [stored.record.version.step for stored in self._evaluations.values()]
        head = Head(
            seq=1, parent=None, lineage=len(self.lineages) - 1, step=max(steps, default=0), cursors=Cursors.start(2),
            lineages=self.lineages, world="w", nonce="n",
        )  # fmt: skip
        job: Any = SimpleNamespace(full_name="colours", uid="u", run_dir=str(self.run_dir), spec={})
        members = {one: Versioned(Member(node=one[:2], incarnation=one, address=""), 1) for one in self._members}
        return JobMirror(
            JobKeys("u"),
            job=Versioned(job, 1),
            head=Versioned(head, 1),
            evaluations=self._evaluations,
            eval_parts=self._parts,
            members=members,
        )

    async def _warn(self, topic: str, sentence: str) -> None:
        self.warned.append(f"{topic}: {sentence}")

    def kept(self, version: Version, pictures: Sequence[KeptPicture]) -> list[bool]:
        return [find_evaluation_picture(self.run_dir, version, one.sha256) is not None for one in pictures]

    @property
    def stamp(self) -> str:
        return read_stamp(self.run_dir / SHEET_FILE)

    @contextlib.asynccontextmanager
    async def running(self, *controllers: HeldOutPictures) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(one.run()) for one in controllers]
        yield
        for task in tasks:
            assert not task.done() or task.result() is None
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def shown(picture: KeptPicture) -> EvalSample:
    return EvalSample(prompt="red", response="", answer="", reward=1.0, source="colours", correct=True, picture=picture)


async def until(condition: Any, limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110, files change
            await asyncio.sleep(0.01)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_pictures_are_linked_when_their_part_is_recorded(bench: Bench) -> None:
    """The blob store may delete them when the job ends, right after the last evaluation."""
    pictures = [bench.picture(number) for number in range(3)]
    one = bench.controller()
    async with bench.running(one):
        bench.part(STARTED, pictures)
        await until(lambda: all(bench.kept(STARTED, pictures)))
    assert not (bench.run_dir / SHEET_FILE).exists(), "the evaluation is not complete"


async def test_a_part_that_was_replaced_before_it_was_seen_leaves_its_pictures_too(bench: Bench) -> None:
    pictures = [bench.picture(number) for number in range(3)]
    one = bench.controller()
    bench.part(STARTED, pictures)
    bench.evaluation(STARTED, pictures)
    await one.finish()
    assert bench.kept(STARTED, pictures) == [True] * 3
    assert bench.stamp == "0.0"


async def test_the_sheet_has_the_first_the_best_and_the_newest_evaluation(bench: Bench) -> None:
    one = bench.controller()
    accuracies = {0: 0.1, 2: 0.5, 4: 0.9, 6: 0.3, 8: 0.7}
    stamps = []
    for step, accuracy in accuracies.items():
        bench.evaluation(Version(0, step), [bench.picture(step)], accuracy)
        await one.finish()
        stamps.append(bench.stamp)
    assert stamps == ["0.0", "0.0 0.2", "0.0 0.4", "0.0 0.4 0.6", "0.0 0.4 0.8"]
    assert bench.warned == []


async def test_a_discarded_branch_leaves_the_sheet(bench: Bench) -> None:
    one = bench.controller()
    for step in (0, 2, 4):
        bench.evaluation(Version(0, step), [bench.picture(step)], step / 10)
    await one.finish()
    assert bench.stamp == "0.0 0.4"
    bench.lineages = (*bench.lineages, Lineage(number=1, base_step=2))
    bench.evaluation(Version(1, 4), [bench.picture(9)], 0.3)
    await one.finish()
    assert bench.stamp == "0.0 1.4"


async def test_a_sheet_is_drawn_once_and_by_the_next_controller_if_the_first_is_gone(bench: Bench) -> None:
    pictures = [bench.picture(number, me) for number, me in enumerate((ME, "n1.b"))]
    first, second = bench.controller(), bench.controller("n1.b")
    async with bench.running(first, second):
        bench.evaluation(STARTED, pictures)
        await until(lambda: bench.stamp == "0.0")
        assert all(bench.kept(STARTED, pictures)), "each controller has its own pictures"
        drawn = (bench.run_dir / SHEET_FILE).stat().st_mtime_ns
        await asyncio.sleep(1.5)
        assert (bench.run_dir / SHEET_FILE).stat().st_mtime_ns == drawn
    for alone in (first, second):  # one of them is the first in the order of turns, and one the second
        (bench.run_dir / SHEET_FILE).unlink()
        alone._drawn = ""
        async with bench.running(alone):
            await until(lambda: bench.stamp == "0.0")


async def test_the_sheet_waits_some_seconds_for_pictures_of_others_and_is_drawn_without_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_recorder, "SHEET_PATIENCE_S", 1.0)
    pictures = [bench.picture(0), bench.picture(1, "n1.away")]
    one = bench.controller()
    async with bench.running(one):
        bench.evaluation(STARTED, pictures)
        await asyncio.sleep(0.5)
        assert bench.stamp == ""
        await until(lambda: bench.stamp == "0.0")
    assert bench.kept(STARTED, pictures) == [True, False]


async def test_evaluations_have_at_most_half_of_the_bound_and_the_first_best_and_newest_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"samples": {"picture_mib": 1}})
    one = bench.controller()
    by_step = {step: [bench.picture(10 * step + n, size=60_000) for n in range(2)] for step in range(8)}
    for step, pictures in by_step.items():
        bench.evaluation(Version(0, step), pictures, 0.9 if step == 3 else step / 10)
        await one.finish()
    # Of 512 KiB, four evaluations of 120,000 bytes have room.
    whole = {step: all(bench.kept(Version(0, step), pictures)) for step, pictures in by_step.items()}
    assert whole == {0: True, 1: False, 2: False, 3: True, 4: False, 5: False, 6: True, 7: True}
    assert sum(file.stat().st_size for file in bench.run_dir.glob("samples/*/*.png")) <= 512 << 10
    left = sorted(folder.name for folder in (bench.run_dir / "samples").iterdir())
    assert left == [f"evaluation-0-{step}" for step in (0, 3, 6, 7)]


async def test_all_evaluations_keep_the_same_prompts_if_not_all_pictures_fit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"samples": {"picture_mib": 1}})
    one = bench.controller()
    for step in (0, 1, 2):
        pictures = [bench.picture(10 * step + n, size=50_000) for n in range(4)]
        bench.part(Version(0, step), pictures[:2])
        bench.part(Version(0, step), pictures[2:], first=2)
        await one.finish()
        bench.evaluation(Version(0, step), pictures)
        await one.finish()
        assert bench.kept(Version(0, step), pictures) == [True, True, False, False]


@pytest.mark.parametrize(
    "spec",
    [{"samples": {"picture_mib": 0}}, {"rollout": {"max_new_tokens": 9}, "reward": {"name": "exact"}, "train": {}}],
)
async def test_a_job_that_keeps_no_pictures_has_no_sheet(tmp_path: Path, spec: dict[str, Any]) -> None:
    bench = Bench(tmp_path, spec)
    one = bench.controller()
    pictures = [bench.picture(0)]
    bench.evaluation(STARTED, pictures)
    await one.finish()
    assert list(bench.run_dir.iterdir()) == []


async def test_nothing_is_written_without_room_on_the_disk(bench: Bench) -> None:
    one = bench.controller()
    one._samples.has_room = False
    bench.evaluation(STARTED, [bench.picture(0)])
    await one.finish()
    assert list(bench.run_dir.iterdir()) == []


async def test_a_folder_that_cannot_be_written_is_reported_once_for_an_evaluation(bench: Bench) -> None:
    (bench.run_dir / "samples").write_text("in the way")
    (bench.run_dir / SHEET_FILE).mkdir()
    one = bench.controller()
    async with bench.running(one):
        bench.evaluation(STARTED, [bench.picture(0)])
        await until(lambda: len(bench.warned) == 1)
        await asyncio.sleep(0.3)
    assert len(bench.warned) == 1
    assert bench.warned[0].startswith("held-out-pictures: the pictures of an evaluation were not kept: [Errno")


async def test_a_controller_that_restarts_draws_no_second_sheet(bench: Bench) -> None:
    bench.evaluation(STARTED, [bench.picture(0)])
    await bench.controller().finish()
    drawn = (bench.run_dir / SHEET_FILE).stat().st_mtime_ns
    await bench.controller().finish()
    assert (bench.run_dir / SHEET_FILE).stat().st_mtime_ns == drawn
