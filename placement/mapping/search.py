"""The first placement of a job: all layouts, those that fit ranked by predicted step time.

Of those that do not fit, the nearest of each kind is kept, with which process exceeds what by how much; hints name the fields of the
spec that would change the answer.

Predicted times (seconds) follow from what the parts of a step compute, read and send. A device's figures are its maker's; real programs
reach a part of them, and those parts are named assumptions below. So a prediction is good for a ranking, and its absolute value is a
guess, which the job's own measurements replace from its first steps on.

Facts that nodes and jobs do not report are not guessed: a sentence stands in their place. Where an accelerator's speed is not known, the
layout is planned with memory alone. Networks and the shared folder have the defaults of a cluster's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gcore.config.spec import JobSpec
from gcore.errors import DataError, UsageError
from gcore.ledger.records.cluster import ModelConfigs, SlotFacts
from placement.mapping.cluster import Accelerator, ClusterSpec, parse_cluster
from placement.mapping.memory import MemoryExcess, MemoryFit, SlotMemory, fit_memory, judge_replicas
from placement.mapping.workload import (
    EngineWorkload,
    JobShapes,
    MeanLengths,
    ModelShape,
    PoolLayout,
    TrainWorkload,
    Workload,
    all_layouts,
    layouts_within,
    make_workload,
    read_shape,
)
from placement.slots import NodeSlots, Split, SplitBounds

DECODING_SHARE = 0.6
"""Of a memory's bandwidth that decoding reaches."""

READING_SHARE = 0.5
"""Of a device's operations that reading prompts reaches."""

TRAINING_SHARE = 0.4
"""Of a device's operations that forward and backward reach."""

SENDING_SHARE = 0.7
"""Of a link's bandwidth that collectives reach."""

SEND_S = 1e-5
"""Of one collective, whatever its size."""

SWITCH_GB_S = 16.0
"""Host memory to device and back, when models sleep and wake, for each slot."""

UPDATE_BYTES = 28
"""Read and written for each parameter that an optimizer updates: master, two moments and gradient."""


@dataclass(frozen=True, slots=True)
class EngineReplica:
    """An engine: slots that it spans, rows that it runs at once."""

    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """What there is, as far as time depends on it. `network_gb_s`: between ranks of different nodes, None where there is one node."""

    device: Accelerator
    network_gb_s: float | None
    storage_gb_s: float

    @classmethod
    def of(cls, cluster: ClusterSpec) -> MachineSpeed:
        """The weakest of its devices."""
        network = cluster.network_gb_s if cluster.node_count > 1 else None
        return cls(cluster.device, network, cluster.storage_gb_s)

    @property
    def item(self) -> int:
        """Bytes of a served weight."""
        return 2 if self.device.is_gpu else 4

    def serve_s(self, served: EngineWorkload, replicas: int, replica: EngineReplica) -> float:
        """Until all that a step asks of a model is answered, by so many replicas.

        The last one is as long as any may be, and runs alone at its end.
        """
        if not served.requests:
            return 0.0
        each = served.requests / replicas
        rows = min(float(replica.rows), max(1.0, each))
        context = served.read + served.written / 2
        steps = each * served.written / rows
        read_tokens = each * served.read / min(served.shared, each if each > 1 else 1)
        tail = max(0.0, served.longest_written - served.written)
        return (
            self._read_s(served.shape, read_tokens, served.read, replica.size)
            + steps * self._decode_s(served.shape, rows, context, replica.size)
            + tail * self._decode_s(served.shape, 1.0, float(served.longest), replica.size)
        )

    def _decode_s(self, shape: ModelShape, rows: float, context: float, size: int) -> float:
        """One more token of each of `rows`."""
        device = self.device
        read = self.item * (shape.computing + rows * context * shape.cache_numbers)
        reading = read / size / (device.bandwidth_gb_s * 1e9 * DECODING_SHARE)
        computing = 2 * rows * shape.computing / size / (device.tflops * 1e12 * READING_SHARE)
        return max(reading, computing) + shape.layers * device.launch_s + self._share_s(shape, rows, size)

    def _read_s(self, shape: ModelShape, tokens: float, length: float, size: int) -> float:
        speed = self.device.tflops * 1e12 * READING_SHARE
        body = shape.layers * shape.layer_parameters
        return tokens * (2 * body + attention_ops(shape, length)) / size / speed + self._share_s(shape, tokens, size)

    def _share_s(self, shape: ModelShape, tokens: float, size: int) -> float:
        """What slots of one replica tell each other of `tokens`: two sums a layer."""
        if size == 1:
            return 0.0
        sent = 2 * tokens * shape.width * self.item * (size - 1) / size
        return 2 * shape.layers * (SEND_S + sent / (self.device.link_gb_s * 1e9 * SENDING_SHARE))

    def train_s(self, training: TrainWorkload, ranks: int) -> float:
        """A step's passes and updates on so many ranks."""
        device, total = self.device, 0.0
        tokens = training.samples * training.tokens
        for name, shape in training.models.items():
            forward = 2 * shape.computing + attention_ops(shape, training.tokens)
            passes = float((4 if training.recomputes else 3) * training.epochs)
            passes += training.forwards if name == "policy training" else 1.0
            total += tokens * forward * passes / ranks / (device.tflops * 1e12 * TRAINING_SHARE)
            updates = training.mini_batches * training.epochs
            micro = max(1.0, tokens / training.mini_batches / ranks / training.micro_tokens) * updates
            total += micro * 4 * shape.layers * device.launch_s
            total += updates * UPDATE_BYTES * shape.parameters / ranks / (device.bandwidth_gb_s * 1e9 * DECODING_SHARE)
            total += self._exchange_s(shape, training, ranks, updates, micro)
        return total

    def _exchange_s(
        self, shape: ModelShape, training: TrainWorkload, ranks: int, updates: float, micro: float
    ) -> float:
        """What ranks tell each other: gradients and new weights of each update; at stage 3 the weights of each pass."""
        if ranks == 1:
            return 0.0
        weights = (2 if training.half else 4) * shape.parameters * (ranks - 1) / ranks
        times = 3 * micro if training.stage == 3 else 2 * updates + (updates if training.stage == 1 else micro)
        return times * (weights / (self._between_ranks(ranks) * 1e9 * SENDING_SHARE) + SEND_S * shape.layers)

    def _between_ranks(self, ranks: int) -> float:
        """GB/s; ranks are dealt to the nodes in turn, so they meet over the network as soon as there are two nodes."""
        link = self.device.link_gb_s
        return link if self.network_gb_s is None or ranks == 1 else min(link, self.network_gb_s)

    def publish_s(self, served: EngineWorkload) -> float:
        """New weights to the shared folder, and from there to each node."""
        return 2 * self.item * served.shape.parameters / (self.storage_gb_s * 1e9)

    def switch_s(self, slept: float) -> float:
        """To put so many bytes of a slot to sleep and to wake them again."""
        return 2 * slept / (SWITCH_GB_S * 1e9)


