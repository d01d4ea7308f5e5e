"""The processes that `gcore run` would start here, for `gcore validate`. Starts nothing."""

from __future__ import annotations

import asyncio

from controllers.cli.local import deal_slots, shared_memory_gib
from controllers.machine import node_facts
from gcore.config import JobSpec
from gcore.emulated.launch import is_emulated
from gcore.ledger.facts import ModelConfigs
from placement.beginning import begun
from placement.plan import NodeSlots, Snapshot


def processes_of(spec: JobSpec, controllers: int, slots: str, models: ModelConfigs | None) -> list[dict[str, str]]:
    """Every process that `gcore run` would start, by the code that places them."""
    shares = deal_slots(slots, controllers)
    of_all = sum(map(len, shares))

    async def nodes_here() -> tuple[NodeSlots, ...]:
        looks = spec.placement.is_live and models is not None
        facts = [await node_facts(s, shared_memory_gib(len(s), of_all)) if looks else None for s in shares]
        return tuple(NodeSlots(f"node-{i}", share, facts[i]) for i, share in enumerate(shares))

    nodes = asyncio.run(nodes_here())
    plan = begun(Snapshot(nodes), spec, models).plan
    rows = [{"process": "etcd", "node": "this machine", "slot": "-"}]
    rows += [{"process": "controller", "node": n.node, "slot": " ".join(n.slots)} for n in nodes]
    kinds = {slot: "emulated" if is_emulated(slot) else spec.rollout.engine for n in nodes for slot in n.slots}
    served_by = {judge.name: judge.serving.engine for judge in spec.judges}
    rows += [
        {
            "process": (f"judge {e.judge} ({served_by[e.judge]})" if e.judge else f"rollout engine ({kinds[e.slot]})")
            + ", asleep" * e.asleep,
            "node": e.node,
            "slot": " ".join(e.slots),
        }
        for e in plan.engines
    ]
    rows += [
        {"process": f"train rank {r.rank}{' (emulated)' * is_emulated(r.slot)}", "node": r.node, "slot": r.slot}
        for r in plan.ranks
    ]
    return rows
