"""The schema version that every stored record and every RPC carries, and the base of what is stored as JSON.

A reader takes its own version and the one before. What it read is of its own version from then on: a record of the version
before is brought up to date (`Record.upgraded`), so that the rest of the program knows one shape only. Keys that a record's
version does not have are an error: they are another version's, or damage.

A writer writes the version that everybody reads who has to. `set_written_version` says which that is in this process: a controller sets
it to the newest version that every node of its cluster reads, so that a node of the version before goes on working beside
newer ones while they are replaced one by one. What did not exist in that version is left out (`came_with`): no field may
come with a version if leaving it out could do harm.

The environment variable GCORE_SCHEMA_VERSION, set to the version before, pins a process: it reads and writes exactly as that
version did, for trying a restart from one version to the next, or for going back after one.

`FIRST_VERSION` is the first that was released, so it has no version before.

Which records there are, and what they mean, stands with those who keep them (`gcore.ledger.records`,
`gcore.worker.records`, ...). Nothing here knows the store.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticSerializationError

from gcore.errors import GcoreError, UsageError

PIN = "GCORE_SCHEMA_VERSION"

FIRST_VERSION = 2
"""The oldest that is read."""

NEWEST_VERSION = 3
"""What this source code reads and writes; it reads the version before too, if there is one. What came with each version stands in
`RecordPart.came_with`."""


def cut_text(most: int) -> BeforeValidator:
    """Of a text that plug-ins, packages or people wrote: a record has so many of its characters at most, and says where it was cut."""

    def cut(text: object) -> object:
        return text if not isinstance(text, str) or len(text) <= most else f"{text[: most - 4]} ..."

    return BeforeValidator(cut)


class UnreadableRecord(GcoreError):
    """A stored record is of a schema this version does not read, or is damaged."""


def pinned_version(value: str | None) -> int:
    """The version that a process is of, whose environment says `value`. Raises UsageError."""
    if value is None or value == "":
        return NEWEST_VERSION
    allowed = [str(version) for version in (NEWEST_VERSION - 1, NEWEST_VERSION) if version >= FIRST_VERSION]
    if value not in allowed:
        raise UsageError(f"schema version {value!r} cannot be spoken", where=PIN, fix=f"Use {' or '.join(allowed)}")
    return int(value)


SCHEMA_VERSION = pinned_version(os.environ.get(PIN))
"""This process's version."""

READABLE = frozenset({max(FIRST_VERSION, SCHEMA_VERSION - 1), SCHEMA_VERSION})
_spoken = SCHEMA_VERSION


def set_written_version(version: int) -> None:
    """Write records of this version from now on. Raises ValueError for one that this process does not read."""
    global _spoken
    if version not in READABLE:
        raise ValueError(f"version {version} is not among {sorted(READABLE)}")
    _spoken = version


def written_version() -> int:
    """The version that this process writes."""
    return _spoken


class RecordPart(BaseModel):
    """Base of what records contain.

    `came_with`: the fields that came after the first version, and the version that each came with.
    """

    # A daemon that has no job yet reads few kinds of records: the validators of the others are built with their first use.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True)
    came_with: ClassVar[Mapping[str, int]] = {}


