"""What a member of the store says of its own size, and of alarms. For people and alerts; nothing is decided by it."""

from __future__ import annotations

from dataclasses import dataclass

ALARMS = ("NOSPACE", "CORRUPT")
"""What etcd may raise; under the first it takes no write."""


@dataclass(frozen=True, slots=True)
class StoreStanding:
    """One member's."""

    database_bytes: int
    in_use_bytes: int
    alarms: frozenset[str] = frozenset()
