"""Asynchronous checkpoints: complete or absent, one at a time, and a failing disk costs no step."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from saving_ranks import SECONDS, Model, Ranks

from gcore.errors import DataError
from gcore.models.layout import (
    MANIFEST_FILE,
    CheckpointDamaged,
    Manifest,
    checkpoint_folder,
    file_entry,
    manifest_digest,
    verify_checkpoint,
)
from gcore.train.checkpoint import writer as saving
from gcore.train.checkpoint.run_files import BackgroundWriter, WriteCallback, WriteProgress, WrittenCheckpoint
from gcore.train.checkpoint.writer import HostSnapshot, UpdateCounts, _write_copy, restore_optimizer
from gcore.types import Version

FILES = ("model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "config.json")


def fill(folder: Path, tick: WriteCallback) -> None:
    """A small whole checkpoint, file by file."""
    for name in FILES:
        (folder / name).write_text(name)
        tick(len(name))
    files = {name: file_entry(folder / name) for name in FILES}
    manifest = Manifest(job_uid="j", world="w", lineage=0, step=1, updates=1, files=files)
    (folder / MANIFEST_FILE).write_bytes(manifest.encode())


class Disk:
    """One that is as the test says: it may take nothing, or hold a write up until it is let go on."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.tries = 0

    def fill(self, folder: Path, tick: WriteCallback) -> None:
        self.tries += 1
        (folder / "half").write_text("half")
        tick(4)
        self.entered.set()
        assert self.open.wait(SECONDS)
        tick(0)
        (folder / "half").unlink()
        if self.errors:
            raise self.errors.pop(0)
        fill(folder, tick)


def lying(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_checkpoint_is_saved_when_it_is_whole_and_not_before(tmp_path: Path) -> None:
    shown = threading.Event()
    writer, disk = BackgroundWriter(tmp_path, "w", shown.set), Disk()
    disk.open.clear()
    writer.begin(Version(0, 1), 100, disk.fill, insist=False)
    assert disk.entered.wait(SECONDS)
    assert writer.busy
    assert not writer.wait(0.0)
    assert writer.saved is None
    assert writer.writing == WriteProgress(Version(0, 1), total=100, written=4)
    assert lying(tmp_path) == [".0-1.w.tmp"], "no name yet"
    disk.open.set()
    assert writer.wait(SECONDS)
    folder = checkpoint_folder(tmp_path, Version(0, 1))
    assert writer.saved == WrittenCheckpoint(Version(0, 1), "checkpoints/0-1", manifest_digest(folder))
    assert verify_checkpoint(folder).step == 1
    assert lying(tmp_path) == ["0-1"]
    assert writer.writing is not None
    assert writer.writing.over
    assert shown.is_set()


def test_there_is_one_write_at_a_time(tmp_path: Path) -> None:
    writer, disk = BackgroundWriter(tmp_path, "w"), Disk()
    disk.open.clear()
    writer.begin(Version(0, 1), 1, disk.fill, insist=False)
    with pytest.raises(ValueError, match="another"):
        writer.begin(Version(0, 2), 1, disk.fill, insist=False)
    disk.open.set()
    assert writer.wait(SECONDS)
    writer.begin(Version(0, 2), 1, disk.fill, insist=False)
    assert writer.wait(SECONDS)
    assert lying(tmp_path) == ["0-1", "0-2"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), "No space left", id="full"),
        pytest.param(OSError(errno.EIO, "Input/output error"), "Input/output error", id="broken"),
        pytest.param(OSError(errno.EROFS, "Read-only file system"), "Read-only", id="read-only"),
        pytest.param(
            CheckpointDamaged("cannot read the manifest (Input/output error)"),
            "cannot read the manifest",
            id="unreadable",
        ),
    ],
)
def test_a_disk_that_takes_nothing_is_told_and_the_next_checkpoint_is_the_next_try(
    tmp_path: Path, error: Exception, said: str
) -> None:
    writer, disk = BackgroundWriter(tmp_path, "w"), Disk()
    disk.errors = [error]
    writer.begin(Version(0, 1), 1, disk.fill, insist=False)
    assert writer.wait(SECONDS), "nobody raises: no step is lost"
    assert writer.writing is not None
    assert said in writer.writing.error
    assert writer.writing.over
    assert str(tmp_path) not in writer.writing.error
    assert (writer.saved, lying(tmp_path), writer.defect()) == (None, [], None)
    writer.begin(Version(0, 2), 1, disk.fill, insist=False)
    assert writer.wait(SECONDS)
    assert writer.saved is not None
    assert writer.saved.version == Version(0, 2)
    assert not writer.writing.error


