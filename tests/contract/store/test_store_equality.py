"""The store in memory and a real etcd give the same results for the same random operations.

Revisions differ by other writes to etcd, so the tests compare them through a map that each write extends; lease ids likewise.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule, run_state_machine_as_test

from gcore.errors import LeaseLost
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd
from gcore.store.types import Compare, Delete, KeyValue, Put, Store, TxnResult, WatchEvent
from gcore.system.clock import SystemClock
from gcore.testing import MemoryCluster, MemoryStore

T = TypeVar("T")
KEYS = st.sampled_from(["a", "a/", "a/b", "a/b/c", "a0", "b", "é", "日"])
PREFIXES = st.sampled_from(["", "a", "a/", "a/b", "b", "é", "nothing"])
VALUES = st.binary(max_size=8)
CALL_S = 120.0
"""Time limit of a call to etcd. The two stores' answers are compared here, not their speed on a busy machine."""


class Refused:
    """A LeaseLost or ValueError, as something that can be compared."""

    def __init__(self, error: LeaseLost | ValueError) -> None:
        self.what = type(error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refused) and other.what is self.what

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Refused({self.what.__name__})"


async def outcome(call: Coroutine[Any, Any, T]) -> T | Refused:
    try:
        return await call
    except (LeaseLost, ValueError) as error:
        return Refused(error)


