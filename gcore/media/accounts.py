"""Pure rules of a blob store's room: which blobs are held, what may be stored, what is deleted first.

A blob is *held* while it has a pin, or is in its grace time: the first seconds after it was stored, or was last
confirmed for a consumer. Held blobs are never selected for deletion. Other blobs are deleted when room is needed, the
least recently used first; the end of the last pin counts as a use.

    stored + incoming              <= bound      always, after `admit`
    held + incoming + reserved     <= bound      after `admit` and `reserve`; later pins may exceed it

A reservation is a promise of room to a holder, such as a controller that is about to generate samples. Blobs that are
stored in the holder's name use it up. Times are seconds of a monotonic clock that the caller passes as `now`; it must
not decrease. A pin may name a blob that is not stored yet.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gcore.media.protocol import BlobTooLarge, StoreFull


class BlobKey(NamedTuple):
    """Identifies a stored blob. Jobs do not share blobs, even with equal bytes."""

    job: str
    sha256: str


@dataclass(slots=True, eq=False)
class StoredBlob:
    """A blob in the store. Compared by identity: a blob that was deleted and stored again is another one."""

    size: int
    """Bytes."""
    verified: bool
    """Whether this process has computed the SHA-256 of the file."""
    grace_until: float


@dataclass(frozen=True, slots=True, eq=False)
class BlobAdmission:
    """Room for one incoming blob; ends with `store` or `cancel`."""

    key: BlobKey
    size: int
    holder: str
    covered: int
    """Bytes that were taken from the holder's reservation."""


@dataclass(slots=True)
class _Reservation:
    size: int
    until: float