def test_the_last_one_is_tried_until_the_disk_takes_it(tmp_path: Path) -> None:
    writer, disk = BackgroundWriter(tmp_path, "w"), Disk()
    writer.again_s = 0.01
    disk.errors = [OSError(errno.ENOSPC, "No space left on device") for _ in range(3)]
    writer.begin(Version(0, 9), 1, disk.fill, insist=True)
    assert writer.wait(SECONDS)
    assert disk.tries == 4
    assert writer.saved is not None
    assert writer.writing is not None
    assert (writer.writing.error, writer.writing.over) == ("", True)


def test_between_two_tries_it_is_shown_why_and_that_it_goes_on(tmp_path: Path) -> None:
    shown, states = threading.Event(), []

    def show() -> None:
        states.append(writer.writing)
        if writer.writing is not None and writer.writing.error:
            shown.set()

    writer, disk = BackgroundWriter(tmp_path, "w", show), Disk()
    writer.again_s = SECONDS
    disk.errors = [OSError(errno.ENOSPC, "No space left on device")]
    writer.begin(Version(0, 9), 1, disk.fill, insist=True)
    assert shown.wait(SECONDS)
    assert writer.writing is not None
    assert not writer.writing.over
    assert writer.busy
    writer.give_up(SECONDS)
    assert not writer.busy
    assert lying(tmp_path) == []


def test_abandoned_checkpoint_leaves_no_files(tmp_path: Path) -> None:
    writer, disk = BackgroundWriter(tmp_path, "w"), Disk()
    disk.open.clear()
    writer.begin(Version(0, 1), 1, disk.fill, insist=True)
    assert disk.entered.wait(SECONDS)
    giving_up = threading.Thread(target=writer.give_up, args=(SECONDS,))
    giving_up.start()
    while not writer.wait(0.0):
        pass
    disk.open.set()
    giving_up.join(SECONDS)
    assert (lying(tmp_path), writer.saved) == ([], None)


def test_a_defect_is_no_failing_disk_and_surfaces(tmp_path: Path) -> None:
    writer, disk = BackgroundWriter(tmp_path, "w"), Disk()
    disk.errors = [KeyError("a defect")]
    writer.begin(Version(0, 1), 1, disk.fill, insist=True)
    with pytest.raises(KeyError, match="a defect"):
        writer.wait(SECONDS)
    assert isinstance(writer.defect(), KeyError)
    assert lying(tmp_path) == []


KILLED = """
import sys
from pathlib import Path
from test_checkpoint_writer import fill
from gcore.train.checkpoint.run_files import BackgroundWriter
from gcore.types import Version
writer = BackgroundWriter(Path(sys.argv[1]), "w")
writer.begin(Version(0, 1), 1, fill, insist=False)
writer.wait(60)
"""