def attention_ops(shape: ModelShape, length: float) -> float:
    """Operations of a token's attention over half of `length` tokens, in all layers."""
    return 2 * shape.layers * shape.heads * shape.head_dim * length


BETTER = 0.95
"""A hint is given where the step would take at most so much of what it takes."""


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """Predicted seconds of a step's parts. `ahead`: the next responses are made while this step is trained."""

    rollout: float
    judging: float
    training: float
    publishing: float
    switching: float
    in_turn: bool
    ahead: bool

    @property
    def step(self) -> float:
        """From commit to commit. Judges of their own slots work beside rollout, else after it."""
        produced = self.rollout + self.judging if self.in_turn else max(self.rollout, self.judging)
        learned = self.training + self.publishing
        if self.ahead and not self.in_turn:
            return max(produced, learned)
        return produced + learned + self.switching


@dataclass(frozen=True, slots=True)
class FittingLayout:
    """A way that fits, and what it is predicted to take."""

    way: PoolLayout
    room: MemoryFit
    times: PredictedTimes


@dataclass(frozen=True, slots=True)
class RejectedLayouts:
    """Ways of one kind that do not fit: the one that is nearest to it, and how many there are."""

    way: PoolLayout
    excess: MemoryExcess
    count: int


@dataclass(frozen=True, slots=True)
class LayoutSearchResult:
    """`fits`: the best first. `misfits`: the nearest first. `hints`: sentences about the spec."""

    fits: tuple[FittingLayout, ...]
    misfits: tuple[RejectedLayouts, ...]
    hints: tuple[str, ...]

    @property
    def first(self) -> FittingLayout | None:
        """What the job can be started with."""
        return next((fit for fit in self.fits if fit.way.starts), None)


def search_layouts(workload: Workload, cluster: ClusterSpec) -> LayoutSearchResult:
    """Try them all."""
    fits, misfits = _tried(all_layouts(cluster, workload), workload, cluster)
    return LayoutSearchResult(fits, misfits, tuple(_hints(workload, cluster, fits)))