class Stores(RuleBasedStateMachine):
    """Runs `MemoryStore` and `EtcdStore` side by side."""

    etcd: LocalEtcd
    runner: asyncio.Runner
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.prefix = f"/equal/{uuid4().hex}/"
        self.memory: Store = MemoryStore(MemoryCluster(SystemClock()))
        self.real: Store = self.runner.run(
            EtcdStore.connect([self.etcd.endpoint], clock=SystemClock(), timeout_s=CALL_S)
        )
        self.revisions = {0: 0}
        """Of etcd, by memory's. 0 stands for no write at all."""
        self.lease_ids = {0: 0}
        self.seen: dict[str, KeyValue] = {}
        """What memory holds, or held: where stale compares come from."""

    @initialize()
    def nothing_is_there(self) -> None:
        self.same_listing("")

    @rule(target=leases)
    def grant(self) -> int:
        number = self.runner.run(self.memory.grant(3_600))
        self.lease_ids[number] = self.runner.run(self.real.grant(3_600))
        return number

    @rule(lease=leases)
    def keep_alive(self, lease: int) -> None:
        mine = self.runner.run(outcome(self.memory.keep_alive(lease)))
        assert mine == self.runner.run(outcome(self.real.keep_alive(self.lease_ids[lease])))

    @rule(lease=leases)
    def revoke(self, lease: int) -> None:
        self.runner.run(self.memory.revoke(lease))
        self.runner.run(self.real.revoke(self.lease_ids[lease]))
        self.same_listing("")

    @rule(lease=consumes(leases))
    def revoke_for_good(self, lease: int) -> None:
        self.revoke(lease)

    @rule(key=KEYS, value=VALUES, lease=st.none() | leases)
    def put(self, key: str, value: bytes, lease: int | None) -> None:
        self.transact([], [Put(key, value, lease or 0)])

    @rule(
        compared=st.lists(st.tuples(KEYS, st.sampled_from(["held", "absent", "older"])), max_size=3),
        puts=st.lists(st.tuples(KEYS, VALUES, st.none() | leases), max_size=3),
        deletes=st.lists(st.tuples(KEYS, st.booleans()), max_size=2),
    )
    def transaction(
        self,
        compared: list[tuple[str, str]],
        puts: list[tuple[str, bytes, int | None]],
        deletes: list[tuple[str, bool]],
    ) -> None:
        compares = [Compare(key, self.expected(key, how)) for key, how in compared]
        writes: list[Put | Delete] = [Put(key, value, lease or 0) for key, value, lease in puts]
        self.transact(compares, writes + [Delete(key, prefix=prefix) for key, prefix in deletes])

    @rule(prefix=PREFIXES)
    def delete_prefix(self, prefix: str) -> None:
        self.transact([], [Delete(prefix, prefix=True)])

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        mine = self.runner.run(self.memory.get(self.prefix + key))
        real = self.runner.run(self.real.get(self.prefix + key))
        assert (mine and self.as_real(mine)) == real

    @rule(prefix=PREFIXES)
    def same_listing(self, prefix: str) -> None:
        mine = self.runner.run(self.memory.list(self.prefix + prefix))
        real = self.runner.run(self.real.list(self.prefix + prefix))
        # The end of a lease makes a revision that no result tells: its keys are gone, so only reads can show it.
        assert [self.as_real(kv) for kv in mine.kvs] == list(real.kvs)

    def teardown(self) -> None:
        try:
            self.runner.run(self.same_history())
        finally:
            self.runner.run(self.real.close())

    def expected(self, key: str, how: str) -> int:
        """A revision to compare with, as memory counts."""
        held = self.runner.run(self.memory.get(self.prefix + key))
        older = self.seen.get(key)
        if how == "held" and held is not None:
            self.seen[key] = held
            return held.mod_revision
        return older.mod_revision if how == "older" and older is not None else 0

    def transact(self, compares: list[Compare], writes: list[Put | Delete]) -> None:
        mine = self.runner.run(outcome(self.memory.transact(*self.placed(compares, writes))))
        real = self.runner.run(
            outcome(
                self.real.transact(
                    *self.placed(
                        [Compare(c.key, self.revisions[c.mod_revision]) for c in compares],
                        [Put(w.key, w.value, self.lease_ids[w.lease]) if isinstance(w, Put) else w for w in writes],
                    )
                )
            )
        )
        if isinstance(mine, TxnResult) and isinstance(real, TxnResult):
            assert mine.won == real.won
            if mine.won and any(isinstance(write, Put) for write in writes):
                self.revisions[mine.revision] = real.revision
        else:
            assert mine == real

    def placed(self, compares: list[Compare], writes: list[Put | Delete]) -> tuple[list[Compare], list[Put | Delete]]:
        """Under this machine's prefix."""
        return (
            [Compare(self.prefix + c.key, c.mod_revision) for c in compares],
            [
                Put(self.prefix + w.key, w.value, w.lease)
                if isinstance(w, Put)
                else Delete(self.prefix + w.key, prefix=w.prefix)
                for w in writes
            ],
        )

    def as_real(self, kv: KeyValue) -> KeyValue:
        """Memory's, in etcd's numbers."""
        return KeyValue(
            kv.key,
            kv.value,
            self.revisions[kv.create_revision],
            self.revisions[kv.mod_revision],
            version=kv.version,
            lease=self.lease_ids[kv.lease],
        )

    async def same_history(self) -> None:
        """Both watches report all later changes in the same batches of revisions."""
        mine, real = await asyncio.gather(self.told(self.memory), self.told(self.real))
        assert mine == real

    async def told(self, store: Store) -> list[tuple[str, str, bytes, int]]:
        """Kind, key, value, and which of the revisions seen: of what two transactions and a revocation do."""
        lease = await store.grant(3_600)
        events: list[WatchEvent] = []
        async with aclosing(store.watch(self.prefix)) as batches:
            events += (await anext(batches)).events
            await store.transact([], [Put(self.prefix + "b", b"1", lease), Put(self.prefix + "é", b"2", lease)])
            await store.transact([], [Delete(self.prefix + "a", prefix=True), Put(self.prefix + "z", b"3")])
            await store.revoke(lease)
            await store.transact([], [Put(self.prefix + "end", b"")])
            while not events or events[-1].kv.key != self.prefix + "end":
                events += (await anext(batches)).events
        ranks = {revision: rank for rank, revision in enumerate(sorted({e.kv.mod_revision for e in events}))}
        return [(e.kind, e.kv.key, e.kv.value, ranks[e.kv.mod_revision]) for e in events]


@pytest.mark.timeout(600)
def test_memory_and_etcd_answer_every_sequence_of_calls_alike(etcd: LocalEtcd) -> None:
    class OnThisServer(Stores):
        pass

    OnThisServer.etcd = etcd
    patient = settings(max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    # One loop for all examples: gRPC does not like to change it.
    with asyncio.Runner() as OnThisServer.runner:
        run_state_machine_as_test(OnThisServer, settings=patient)
