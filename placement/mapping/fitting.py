"""Whether a way of placing the pools fits into memory, who it is that does not, and by how much. Pure.

On a slot lie what its pools are: a rank with the models it trains, engines with weights and cache. Engines get the cache that they
want if there is room, else what is left, shared by what they want; none gets less than one longest request takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.mapping.cluster import Cluster
from placement.mapping.devices import GIB, NODE_GIB
from placement.mapping.memory import (
    EngineNeed,
    Need,
    checkpoint_bytes,
    engine_need,
    rank_host_bytes,
    rank_needs,
    rows_in,
)
from placement.mapping.ways import Way
from placement.mapping.workload import Served, Workload
from placement.plan import counted

PROCESS_GIB = 0.8
"""Of a process on a GPU: its context, its libraries' workspaces."""
HOST_PROCESS_GIB = 0.45
"""Of a process that holds torch, in host memory."""
RESERVE = 0.05
"""Of a GPU's memory, for what allocators lose between pieces."""
HOST_RESERVE = 0.1
"""Of host memory that is a slot's: so much may an estimate be below what is taken (docs/first-placement.md)."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Who is together on each of `slots` slots, and by how many bytes that is more than `memory`. `where`: of what memory, if not
    the slots'; `engines`: whether engines are among them."""

    names: tuple[str, ...]
    slots: int
    memory: float
    over: float
    engines: bool
    where: str = ""

    def __str__(self) -> str:
        verb = "exceed" if len(self.names) > 1 else "exceeds"
        what = self.where or f"{self.memory / GIB:.4g} GiB on {counted(self.slots, 'slot')}"
        return f"{' + '.join(self.names)} {verb} {what} by {gib(self.over)}"


@dataclass(frozen=True, slots=True)
class Room:
    """A way that fits. `used`: bytes of the fullest slot of each pool; `cells`, `rows`: of each engine's cache, and what runs in
    it at once, by name; `bound`: engines that have less cache than they want."""

    used: tuple[tuple[str, float], ...]
    cells: tuple[tuple[str, int], ...]
    rows: tuple[tuple[str, int], ...]
    bound: tuple[str, ...]
    slept: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What a slot has. `limit`: bytes that may be planned with, `all_of_it`: bytes that there are."""

    limit: float
    all_of_it: float
    gpu: bool
    process: float

    @classmethod
    def of(cls, cluster: Cluster) -> Memory:
        """Of the weakest slot. A CPU slot has its part of its host's memory."""
        device = cluster.device
        if device.memory_gib is None:
            whole = cluster.host_gib_of_a_slot * GIB
            limit = whole * (1 - HOST_RESERVE) - NODE_GIB / cluster.smallest_node * GIB
            return cls(limit, whole, False, HOST_PROCESS_GIB * GIB)
        return cls(device.memory_gib * GIB * (1 - RESERVE), device.memory_gib * GIB, True, PROCESS_GIB * GIB)


def room(way: Way, workload: Workload, cluster: Cluster, memory: Memory) -> Room | Excess:
    """How it fits, or why not: into the slots, and into their hosts."""
    found = _on_slots(way, workload, memory)
    if isinstance(found, Excess):
        return found
    return _host_excess(way, workload, cluster, memory) or found


def world_excess(way: Way, workload: Workload, cluster: Cluster, memory: Memory) -> Excess | None:
    """Why its ranks do not fit on slots of their own, whatever the other slots do."""
    alone = _together("train", rank_needs(workload.training, way.ranks, gpu=memory.gpu), [], way.ranks, memory)
    return alone if isinstance(alone, Excess) else _host_excess(way, workload, cluster, memory)


