"""Records of the previous version and of this one: a process reads both, and writes either."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from gcore import schema
from gcore.ledger.records.chain import Member
from gcore.schema import NEWEST_VERSION, PIN, Record, RecordPart, UnreadableRecord, pinned_version

OLDER = NEWEST_VERSION - 1
FOLDER = Path(__file__).parents[2] / "golden" / f"records_of_version_{OLDER}"
GOLDEN = sorted(path for path in FOLDER.glob("*.json") if path.name != "fields.json")


@pytest.fixture(autouse=True)
def newest() -> Iterator[None]:
    """Reset the written version after each test."""
    yield
    schema.set_written_version(NEWEST_VERSION)


class NotePart(RecordPart):
    """A part of a record, of which a field came with the next version."""

    came_with: ClassVar[Mapping[str, int]] = {"digest": NEWEST_VERSION}

    ref: tuple[int, int]
    digest: str = ""


class Note(Record):
    """A record of which a field came with the next version."""

    came_with: ClassVar[Mapping[str, int]] = {"leaving": NEWEST_VERSION}

    node: str
    leaving: bool = False
    parts: tuple[NotePart, ...] = ()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_record_of_the_version_before_is_read_whole_and_written_as_it_was(path: Path) -> None:
    data = path.read_bytes().strip()
    module, _, name = path.stem.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    record = kind.decode(data, "a golden record")
    assert record.schema_version == NEWEST_VERSION  # from here on there is one shape only
    assert json.loads(record.encode(OLDER)) == json.loads(data)
    again = kind.decode(record.encode())
    assert again == record


def test_newer_fields_are_omitted_for_readers_of_the_previous_version() -> None:
    note = Note(node="n", leaving=True)
    assert json.loads(note.encode())["leaving"] is True
    assert json.loads(note.encode(OLDER)) == {"schema_version": OLDER, "node": "n"}
    assert Note.decode(note.encode(OLDER)) == note.model_copy(update={"leaving": False})


def test_newer_fields_are_omitted_at_any_depth() -> None:
    tree = json.loads(Note(node="n", parts=(NotePart(ref=(1, 2), digest="d"),)).encode(OLDER))
    assert tree["parts"] == [{"ref": [1, 2]}]


def test_a_field_that_its_version_does_not_have_is_refused() -> None:
    note = Note(node="n", leaving=True)
    newer, older = f'"schema_version":{NEWEST_VERSION}'.encode(), f'"schema_version":{OLDER}'.encode()
    with pytest.raises(UnreadableRecord, match=f"leaving: no field of version {OLDER}"):
        Note.decode(note.encode().replace(newer, older), "here")
    with pytest.raises(UnreadableRecord, match="Extra inputs"):
        Note.decode(note.encode().replace(b'"leaving"', b'"unknown"'), "here")


def test_a_record_of_the_version_before_that_lacks_something_is_refused() -> None:
    with pytest.raises(UnreadableRecord, match="incarnation: Field required"):
        Member.decode(f'{{"schema_version":{OLDER},"node":"n","address":"a:1"}}'.encode())


def test_a_process_writes_what_it_was_told_to_speak() -> None:
    note = Note(node="n", leaving=True)
    schema.set_written_version(OLDER)
    assert json.loads(note.encode())["schema_version"] == OLDER
    schema.set_written_version(NEWEST_VERSION)
    assert json.loads(note.encode())["schema_version"] == NEWEST_VERSION
    with pytest.raises(ValueError, match="not among"):
        schema.set_written_version(NEWEST_VERSION + 1)


@pytest.mark.parametrize(
    ("value", "version"),
    [
        (None, NEWEST_VERSION),
        ("", NEWEST_VERSION),
        (str(OLDER), OLDER),
        (str(NEWEST_VERSION), NEWEST_VERSION),
    ],
)
def test_a_process_can_be_pinned_to_the_version_before(value: str | None, version: int) -> None:
    assert pinned_version(value) == version


PINNED = """
import importlib, json, sys
from pathlib import Path
from typing import ClassVar
from gcore.schema import Record, UnreadableRecord

for path in Path(sys.argv[1]).glob("gcore.*.json"):
    module, _, kind = path.stem.rpartition(".")
    record = getattr(importlib.import_module(module), kind).decode(path.read_bytes())
    assert json.loads(record.encode()) == json.loads(path.read_bytes()), path

class Note(Record):
    came_with: ClassVar[dict[str, int]] = {"leaving": 3}
    node: str
    leaving: bool = False

note = Note(node="n", leaving=True)
assert json.loads(note.encode()) == {"schema_version": 2, "node": "n"}, "though it is the version it writes"
assert Note.decode(note.encode()).leaving is False
for data in (b'{"schema_version":3,"node":"n"}', b'{"schema_version":2,"node":"n","leaving":true}'):
    try:
        Note.decode(data)
    except UnreadableRecord:
        continue
    raise AssertionError(data)
"""


def test_a_pinned_process_reads_and_writes_exactly_what_the_version_before_did() -> None:
    environment = {**os.environ, PIN: str(OLDER)}
    subprocess.run([sys.executable, "-c", PINNED, str(FOLDER)], env=environment, check=True, timeout=60)
