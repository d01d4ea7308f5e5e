"""What a job's engines have to do now: told by each controller of those it sees to, asked for by the one that plans, about once a
second, and never over the store. What a node that does not answer in time told last counts for a few seconds more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import grpc

from controllers.engines import EngineBook
from controllers.judge_engines import JudgeEngines
from controllers.sleeping import mine, put_to_sleep
from controllers.view import JobView
from gcore.api.v1 import placement_pb2 as pb
from gcore.api.v1 import placement_pb2_grpc
from gcore.clock import Clock
from gcore.ledger.job import NodeRecord
from gcore.rpc_schema import VersionedStub
from gcore.tls.connecting import PLAIN, Connector
from placement.loads import EngineLoad, Loads

ANSWER_S = 2.0
"""For a peer's answer, which asks engines that may be busy."""
STALE_S = 5.0
"""So long does an answer count where no newer one has come."""
WAKES_AS, WAKE_PRIOR_S = 3.0, 1.0
"""Before any engine has woken here, it is taken for so many times what it took to put one to sleep, and so much more."""


async def own_loads(view: JobView, engines: EngineBook, judges: JudgeEngines | None) -> pb.LoadsReply:
    """What this controller's engines have to do."""
    known, asleep = mine(view), put_to_sleep(view)
    loads = await engines.loads(known)
    if judges is not None:
        loads |= await judges.loads(known)
    tokens, foreseen = engines.foreseen()
    reply = pb.LoadsReply(unseated={"rollout": engines.unseated()}, left_tokens=tokens, foreseen=foreseen)
    for name, engine in sorted(known.items()):
        worker = view.workers.get(name)
        if worker is None or name not in loads:
            continue
        running, waiting = loads[name]
        reply.engines.add(
            node=worker.node,
            slot=worker.slot,
            judge=worker.judge,
            running=running,
            waiting=waiting,
            ready=engine.version is not None and not engine.silent and name not in asleep,
            asleep=engine.asleep,
        )
    slept, woke = [engines.slept_s], [engines.woke_s]
    if judges is not None:
        reply.unseated["reward"] = judges.unseated()
        slept.append(judges.changed_s[0])
        woke.append(judges.changed_s[1])
    sleep_s, wake_s = (max((one for one in found if one is not None), default=None) for found in (slept, woke))
    if sleep_s is not None:
        reply.change_s = sleep_s + (wake_s if wake_s is not None else WAKES_AS * sleep_s + WAKE_PRIOR_S)
    return reply


class Polling:
    """Asks all controllers of a cluster. Close it."""

    def __init__(self, uid: str, clock: Clock, connector: Connector = PLAIN) -> None:
        self._connector = connector
        self._generation = connector.generation
        self._uid = uid
        self._clock = clock
        self._told: dict[str, tuple[float, pb.LoadsReply]] = {}
        """By address, when and what was told last."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.change_s: float | None = None
        """What it takes that an engine is put to sleep and another woken, on the node where it takes longest; None: no node that is there
        knows."""

    async def loads(self, nodes: Mapping[str, NodeRecord]) -> Loads:
        """Of all engines, as far as their controllers answer."""
        addresses = {record.for_peers for record in nodes.values() if record.for_peers}
        if self._generation != self._connector.generation:  # what is open goes on with a certificate that ends
            self._generation = self._connector.generation
            await self.close()
        for gone in self._channels.keys() - addresses:
            await self._channels.pop(gone).close()
        found = await asyncio.gather(*map(self._ask, sorted(addresses)))
        now = self._clock.monotonic()
        self._told |= {
            at: (now, reply) for at, reply in zip(sorted(addresses), found, strict=True) if reply is not None
        }
        self._told = {at: told for at, told in self._told.items() if at in addresses and now < told[0] + STALE_S}
        replies = [reply for _, (_, reply) in sorted(self._told.items())]
        unseated: dict[str, int] = {}
        for reply in replies:
            for pool, count in reply.unseated.items():
                unseated[pool] = unseated.get(pool, 0) + count
        self.change_s = max((reply.change_s for reply in replies if reply.change_s > 0), default=None)
        engines = {load.key: load for reply in replies for load in map(_load, reply.engines)}
        tokens, foreseen = sum(reply.left_tokens for reply in replies), sum(reply.foreseen for reply in replies)
        return Loads(tuple(engines.values()), unseated, tokens, foreseen)

    async def _ask(self, address: str) -> pb.LoadsReply | None:
        channel = self._channels.get(address) or self._channels.setdefault(address, self._connector.channel(address))
        stub: Any = VersionedStub(placement_pb2_grpc.PlacementStub(channel))  # type: ignore[no-untyped-call]
        with contextlib.suppress(grpc.aio.AioRpcError):
            reply: pb.LoadsReply = await stub.Loads(pb.LoadsRequest(job_uid=self._uid), timeout=ANSWER_S)
            return reply
        return None

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


def _load(told: pb.EngineLoad) -> EngineLoad:
    return EngineLoad(told.node, told.slot, told.judge, told.running, told.waiting, told.ready, told.asleep)
