"""A rank that finds another folder at its run's path writes nothing there, and goes on when the right one is back."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore.models.layout import MANIFEST_FILE
from gcore.train.checkpoint.run_files import BackgroundWriter, ReceiptWriter, RetryingWriter, RunFolder
from gcore.types import Version

WORK: Any = SimpleNamespace(
    layout=SimpleNamespace(of_rank=lambda rank: ()), rank=0, seal=SimpleNamespace(token="0-1-1", groups=())
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
    with pytest.raises(OSError, match="another folder stands where the run's was") as raised:
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
    assert "another folder stands where the run's was" in writer.writing.error
    assert list(run_dir.iterdir()) == []
    put_back(run_dir, moved)
    writer.begin(Version(0, 2), 2, fill, insist=False)
    assert writer.wait(60.0)
    assert writer.saved is not None
    assert (run_dir / writer.saved.file / MANIFEST_FILE).exists()
