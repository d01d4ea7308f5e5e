"""A store that was restored from an older backup with etcd's own tools while a session had a lease in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from etcd_tools import EtcdTools

from gcore.errors import LeaseLost
from gcore.store.client import EtcdStore
from gcore.store.etcd import EtcdBinary, LocalEtcd
from gcore.store.types import Compare, Put
from gcore.system.clock import SystemClock

CLOCK = SystemClock()


async def start(folder: Path, tools: EtcdTools, port: int | None = None) -> LocalEtcd:
    return await LocalEtcd.start(
        folder / "data", log_file=folder / "log", clock=CLOCK, client_port=port, binary=EtcdBinary(tools.etcd)
    )


@pytest.mark.parametrize("writes_since", [0, 2], ids=["nothing was written since", "others wrote since"])
async def test_a_lease_that_a_backup_brought_back_is_lost_all_the_same(tmp_path: Path, writes_since: int) -> None:
    """etcd gives the lease its full time again; what its holder has read is of a future that is no more."""
    tools = EtcdTools.find()
    etcd = await start(tmp_path, tools)
    store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    lease = await store.grant(600)
    await store.transact([Compare("k", 0)], [Put("k", b"0", lease=lease)])
    tools.save(etcd.endpoint, tmp_path / "backup.db")
    for number in range(5):
        await store.transact([], [Put("k", str(number).encode(), lease=lease)])
    assert await store.keep_alive(lease) > 0
    await etcd.stop()
    tools.restore(tmp_path / "backup.db", tmp_path / "data", "gcore")
    etcd = await start(tmp_path, tools, etcd.client_port)
    other = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    for _ in range(writes_since):
        await other.transact([], [Put("other", b"1")])
    assert await other.keep_alive(lease) > 0, (
        "etcd itself knows it, and whoever has read nothing of that future may hold it"
    )
    with pytest.raises(LeaseLost, match="the store was restored from a backup"):
        await store.keep_alive(lease)
    fresh = await store.grant(600)
    assert await store.keep_alive(fresh) > 0, "after that what stands there counts"
    assert await store.keep_alive(fresh) > 0
    for one in (store, other):
        await one.close()
    await etcd.stop()


async def test_a_store_that_only_stopped_for_a_while_keeps_its_leases(tmp_path: Path) -> None:
    tools = EtcdTools.find()
    etcd = await start(tmp_path, tools)
    store = await EtcdStore.connect([etcd.endpoint], clock=CLOCK)
    lease = await store.grant(600)
    await store.transact([], [Put("k", b"0", lease=lease)])
    await etcd.stop()
    etcd = await start(tmp_path, tools, etcd.client_port)
    assert await store.keep_alive(lease) > 0
    await store.close()
    await etcd.stop()