@pytest.mark.parametrize(("moment", "left"), [("before", [".0-1.w.tmp"]), ("after", ["0-1"])])
def test_a_process_that_is_killed_leaves_the_whole_or_nothing_that_has_a_name(
    tmp_path: Path, moment: str, left: list[str]
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    (points / f"checkpoint.{moment}").write_text("kill")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"GCORE_FAULT_POINTS": str(points), "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=env, check=False, timeout=SECONDS)
    assert ended.returncode == -signal.SIGKILL
    assert lying(tmp_path) == left
    if left == ["0-1"]:
        verify_checkpoint(checkpoint_folder(tmp_path, Version(0, 1)))


def read(folder: Path, files: Any) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    for one in files:
        ticks: list[int] = []
        entry = _write_copy(folder / one.name, one, ticks.append)
        assert entry == file_entry(folder / one.name)
        assert sum(ticks) == one.nbytes
    return {one.name: load_file(folder / one.name) for one in files}


def test_a_copy_is_not_changed_by_the_steps_that_follow(tmp_path: Path) -> None:
    model: Any = Model()
    copy = HostSnapshot(model)
    taken = copy.take(lambda: None)
    for value in (*model.values.values(), model.steps):
        value.add_(1)  # the next step, before anything was written
    found = read(tmp_path, taken)
    assert list(found) == ["model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors"]
    weights = found["model.safetensors"]
    assert np.array_equal(weights["a"], np.arange(6, dtype=np.float32).reshape(3, 2))
    assert (float(weights["b"]), int(weights["steps"][0])) == (4.0, 7)
    assert weights["flag"].tolist() == [True, False, True]
    assert weights["c"].dtype == np.float32
    assert float(found["exp_avg_sq.safetensors"]["b"]) == 8.0
    assert "steps" not in found["exp_avg.safetensors"]
    again = read(tmp_path, copy.take(lambda: None))
    assert float(again["model.safetensors"]["b"]) == 5.0


def test_the_copys_memory_is_used_again(tmp_path: Path) -> None:
    copy = HostSnapshot(Model())  # type: ignore[arg-type]
    first = copy.take(lambda: None)
    second = copy.take(lambda: None)
    at = [np.frombuffer(files[0].tensors["a"].data, dtype=np.uint8).ctypes.data for files in (first, second)]
    assert at[0] == at[1]
    assert sum(one.nbytes for one in first) == 12 * 12 + 3 + 8, "12 bytes a parameter, and the buffers"


def test_a_checkpoint_that_is_due_waits_for_the_one_before_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "DRAIN_S", 0.01)
    ranks, disk = Ranks(tmp_path), Disk()
    disk.open.clear()
    writer = ranks.savers[0].writer
    writer.begin(Version(0, 1), 100, disk.fill, insist=False)
    assert disk.entered.wait(SECONDS)
    told, told_twice = [0, 0], threading.Barrier(3, timeout=SECONDS)
    over = [threading.Event(), threading.Event()]

    def wait(rank: int) -> None:
        def tell() -> None:
            told[rank] += 1
            if told[rank] == 1:
                told_twice.wait()

        ranks.savers[rank].drain(partial(ranks.highest, rank), tell)
        over[rank].set()

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    told_twice.wait()
    assert not over[0].is_set()
    assert not over[1].is_set(), "it waits with the rank that writes"
    disk.open.set()
    for thread in threads:
        thread.join(SECONDS)
    assert over[0].is_set()
    assert over[1].is_set()
    assert not writer.busy
    assert told[0] == told[1] <= 3, "bytes that stand still are no progress: a disk that hangs is found by the watchdog"


def test_the_rank_that_writes_leaves_a_whole_checkpoint_and_the_other_nothing(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for saver in ranks.savers:
        saver.checkpoint(Version(0, 3), UpdateCounts(6, 1), lambda: None)
    assert all(saver.writer.wait(SECONDS) for saver in ranks.savers)
    assert ranks.savers[1].writer.saved is None
    manifest = verify_checkpoint(checkpoint_folder(tmp_path / "run", Version(0, 3)))
    assert (manifest.step, manifest.updates, manifest.skipped, manifest.world) == (3, 6, 1, "w")
    assert manifest.files.keys() == {*FILES}
    assert ranks.savers[0].writer.writing is not None
    assert ranks.savers[0].writer.writing.written == ranks.savers[0].writer.writing.total


class TwoLayers:
    """A backend of two parameters, which counts how often its optimizer was restored."""

    def __init__(self) -> None:
        self.shapes = {"a.weight": (2, 3), "b.weight": (4,)}
        self.restored: list[tuple[dict[str, Path], int]] = []

    def restore_optimizer(self, states: dict[str, Path], adam_steps: int) -> None:
        self.restored.append((states, adam_steps))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a.weight": (2, 3), "b.weight": (4,)}, ""),
        ({"a.weight": (2, 3)}, "for 'b.weight' it has none, and the model [4]"),
        ({"a.weight": (3, 2), "b.weight": (4,)}, "for 'a.weight' it has [3, 2], and the model [2, 3]"),
        ({"a.weight": (2, 3), "b.weight": (4,), "c.weight": (1,)}, "for 'c.weight' it has [1], and the model none"),
        (None, "cannot read the tensors"),
    ],
    ids=["the same", "moments missing", "another size", "more moments", "no file"],
)
def test_optimizer_state_of_another_model_is_refused_before_any_of_it_is_used(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]] | None, said: str
) -> None:
    manifest = SimpleNamespace(updates=5, skipped=1)
    for name in ("exp_avg.safetensors", "exp_avg_sq.safetensors"):
        if tensors is not None:
            save_file({key: np.zeros(shape, np.float32) for key, shape in tensors.items()}, tmp_path / name)
    model: Any = TwoLayers()
    if not said:
        restore_optimizer(model, tmp_path, manifest)  # type: ignore[arg-type]
        assert model.restored[0][1] == 4
        return
    with pytest.raises(DataError, match=re.escape(said)):
        restore_optimizer(model, tmp_path, manifest)  # type: ignore[arg-type]
    assert not model.restored
