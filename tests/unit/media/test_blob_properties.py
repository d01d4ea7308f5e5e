"""Random histories of a blob store: pinned blobs stay, the bound holds, and the accounts equal the disk."""

import hashlib
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gcore.media.blobs import BlobStore
from gcore.media.protocol import Blob, StoreFull
from gcore.testing.clock import FakeClock

BOUND, GRACE_S = 100, 10.0
JOBS, HOLDERS = ("one", "two"), ("x", "y")
CONTENTS = tuple(bytes([number]) * size for number, size in enumerate((0, 1, 5, 20, 20, 40, 60, 100)))
SHA256 = tuple(hashlib.sha256(data).hexdigest() for data in CONTENTS)
jobs, numbers, holders = st.sampled_from(JOBS), st.integers(0, len(CONTENTS) - 1), st.sampled_from(HOLDERS)
seconds = st.sampled_from((0.5, 4.0, 10.0, 25.0))


class Histories(RuleBasedStateMachine):
    """A store, and a simple model of its pins, reservations and grace times."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.clock = FakeClock()
        self.store = BlobStore(Path(self.place.name), BOUND, self.clock, grace_s=GRACE_S)
        self.pins: dict[tuple[str, str, int], float] = {}
        self.grace: dict[tuple[str, int], float] = {}
        self.reserved: dict[tuple[str, str], tuple[int, float]] = {}

    def teardown(self) -> None:
        self.store.close()
        self.place.cleanup()

    @rule(job=jobs, number=numbers, holder=st.sampled_from(("", *HOLDERS)))
    def put(self, job: str, number: int, holder: str) -> None:
        now, data = self.clock.monotonic(), CONTENTS[number]
        protected, was_there = self.held(), self.store.has(job, SHA256[number])
        promised = self.promised(job, holder)
        try:
            self.store.put_bytes(job, data, holder=holder)
        except StoreFull:
            others = sum(size for size, _ in self.live_reservations().values()) - min(promised, len(data))
            assert sum(len(CONTENTS[n]) for _, n in protected) + others + len(data) > BOUND
            assert not was_there
        else:
            self.grace[job, number] = now + GRACE_S
            if not was_there and (job, holder) in self.reserved:
                size, until = self.reserved[job, holder]
                self.reserved[job, holder] = (size - min(size, len(data)), until)
        for kept_job, kept in protected:
            assert self.store.has(kept_job, SHA256[kept])

    @rule(job=jobs, number=numbers)
    def put_other_bytes(self, job: str, number: int) -> None:
        before = self.store.counters()
        try:
            incoming = self.store.begin(job, Blob("0" * 64, len(CONTENTS[number])))
        except StoreFull:
            return
        incoming.write(CONTENTS[number])
        incoming.close()
        assert self.store.counters().stored <= before.stored

    @rule(job=jobs, number=numbers, incarnation=holders, ttl_s=seconds)
    def pin(self, job: str, number: int, incarnation: str, ttl_s: float) -> None:
        self.store.pin(incarnation, job, [SHA256[number]], ttl_s)
        self.pins[incarnation, job, number] = self.clock.monotonic() + ttl_s

    @rule(job=jobs, number=numbers, incarnation=holders)
    def unpin(self, job: str, number: int, incarnation: str) -> None:
        self.store.unpin(incarnation, job, [SHA256[number]])
        self.pins.pop((incarnation, job, number), None)

    @rule(job=jobs, number=numbers)
    def confirm(self, job: str, number: int) -> None:
        if self.store.confirm(job, Blob(SHA256[number], len(CONTENTS[number]))):
            self.grace[job, number] = self.clock.monotonic() + GRACE_S

    @rule(job=jobs, holder=holders, size=st.sampled_from((0, 10, 50, 100)), ttl_s=seconds)
    def reserve(self, job: str, holder: str, size: int, ttl_s: float) -> None:
        if self.store.reserve(job, holder, size, ttl_s):
            self.reserved[job, holder] = (size, self.clock.monotonic() + ttl_s)

    @rule(duration=seconds)
    def wait(self, duration: float) -> None:
        self.clock.jump(duration)

    @rule(job=jobs)
    def drop(self, job: str) -> None:
        self.store.drop_job(job)
        self.pins = {key: until for key, until in self.pins.items() if key[1] != job}
        self.reserved = {key: value for key, value in self.reserved.items() if key[0] != job}

    @precondition(lambda self: self.store.counters().blobs)
    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = BlobStore(Path(self.place.name), BOUND, self.clock, grace_s=GRACE_S)
        self.pins, self.reserved = {}, {}
        self.grace = {(job, number): self.clock.monotonic() + GRACE_S for job, number in self.on_disk()}

    @invariant()
    def accounts_equal_the_disk(self) -> None:
        counters, disk = self.store.counters(), self.on_disk()
        assert counters.blobs == len(disk)
        assert counters.stored == sum(len(CONTENTS[number]) for _, number in disk) <= BOUND
        assert counters.incoming == 0
        assert counters.held == sum(len(CONTENTS[number]) for _, number in self.held())
        assert counters.pinned == sum(len(CONTENTS[number]) for _, number in self.pinned())
        assert counters.reserved == sum(size for size, _ in self.live_reservations().values())
        assert not any(Path(self.place.name, ".incoming").iterdir())

    def on_disk(self) -> set[tuple[str, int]]:
        return {
            (job, number)
            for job in JOBS
            for number, sha256 in enumerate(SHA256)
            if Path(self.place.name, job, sha256[:2], sha256).exists()
        }

    def pinned(self) -> set[tuple[str, int]]:
        live = {key[1:] for key, until in self.pins.items() if until > self.clock.monotonic()}
        return live & self.on_disk()

    def held(self) -> set[tuple[str, int]]:
        new = {key for key, until in self.grace.items() if until > self.clock.monotonic()}
        return self.pinned() | (new & self.on_disk())

    def live_reservations(self) -> dict[tuple[str, str], tuple[int, float]]:
        return {key: value for key, value in self.reserved.items() if value[1] > self.clock.monotonic()}

    def promised(self, job: str, holder: str) -> int:
        return self.live_reservations().get((job, holder), (0, 0.0))[0]


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=20)
