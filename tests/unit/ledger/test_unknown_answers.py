"""A transaction without an answer: its outcome is read back, and it is never executed twice."""

from __future__ import annotations

import pytest
from stored_job import StoredJob

from gcore.ledger import transactions
from gcore.ledger.transactions import TxnOutcome
from gcore.store.types import Delete, KeyValue
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.testing.store import Call, Fate


class Line:
    """Between a controller and the store: what becomes of its next transactions, and whether it is cut after them."""

    def __init__(self) -> None:
        self.fates: list[Fate] = []
        self.reads_fail = False
        self.transactions = 0

    async def request(self, call: Call) -> Fate:
        """See Network."""
        if call.kind == "transact":
            self.transactions += 1
            return self.fates.pop(0) if self.fates else Fate.DELIVER
        return Fate.LOSE_REQUEST if self.reads_fail else Fate.DELIVER

    async def reply(self, call: Call) -> None:
        """See Network."""


class Meeting:
    """Two controllers of one job: `late`, whose line is bad, and `other`."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(FakeClock())
        self.line = Line()
        self.late = StoredJob(MemoryStore(self.cluster, network=self.line, timeout_s=0.0), "u", "late")
        self.other = StoredJob(MemoryStore(self.cluster), "u", "other")


@pytest.fixture
async def meeting() -> Meeting:
    meeting = Meeting()
    await meeting.other.create()
    await meeting.other.won(meeting.other.sealing())
    await meeting.other.won(transactions.ready(meeting.other.keys, meeting.other.slots, 1))
    await meeting.late.look()
    return meeting


async def test_a_commit_whose_answer_was_lost_was_made(meeting: Meeting) -> None:
    meeting.line.fates = [Fate.LOSE_REPLY]
    report = await meeting.late.run(meeting.late.committing())
    assert report.outcome is TxnOutcome.WON
    assert report.revision == meeting.cluster.revision
    assert meeting.line.transactions == 1


async def test_a_commit_whose_answer_was_lost_was_made_although_head_has_moved_on_since(meeting: Meeting) -> None:
    late, other = meeting.late, meeting.other
    txn = late.committing()
    # The commit is made, and before its writer reads, another goes on from it.
    read = late.ledger._store.get

    async def slow_read(key: str) -> KeyValue | None:
        if other.slots.head.record.step == 0:
            await other.look()
            await other.step()
        return await read(key)

    late.ledger._store.get = slow_read  # type: ignore[method-assign]
    meeting.line.fates = [Fate.LOSE_REPLY]
    assert (await late.run(txn)).outcome is TxnOutcome.WON
    assert (await late.look()).head.record.step == 2  # type: ignore[union-attr]


async def test_a_commit_that_never_arrived_may_yet_be_made_until_its_place_is_taken(meeting: Meeting) -> None:
    late, other = meeting.late, meeting.other
    meeting.line.fates = [Fate.DELIVER_LATE]
    txn = late.committing()
    assert (await late.run(txn)).outcome is TxnOutcome.UNKNOWN
    await other.look()
    await other.won(other.committing())
    assert meeting.cluster.deliver_late() == 1  # it arrives, and its compare fails
    entry = (await late.look()).log[1].record
    assert entry.writer == "other"
    meeting.line.fates = [Fate.LOSE_REQUEST]
    assert (await late.run(txn)).outcome is TxnOutcome.STALE  # what took its place was not it, for ever


async def test_while_nothing_can_be_read_nothing_is_known(meeting: Meeting) -> None:
    meeting.line.fates, meeting.line.reads_fail = [Fate.LOSE_REPLY], True
    assert (await meeting.late.run(meeting.late.committing())).outcome is TxnOutcome.UNKNOWN
    assert meeting.line.transactions == 1


async def test_an_entry_that_was_moved_away_since_tells_nothing(meeting: Meeting) -> None:
    late, other = meeting.late, meeting.other
    txn = late.committing()
    await other.won(other.committing())
    await other.step()
    await other.store.transact((), (Delete(other.keys.log(1)),))
    meeting.line.fates = [Fate.LOSE_REQUEST]
    assert (await late.run(txn)).outcome is TxnOutcome.UNKNOWN


async def test_a_transaction_that_does_not_move_head_is_looked_for_by_whoever_needs_it(meeting: Meeting) -> None:
    await meeting.other.won(meeting.other.committing())
    await meeting.late.look()
    meeting.line.fates = [Fate.LOSE_REPLY]
    assert (await meeting.late.run(meeting.late.sealing())).outcome is TxnOutcome.UNKNOWN
    seal = (await meeting.late.look()).seals[2].record  # only what was read back is acted on
    assert seal.sealer == "late"


@pytest.mark.parametrize("copies", [1, 2])
async def test_a_message_that_arrives_more_than_once_does_nothing_more(meeting: Meeting, copies: int) -> None:
    late = meeting.late
    txn = late.committing()
    meeting.line.fates = [Fate.DELIVER_LATE] * copies
    for _ in range(copies):
        await late.run(txn)
    assert (await late.run(txn)).outcome is TxnOutcome.WON
    revision = meeting.cluster.revision
    meeting.cluster.deliver_late()
    assert meeting.cluster.revision == revision


async def test_while_it_is_not_known_what_became_of_a_transaction_it_is_told_why(meeting: Meeting) -> None:
    meeting.line.fates = [Fate.LOSE_REQUEST]
    report = await meeting.late.run(meeting.late.committing())
    assert report.outcome is TxnOutcome.UNKNOWN
    assert report.why
