"""A rank that finds another folder at its run's path writes nothing there, and continues when the right one is back.

Writes of staged weights and receipts are retried by all ranks together until the disk accepts them, up to a limit.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file
from saving_ranks import SECONDS, Ranks

from gcore.models.layout import MANIFEST_FILE, TensorsFile, weights_folder
from gcore.rollout.api import FolderUpdate
from gcore.train.checkpoint import writer as saving
from gcore.train.checkpoint.run_files import BackgroundWriter, ReceiptWriter, RetryingWriter, RunFolder, WriteRefused
from gcore.types import Version

WORK: Any = SimpleNamespace(
    layout=SimpleNamespace(receipt_of=lambda rank: ()), rank=0, seal=SimpleNamespace(token="0-1-1", groups=())
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def taken_away(run_dir: Path) -> Path:
    """Where it is now; another stands in its place."""
    moved = run_dir.rename(run_dir.with_name("moved"))
    run_dir.mkdir()
    return moved


def put_back(run_dir: Path, moved: Path) -> None:
    run_dir.rmdir()
    moved.rename(run_dir)


def test_a_folder_is_the_one_that_was_there_the_first_time(run_dir: Path) -> None:
    folder = RunFolder(run_dir)
    folder.check()
    moved = taken_away(run_dir)
    with pytest.raises(OSError, match="the run folder was replaced by another folder") as raised:
        folder.check()
    assert raised.value.errno == errno.ESTALE
    run_dir.rmdir()
    with pytest.raises(FileNotFoundError):
        folder.check()
    moved.rename(run_dir)
    folder.check()


def test_a_folder_that_is_not_made_yet_is_known_from_its_first_sight_on(tmp_path: Path) -> None:
    path = tmp_path / "later"
    folder = RunFolder(path)
    folder.check()
    path.mkdir()
    folder.check()
    path.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        folder.check()


def test_a_receipt_waits_for_the_folder_to_be_back(run_dir: Path) -> None:
    book = ReceiptWriter(run_dir, "w", 0, RunFolder(run_dir))
    moved = taken_away(run_dir)
    shown: list[str] = []

    def show(sentence: str) -> None:
        if sentence and not shown:
            assert list(run_dir.iterdir()) == []
            put_back(run_dir, moved)
        shown.append(sentence)

    RetryingWriter(show, 60.0, again_s=0.01).until_taken(
        "a receipt of step 1", run_dir, lambda: book.write(WORK, 0.5), list, lambda: None
    )
    assert shown[0].startswith("a receipt of step 1 cannot be written (Stale file handle)")
    assert shown[-1] == ""
    assert book.file.is_relative_to(run_dir)
    assert len(book.file.read_text().splitlines()) == 1


def test_a_checkpoint_is_not_written_into_another_folder(run_dir: Path) -> None:
    over = threading.Event()
    writer = BackgroundWriter(run_dir, "w", lambda: over.set() if writer.writing and writer.writing.over else None)
    moved = taken_away(run_dir)

    def fill(folder: Path, tick: Any) -> None:
        (folder / MANIFEST_FILE).write_bytes(b"{}")

    writer.begin(Version(0, 1), 2, fill, insist=False)
    assert writer.wait(60.0)
    assert over.wait(60.0)
    assert writer.writing is not None
    assert "the run folder was replaced by another folder" in writer.writing.error
    assert list(run_dir.iterdir()) == []
    put_back(run_dir, moved)
    writer.begin(Version(0, 2), 2, fill, insist=False)
    assert writer.wait(60.0)
    assert writer.saved is not None
    assert (run_dir / writer.saved.file / MANIFEST_FILE).exists()


NEXT = Version(0, 1)


def insist(ranks: Ranks, *, limit_s: float = SECONDS) -> list[list[str]]:
    """Have both savers try again at once. What each of them shows."""
    shown: list[list[str]] = [[], []]
    for publisher, said in zip(ranks.publishers, shown, strict=True):
        publisher.insisting = RetryingWriter(said.append, limit_s, again_s=0.01)
    return shown


def both(work: Callable[[int], Any]) -> list[Any]:
    """What it comes to on either rank: a result or what was raised."""
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except (WriteRefused, threading.BrokenBarrierError) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return found


def stage(ranks: Ranks) -> list[Any]:
    return both(lambda rank: ranks.publishers[rank].stage(NEXT, lambda: None))


def gathered(ranks: Ranks) -> list[list[int]]:
    """Counts how many tensors each rank's model gives at each gathering, which are collectives."""
    counts: list[list[int]] = [[], []]
    for model, own in zip(ranks.models, counts, strict=True):

        def tensors(kind: str, give: Any = model.tensors, own: list[int] = own) -> Any:
            own.append(0)
            for one in give(kind):
                own[-1] += 1
                yield one

        model.tensors = tensors  # type: ignore[method-assign]
    return counts


