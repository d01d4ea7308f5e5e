"""Jobs in a store in memory, for tests of listing and control."""

from __future__ import annotations

from typing import Any

from gcore.config import parse_spec
from gcore.ledger import transactions
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus
from gcore.ledger.transactions import TransactionExecutor, Versioned
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.testing import MemoryStore

SPEC: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"path": "d"},
    "flow": {"steps": 9},
    "rollout": {"max_new_tokens": 4},
}


async def create(store: MemoryStore, uid: str, name: str, phase: JobPhase = JobPhase.PENDING) -> None:
    """A job, and how it stands."""
    spec = parse_spec(SPEC | {"name": name}).model_dump(mode="json")
    job = JobRecord(uid=uid, name=name, spec=spec, run_dir="/r", created=1.0, prompts=9, request_id=f"r-{uid}")
    named = await store.get(keys.name(name))
    job_keys = JobKeys(uid)
    txn = transactions.create(job_keys, job, JobStatus(phase=JobPhase.PENDING), named.mod_revision if named else 0)
    ledger = TransactionExecutor(store, job_keys)
    await ledger.run(txn)
    if phase is not JobPhase.PENDING:
        status = await store.get(job_keys.state)
        assert status is not None
        old = Versioned(JobStatus(phase=JobPhase.PENDING), status.mod_revision)
        await ledger.run(transactions.set_status(job_keys, old, JobStatus(phase=phase), None))