@dataclass(frozen=True, slots=True)
class FirstLayout:
    """What a job begins with before anything of it was measured: the best of `count` ways that fit. `untimed`: why it is only the first
    of them, for want of figures."""

    fit: FittingLayout
    count: int
    untimed: str = ""

    @property
    def split(self) -> Split:
        """Its split."""
        return self.fit.way.split

    @property
    def expected_s(self) -> float | None:
        """What a step is predicted to take."""
        return None if self.untimed else self.fit.times.step

    @property
    def reason(self) -> str:
        """Why."""
        if self.untimed:
            which = f"it is the first of {self.count} ways that fit" if self.count > 1 else "it alone fits"
            return f"nothing is measured yet, and {self.untimed}: {which}"
        which = f"of {self.count} ways that fit it" if self.count > 1 else "it alone fits, and"
        least = "least, " if self.count > 1 else ""
        return f"nothing is measured yet: {which} is predicted to take {least}{self.fit.times.step:.3g} s a step"

    @property
    def cut(self) -> str:
        """Which engines want more memory for their caches than there is, and what to write against that; or nothing."""
        cells, bound = dict(self.fit.room.cells), self.fit.room.bound
        keys = {
            name: "rollout.cache_tokens" if name == "rollout" else f"serving.cache_tokens of {name}" for name in bound
        }
        rooms = [f"{name} has room for a cache of {cells[name]} tokens" for name in bound]
        told = " and ".join(f"{keys[name]}: {cells[name]}" for name in bound)
        return f"{', '.join(rooms)} and takes more unless it is told not to ({told})" if bound else ""


def choose_first_layout(
    workload: Workload, cluster: ClusterSpec, bounds: SplitBounds, untimed: str = ""
) -> FirstLayout | RejectedLayouts | None:
    """What a job begins with, of what can be started as its spec stands: ways in which an engine that is left to itself would take more
    than there is come last. Misfits: nothing fits, and this is the nearest to it. None: there are too few slots. `untimed`: why no time
    can be predicted."""
    gpu = cluster.device.is_gpu
    fits, misfits = _tried(layouts_within(bounds, workload, gpu=gpu), workload, cluster)
    if not fits:
        return next(iter(misfits), None)
    if untimed:
        order = {way: number for number, way in enumerate(layouts_within(bounds, workload, gpu=gpu))}
        return FirstLayout(min(fits, key=lambda fit: (bool(fit.room.bound), order[fit.way])), len(fits), untimed)
    return FirstLayout(min(fits, key=lambda fit: (bool(fit.room.bound), fit.times.step, fit.way)), len(fits))


def _tried(
    some: Iterable[PoolLayout], workload: Workload, cluster: ClusterSpec
) -> tuple[tuple[FittingLayout, ...], tuple[RejectedLayouts, ...]]:
    memory, machine = SlotMemory.of(cluster), MachineSpeed.of(cluster)
    fits: list[FittingLayout] = []
    failed: dict[tuple[object, ...], RejectedLayouts] = {}
    for way in some:
        found = fit_memory(way, workload, cluster, memory)
        if isinstance(found, MemoryFit):
            fits.append(FittingLayout(way, found, predict_times(way, found, workload, machine)))
            continue
        spans = (way.rollout_size, way.reward_size) if found.engines else ()
        kind = (way.split.mode, way.asleep, spans, found.names, bool(found.where))
        known = failed.get(kind)
        if known is None:
            failed[kind] = RejectedLayouts(way, found, 1)
        else:
            nearer = (found.over, not way.starts, way) < (known.excess.over, not known.way.starts, known.way)
            nearest = RejectedLayouts(way, found, 0) if nearer else known
            failed[kind] = replace(nearest, count=known.count + 1)
    fits.sort(key=lambda fit: (fit.times.step, fit.way))
    misfits = sorted(failed.values(), key=lambda one: (one.excess.over, one.way))
    return tuple(fits), tuple(misfits)


