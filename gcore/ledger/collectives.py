"""What peers tell each other in a step: small values under a name, and the one answer that all of them read.

Each peer has one record, `part/{incarnation}`, under its lease: at which step its flow is, and what it has given there. When
every member has given something under a name, or is past the step and never will, one of those who wait fixes the answer,
`agreed/{version}/{name}`, in a transaction that only creates. Whoever comes later, or repeats the step, reads that. So the
answer is the same for all, whoever died or joined meanwhile; whether such a one is in it, is not promised. A value that
was given is never changed, so an old view of the parts can make the answer poorer, never wrong.

An answer is forgotten once every member is past its step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from gcore.ledger.transactions import Revisioned, Transaction, TxnKind, put_if_unchanged
from gcore.schema import Record
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put
from gcore.types import Version

MAX_VALUE_BYTES = 4096
"""Of one value, as JSON."""

MAX_DEPTH = 16
"""Lists and objects within each other. Far deeper ones can be written and not be read again, by anybody."""

MAX_NAMES = 64
"""A peer gives under so many names in one step, at most."""

MAX_FORGOTTEN = 100
"""Answers that one transaction forgets."""

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class Part(Record):
    """`part/{incarnation}`: how far a peer's flow is, and what it gave in that step. `at`: the version the step begins with."""

    incarnation: str
    at: Version
    given: dict[str, Any] = Field(default_factory=dict)


class Agreed(Record):
    """`agreed/{version}/{name}`: the answer; written once. By incarnation."""

    version: Version
    name: str
    values: dict[str, Any]


def check_contribution(name: str, value: Any) -> None:
    """Raises ValueError for a name or a value that cannot be given."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name: up to 64 lower-case letters, digits, '_' and '-'")
    try:
        size = len(json.dumps(value, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"what is given under {name!r} is no JSON of finite numbers ({error})") from error
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"what is given under {name!r} takes {size} bytes as JSON, more than {MAX_VALUE_BYTES}")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"what is given under {name!r} is nested more than {MAX_DEPTH} deep")


def _depth(value: Any) -> int:
    """How many lists and objects are within each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list | tuple)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def add_contribution(part: Part | None, incarnation: str, at: Version, name: str, value: Any) -> Part:
    """A peer's part with one thing more; of another step nothing is kept. Raises ValueError beyond MAX_NAMES."""
    given = dict(part.given) if part is not None and part.at == at else {}
    given.setdefault(name, value)
    if len(given) > MAX_NAMES:
        raise ValueError(f"more than {MAX_NAMES} names in one step")
    return Part(incarnation=incarnation, at=at, given=given)


def awaited_members(at: Version, name: str, members: Iterable[str], parts: Mapping[str, Part]) -> frozenset[str]:
    """The members who have not given under `name` in the step at `at`, and still may."""
    return frozenset(
        member
        for member in members
        if (part := parts.get(member)) is None or part.at < at or (part.at == at and name not in part.given)
    )


def compute_answer(at: Version, name: str, parts: Mapping[str, Part]) -> Agreed:
    """What the parts come to."""
    found = {m: part.given[name] for m, part in sorted(parts.items()) if part.at == at and name in part.given}
    return Agreed(version=at, name=name, values=found)


def finished_answers(
    members: Iterable[str], parts: Mapping[str, Part], agreed: Iterable[tuple[Version, str]]
) -> tuple[Any, ...]:
    """The answers that nobody will ask for any more: every member is known to be past their step."""
    ends = [parts[member].at if member in parts else Version(-1, -1) for member in members]
    if not ends:
        return ()
    return tuple(sorted((at, name) for at, name in agreed if at < min(ends))[:MAX_FORGOTTEN])


def give(keys: JobKeys, old: Revisioned | None, new: Part, lease: int) -> Transaction:
    """A peer's own part, under its lease."""
    key = keys.part(new.incarnation)
    return put_if_unchanged(TxnKind.GIVE, key, old, new, lease)


def agree(keys: JobKeys, found: Agreed, forgotten: Iterable[tuple[Version, str]]) -> Transaction:
    """Fix an answer, unless there is one; and forget others."""
    key = keys.agreed(found.version, found.name)
    deletes = [Delete(keys.agreed(at, name)) for at, name in forgotten]
    return Transaction(TxnKind.AGREE, (Compare(key, 0),), (Put(key, found.encode()), *deletes))


def exact_sum(values: Iterable[Any]) -> float:
    """The sum, whatever the order. Raises ValueError for what is no number."""
    numbers = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{value!r} is no number")
        numbers.append(float(value))
    return math.fsum(numbers)
