"""What was worked out from records, kept while the records are the same objects. No policy, and nothing that could be wrong.

A controller looks at its job whenever anything changes, and most changes (a response that came, a rank that got on) concern
none of the records from which the long computations follow: what is due, what a seal would take, which rank takes which
sample. Records are never changed, only replaced, so that they are the same objects says that the result is the same too.

Holds the newest result of each name only. For one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Known:
    sources: tuple[object, ...]
    result: Any


class Remembered:
    """Results by name."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def get(self, name: Hashable, sources: tuple[object, ...], work: Callable[[], T]) -> T:
        """What `work` gives, or gave from these very `sources`. It may follow from nothing else."""
        known = self._known.get(name)
        if known is None or len(known.sources) != len(sources) or not all(map(is_, known.sources, sources)):
            known = self._known[name] = _Known(sources, work())
        result: T = known.result
        return result
