"""What a job's slots did, for whoever asks: the newest steps from the store's records, any other from the run's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from controllers.service.refusals import NotFound
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError
from gcore.ledger.books_file import line_of, step_lines
from gcore.ledger.mirror import JobMirror


class NoBooks(NotFound):
    """Nobody has booked what was asked for."""


async def find_books(mirror: JobMirror, step: int | None) -> list[pb.BookOfNode]:
    """Node by node. Raises NoBooks, and GcoreError if the folder cannot be read."""
    assert mirror.job is not None
    if step is None:
        return list(_newest(mirror))
    return await asyncio.to_thread(books_of_folder, Path(mirror.job.record.run_dir), step)


def books_of_folder(run_dir: Path, step: int) -> list[pb.BookOfNode]:
    """A step's. Raises NoBooks, GcoreError. Blocks on the disk."""
    try:
        found = step_lines(run_dir, step)
    except OSError as error:
        raise GcoreError(f"the run's folder cannot be read ({error.strerror or error})", where=str(run_dir)) from error
    if not found:
        raise NoBooks(
            f"no node has booked step {step}",
            fix="A step is booked a moment after it is committed; `gcore describe` shows the newest",
        )
    return [
        pb.BookOfNode(
            node=node, lineage=line.book.version.lineage, step=step, book_json=line_of(line).encode().decode()
        )
        for node, line in sorted(found.items())
    ]


def _newest(mirror: JobMirror) -> Iterator[pb.BookOfNode]:
    for node, stored in sorted(mirror.books.items()):
        for book in stored.record.steps[-1:]:
            lineage, step = book.version
            yield pb.BookOfNode(node=node, lineage=lineage, step=step, book_json=book.model_dump_json())
