"""Schema versions of stored records and RPCs, and the base class of JSON records.

A reader accepts its own version and the one before. It converts an older record at once (`Record.upgraded`), so that the rest of the program
knows one format only. Keys that a record's version does not have are errors.

A writer uses the newest version that every reader accepts. `set_written_version` sets it per process: a controller sets it to the newest
version that every node of the cluster reads. So old and new nodes work together during a rolling upgrade. A writer leaves out fields that the
version does not have (`came_with`). A version may add a field only if leaving it out is harmless.

The environment variable GCORE_SCHEMA_VERSION, set to the previous version, pins a process to it for reading and writing. Use it to try an
upgrade, or to go back after one.

`FIRST_VERSION` is the first released version, so no version precedes it.

The modules that store records define them (`gcore.ledger.records`, `gcore.worker.records`, ...). This module does not know the store.
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
"""The oldest readable version."""

NEWEST_VERSION = 3
"""The version of this source code. It also reads the previous version, if there is one. `RecordPart.came_with` lists the fields that each
version added."""


def cut_text(most: int) -> BeforeValidator:
    """Return a validator that shortens text from plug-ins, packages or users to `most` characters and marks the cut."""

    def cut(text: object) -> object:
        return text if not isinstance(text, str) or len(text) <= most else f"{text[: most - 4]} ..."

    return BeforeValidator(cut)


class UnreadableRecord(GcoreError):
    """A stored record has a schema version that this gcore does not read, or is damaged."""


def pinned_version(value: str | None) -> int:
    """Return the schema version of a process whose environment has `value`. Raises UsageError."""
    if value is None or value == "":
        return NEWEST_VERSION
    allowed = [str(version) for version in (NEWEST_VERSION - 1, NEWEST_VERSION) if version >= FIRST_VERSION]
    if value not in allowed:
        raise UsageError(f"schema version {value!r} is not supported", where=PIN, fix=f"Use {' or '.join(allowed)}")
    return int(value)


SCHEMA_VERSION = pinned_version(os.environ.get(PIN))
"""The schema version of this process."""

READABLE = frozenset({max(FIRST_VERSION, SCHEMA_VERSION - 1), SCHEMA_VERSION})
_spoken = SCHEMA_VERSION


def set_written_version(version: int) -> None:
    """Write records of this version from now on. Raises ValueError for a version that this process does not read."""
    global _spoken
    if version not in READABLE:
        raise ValueError(f"version {version} is not among {sorted(READABLE)}")
    _spoken = version


def written_version() -> int:
    """Return the version that this process writes."""
    return _spoken


class RecordPart(BaseModel):
    """Base class of the parts of records.

    `came_with`: fields added after the first version, with the version that added them.
    """

    # Build validators at first use: a daemon without jobs reads few kinds of records.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True)
    came_with: ClassVar[Mapping[str, int]] = {}


class Record(RecordPart):
    """Base class of all stored records."""

    schema_version: int = SCHEMA_VERSION
    called: ClassVar[str] = ""
    """Name in sentences, if the class name in words is not suitable."""

    @classmethod
    def kind_in_words(cls) -> str:
        """Return the kind of record in words: `log entry` for `LogEntry`."""
        return cls.called or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()

    def encode(self, version: int | None = None) -> bytes:
        """Return compact JSON of `version` (None: the written version). Leaves out defaults, but never the version.

        Escapes lone surrogates, which an error's message may contain, because no reader could decode them.
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
        """Encode the current version with pydantic's fast path, because other processes wait while a large seal is encoded.

        Returns None for text that pydantic cannot write (lone surrogates).
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
                f"this gcore cannot read the {cls.kind_in_words()} ({_first_word(error)})",
                where=where,
                fix="Another version of gcore wrote it, or it is damaged",
            ) from error

    @classmethod
    def upgraded(cls, tree: dict[str, Any], version: int) -> dict[str, Any]:
        """Convert the fields of a record of the older `version` to this version. Override it if fields were renamed or changed their
        meaning; new fields need no override."""
        return tree

    @classmethod
    def downgraded(cls, tree: dict[str, Any], version: int) -> dict[str, Any]:
        """Inverse of `upgraded`. Fields that this version added are already removed."""
        return tree

    @classmethod
    def _decode_other(cls, data: bytes, where: str) -> Self:
        """Decode a record of another version, or with another order of keys than `encode` writes."""
        tree = json.loads(data)
        if not isinstance(tree, dict):
            raise ValueError("not a JSON object")
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
"""Start of an encoded record of this version. A record without other fields differs and takes the slow path."""


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the direct parts of `value` with their keys in its dump."""
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _newer_fields(value: Any, version: int) -> Iterator[str]:
    """Yield the fields that are set, at any depth, but did not exist in `version`."""
    if isinstance(value, RecordPart):
        since = type(value).came_with
        yield from (name for name in sorted(value.model_fields_set) if since.get(name, FIRST_VERSION) > version)
    for _, part in _parts(value):
        yield from _newer_fields(part, version)


def _leave_out(value: Any, dumped: Any, version: int) -> None:
    """Remove fields that did not exist in `version` from `dumped`, the dump of `value`."""
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
    """Return the first problem: the field, and why."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return str(error)


def _whole(tree: Any) -> Any:
    """Return the tree with every lone surrogate escaped."""
    match tree:
        case str():
            return tree.encode("utf-8", errors="backslashreplace").decode("utf-8")
        case dict():
            return {_whole(key): _whole(value) for key, value in tree.items()}
        case list():
            return [_whole(value) for value in tree]
    return tree
