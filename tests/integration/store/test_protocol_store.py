"""The step protocol against a real etcd: a paused process cannot write after its lease, a watcher resumes after a compaction, and invalid requests
are refused before etcd gets them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
from aetcd import rpc
from stored_job import RULES, StoredJob
from tcp_proxy import Proxy

from gcore.data.order import Cursors, ShardCursor
from gcore.errors import LeaseLost
from gcore.ledger import transactions
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment, Checkpoint, EndedRef, EpochRecord, Member, Seal
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.ledger.selection import MOST_OUTCOMES, SealStep, sealed_group
from gcore.ledger.transactions import Transaction, TxnKind, TxnOutcome, Versioned
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd
from gcore.store.session import Session
from gcore.store.types import MAX_BYTES, MAX_OPERATIONS, MIN_TTL_S, Compare, Delete, Put
from gcore.system.clock import SystemClock
from gcore.types import PromptRef

CLOCK = SystemClock()
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def store(etcd: LocalEtcd) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    yield store
    await store.close()


@pytest.fixture
async def job(store: EtcdStore) -> StoredJob:
    """With a commit, whose cursors were kept, and a second step that is SEALED."""
    job = StoredJob(store, f"u-{uuid.uuid4().hex}", "other")
    await job.create()
    await job.won(transactions.assign(job.keys, None, Assignment(members=("other",), owners=(0, 0))))
    await job.step(keep_cursors=True)
    await job.won(job.sealing())
    return job


def everything(late: StoredJob, lease: int) -> dict[TxnKind, Callable[[], Transaction]]:
    """Every transaction that moves a job which exists, as `late` would make it from what it saw last."""
    keys, mirror = late.keys, late.mirror
    head, checkpoints, plan, status = mirror.head, mirror.checkpoints, mirror.plan, mirror.status
    assert head is not None
    assert checkpoints is not None
    assert plan is not None
    assert status is not None
    checkpoint = Checkpoint(lineage=0, step=1, seq=1, file="c")
    epoch = EpochRecord(epoch=1, version=head.record.version)
    failed = JobStatus(phase=JobPhase.FAILED, reason="why")
    owners = Assignment(members=("late",), owners=(0, 0))
    return {
        TxnKind.ASSIGN: lambda: transactions.assign(keys, mirror.assign, owners),
        TxnKind.OFFER: lambda: late.offering(lease),
        TxnKind.RESEAL: lambda: transactions.reseal(keys, late.slots, 2, "late"),
        TxnKind.READY: lambda: transactions.ready(keys, late.slots, 2),
        TxnKind.ACCOUNT: late.accounting,
        TxnKind.REGISTER: lambda: transactions.register(keys, head, checkpoints, mirror.log[1], checkpoint),
        TxnKind.RETAIN: lambda: transactions.retain(keys, head, checkpoints, checkpoints.record.entries),
        TxnKind.PRUNE: lambda: transactions.prune(keys, head, checkpoints, [0]),
        TxnKind.ROLLBACK: late.rolling_back,
        TxnKind.STATUS: lambda: transactions.set_status(keys, status, failed, late.slots),
        TxnKind.REPLAN: lambda: transactions.replan(keys, plan, plan.record),
        TxnKind.EPOCH: lambda: transactions.begin_epoch(keys, head, checkpoints, None, epoch, []),
        TxnKind.DELETE: lambda: transactions.delete_job(
            keys, head, Versioned(JobStatus(phase=JobPhase.FAILED), status.revision)
        ),
    }


async def test_a_controller_that_was_paused_beyond_its_lease_can_write_nothing_when_it_wakes_up(
    etcd: LocalEtcd, job: StoredJob
) -> None:
    mine = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    late = StoredJob(mine, job.keys.uid, "late")
    session = await Session.open(mine, clock=CLOCK, ttl=MIN_TTL_S)
    member = Member(incarnation="late", node="n0", address="a:1")
    await mine.transact((), (Put(late.keys.member("late"), member.encode(), lease=session.lease),))
    await late.look()
    await late.won(late.offering(session.lease))
    planned = {kind: make() for kind, make in everything(late, session.lease).items()}

    # It is paused: nobody renews its lease, until etcd itself says that it is over.
    async with aclosing(job.store.watch(late.keys.member("late"))) as batches:
        async for batch in batches:
            if any(event.kind == "delete" for event in batch.events):
                break
    await job.look()
    assert not job.mirror.members
    assert not job.mirror.offers
    # The others go on, and go back once, so that nothing is as it was.
    await job.won(transactions.assign(job.keys, job.mirror.assign, Assignment(members=("other",), owners=(0, None))))
    await job.won(transactions.ready(job.keys, job.slots, 2))
    await job.won(job.committing())
    await job.won(job.rolling_back())
    before = await job.store.list(job.keys.prefix)

    for kind, txn in planned.items():
        report = await late.run(txn)
        assert report.outcome is TxnOutcome.STALE, kind
    assert not session.alive(CLOCK.monotonic())
    with pytest.raises(LeaseLost):
        await mine.keep_alive(session.lease)
    after = await job.store.list(job.keys.prefix)
    assert after.kvs == before.kvs
    await mine.close()


async def test_a_paused_sealer_and_a_paused_committer_fail_too(etcd: LocalEtcd, job: StoredJob) -> None:
    mine = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    late = StoredJob(mine, job.keys.uid, "late")
    await job.won(transactions.ready(job.keys, job.slots, 2))
    await late.look()
    commit = late.committing()
    await job.won(job.rolling_back())
    assert (await late.run(commit)).outcome is TxnOutcome.STALE  # what was READY belongs to a world that is gone
    await late.look()
    seal = late.sealing()
    await job.won(job.accounting())
    assert (await late.run(seal)).outcome is TxnOutcome.STALE
    assert not (await job.look()).seals
    await mine.close()


async def test_watcher_that_missed_a_compaction_lists_again_and_continues_writing(
    etcd: LocalEtcd, job: StoredJob
) -> None:
    proxy = await Proxy.start(etcd.endpoint)
    mine = await EtcdStore.connect([proxy.endpoint], clock=CLOCK)
    late = StoredJob(mine, job.keys.uid, "late")
    resets = 0
    mirror = JobMirror(late.keys)

    async with aclosing(mine.watch(late.keys.prefix)) as batches:
        mirror = mirror.fold(await anext(batches))
        assert mirror.seals
        await proxy.cut()
        # Meanwhile the step is given up and another way taken; what was there is gone, and so is its history.
        await job.won(transactions.reseal(job.keys, job.slots, 2, "other"))
        await job.won(job.rolling_back())
        await job.won(job.accounting())
        await compact(job.store)
        await proxy.heal()
        async for batch in batches:
            resets += batch.reset
            mirror = mirror.fold(batch)
            if mirror.head is not None and mirror.head == job.mirror.head:
                break
    assert resets == 1
    expected = await job.look()
    assert mirror.seals == {}
    assert (mirror.head, mirror.plan, mirror.log) == (expected.head, expected.plan, expected.log)
    late.mirror = mirror
    await late.won(late.sealing())  # with the revisions that the watch brought
    await late.won(transactions.ready(late.keys, late.slots, 1))
    await late.won(late.committing())
    await mine.close()
    await proxy.close()


async def compact(store: object) -> None:
    """Forget all history up to now."""
    assert isinstance(store, EtcdStore)
    revision = (await store.list("nothing/")).revision
    request = rpc.CompactionRequest(revision=revision, physical=True)
    await store._caller.call(
        lambda connection, metadata, within: connection.kv.Compact(request, metadata=metadata, timeout=within),
        repeatable=False,
    )


async def test_etcd_takes_all_that_a_transaction_may_hold_and_what_is_more_never_reaches_it(store: EtcdStore) -> None:
    prefix = f"limits-{uuid.uuid4().hex}/"
    compares = [Compare(f"{prefix}{i}", 0) for i in range(MAX_OPERATIONS)]
    writes = [Put(f"{prefix}{i}", b"v") for i in range(MAX_OPERATIONS)]
    assert (await store.transact(compares, writes)).won
    with pytest.raises(ValueError, match="at most 128 writes"):
        await store.transact((), [*writes, Put(f"{prefix}more", b"v")])
    with pytest.raises(ValueError, match="at most 128 compares"):
        await store.transact([*compares, Compare(f"{prefix}more", 0)], ())
    key = f"{prefix}large"
    room = MAX_BYTES - 512 - 64 - 2 * len(key)
    assert (await store.transact((), (Put(key, b"x" * room),))).won
    with pytest.raises(ValueError, match="bytes"):
        await store.transact((), (Put(key, b"x" * (room + 1)),))
    with pytest.raises(ValueError, match="puts"):
        await store.transact((), (Put(key, b"x"), Delete(prefix, prefix=True)))
    assert len((await store.list(prefix)).kvs) == MAX_OPERATIONS + 1


async def test_a_listing_larger_than_any_message_comes_whole_in_pages(store: EtcdStore) -> None:
    prefix = f"pages-{uuid.uuid4().hex}/"
    for first in range(0, 1200, 100):
        await store.transact((), [Put(f"{prefix}{i:05d}", b"x" * 8000) for i in range(first, first + 100)])
    listing = await store.list(prefix)
    assert [kv.key for kv in listing.kvs] == [f"{prefix}{i:05d}" for i in range(1200)]
    assert sum(len(kv.value) for kv in listing.kvs) > 2 * (4 << 20)
    await store.transact((), (Delete(prefix, prefix=True),))


async def test_the_largest_records_of_a_job_fit_into_one_transaction(store: EtcdStore) -> None:
    """Cursors of 1,024 shards with ragged windows of 256, 512 outcomes with the longest reasons, 100 pruned entries."""
    job = StoredJob(store, f"u-{uuid.uuid4().hex}", "large")
    await job.create()
    ragged = Cursors(tuple(ShardCursor(10**6, (1 << 256) - 2) for _ in range(1024)))
    head = job.slots.head.record.model_copy(update={"cursors": ragged})
    assert len(head.encode()) < 100_000
    ended = tuple(
        EndedRef(ref=PromptRef(0, 0, i), kind="failed", reason="ü" * 200, holder="n" * 60, source="s" * 60)
        for i in range(MOST_OUTCOMES)
    )
    chosen = SealStep(tuple(sealed_group(job.group(ref), "large") for ref in job.due()), ())
    assert job.mirror.plan is not None
    seal = transactions.seal(job.keys, job.slots, chosen, job.mirror.plan.record, 1, "large")
    put = seal.writes[0]
    assert isinstance(put, Put)
    record = Seal.decode(put.value).model_copy(update={"outcomes": ended})
    assert (await store.transact(seal.compares, (Put(put.key, record.encode()),))).won
    await job.look()
    entries = [Put(job.keys.log(seq), b"{}") for seq in range(1, transactions.MOST_PRUNED + 1)]
    assert (await store.transact((), entries)).won
    mirror = job.mirror
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    prune = transactions.prune(job.keys, mirror.head, mirror.checkpoints, range(1, transactions.MOST_PRUNED + 1))
    assert (await job.run(prune)).outcome is TxnOutcome.WON
    assert RULES.quota == 2


async def test_two_that_want_the_same_do_not_both_get_it(etcd: LocalEtcd, job: StoredJob) -> None:
    stores = [await EtcdStore.connect([etcd.endpoint], clock=CLOCK) for _ in range(4)]
    hands = [StoredJob(store, job.keys.uid, f"c{i}") for i, store in enumerate(stores)]
    for _ in range(5):
        await asyncio.gather(*(one.look() for one in hands))
        step = hands[0].slots.head.record.step + 1
        slot = hands[0].slots.slots.get(step)
        if slot is None:
            made = [one.sealing() for one in hands]
        elif slot.record.state == "SEALED":
            made = [transactions.ready(one.keys, one.slots, step) for one in hands]
        else:
            made = [one.committing() for one in hands]
        reports = await asyncio.gather(*(one.run(txn) for one, txn in zip(hands, made, strict=True)))
        assert sorted(report.outcome for report in reports) == [TxnOutcome.STALE] * 3 + [TxnOutcome.WON]
    await asyncio.gather(*(store.close() for store in stores))