def test_a_disk_that_fills_up_on_the_way_is_tried_again_and_no_rank_is_left_in_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Filling(TensorsFile):
        failures = 2

        def write(self, name: str, data: memoryview) -> None:
            if name == "b" and Filling.failures:
                Filling.failures -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(name, data)

    monkeypatch.setattr(saving, "TensorsFile", Filling)
    ranks = Ranks(tmp_path)
    shown, counts = insist(ranks), gathered(ranks)
    assert stage(ranks) == [FolderUpdate(NEXT, "weights/0-1")] * 2
    assert counts == [[3, 3, 3], [3, 3, 3]]
    folder = weights_folder(tmp_path / "run", NEXT)
    assert load_file(folder / "model.safetensors").keys() == {"a", "b", "c", "flag", "steps"}
    assert [path.name for path in folder.parent.iterdir()] == ["0-1"]
    for said in shown:
        assert said[0].startswith("the weights of step 1 cannot be written (No space left on device): ")
        assert str(folder.parent) in said[0]
        assert said[-1] == "", "it is over"


def test_a_folder_that_takes_nothing_ends_the_world_with_a_sentence_on_every_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    insist(ranks, limit_s=0.02)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").write_text("a file where the folder should be")
    for error in stage(ranks):
        assert isinstance(error, WriteRefused)
        assert "the weights of step 1 cannot be written (" in error.what
        assert error.where == str(tmp_path / "run" / "weights")
        assert error.fix


def test_signs_of_life_are_given_while_it_is_waited() -> None:
    told: list[int] = []
    tries = [OSError(errno.EIO, "x"), None]

    def attempt() -> None:
        error = tries.pop(0)
        if error is not None:
            raise error

    again = RetryingWriter(lambda sentence: None, SECONDS, again_s=0.01)
    again.until_taken("it", Path("f"), attempt, lambda values: list(values), lambda: told.append(1))
    assert told


def test_a_defect_is_raised_at_once() -> None:
    def attempt() -> None:
        raise KeyError("a defect")

    with pytest.raises(KeyError):
        RetryingWriter(lambda sentence: None, SECONDS).until_taken("it", Path("f"), attempt, list, lambda: None)


def test_writer_reports_each_change_of_its_trouble(tmp_path: Path) -> None:
    seen: list[str] = []
    writer = BackgroundWriter(tmp_path, "w", lambda: seen.append(writer.trouble))
    writer.hindered("full")
    writer.hindered("")
    assert seen == ["full", ""]


def test_a_receipt_that_the_disk_did_not_take_leaves_nothing_and_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = ReceiptWriter(tmp_path, "w", 0)
    seal = SimpleNamespace(token="0-1-1", groups=())
    work: Any = SimpleNamespace(layout=SimpleNamespace(receipt_of=lambda rank: ()), rank=0, seal=seal)
    book.write(work, 0.5)
    whole = book.file.read_bytes()
    errors = [OSError(errno.ENOSPC, "No space left on device")]
    sync = os.fsync

    def full(fd: int) -> None:
        if errors:
            raise errors.pop()
        sync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        book.write(work, 0.25)
    assert book.file.read_bytes() == whole
    book.write(work, 0.25)
    assert [json.loads(line)["loss"] for line in book.file.read_text().splitlines()] == [0.5, 0.25]
