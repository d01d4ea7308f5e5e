"""A job's events, derived from the changes of its records.

Every controller derives the same events with the same sequence numbers (from the store's revisions), so that a follower
can go on with any of them after the last number it saw, and nothing comes twice or is lost, as long as it is not `MOST_EVENTS`
behind. Pure.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from controllers.by_source import mostly_truncated
from controllers.service.derived_events import Derived, derive, truncated
from gcore.config.sources import ONLY_SOURCE
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import NEWEST_MOVES
from gcore.store.keys import JobKeys
from gcore.store.types import WatchBatch, WatchEvent

PER_REVISION = 16
"""Room for the events of one revision: their numbers lie between its own and the next one's (`_in_their_room`)."""
MOST_EVENTS = 10_000
"""Events that a controller remembers of a job: the newest. A long job has one for every step, with all its numbers, and whoever
asks for what is older finds it in the run's folder."""
SUMMED_UP = frozenset({"checkpoint", "placement"})
"""Kinds of events that come from a record with a list of what happened."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    sequence: int
    time: float
    kind: str
    message: str
    data: dict[str, Any]
    again: bool = False
    """Whether it may have been told under another number by who heard of it when it happened: it comes from a record that is written
    again and again, as it was found later."""

    @property
    def data_json(self) -> str:
        """The data as JSON."""
        return json.dumps(self.data)


def by_revision(batch: WatchBatch) -> Iterator[WatchBatch]:
    """A batch in pieces of one revision each, but for one that tells everything anew: which changes come together is chance, and
    every controller is to derive the same events from them."""
    if batch.reset or len({event.kv.mod_revision for event in batch.events}) < 2:
        yield batch
        return
    for revision, events in groupby(batch.events, key=lambda event: event.kv.mod_revision):
        yield WatchBatch(tuple(events), revision)


class EventLog:
    """The newest events of one job that this controller has heard of, ascending."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._warned: set[str] = set()
        """The sources whose responses were mostly cut off in some step: said once."""
        self._moved: deque[tuple[Any, ...]] = deque(maxlen=NEWEST_MOVES)
        """The newest moves that were told."""
        self._last = -1

    def note(self, before: JobMirror, batch: WatchBatch, after: JobMirror, wall: float) -> None:
        """Add what `batch` brought; what is known already is not added again."""
        ordered = sorted(batch.events, key=self._place)
        for revision, changes in groupby(ordered, key=lambda change: change.kv.mod_revision):
            told = [one for change in changes for one in self._told(before, change, after)]
            for sequence, (kind, message, data) in enumerate(_in_their_room(told), revision * PER_REVISION):
                if sequence > self._last:
                    again = batch.reset and kind in SUMMED_UP
                    self.events.append(Event(sequence, wall, kind, message, data, again=again))
                    self._last = sequence

    def _told(self, before: JobMirror, change: WatchEvent, after: JobMirror) -> Iterator[Derived]:
        """What one change tells."""
        derived = [one for one in derive(self._keys, before, change, after) if self._is_new(one)]
        yield from derived
        yield from self._warnings(derived, after)

    def _place(self, change: WatchEvent) -> tuple[int, int, str]:
        """The order of changes. Of one revision, what is never written over comes first, then the state: whoever hears of them so late
        that the others were written over gives these the same numbers. Last is what tells more, the later it is heard."""
        key = change.kv.key
        lasting = key.startswith((self._keys.log_prefix, self._keys.eval_prefix)) or key == self._keys.job
        lists = key in (self._keys.checkpoints, self._keys.moves)
        return change.kv.mod_revision, 0 if lasting else 1 if key == self._keys.state else 3 if lists else 2, key

    def _is_new(self, derived: Derived) -> bool:
        """Whether a move is not told yet: writes that are heard together would tell of it each."""
        kind, _, data = derived
        if kind != "placement":
            return True
        move = data["generation"], data["step"], data["kind"], data["state"]
        known = move in self._moved
        self._moved.append(move)
        return not known

    def _warnings(self, derived: Sequence[Derived], after: JobMirror) -> Iterator[Derived]:
        """What a person should see at once in what happened. Every controller that heard of the same says the same."""
        for kind, _, data in derived:
            if kind != "step":
                continue
            sources = list(after.head.record.tally.sources) if after.head is not None else []
            only = sources[0] if len(sources) == 1 else ONLY_SOURCE
            fresh = [source for source in mostly_truncated(data["stats"], only) if source not in self._warned]
            for source in fresh[: PER_REVISION - len(derived)]:
                self._warned.add(source)
                yield truncated(source, data)

    def after(self, sequence: int, *, goes_on: bool = False) -> list[Event]:
        """The events with greater numbers. `goes_on`: for whoever has heard of events before; what may have been told already is not
        told again."""
        newer = []
        for event in reversed(self.events):
            if event.sequence <= sequence:
                break
            if not (goes_on and event.again):
                newer.append(event)
        return newer[::-1]


def _in_their_room(told: list[Derived]) -> list[Derived]:
    """The events of one revision, as many as have numbers of their own; those beyond are counted in the last one."""
    if len(told) <= PER_REVISION:
        return told
    kept, more = told[: PER_REVISION - 1], told[PER_REVISION - 1 :]
    kinds = Counter(kind for kind, _, _ in more)
    what = ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))
    return [*kept, ("note", f"{len(more)} things more that came with these: {what}", {"more": dict(kinds)})]
