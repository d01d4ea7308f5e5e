"""A chain with steps from controllers of this schema version and of the previous one, as during a rolling upgrade: both read one
chain, and the audit finds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_job import RULES, StoredJob

from gcore import schema
from gcore.ledger import transactions
from gcore.ledger.audit.audit import audit_records
from gcore.ledger.audit.receipts import Receipt
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import Seal
from gcore.schema import NEWEST_VERSION
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

OLDER = NEWEST_VERSION - 1


@pytest.fixture(autouse=True)
def newest() -> Iterator[None]:
    """Reset the written version after each test."""
    yield
    schema.set_written_version(NEWEST_VERSION)


def receipts_of(seal: Seal) -> list[Receipt]:
    layout, found = balance_samples(seal), []
    for rank in range(seal.world_size):
        samples: dict = {}
        for slot in layout.of_rank(rank):
            samples.setdefault(seal.groups[slot.group].ref, set()).add(slot.sample)
        digests = {g.ref: g.digest for g in seal.groups if g.ref in samples}
        shares = {ref: frozenset(indexes) for ref, indexes in samples.items()}
        found.append(Receipt(seal.token, seal.world, rank, shares, digests))
    return found


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([OLDER, NEWEST_VERSION]), st.booleans()), max_size=4), st.booleans())
async def test_chain_with_steps_of_both_versions_is_whole(history: list[tuple[int, bool]], rolls_back: bool) -> None:
    schema.set_written_version(OLDER)
    job = StoredJob(MemoryStore(MemoryCluster(FakeClock())), "u", "a")
    await job.create()
    receipts: list[Receipt] = []
    for version, accounts in history:
        schema.set_written_version(version)
        if accounts:
            await job.won(job.accounting())
        await job.won(job.sealing())
        step = job.slots.head.record.step + 1
        await job.won(transactions.ready(job.keys, job.slots, step))
        receipts += receipts_of(job.mirror.seals[step].record)
        await job.won(job.committing())
        written = await job.store.get(job.keys.head)
        assert written is not None
        assert json.loads(written.value)["schema_version"] == version
    if rolls_back:
        await job.won(job.rolling_back())
    log = {seq: stored.record for seq, stored in job.mirror.log.items()}
    found = audit_records(RULES, job.slots.head.record, log, receipts)
    assert found.violations == ()