def _on_slots(way: Way, workload: Workload, memory: Memory) -> Room | Excess:
    ranks = rank_needs(workload.training, way.ranks, gpu=memory.gpu)
    rollout = [_engine(workload.rollout, way.rollout_size, way.split.rollout // way.rollout_size, memory)]
    judges = [_engine(judge, way.reward_size, judge_replicas(judge, way), memory) for judge in workload.judges]
    if way.split.mode == "colocated":
        engines = [*rollout, *judges]
        if way.asleep:
            return _asleep(way, ranks, engines, memory)
        return _together("every slot", ranks, engines, way.ranks, memory)
    parts = [
        _together("train", ranks, [], way.split.train, memory),
        _together("rollout", (), rollout, way.split.rollout, memory, asleep=len(judges) * workload.resident),
    ]
    if judges:
        parts.append(_together("reward", (), judges, way.split.reward, memory, asleep=int(workload.resident)))
    return _worst(parts) or _joined([part for part in parts if isinstance(part, Room)])


def judge_replicas(judge: Served, way: Way) -> int:
    """Engines of a judge."""
    most = max(1, way.split.reward // way.reward_size)
    return most if judge.replicas is None else min(most, judge.replicas)


@dataclass(frozen=True, slots=True)
class _Engine:
    served: Served
    need: EngineNeed
    rows: int


def _engine(served: Served, size: int, replicas: int, memory: Memory) -> _Engine:
    rows = max(1, min(served.rows, -(-served.requests // max(1, replicas))))
    return _Engine(served, engine_need(served, size=size, rows=rows, gpu=memory.gpu), rows)


def _together(
    pool: str,
    ranks: Sequence[Need],
    engines: Sequence[_Engine],
    slots: int,
    memory: Memory,
    *,
    asleep: int = 0,
) -> Room | Excess:
    """All of these on one slot at the same time: ranks and engines compute in turn, engines beside one another.

    `asleep`: engines that sleep there besides, of which the process remains.
    """
    processes = memory.process * (len(engines) + bool(ranks) + asleep)
    working = max(sum(one.need.works for one in engines), max((need.works for need in ranks), default=0))
    held = processes + working + sum(need.stays for need in ranks)
    return _with_caches(pool, [need.name for need in ranks], engines, held, slots, memory)


def _asleep(way: Way, ranks: Sequence[Need], engines: Sequence[_Engine], memory: Memory) -> Room | Excess:
    """Engines while ranks sleep, and ranks while engines sleep; what sleeps keeps its process."""
    processes = memory.process * (len(engines) + 1)
    training = processes + sum(need.stays for need in ranks) + max(need.works for need in ranks)
    serving = processes + sum(one.need.works for one in engines)
    found = _with_caches("every slot", [], engines, serving, way.split.rollout, memory)
    if training > memory.limit:
        names, over = tuple(need.name for need in ranks), training - memory.limit
        return _worst([found, Excess(names, way.ranks, memory.all_of_it, over, engines=False)]) or found
    if isinstance(found, Excess):
        return found
    slept = sum(need.stays for need in ranks) + sum(one.need.weights for one in engines)
    used = (("every slot", max(training, found.used[0][1])),)
    return Room(used, found.cells, found.rows, found.bound, slept)


def _with_caches(
    pool: str, names: Sequence[str], engines: Sequence[_Engine], held: float, slots: int, memory: Memory
) -> Room | Excess:
    """Engines beside what is `held`. Some take a share of the memory, whatever they need; what is left is the others'."""
    shared = [one for one in engines if memory.gpu and one.served.share is not None]
    free = [one for one in engines if one not in shared]
    problems = [_share_excess(one, slots, memory) for one in shared]
    held += sum(_share(one, memory) for one in shared)
    left = memory.limit - held - sum(one.need.stays(one.need.least) for one in free)
    if left < 0:
        named = (*names, *(one.need.name for one in engines))
        problems.append(Excess(named, slots, memory.all_of_it, -left, engines=bool(engines)))
    if (worst := _worst(problems)) is not None:
        return worst
    more = [one.need.cell * (one.need.wanted - one.need.least) for one in free]
    part = min(1.0, left / sum(more)) if sum(more) else 1.0
    cells = [(one, one.need.least + int(part * (one.need.wanted - one.need.least))) for one in free]
    used = held + sum(one.need.stays(count) for one, count in cells)
    cells += [(one, int((_share(one, memory) - one.need.weights) // max(1, one.need.cell))) for one in shared]
    return Room(
        used=((pool, used),),
        cells=tuple((one.need.name, count) for one, count in cells),
        rows=tuple((one.need.name, rows_in(one.served, count, one.rows)) for one, count in cells),
        bound=tuple(one.need.name for one in free if part < 1.0),
    )


def _share(one: _Engine, memory: Memory) -> float:
    return (one.served.share or 0.0) * memory.all_of_it


def _share_excess(one: _Engine, slots: int, memory: Memory) -> Excess | None:
    """Why the share that an engine takes does not hold what it needs at least."""
    share, least = _share(one, memory), one.need.stays(one.need.least)
    if least <= share:
        return None
    what = f"SGLang's {one.served.share:g} of {memory.all_of_it / GIB:.4g} GiB"
    return Excess((f"{one.need.name} with one longest request",), slots, share, least - share, engines=True, where=what)


def _worst(found: Sequence[Room | Excess | None]) -> Excess | None:
    """Of what does not fit, that which lacks most."""
    return max((one for one in found if isinstance(one, Excess)), key=lambda one: one.over, default=None)


def _joined(rooms: Sequence[Room]) -> Room:
    return Room(
        used=tuple(pair for one in rooms for pair in one.used),
        cells=tuple(pair for one in rooms for pair in one.cells),
        rows=tuple(pair for one in rooms for pair in one.rows),
        bound=tuple(name for one in rooms for name in one.bound),
    )


def _host_excess(way: Way, workload: Workload, cluster: Cluster, memory: Memory) -> Excess | None:
    """GPUs' hosts: ranks load whole models there, and rank 0 keeps a copy of the checkpoint that is being written."""
    if not memory.gpu:
        return None
    kind = min(cluster.nodes, key=lambda one: one.host_memory_gib / one.accelerators)
    ranks = min(kind.accelerators, -(-way.ranks // cluster.node_count))
    processes = HOST_PROCESS_GIB * GIB * 2 * kind.accelerators
    needed = processes + ranks * rank_host_bytes(workload.training) + checkpoint_bytes(workload.training)
    needed += kind.accelerators * _slept_of_engines(way, workload)
    if way.asleep:
        needed += ranks * sum(need.stays for need in rank_needs(workload.training, way.ranks, gpu=True))
    limit = (kind.host_memory_gib - NODE_GIB) * GIB
    if needed <= limit:
        return None
    names = tuple(workload.training.models)
    what = f"{kind.host_memory_gib:.4g} GiB of host memory with {counted(ranks, 'rank')} a node"
    return Excess(names, way.ranks, kind.host_memory_gib * GIB, needed - limit, engines=False, where=what)


def _slept_of_engines(way: Way, workload: Workload) -> float:
    """Bytes of weights that wait in host memory, at most, for each slot of GPUs."""
    policy = 2 * workload.rollout.shape.parameters / way.rollout_size
    judges = sum(2 * judge.shape.parameters for judge in workload.judges) / way.reward_size
    if way.asleep:
        return policy + judges
    return max(policy, judges) if workload.resident and way.split.mode == "coexisting" else 0.0


def gib(size: float) -> str:
    """`1,220 GiB`, `11 GiB`, `0.4 GiB`."""
    if size >= 100 * GIB:
        return f"{size / GIB:,.0f} GiB"
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.3g} MiB"
