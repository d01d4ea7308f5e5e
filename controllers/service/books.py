"""What a job's slots did, for whoever asks: the newest steps from the store's records, any other from the run's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from controllers.service.refusals import NotFound
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError
from gcore.ledger.books_file import line_of, step_lines
from gcore.ledger.mirror import JobMirror


class NoBooks(NotFound):
    """Nobody has booked what was asked for."""


async def find_books(mirror: JobMirror, step: int | None) -> Iterator[pb.BookOfNode]:
    """Node by node, each read when it is asked for, which blocks. Raises NoBooks, and GcoreError if the folder cannot be read, now or
    then."""
    assert mirror.job is not None
    if step is None:
        return iter(list(_newest(mirror)))
    return await asyncio.to_thread(books_of_folder, Path(mirror.job.record.run_dir), step)


def books_of_folder(run_dir: Path, step: int) -> Iterator[pb.BookOfNode]:
    """A step's. Raises NoBooks, GcoreError. Blocks on the disk."""
    books = _of_folder(run_dir, step)
    first = next(books, None)
    if first is None:
        raise NoBooks(
            f"no node has booked step {step}",
            fix="A step is booked a moment after it is committed; `gcore describe` shows the newest",
        )
    return chain((first,), books)


def _of_folder(run_dir: Path, step: int) -> Iterator[pb.BookOfNode]:
    try:
        for line in step_lines(run_dir, step):
            lineage = line.book.version.lineage
            yield pb.BookOfNode(node=line.node, lineage=lineage, step=step, book_json=line_of(line))
    except OSError as error:
        raise GcoreError(f"the run's folder cannot be read ({error.strerror or error})", where=str(run_dir)) from error


def _newest(mirror: JobMirror) -> Iterator[pb.BookOfNode]:
    for node, stored in sorted(mirror.books.items()):
        for book in stored.record.steps[-1:]:
            lineage, step = book.version
            yield pb.BookOfNode(node=node, lineage=lineage, step=step, book_json=book.model_dump_json())
