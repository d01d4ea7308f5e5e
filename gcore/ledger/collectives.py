"""Collective operations between a job's controllers within a step (all-gather of small named values).

Each controller has one record under its lease, `part/{incarnation}`: the step that its flow (the user's code that
produces groups) is in, and the values that it contributed in that step. Once every controller of the job has
contributed a value under a name, or is past the step, one of the waiting controllers writes the answer,
`agreed/{version}/{name}`, unless it exists. The answer contains the value of each controller that contributed. A
controller that comes later or repeats the step reads this answer, so it is the same for all, whichever controllers died
or joined; whether it includes their values is not guaranteed. A contributed value never changes, so a stale view can
make the answer less complete but never wrong.

An answer is deleted once every controller of the job is past its step.
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
"""Maximum size of one value as JSON."""

MAX_DEPTH = 16
"""Maximum nesting depth of lists and objects. Much deeper values can be written but not read."""

MAX_NAMES = 64
"""Maximum number of named values that a controller contributes per step."""

MAX_FORGOTTEN = 100
"""Maximum number of old answers that one transaction deletes."""

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class Part(Record):
    """Record `part/{incarnation}`: which step a controller's flow is in, and what it contributed in that step.

    `at`: the policy version at the start of the step, which identifies the step. `given`: JSON values by name.
    """

    incarnation: str
    at: Version
    given: dict[str, Any] = Field(default_factory=dict)


class Agreed(Record):
    """Record `agreed/{version}/{name}`: the answer of one collective operation, written once.

    `values`: the contributed values, by the incarnation that contributed them.
    """

    version: Version
    name: str
    values: dict[str, Any]


def check_contribution(name: str, value: Any) -> None:
    """Raise ValueError if a controller cannot contribute `value` under `name`: invalid name, not JSON, or too large."""
    if not NAME.fullmatch(name):
        raise ValueError(f"invalid name {name!r}: use up to 64 lower-case letters, digits, '_' and '-'")
    try:
        size = len(json.dumps(value, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the value for {name!r} is not JSON with finite numbers ({error})") from error
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"the value for {name!r} has {size} bytes as JSON; the maximum is {MAX_VALUE_BYTES}")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"the value for {name!r} is nested more than {MAX_DEPTH} levels deep")


def _depth(value: Any) -> int:
    """Nesting depth of lists and objects in a JSON value; 0 for a scalar."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list | tuple)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def add_contribution(part: Part | None, incarnation: str, at: Version, name: str, value: Any) -> Part:
    """Return a controller's record with `value` added under `name` for the step at version `at`.

    Values of another step are dropped. A value that was already contributed under `name` stays. Raises ValueError
    beyond `MAX_NAMES`.
    """
    given = dict(part.given) if part is not None and part.at == at else {}
    given.setdefault(name, value)
    if len(given) > MAX_NAMES:
        raise ValueError(f"a step can have at most {MAX_NAMES} names; {name!r} is one more")
    return Part(incarnation=incarnation, at=at, given=given)


def awaited_members(at: Version, name: str, members: Iterable[str], parts: Mapping[str, Part]) -> frozenset[str]:
    """Controllers that the answer must wait for: those that are not past the step at `at` and lack a value for `name`.

    `members`: incarnations of the job's controllers. `parts`: their records, by incarnation.
    """
    return frozenset(
        member
        for member in members
        if (part := parts.get(member)) is None or part.at < at or (part.at == at and name not in part.given)
    )


def compute_answer(at: Version, name: str, parts: Mapping[str, Part]) -> Agreed:
    """Compute the answer for `name` in the step at `at`: the values that controllers have contributed so far."""
    found = {m: part.given[name] for m, part in sorted(parts.items()) if part.at == at and name in part.given}
    return Agreed(version=at, name=name, values=found)


def finished_answers(
    members: Iterable[str], parts: Mapping[str, Part], agreed: Iterable[tuple[Version, str]]
) -> tuple[Any, ...]:
    """Answers that may be deleted, as (version, name), oldest first, at most `MAX_FORGOTTEN`.

    Every controller of the job is past their step. `agreed`: the existing answers.
    """
    ends = [parts[member].at if member in parts else Version(-1, -1) for member in members]
    if not ends:
        return ()
    return tuple(sorted((at, name) for at, name in agreed if at < min(ends))[:MAX_FORGOTTEN])


def give(keys: JobKeys, old: Revisioned | None, new: Part, lease: int) -> Transaction:
    """Write a controller's own record of contributions, under its lease. Compares that it is still `old`."""
    key = keys.part(new.incarnation)
    return put_if_unchanged(TxnKind.GIVE, key, old, new, lease)


def agree(keys: JobKeys, found: Agreed, forgotten: Iterable[tuple[Version, str]]) -> Transaction:
    """Write an answer, unless it already exists, and delete the answers in `forgotten`."""
    key = keys.agreed(found.version, found.name)
    deletes = [Delete(keys.agreed(at, name)) for at, name in forgotten]
    return Transaction(TxnKind.AGREE, (Compare(key, 0),), (Put(key, found.encode()), *deletes))


def exact_sum(values: Iterable[Any]) -> float:
    """Correctly rounded sum, which does not depend on the order of `values`. Raises ValueError for a non-number."""
    numbers = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{value!r} is not a number")
        numbers.append(float(value))
    return math.fsum(numbers)