class Record(RecordPart):
    """Base of everything stored."""

    schema_version: int = SCHEMA_VERSION
    called: ClassVar[str] = ""
    """What people call it, where the class's name in words does not say it."""

    @classmethod
    def kind_in_words(cls) -> str:
        """`log entry` of `LogEntry`."""
        return cls.called or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()

    def encode(self, version: int | None = None) -> bytes:
        """Compact JSON of `version` (None: the spoken one); what is at its default is left out, the version never.

        Half a surrogate pair, which an error's message may hold, is spelt out: no reader could decode it.
        """
        version = _spoken if version is None else version
        if version == SCHEMA_VERSION == NEWEST_VERSION and (written := self._as_json()) is not None:
            return written
        fields = self.model_dump(mode="json", exclude_defaults=True)
        fields.pop("schema_version", None)
        if version < NEWEST_VERSION:
            _leave_out(self, fields, version)
            fields = type(self).downgraded(fields, version)
        tree = {"schema_version": version} | fields
        text = json.dumps(tree, separators=(",", ":"))
        if "\\ud" in text:
            text = json.dumps(_whole(tree), separators=(",", ":"))
        return text.encode()

    def _as_json(self) -> bytes | None:
        """This version's fields, written by pydantic itself: a seal of a thousand groups is encoded while everybody waits for it.

        None for what it does not write, half a surrogate pair.
        """
        try:
            fields = self.model_dump_json(exclude_defaults=True, exclude={"schema_version"}).encode()
        except (PydanticSerializationError, UnicodeEncodeError):
            return None
        return _CURRENT + fields[1:] if len(fields) > len(b"{}") else _CURRENT.removesuffix(b",") + b"}"

    @classmethod
    def decode(cls, data: bytes, where: str = "a record") -> Self:
        """Inverse of `encode`. Raises UnreadableRecord."""
        try:
            if SCHEMA_VERSION == NEWEST_VERSION and data.startswith(_CURRENT):
                return cls.model_validate_json(data)
            return cls._decode_other(data, where)
        except (ValidationError, ValueError, RecursionError) as error:
            raise UnreadableRecord(
                f"no {cls.kind_in_words()} that this gcore can read ({_first_word(error)})",
                where=where,
                fix="It was written by another version of gcore, or damaged",
            ) from error

    @classmethod
    def upgraded(cls, tree: dict[str, Any], version: int) -> dict[str, Any]:
        """The fields of a record of the older `version`, as this version calls them. A class whose fields were renamed or
        mean something else says so here; one that has new fields only need not."""
        return tree

    @classmethod
    def downgraded(cls, tree: dict[str, Any], version: int) -> dict[str, Any]:
        """Inverse of `upgraded`; what came with this version is left out already."""
        return tree

    @classmethod
    def _decode_other(cls, data: bytes, where: str) -> Self:
        """Of another version, or in another order of keys than `encode` writes."""
        tree = json.loads(data)
        if not isinstance(tree, dict):
            raise ValueError("no object")
        version = tree.pop("schema_version", None)
        if not isinstance(version, int) or isinstance(version, bool) or version not in READABLE:
            raise UnreadableRecord(
                f"schema version {version} of the {cls.kind_in_words()} is not among {sorted(READABLE)}",
                where=where,
                fix="Run the gcore version that wrote it, or upgrade one version at a time",
            )
        if version < NEWEST_VERSION:
            tree = cls.upgraded(tree, version)
        record = cls.model_validate_json(json.dumps(tree))
        newer = next(_newer_fields(record, version), None)
        if newer is not None:
            raise ValueError(f"{newer}: no field of version {version}")
        return record


_CURRENT = json.dumps({"schema_version": SCHEMA_VERSION}, separators=(",", ":")).removesuffix("}").encode() + b","
"""How a record of this version begins; a record without a field does not, and is read the longer way."""


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What `value` directly contains: its key, as a dump of it has it, and the thing."""
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _newer_fields(value: Any, version: int) -> Iterator[str]:
    """The fields that were set, at any depth, and did not exist in `version`."""
    if isinstance(value, RecordPart):
        since = type(value).came_with
        yield from (name for name in sorted(value.model_fields_set) if since.get(name, FIRST_VERSION) > version)
    for _, part in _parts(value):
        yield from _newer_fields(part, version)


def _leave_out(value: Any, dumped: Any, version: int) -> None:
    """Take what did not exist in `version` out of what `value` was dumped as."""
    if isinstance(value, RecordPart):
        for name, since in type(value).came_with.items():
            if since > version:
                dumped.pop(name, None)
    for key, part in _parts(value):
        if isinstance(dumped, dict):
            name = key if key in dumped else str(key)
            if name in dumped:
                _leave_out(part, dumped[name], version)
        elif isinstance(dumped, list):
            _leave_out(part, dumped[key], version)


def _first_word(error: Exception) -> str:
    """What is wrong first of all: the field, and why."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return str(error)


def _whole(tree: Any) -> Any:
    """The tree with each half of a surrogate pair in it spelt out."""
    match tree:
        case str():
            return tree.encode("utf-8", errors="backslashreplace").decode("utf-8")
        case dict():
            return {_whole(key): _whole(value) for key, value in tree.items()}
        case list():
            return [_whole(value) for value in tree]
    return tree