class BlobAccounts:
    """Sizes, pins, reservations and the order of deletion of all blobs of a store. Not thread-safe."""

    def __init__(self, bound_bytes: int, grace_s: float) -> None:
        self.bound = bound_bytes
        """Maximum bytes of all blobs."""
        self.stored = 0
        """Bytes of stored blobs."""
        self.incoming = 0
        """Bytes of admitted blobs that are not stored yet."""
        self.pinned = 0
        """Bytes of stored blobs with a pin."""
        self.held = 0
        """Bytes of stored blobs with a pin or in their grace time."""
        self._grace_s = grace_s
        self._blobs: dict[BlobKey, StoredBlob] = {}
        self._free: OrderedDict[BlobKey, None] = OrderedDict()  # not held, in the order of deletion
        self._grace_ends: deque[tuple[float, BlobKey]] = deque()  # in the order of time
        self._pins: dict[BlobKey, dict[str, float]] = {}
        self._pin_ends: list[tuple[float, BlobKey, str]] = []  # a heap; has outdated ends of renewed pins
        self._reservations: dict[tuple[str, str], _Reservation] = {}
        self._admitted: set[BlobAdmission] = set()

    def __len__(self) -> int:
        return len(self._blobs)

    def find(self, key: BlobKey) -> StoredBlob | None:
        """Return the blob, or None if it is not stored."""
        return self._blobs.get(key)

    def keys_of(self, job: str) -> list[BlobKey]:
        """Return the stored blobs of a job."""
        return [key for key in self._blobs if key.job == job]

    def reserved(self, now: float) -> int:
        """Return the bytes of all reservations."""
        self._expire(now)
        return sum(one.size for one in self._reservations.values())

    def is_held(self, key: BlobKey, now: float) -> bool:
        """Return whether the blob is stored and may not be deleted."""
        self._expire(now)
        return key in self._blobs and key not in self._free

    def use(self, key: BlobKey, now: float, *, confirm: bool = False) -> None:
        """Record a use of a stored blob. `confirm`: also begin its grace time again, for a consumer that comes soon."""
        self._expire(now)
        blob = self._blobs[key]
        if confirm:
            was_held = key not in self._free
            self._begin_grace(key, blob, now)
            self._free.pop(key, None)
            self.held += 0 if was_held else blob.size
        elif key in self._free:
            self._free.move_to_end(key)

    def admit(self, key: BlobKey, size: int, holder: str, now: float) -> tuple[BlobAdmission, list[BlobKey]]:
        """Make room for a blob of `size` bytes; return its admission and the blobs that the caller must delete.

        These blobs are no longer in the accounts. `holder`: the holder of a reservation of this job, or empty. Raises
        StoreFull and BlobTooLarge, and then changes nothing.
        """
        self._expire(now)
        if size > self.bound:
            raise BlobTooLarge(
                f"the blob has {size} bytes, but the whole store may have {self.bound}",
                fix="Raise the bound of the store",
            )
        reservation = self._reservations.get((key.job, holder))
        covered = 0 if reservation is None else min(size, reservation.size)
        reserved = sum(one.size for one in self._reservations.values())
        if self.held + self.incoming + reserved - covered + size > self.bound:
            raise self._full(size, reserved - covered)
        deleted: list[BlobKey] = []
        while self.stored + self.incoming + size > self.bound:
            if not self._free:  # after a restart with a lower bound
                raise self._full(size, reserved - covered)
            victim = next(iter(self._free))
            self.remove(victim, now)
            deleted.append(victim)
        if reservation is not None:
            reservation.size -= covered
        admission = BlobAdmission(key, size, holder, covered)
        self._admitted.add(admission)
        self.incoming += size
        return admission, deleted

    def delete_free(self, size: int, now: float) -> list[BlobKey]:
        """Remove blobs that are not held, the least recently used first, until they have `size` bytes in all; return those
        that the caller must delete. At least one, if there is any."""
        self._expire(now)
        deleted: list[BlobKey] = []
        while self._free and (size > 0 or not deleted):
            victim = next(iter(self._free))
            size -= self._blobs[victim].size
            self.remove(victim, now)
            deleted.append(victim)
        return deleted

    def cancel(self, admission: BlobAdmission) -> None:
        """End an admission whose blob was not stored. Its part of the reservation is free again."""
        if admission in self._admitted:
            self._admitted.discard(admission)
            self.incoming -= admission.size
            reservation = self._reservations.get((admission.key.job, admission.holder))
            if reservation is not None:
                reservation.size += admission.covered

    def store(self, admission: BlobAdmission, now: float) -> bool:
        """Add the blob of an admission. False: its job was dropped meanwhile, so the caller must delete the file."""
        self._expire(now)
        if admission not in self._admitted:
            return False
        self._admitted.discard(admission)
        self.incoming -= admission.size
        if admission.key not in self._blobs:  # two clients may send the same blob
            self.add(admission.key, admission.size, now, verified=True)
        return True

    def add(self, key: BlobKey, size: int, now: float, *, verified: bool) -> None:
        """Add a blob that is in the folder, for example after a restart. It begins its grace time."""
        self._expire(now)
        blob = StoredBlob(size, verified, now)
        self._blobs[key] = blob
        self.stored += size
        self.held += size
        self.pinned += size if key in self._pins else 0
        self._begin_grace(key, blob, now)

    def remove(self, key: BlobKey, now: float) -> None:
        """Remove a stored blob, held or not. Its pins stay, in case it is stored again."""
        self._expire(now)
        blob = self._blobs.pop(key)
        self.stored -= blob.size
        self.pinned -= blob.size if key in self._pins else 0
        if key in self._free:
            del self._free[key]
        else:
            self.held -= blob.size

    def pin(self, incarnation: str, job: str, sha256s: Iterable[str], until: float, now: float) -> None:
        """Hold blobs for an incarnation until the time `until`; a later call for the same blobs replaces the time."""
        self._expire(now)
        for sha256 in sha256s:
            key = BlobKey(job, sha256)
            blob = self._blobs.get(key)
            if blob is not None and key not in self._pins:
                self.pinned += blob.size
                if key in self._free:
                    del self._free[key]
                    self.held += blob.size
            self._pins.setdefault(key, {})[incarnation] = until
            heapq.heappush(self._pin_ends, (until, key, incarnation))

    def unpin(
        self, incarnation: str, job: str, sha256s: Iterable[str], now: float, *, ends_grace: bool = False
    ) -> None:
        """End pins of an incarnation. Names without a pin are ignored. `ends_grace`: the end of the last pin also ends the
        grace time, because nothing will use the blob.
        """
        self._expire(now)
        for sha256 in sha256s:
            key = BlobKey(job, sha256)
            if incarnation in self._pins.get(key, ()):
                if ends_grace and len(self._pins[key]) == 1 and (blob := self._blobs.get(key)) is not None:
                    blob.grace_until = min(blob.grace_until, now)
                self._end_pin(key, incarnation, now)

    def reserve(self, job: str, holder: str, size: int, until: float, now: float) -> bool:
        """Set the reservation of a holder to `size` bytes until the time `until`; return whether there is room.

        If not, the previous reservation of the holder stays. A reservation can always be lowered; size 0 ends it.
        """
        self._expire(now)
        before = self._reservations.get((job, holder), _Reservation(0, now)).size
        if size == 0:
            self._reservations.pop((job, holder), None)
            return True
        more = size - before
        if more > 0 and self.held + self.incoming + self.reserved(now) + more > self.bound:
            return False
        self._reservations[job, holder] = _Reservation(size, until)
        return True

    def drop_job(self, job: str, now: float) -> Collection[BlobKey]:
        """Remove everything of a job, and return the blobs that the caller must delete."""
        self._expire(now)
        for key in [key for key in self._pins if key.job == job]:
            for incarnation in list(self._pins[key]):
                self._end_pin(key, incarnation, now)
        for name in [name for name in self._reservations if name[0] == job]:
            del self._reservations[name]
        for admission in [one for one in self._admitted if one.key.job == job]:
            self.cancel(admission)
        dropped = self.keys_of(job)
        for key in dropped:
            self.remove(key, now)
        return dropped

    def _begin_grace(self, key: BlobKey, blob: StoredBlob, now: float) -> None:
        blob.grace_until = now + self._grace_s
        self._grace_ends.append((blob.grace_until, key))

    def _expire(self, now: float) -> None:
        """End the pins, grace times and reservations whose time has come."""
        while self._grace_ends and self._grace_ends[0][0] <= now:
            _, key = self._grace_ends.popleft()
            self._release(key, now)
        while self._pin_ends and self._pin_ends[0][0] <= now:
            _, key, incarnation = heapq.heappop(self._pin_ends)
            if self._pins.get(key, {}).get(incarnation, now + 1) <= now:  # otherwise renewed, or ended
                self._end_pin(key, incarnation, now)
        for name in [name for name, one in self._reservations.items() if one.until <= now]:
            del self._reservations[name]

    def _end_pin(self, key: BlobKey, incarnation: str, now: float) -> None:
        pins = self._pins[key]
        del pins[incarnation]
        if not pins:
            del self._pins[key]
            blob = self._blobs.get(key)
            self.pinned -= 0 if blob is None else blob.size
            self._release(key, now)

    def _release(self, key: BlobKey, now: float) -> None:
        """Allow the deletion of a blob, unless it has a pin, is in its grace time, or is not stored."""
        blob = self._blobs.get(key)
        if blob is not None and key not in self._pins and blob.grace_until <= now and key not in self._free:
            self._free[key] = None
            self.held -= blob.size

    def _full(self, wanted: int, reserved: int) -> StoreFull:
        return StoreFull(
            f"no room for {wanted} bytes: of {self.bound}, {self.pinned} are pinned, {self.held - self.pinned} are of new"
            f" blobs, {self.incoming} are arriving and {reserved} are reserved",
            fix="Wait until groups are trained, or raise the bound of the store",
        )