def predict_times(way: PoolLayout, room: MemoryFit, workload: Workload, machine: MachineSpeed) -> PredictedTimes:
    """The step's parts."""
    rows = dict(room.rows)
    rollout = EngineReplica(way.rollout_size, rows["rollout"])
    judging = sum(
        machine.serve_s(judge, judge_replicas(judge, way), EngineReplica(way.reward_size, rows[judge.name]))
        for judge in workload.judges
    )
    return PredictedTimes(
        rollout=machine.serve_s(workload.rollout, way.split.rollout // way.rollout_size, rollout),
        judging=judging,
        training=machine.train_s(workload.training, way.ranks),
        publishing=machine.publish_s(workload.rollout),
        switching=machine.switch_s(room.slept),
        in_turn=way.split.mode == "colocated",
        ahead=workload.ahead,
    )


def _hints(workload: Workload, cluster: ClusterSpec, fits: Sequence[FittingLayout]) -> Iterator[str]:
    now = next((fit for fit in fits if fit.way.starts), None)
    for words, training in _alternatives(workload.training):
        other = replace(workload, training=training)
        others, _ = _tried(all_layouts(cluster, other), other, cluster)
        best = next((fit for fit in others if fit.way.starts), None)
        if best is None:
            continue
        if now is None:
            yield f"With {words} {best.way} would fit, at a predicted {best.times.step:.3g} s a step"
        elif best.times.step < BETTER * now.times.step:
            yield f"With {words} {best.way} is predicted to take {best.times.step:.3g} s a step instead of {now.times.step:.3g} s"
    if now is None and any(fit.way.starts is False for fit in fits):
        yield "What fits has engines that span several slots, which SGLang's can: set engine: sglang, and plan anew"


def _alternatives(training: TrainWorkload) -> Iterator[tuple[str, TrainWorkload]]:
    for stage in (1, 2, 3):
        if stage != training.stage:
            yield f"train.zero_stage: {stage}", replace(training, stage=stage)
    if not training.recomputes:
        yield "train.activation_checkpointing: true", replace(training, recomputes=True)
        if training.stage != 3:
            both = replace(training, recomputes=True, stage=3)
            yield "train.zero_stage: 3 and train.activation_checkpointing: true", both


CALLED: Mapping[str, str] = {
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
}
"""By what the driver calls an accelerator, its name in `placement.mapping.cluster`."""

CORE = "cpu-core"

NO_FIGURES: dict[str, Any] = {"tflops": 1.0, "bandwidth_gb_s": 1.0, "link_gb_s": 1.0}
"""In the place of what is not known: times that follow from it are not looked at."""


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """The nodes that are there. `untimed`: why no time can be predicted; empty where it can."""

    cluster: ClusterSpec
    untimed: str = ""


def describe_nodes(nodes: Sequence[NodeSlots]) -> KnownNodes | str:
    """What the nodes are, or why that is not known."""
    there = [node for node in nodes if node.slots]
    silent = sorted(node.node for node in there if node.facts is None)
    if silent or not there:
        return _silent(silent)
    kinds: dict[tuple[int, str, bool], dict[str, Any]] = {}
    for node in there:
        assert node.facts is not None
        known = {slot.slot: slot for slot in node.facts.slots}
        slots = [known[name] for name in node.slots if name in known]
        memories = {slot.memory_gib for slot in slots}
        if len(slots) < len(node.slots) or (None in memories and len(memories) > 1):
            return f"{node.node} does not tell alike of all its slots"
        device = _device(slots)
        kind = kinds.setdefault((len(slots), device, None in memories), {"count": 0})
        kind["count"] += 1
        _keep_least(kind, "host_memory_gib", node.facts.host_memory_gib)
        if None not in memories:
            _keep_least(kind, "memory_gib", min(memory for memory in memories if memory is not None))
    unknown = sorted({device for _, device, is_core in kinds if not is_core and device not in CALLED})
    tree = [_tree(*key) | kind for key, kind in kinds.items()]
    try:
        cluster = parse_cluster({"nodes": tree}, where="the nodes that are there")
    except UsageError as error:
        return error.what
    return KnownNodes(cluster, f"how fast {unknown[0] or 'a GPU'} is is not known" if unknown else "")


def describe_workload(spec: JobSpec, models: ModelConfigs | None) -> Workload | str:
    """What a step of the job is, or why that is not known."""
    if models is None:
        return "what the job's models are was not kept"
    served = [judge.name for judge in spec.served_judges]
    try:
        shapes = JobShapes(
            policy=read_shape(models.policy, where="model.path"),
            critic=None if models.critic is None else read_shape(models.critic, where="train.critic.path"),
            judges={name: read_shape(models.judges.get(name, {}), where=f"judge {name}") for name in served},
        )
    except DataError as error:
        return f"{error.where}: {error.what}"
    return make_workload(spec, shapes, MeanLengths.guessed(spec, shapes.policy))


def _silent(nodes: Sequence[str]) -> str:
    if len(nodes) < 2:
        return f"{nodes[0]} tells no memory" if nodes else "no node is there"
    more = f" and {len(nodes) - 2} more" if len(nodes) > 2 else ""
    return f"{nodes[0]}{',' if more else ' and'} {nodes[1]}{more} tell no memory"


def _device(slots: Sequence[SlotFacts]) -> str:
    """What they are called, if all are called alike."""
    names = {slot.device for slot in slots}
    return names.pop() if len(names) == 1 else ""


def _keep_least(kind: dict[str, Any], name: str, value: float) -> None:
    kind[name] = min(kind.get(name, value), value)


def _tree(accelerators: int, device: str, is_core: bool) -> dict[str, Any]:
    base: dict[str, Any] = {"accelerators": accelerators}
    if is_core:
        return base | {"device": CORE}
    return base | ({"device": CALLED[device]} if device in CALLED else NO_FIGURES)
