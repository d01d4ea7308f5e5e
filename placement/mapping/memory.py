"""Estimate the memory of engines and train ranks, and check which layouts and splits fit on the slots.

Memory of a train rank: FSDP2 splits weights, gradients and optimizer state between the ranks, and gathers a layer while
it computes, and at stages 1 and 2 until its backward pass. DeepSpeed partitions the optimizer state between the ranks at ZeRO stage 1, also the gradients
at stage 2, and also the weights at stage 3, where it gathers them while it uses them. A gradient bucket is as large as
the model, up to `BUCKET`. Activations are those that autograd keeps in each layer of a transformers decoder; with
sequence parallelism a rank has those of its slice of a micro-batch. `make bench-memory` compares these numbers with real
processes.

A policy that generates pictures (`placement.mapping.pictures`) has no KV cache: its engine has room for a number of running
pictures. Its ranks hold the network only, and activations of the rows of a micro-batch: trained steps of pictures.

A layout fits if each slot holds the processes that share it: a rank with the models that it trains, engines with
weights and KV cache. Each engine gets the cache that it wants if there is room, else a proportional part of what is
left, but never less than one request of maximum length needs.

`bound_by_memory` removes splits that cannot fit. It only removes train worlds whose ranks do not fit on slots of their
own or into host memory, and co-location if ranks and engines do not fit together; the number of a pool's engines hardly
changes the memory of one. If no split would remain, it removes none, because these are estimates and a running job must
continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.mapping.cluster import GIB, NODE_GIB, ClusterSpec
from placement.mapping.pictures import STATE_HELD, DenoiserShape
from placement.mapping.workload import (
    EngineWorkload,
    ModelShape,
    PolicyShape,
    PoolLayout,
    TrainWorkload,
    Workload,
)
from placement.slots import Split, SplitBounds, count_noun, feasible

BUCKET = 500_000_000
"""Maximum number of values that DeepSpeed sends at once."""

GATHERED = 1_000_000_000
"""Maximum number of parameters that stage 3 keeps gathered (DeepSpeed's `stage3_max_live_parameters`)."""

MASTER, MOMENTS = 4, 8
"""Bytes per parameter of the optimizer's float32 weights, and of Adam's two moments."""

PIECE = 1 << 22
"""Number of logits whose log-probabilities are computed together, in float32."""

IDLE_TOKENS = 8192
"""Maximum number of prompt tokens that the torch engine prefills at once."""

FOREIGN_CPU_TOKENS = 65536
"""Minimum tokens of the KV cache of SGLang and vLLM on a CPU if the spec sets no number."""

COLUMNS = 64
"""The torch engine's KV cache is a table of requests by token positions. Full size: twice the longest request plus this
many positions."""

SLACK = 32
"""Minimum size of that table: the longest request plus this many positions."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that one model needs on its slot. `stays`: at all times. `works`: in addition while it computes."""

    name: str
    stays: int
    works: int


def activation_bytes(shape: PolicyShape, training: TrainWorkload, ranks: int) -> int:
    """Return the bytes that a rank keeps for the backward pass of the largest micro-batch: activations and logits."""
    item = 2 if training.half else 4
    if isinstance(shape, DenoiserShape):
        rows = micro_tokens(training, ranks) // training.longest
        return int(rows * (item * shape.kept_numbers + 4 * STATE_HELD * shape.state))
    tokens = -(-micro_tokens(training, ranks) // training.together)
    layer = item * (6 * shape.width + 4 * shape.inner + _attention_numbers(shape))
    kept = item * shape.width * shape.layers + layer if training.recomputes else layer * shape.layers
    scored = tokens * training.scored
    # Logits, their gradient, and a few rows of each in float32.
    logits = scored * shape.outputs * item * 2 + 2 * 4 * min(PIECE, scored * shape.outputs)
    return int(tokens * (kept + 3 * item * shape.width) + logits) + tower_bytes(shape, training, ranks)


def most_patches(shape: ModelShape, training: TrainWorkload, ranks: int) -> int:
    """Return the patches of the largest micro-batch: the bound of the spec, or those of a micro-batch that has nothing but
    pictures, whichever is smaller. 0 without pictures."""
    return 0 if shape.tower is None else min(training.patches, shape.tower.merged * micro_tokens(training, ranks))


def tower_bytes(shape: ModelShape, training: TrainWorkload, ranks: int) -> int:
    """Return the bytes that the vision tower keeps for the backward pass of the largest micro-batch; if the tower is
    frozen, those of the layer that computes."""
    if shape.tower is None:
        return 0
    item, one = (2 if training.half else 4), shape.tower
    frozen = "vision" in training.frozen
    values = (
        replace(one, layers=1).activation_numbers(recomputes=False)
        if frozen
        else one.activation_numbers(recomputes=training.recomputes)
    )
    return item * most_patches(shape, training, ranks) * values


@dataclass(frozen=True, slots=True)
class TrainMemory:
    """Bytes of one trained model on one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def need(self) -> tuple[int, int]:
        """Bytes at all times (weights, optimizer), and additional bytes during computation (gradients, activations)."""
        return self.weights + self.optimizer, self.gradients + self.activations


def train_memory(
    shape: PolicyShape, training: TrainWorkload, ranks: int, *, gpu: bool, lora_rank: int = 0
) -> TrainMemory:
    """Compute the memory of a trained model on one of `ranks` ranks. `lora_rank`: of its adapters, which alone are
    trained; 0: all of it is."""
    item, count = 2 if training.half else 4, shape.parameters
    trained = min(count, shape.adapter_parameters(lora_rank)) if lora_rank else count
    if shape == training.models.get("policy training"):
        trained -= shape.frozen_parameters(training.frozen)
    part = -(-trained // ranks)
    working = activation_bytes(shape, training, ranks)
    if training.half and not gpu:  # while the model loads, its weights are also in memory in float32
        working = max(working, 4 * count)
    if training.fsdp:
        return _fsdp_memory(shape, training, part, working, gpu=gpu, frozen=-(-(count - trained) // ranks))
    bucket = item * min(trained, BUCKET)
    if training.stage == 3:
        weights = item * -(-count // ranks)
        gradients = item * (part + min(count, GATHERED)) + bucket
        if ranks > 1:  # collectives send a flat copy; gloo makes another one
            gradients += bucket if gpu else 2 * bucket
    else:
        weights = item * count
        gradients = item * (trained if training.stage == 1 else part) + bucket
    gradients += 4 * part  # the optimizer uses float32
    return TrainMemory(weights, gradients, (MASTER + MOMENTS) * part, working)


def _fsdp_memory(
    shape: PolicyShape, training: TrainWorkload, part: int, activations: int, *, gpu: bool, frozen: int
) -> TrainMemory:
    """Compute the memory of a model of which FSDP2 gives each rank `part` trained and `frozen` other parameters."""
    item, layer = 2 if training.half else 4, shape.layer_parameters
    rest = shape.parameters - shape.layers * layer
    # The parameters outside of layers stay gathered; of the layers, the current one and the next.
    gathered = rest + 2 * layer if training.stage == 3 else shape.parameters
    gradients = (item + 4) * max(rest, layer)  # of one layer, as computed and in float32, while it is reduced
    offloads = training.state_offloads and gpu
    stays, frozen = (0, 0) if offloads else (part, frozen)
    if not gpu:  # while the model loads, all of its weights are in memory in float32
        activations = max(activations, MASTER * shape.parameters)
    weights = item * (gathered + frozen)
    return TrainMemory(weights, gradients + 4 * stays, (MASTER + MOMENTS) * stays, activations)


def _attention_numbers(shape: ModelShape) -> int:
    """Count the values that attention keeps per token and layer for the backward pass: queries, keys, values and the
    output. Norms of queries and keys keep these once more."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 3 * queries + 2 * keys + 2 * (queries + keys) * shape.head_norms


def micro_tokens(training: TrainWorkload, ranks: int) -> int:
    """Return the tokens of the largest micro-batch of a rank or sequence group: the spec's limit or all tokens of its
    mini-batch, whichever is smaller, but at least the longest sample, or the largest row."""
    own = -(-training.samples * training.together // (ranks * training.mini_batches)) * training.longest
    own = int(own * training.rows)
    return max(training.longest, min(training.micro_tokens, own))


def reference_bytes(shape: PolicyShape, training: TrainWorkload, ranks: int) -> int:
    """Return the bytes of the frozen reference model on one rank."""
    item = 2 if training.half else 4
    return item * (-(-shape.parameters // ranks) if training.stage == 3 else shape.parameters)


def rank_needs(training: TrainWorkload, ranks: int, *, gpu: bool) -> tuple[MemoryNeed, ...]:
    """List the memory of one rank by model: each trained model, and the reference model. On a GPU the reference model
    may be kept in host memory while it does not compute."""
    needs = [
        MemoryNeed(
            name,
            *train_memory(
                shape, training, ranks, gpu=gpu, lora_rank=training.lora_rank if name == "policy training" else 0
            ).need,
        )
        for name, shape in training.models.items()
    ]
    if training.reference and not training.lora_rank:  # without its adapters the policy is the reference
        size = reference_bytes(training.models["policy training"], training, ranks)
        needs.append(
            MemoryNeed("reference", 0, size) if gpu and training.offloads else MemoryNeed("reference", size, 0)
        )
    if training.followed:
        item = 2 if training.half else 4
        needs.append(MemoryNeed("network that follows", item * training.models["policy training"].parameters, 0))
    return tuple(needs)


def rank_host_bytes(training: TrainWorkload) -> int:
    """Return the host memory in bytes that a GPU rank needs while it loads: complete float32 weights of all trained
    models, and of the reference model if it is offloaded."""
    loading = sum(4 * shape.parameters for shape in training.models.values())
    kept = training.reference and training.offloads and not training.lora_rank
    more = kept + (training.followed and training.half)  # float32 weights of a network that computes in bfloat16
    return loading + 4 * more * training.models["policy training"].parameters


def checkpoint_bytes(training: TrainWorkload) -> int:
    """Return the host memory in bytes that rank 0 needs for the copy of a checkpoint that it writes in the background:
    twelve bytes per trained parameter, and four per frozen one."""
    policy = training.models["policy training"]
    frozen = policy.frozen_parameters(training.frozen)
    saved = policy.adapter_parameters(training.lora_rank) if training.lora_rank else policy.parameters - frozen
    others = sum(shape.parameters for name, shape in training.models.items() if name != "policy training")
    return (MASTER + MOMENTS) * (saved + others) + MASTER * frozen


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of an engine on each slot that it spans.

    `works`: bytes in addition to weights and cache while it computes or loads. `cell`: bytes of one token in the KV
    cache. `least`, `wanted`: tokens that the cache must hold for one request of maximum length, and those that it
    should hold for all concurrent requests. Of a policy that generates pictures, cells are running pictures.
    """

    name: str
    weights: int
    works: int
    cell: int
    least: int
    wanted: int

    def stays(self, cells: int) -> int:
        """Return the bytes that the engine holds at all times with a KV cache of `cells` tokens."""
        return self.weights + self.cell * cells


def engine_memory(served: EngineWorkload, *, size: int, rows: int, gpu: bool) -> EngineMemory:
    """Compute the memory of an engine that spans `size` slots and serves at most `rows` concurrent requests."""
    item, shape = 2 if gpu else 4, served.shape
    if isinstance(shape, DenoiserShape):
        return _pipeline_memory(served.name, shape, rows, item, gpu=gpu)
    if served.longest_written == 0:  # a classifier has no KV cache
        least = wanted = 0
    elif served.engine == "torch":
        least, wanted = served.longest + SLACK, rows * (2 * served.longest + COLUMNS)
    elif gpu or served.engine == "hf":
        least, wanted = served.longest, rows * served.longest
    else:  # SGLang and vLLM allocate the whole cache at start
        least = wanted = served.cache_tokens or max(FOREIGN_CPU_TOKENS, served.longest)
    if served.cache_tokens is not None:
        wanted = max(least, min(wanted, served.cache_tokens))
    read = min(IDLE_TOKENS, max(served.longest, rows * int(served.read + 1)))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    reading = read * item * (4 * shape.width + 3 * shape.inner + 2 * queries + 2 * keys + shape.cache_numbers)
    if shape.tower is not None:  # a prompt may be nothing but pictures
        reading += read * shape.tower.merged * item * (6 * shape.tower.width + 2 * shape.tower.inner)
    drawing = rows * shape.outputs * (item + 3 * 4) if served.longest_written else 0
    weights = -(-item * shape.parameters // size)
    cell = -(-item * (shape.cache_numbers + shape.kv_heads * (served.engine == "torch")) // size)
    # In host memory the file being loaded is present beside the weights, but no requests are.
    loading = 0 if gpu else weights - cell * wanted
    return EngineMemory(
        served.name,
        weights=weights,
        works=max(reading // size, drawing // size, loading),
        cell=cell,
        least=least,
        wanted=wanted,
    )


def _pipeline_memory(name: str, shape: DenoiserShape, rows: int, item: int, *, gpu: bool) -> EngineMemory:
    """Compute the memory of an engine that runs at most `rows` pictures. It measures at its start how many fit."""
    weights, cell = item * shape.served_parameters, int(item * shape.held_numbers + 4 * STATE_HELD * shape.state)
    # In host memory the largest file being loaded is present beside the weights, but no pictures run.
    largest = item * max(shape.parameters, shape.encoders, shape.decoder)
    return EngineMemory(
        name, weights, works=0 if gpu else max(0, largest - cell * rows), cell=cell, least=1, wanted=max(1, rows)
    )


def rows_in_cache(served: EngineWorkload, cells: int, rows: int) -> int:
    """Return the number of concurrent requests, at most `rows`, that fit into a KV cache of `cells` tokens."""
    if served.longest_written == 0:
        return rows
    if isinstance(served.shape, DenoiserShape):
        return max(1, min(rows, cells))
    if served.engine == "torch":
        return max(1, min(rows, cells // (served.longest + SLACK)))
    return max(1, min(rows, int(cells / max(1.0, served.read + served.written))))


PROCESS_GIB = 0.8
"""Memory of a GPU process for its context and the workspaces of libraries."""

HOST_PROCESS_GIB = 0.45
"""Host memory of a process that has imported torch."""

RESERVE = 0.05
"""Share of GPU memory that allocators lose to fragmentation."""

HOST_RESERVE = 0.1
"""Share of a CPU slot's memory that is kept free, because estimates may be this much too low
(docs/operate/scheduling.md#the-first-placement-gcore-plan)."""


@dataclass(frozen=True, slots=True)
class MemoryExcess:
    """Models that together need too much memory: `over` bytes more than `memory`, on each of `slots` slots.

    `names`: the models. `engines`: whether engines are among them. `where`: describes the memory if it is not that of a
    slot (host memory, or an engine's share).
    """

    names: tuple[str, ...]
    slots: int
    memory: float
    over: float
    engines: bool
    where: str = ""

    def __str__(self) -> str:
        verb = "exceed" if len(self.names) > 1 else "exceeds"
        what = self.where or f"{self.memory / GIB:.4g} GiB on {count_noun(self.slots, 'slot')}"
        return f"{' + '.join(self.names)} {verb} {what} by {format_gib(self.over)}"


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Memory use of a layout that fits.

    `used`: bytes on a slot of each pool. `cells`, `rows`: by engine name, the tokens of its KV cache and the concurrent
    requests that fit into it; an engine for pictures has no tokens and is only in `rows`. `bound`: engines whose cache is smaller than wanted. `slept`: bytes per slot that move to
    host memory when models sleep.
    """

    used: tuple[tuple[str, float], ...]
    cells: tuple[tuple[str, int], ...]
    rows: tuple[tuple[str, int], ...]
    bound: tuple[str, ...]
    slept: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """Memory of one slot in bytes. `all_of_it`: total. `limit`: total without the reserve. `process`: used by each
    process besides its model. `gpu`: whether the device has its own memory."""

    limit: float
    all_of_it: float
    gpu: bool
    process: float

    @classmethod
    def of(cls, cluster: ClusterSpec) -> SlotMemory:
        """Return the memory of the weakest slot. A CPU slot has a part of its host's memory."""
        device = cluster.device
        if device.memory_gib is None:
            whole = cluster.host_gib_of_a_slot * GIB
            limit = whole * (1 - HOST_RESERVE) - NODE_GIB / cluster.smallest_node * GIB
            return cls(limit, whole, False, HOST_PROCESS_GIB * GIB)
        return cls(device.memory_gib * GIB * (1 - RESERVE), device.memory_gib * GIB, True, PROCESS_GIB * GIB)


def fit_memory(
    layout: PoolLayout, workload: Workload, cluster: ClusterSpec, memory: SlotMemory
) -> MemoryFit | MemoryExcess:
    """Check whether the layout fits into the memory of slots and hosts. Return its memory use, or the largest
    excess."""
    found = _on_slots(layout, workload, memory)
    if isinstance(found, MemoryExcess):
        return found
    return _host_excess(layout, workload, cluster, memory) or found


def world_excess(
    layout: PoolLayout, workload: Workload, cluster: ClusterSpec, memory: SlotMemory
) -> MemoryExcess | None:
    """Return the excess of memory if the train ranks do not fit even without engines beside them, else None."""
    alone = _together("train", rank_needs(workload.training, layout.ranks, gpu=memory.gpu), [], layout.ranks, memory)
    return alone if isinstance(alone, MemoryExcess) else _host_excess(layout, workload, cluster, memory)


def _on_slots(layout: PoolLayout, workload: Workload, memory: SlotMemory) -> MemoryFit | MemoryExcess:
    ranks = rank_needs(workload.training, layout.ranks, gpu=memory.gpu)
    rollout = [_engine(workload.rollout, layout.rollout_size, layout.split.rollout // layout.rollout_size, memory)]
    judges = [_engine(judge, layout.reward_size, judge_replicas(judge, layout), memory) for judge in workload.judges]
    if layout.split.mode == "colocated":
        engines = [*rollout, *judges]
        if layout.asleep:
            return _asleep(layout, ranks, engines, memory)
        return _together("every slot", ranks, engines, layout.ranks, memory)
    parts = [
        _together("train", ranks, [], layout.split.train, memory),
        _together("rollout", (), rollout, layout.split.rollout, memory, asleep=len(judges) * workload.resident),
    ]
    if judges:
        parts.append(_together("reward", (), judges, layout.split.reward, memory, asleep=int(workload.resident)))
    return _worst(parts) or _joined([part for part in parts if isinstance(part, MemoryFit)])


def judge_replicas(judge: EngineWorkload, layout: PoolLayout) -> int:
    """Return how many engines a judge gets: as many replicas as the pool has room for, up to the number in the spec."""
    most = max(1, layout.split.reward // layout.reward_size)
    return most if judge.replicas is None else min(most, judge.replicas)


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine with its memory need. `rows`: maximum of concurrent requests."""

    served: EngineWorkload
    need: EngineMemory
    rows: int


def _engine(served: EngineWorkload, size: int, replicas: int, memory: SlotMemory) -> _Engine:
    rows = max(1, min(served.rows, -(-served.requests // max(1, replicas))))
    return _Engine(served, engine_memory(served, size=size, rows=rows, gpu=memory.gpu), rows)


def _together(
    pool: str,
    ranks: Sequence[MemoryNeed],
    engines: Sequence[_Engine],
    slots: int,
    memory: SlotMemory,
    *,
    asleep: int = 0,
) -> MemoryFit | MemoryExcess:
    """Check whether ranks and engines fit on one slot if all of them keep their memory. Ranks do not compute while
    engines do; engines compute concurrently.

    `pool`: label of the result. `slots`: number of such slots. `asleep`: number of further engines that sleep on the
    slot; of these only the memory of the process without its model counts.
    """
    processes = memory.process * (len(engines) + bool(ranks) + asleep)
    working = max(sum(one.need.works for one in engines), max((need.works for need in ranks), default=0))
    held = processes + working + sum(need.stays for need in ranks)
    return _with_caches(pool, [need.name for need in ranks], engines, held, slots, memory)


def _asleep(
    layout: PoolLayout, ranks: Sequence[MemoryNeed], engines: Sequence[_Engine], memory: SlotMemory
) -> MemoryFit | MemoryExcess:
    """Check whether a co-located layout fits if ranks and engines sleep in turns: engines while the ranks sleep, and
    the ranks while the engines sleep. A process whose model sleeps still takes `memory.process`."""
    processes = memory.process * (len(engines) + 1)
    training = processes + sum(need.stays for need in ranks) + max(need.works for need in ranks)
    serving = processes + sum(one.need.works for one in engines)
    found = _with_caches("every slot", [], engines, serving, layout.split.rollout, memory)
    if training > memory.limit:
        names, over = tuple(need.name for need in ranks), training - memory.limit
        return _worst([found, MemoryExcess(names, layout.ranks, memory.all_of_it, over, engines=False)]) or found
    if isinstance(found, MemoryExcess):
        return found
    slept = sum(need.stays for need in ranks) + sum(one.need.weights for one in engines)
    used = (("every slot", max(training, found.used[0][1])),)
    return MemoryFit(used, found.cells, found.rows, found.bound, slept)


def _with_caches(
    pool: str, names: Sequence[str], engines: Sequence[_Engine], held: float, slots: int, memory: SlotMemory
) -> MemoryFit | MemoryExcess:
    """Divide what `held` bytes leave of a slot's memory between its engines. Engines with a fixed share of
    the device take it in any case; the others divide the rest. `names`: models that use the `held` bytes, for the error
    message."""
    shared = [one for one in engines if memory.gpu and one.served.share is not None]
    free = [one for one in engines if one not in shared]
    problems = [_share_excess(one, slots, memory) for one in shared]
    held += sum(_share(one, memory) for one in shared)
    left = memory.limit - held - sum(one.need.stays(one.need.least) for one in free)
    if left < 0:
        named = (*names, *(one.need.name for one in engines))
        problems.append(MemoryExcess(named, slots, memory.all_of_it, -left, engines=bool(engines)))
    if (worst := _worst(problems)) is not None:
        return worst
    more = [one.need.cell * (one.need.wanted - one.need.least) for one in free]
    part = min(1.0, left / sum(more)) if sum(more) else 1.0
    cells = [(one, one.need.least + int(part * (one.need.wanted - one.need.least))) for one in free]
    used = held + sum(one.need.stays(count) for one, count in cells)
    cells += [(one, int((_share(one, memory) - one.need.weights) // max(1, one.need.cell))) for one in shared]
    return MemoryFit(
        used=((pool, used),),
        cells=tuple((one.need.name, count) for one, count in cells if isinstance(one.served.shape, ModelShape)),
        rows=tuple((one.need.name, rows_in_cache(one.served, count, one.rows)) for one, count in cells),
        bound=tuple(one.need.name for one in free if part < 1.0),
    )


def _share(one: _Engine, memory: SlotMemory) -> float:
    """Return the bytes of an engine's fixed share of its device."""
    return (one.served.share or 0.0) * memory.all_of_it


def _share_excess(one: _Engine, slots: int, memory: SlotMemory) -> MemoryExcess | None:
    """Return the excess if the fixed share of an engine is too small for its weights and one request of maximum length,
    else None."""
    share, least = _share(one, memory), one.need.stays(one.need.least)
    if least <= share:
        return None
    what = f"the engine's {one.served.share:g} of {memory.all_of_it / GIB:.4g} GiB"
    return MemoryExcess(
        (f"{one.need.name} with one longest request",), slots, share, least - share, engines=True, where=what
    )


def _worst(found: Sequence[MemoryFit | MemoryExcess | None]) -> MemoryExcess | None:
    """Return the largest excess, or None if everything fits."""
    return max((one for one in found if isinstance(one, MemoryExcess)), key=lambda one: one.over, default=None)


def _joined(rooms: Sequence[MemoryFit]) -> MemoryFit:
    return MemoryFit(
        used=tuple(pair for one in rooms for pair in one.used),
        cells=tuple(pair for one in rooms for pair in one.cells),
        rows=tuple(pair for one in rooms for pair in one.rows),
        bound=tuple(name for one in rooms for name in one.bound),
    )


def _host_excess(
    layout: PoolLayout, workload: Workload, cluster: ClusterSpec, memory: SlotMemory
) -> MemoryExcess | None:
    """Return the excess of host memory on a GPU node, or None. There ranks load complete models, rank 0 keeps a copy of
    the checkpoint that it writes, and sleeping models keep their weights."""
    if not memory.gpu:
        return None
    kind = min(cluster.nodes, key=lambda one: one.host_memory_gib / one.accelerators)
    ranks = min(kind.accelerators, -(-layout.ranks // cluster.node_count))
    processes = HOST_PROCESS_GIB * GIB * 2 * kind.accelerators
    needed = processes + ranks * rank_host_bytes(workload.training) + checkpoint_bytes(workload.training)
    needed += kind.accelerators * _slept_of_engines(layout, workload)
    if layout.asleep:
        needed += ranks * sum(need.stays for need in rank_needs(workload.training, layout.ranks, gpu=True))
    limit = (kind.host_memory_gib - NODE_GIB) * GIB
    if needed <= limit:
        return None
    names = tuple(workload.training.models)
    what = f"{kind.host_memory_gib:.4g} GiB of host memory with {count_noun(ranks, 'rank')} a node"
    return MemoryExcess(names, layout.ranks, kind.host_memory_gib * GIB, needed - limit, engines=False, where=what)


def _slept_of_engines(layout: PoolLayout, workload: Workload) -> float:
    """Return the maximum bytes of sleeping engines' weights in host memory, per GPU slot."""
    policy = 2 * workload.rollout.parameters / layout.rollout_size
    judges = sum(2 * judge.shape.parameters for judge in workload.judges) / layout.reward_size
    if layout.asleep:
        return policy + judges
    return max(policy, judges) if workload.resident and layout.split.mode == "coexisting" else 0.0


def format_gib(size: float) -> str:
    """Format bytes, for example `1,220 GiB`, `11 GiB`, `0.4 GiB`."""
    if size >= 100 * GIB:
        return f"{size / GIB:,.0f} GiB"
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.3g} MiB"


def bound_by_memory(
    bounds: SplitBounds, workload: Workload, cluster: ClusterSpec, now: int | None = None
) -> SplitBounds:
    """Restrict `bounds` to the splits that fit into memory (see the module docstring). `now`: number of ranks of the
    present train world, which evidently fits."""
    memory = SlotMemory.of(cluster)
    together = bounds.all_together()
    colocated = False
    if together is not None:
        layout = PoolLayout(together, bounds.rollout_size, bounds.reward_size, workload.turns[-1 if memory.gpu else 0])
        colocated = isinstance(fit_memory(layout, workload, cluster, memory), MemoryFit)

    def fits(size: int) -> bool:
        split = Split("coexisting", bounds.slots - size, 0, size)
        return (
            world_excess(PoolLayout(split, bounds.rollout_size, bounds.reward_size, False), workload, cluster, memory)
            is None
        )

    keeps = {now, together.train if together is not None and colocated else None}
    sizes = tuple(size for size in bounds.train_sizes if size in keeps or fits(size))
    left = replace(bounds, train_sizes=sizes, colocated=colocated)
    return left if next(feasible(left), None) is not None else bounds
