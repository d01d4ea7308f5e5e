"""Schema versions of stored records and RPCs, and the base class of JSON records.

A reader accepts its own version and the one before. It converts an older record when it reads it (`Record.upgraded`),
so that the rest of the program handles one format only. Fields that a record's version does not have are errors.

A writer uses the newest version that every reader accepts. `set_written_version` sets it per process: a controller sets
it to the newest version that every node of the cluster reads. So old and new nodes work together during a rolling
upgrade. A writer leaves out fields that the version does not have (`came_with`). A version may add a field only if
leaving it out is harmless.

The environment variable GCORE_SCHEMA_VERSION, set to the previous version, pins a process to it for reading and
writing. Use it to try an upgrade, or to go back after one.

The modules that store records define them (`gcore.ledger.records`, `gcore.worker.records`, ...). This module does not
depend on the store.
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
"""The first released schema version; no version precedes it."""

NEWEST_VERSION = 3
"""The schema version of this source code, which also reads the previous version. `RecordPart.came_with` lists the
fields that each version added.
"""


def cut_text(most: int) -> BeforeValidator:
    """Return a pydantic validator that cuts a text to at most `most` characters, ending with " ..." if it was longer.

    For text from plug-ins, packages or users.
    """

    def cut(text: object) -> object:
        return text if not isinstance(text, str) or len(text) <= most else f"{text[: most - 4]} ..."

    return BeforeValidator(cut)


class UnreadableRecord(GcoreError):
    """A stored record has a schema version that this gcore does not read, or is damaged."""


def pinned_version(value: str | None) -> int:
    """Return the schema version for a value of the environment variable `PIN` (None: not set). Raises UsageError."""
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
    """Set the schema version in which this process writes records from now on.

    Raises ValueError for a version that this process does not read.
    """
    global _spoken
    if version not in READABLE:
        raise ValueError(f"version {version} is not among {sorted(READABLE)}")
    _spoken = version


def written_version() -> int:
    """Return the schema version in which this process writes records."""
    return _spoken


class RecordPart(BaseModel):
    """Base class of records, and of objects inside records.

    `came_with`: for each field that the first schema version did not have, the version that added it.
    """

    # Build validators at first use: a daemon without jobs reads few kinds of records.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True)
    came_with: ClassVar[Mapping[str, int]] = {}


class Record(RecordPart):
    """Base class of all stored records."""

    schema_version: int = SCHEMA_VERSION
    called: ClassVar[str] = ""
    """Name of the record in error messages, if the words of the class name are not suitable."""

    @classmethod
    def kind_in_words(cls) -> str:
        """Return the name of this kind of record for error messages, such as "log entry" for `LogEntry`."""
        return cls.called or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()

    def encode(self, version: int | None = None) -> bytes:
        """Encode the record as compact JSON in schema version `version` (None: the one that this process writes).

        Leaves out fields with their default value, but never the version. Escapes lone surrogates, which an error's
        message may contain, because no reader could decode them.
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
        """Encode the record in the current version with pydantic's encoder, which is faster.

        Returns None for text that it cannot write (lone surrogates).
        """
        try:
            fields = self.model_dump_json(exclude_defaults=True, exclude={"schema_version"}).encode()
        except (PydanticSerializationError, UnicodeEncodeError):
            return None
        return _CURRENT + fields[1:] if len(fields) > len(b"{}") else _CURRENT.removesuffix(b",") + b"}"

    @classmethod
    def decode(cls, data: bytes, where: str = "a record") -> Self:
        """Decode a record from JSON. `where`: its key or file, for the error. Raises UnreadableRecord."""
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
        """Convert the fields of a record of the older schema version `version` to the current one.

        Override it if fields were renamed or changed their meaning; new fields need no override.
        """
        return tree

    @classmethod
    def downgraded(cls, tree: dict[str, Any], version: int) -> dict[str, Any]:
        """Convert the fields of a record to the older schema version `version`: the inverse of `upgraded`.

        Fields that newer versions added are already removed.
        """
        return tree

    @classmethod
    def _decode_other(cls, data: bytes, where: str) -> Self:
        """Decode a record of another schema version, or whose keys are in another order than `encode` writes."""
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
"""First bytes of an encoded record of the current version; records that begin otherwise are decoded by a slower path.
"""


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the fields or items of `value`, each with its key or index in the dumped `value`."""
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _newer_fields(value: Any, version: int) -> Iterator[str]:
    """Yield the names of fields that are set in `value`, at any depth, but did not exist in schema version `version`."""
    if isinstance(value, RecordPart):
        since = type(value).came_with
        yield from (name for name in sorted(value.model_fields_set) if since.get(name, FIRST_VERSION) > version)
    for _, part in _parts(value):
        yield from _newer_fields(part, version)


def _leave_out(value: Any, dumped: Any, version: int) -> None:
    """Remove from `dumped`, the dump of `value`, all fields that did not exist in schema version `version`."""
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
    """Return the first problem of an error: which field, and what is wrong with it."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return str(error)


def _whole(tree: Any) -> Any:
    """Return a JSON value with every lone surrogate in its texts escaped."""
    match tree:
        case str():
            return tree.encode("utf-8", errors="backslashreplace").decode("utf-8")
        case dict():
            return {_whole(key): _whole(value) for key, value in tree.items()}
        case list():
            return [_whole(value) for value in tree]
    return tree
