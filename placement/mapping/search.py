"""Find the first placement of a job: enumerate all layouts (split, slots per engine, memory mode) and rank those that
fit into memory by predicted step time.

Of the layouts that do not fit, the closest one of each kind is kept, with the models that exceed the memory and by how
much. Hints name the fields of the spec that would change the result.

A predicted time (seconds) is the sum of the computation, memory traffic and communication of each part of a step.
Device figures are the maker's; the constants below say which share of them real programs are assumed to reach. So
predictions can rank layouts, but their absolute values are rough. Measurements of the job replace them from its first
steps on.

If a node or a job does not report a fact, it is not guessed: the result is then a sentence that says what is missing.
If the speed of an accelerator is not known, only memory is planned. Networks and the shared folder are assumed to have
the default bandwidths of a cluster file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gcore.config.capabilities import ENGINES, having
from gcore.config.spec import JobSpec
from gcore.errors import DataError, UsageError
from gcore.ledger.records.cluster import ModelConfigs, SlotFacts
from placement.mapping.cluster import Accelerator, ClusterSpec, parse_cluster
from placement.mapping.memory import MemoryExcess, MemoryFit, SlotMemory, fit_memory, judge_replicas
from placement.mapping.pictures import DenoiserShape
from placement.mapping.workload import (
    EngineWorkload,
    JobShapes,
    MeanLengths,
    ModelShape,
    PolicyShape,
    PoolLayout,
    TrainWorkload,
    Workload,
    all_layouts,
    layouts_within,
    make_workload,
    read_policy,
    read_shape,
)
from placement.slots import NodeSlots, Split, SplitBounds, count_noun

DECODING_SHARE = 0.6
"""Share of the memory bandwidth that decoding reaches."""

READING_SHARE = 0.5
"""Share of the device's peak operations that prefill reaches."""

TRAINING_SHARE = 0.4
"""Share of the device's peak operations that forward and backward passes reach."""

SENDING_SHARE = 0.7
"""Share of the link bandwidth that collectives reach."""

SEND_S = 1e-5
"""Latency of one collective, in seconds."""

SWITCH_GB_S = 16.0
"""Bandwidth between host memory and device during sleep and wake, per slot."""

UPDATE_BYTES = 28
"""Bytes read and written per parameter in an optimizer update: master weights, two moments and gradient."""


@dataclass(frozen=True, slots=True)
class EngineReplica:
    """One engine. `size`: slots that it spans. `rows`: its maximum of concurrent requests."""

    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Speed of the hardware. `network_gb_s`: between ranks of different nodes; None if there is one node."""

    device: Accelerator
    network_gb_s: float | None
    storage_gb_s: float

    @classmethod
    def of(cls, cluster: ClusterSpec) -> MachineSpeed:
        """Return the speed of the weakest devices of a cluster."""
        network = cluster.network_gb_s if cluster.node_count > 1 else None
        return cls(cluster.device, network, cluster.storage_gb_s)

    @property
    def item(self) -> int:
        """Bytes per weight of a served model."""
        return 2 if self.device.is_gpu else 4

    def serve_s(self, served: EngineWorkload, replicas: int, replica: EngineReplica) -> float:
        """Return the seconds until `replicas` engines have answered all requests of a step to one model.

        The longest response is assumed to run alone from the mean length on.
        """
        if not served.requests:
            return 0.0
        each, shape = served.requests / replicas, served.shape
        if isinstance(shape, DenoiserShape):
            return self._draw_s(shape, served, each, replica.rows)
        rows = min(float(replica.rows), max(1.0, each))
        context = served.read + served.written / 2
        steps = each * served.written / rows
        prompts = each / min(served.shared, each if each > 1 else 1)
        tail = max(0.0, served.longest_written - served.written)
        return (
            self._read_s(shape, prompts * served.read, served.read, replica.size)
            + self._encode_s(shape, prompts * served.patches, replica.size)
            + steps * self._decode_s(shape, rows, context, replica.size)
            + tail * self._decode_s(shape, 1.0, float(served.longest), replica.size)
        )

    def _draw_s(self, shape: DenoiserShape, served: EngineWorkload, pictures: float, rows: int) -> float:
        """Return the seconds in which an engine generates this many pictures, at most `rows` at once: their denoising steps,
        the text encoders for each prompt, and decoding. All pictures have equally many steps, so they come in batches."""
        speed = self.device.tflops * 1e12 * READING_SHARE
        batch = min(float(rows), max(1.0, pictures))
        full, rest = divmod(max(pictures, 1.0), batch)
        denoising = served.written * (full * self._pass_s(shape, batch) + (rest > 0) * self._pass_s(shape, rest))
        encoding = pictures / served.shared * 2 * shape.encoders * shape.text_tokens / speed
        return denoising + encoding + pictures * shape.decoding / speed

    def _pass_s(self, shape: DenoiserShape, pictures: float) -> float:
        """Return the seconds of a denoising step of this many pictures: all passes of the network."""
        device = self.device
        reading = self.item * shape.parameters / (device.bandwidth_gb_s * 1e9 * DECODING_SHARE)
        computing = pictures * shape.pass_ops / (device.tflops * 1e12 * READING_SHARE)
        return shape.passes * (max(reading, computing) + shape.layers * device.launch_s)

    def _decode_s(self, shape: ModelShape, rows: float, context: float, size: int) -> float:
        """Return the seconds in which an engine of `size` slots decodes one token of each of `rows` requests.
        `context`: tokens in the KV cache per request."""
        device = self.device
        read = self.item * (shape.computing + rows * context * shape.cache_numbers)
        reading = read / size / (device.bandwidth_gb_s * 1e9 * DECODING_SHARE)
        computing = 2 * rows * shape.computing / size / (device.tflops * 1e12 * READING_SHARE)
        return max(reading, computing) + shape.layers * device.launch_s + self._share_s(shape, rows, size)

    def _read_s(self, shape: ModelShape, tokens: float, length: float, size: int) -> float:
        """Return the seconds to prefill `tokens` tokens of prompts that are `length` tokens long."""
        speed = self.device.tflops * 1e12 * READING_SHARE
        body = shape.layers * shape.layer_parameters
        return tokens * (2 * body + attention_ops(shape, length)) / size / speed + self._share_s(shape, tokens, size)

    def _encode_s(self, shape: ModelShape, patches: float, size: int) -> float:
        """Return the seconds in which an engine of `size` slots encodes this many patches of pictures."""
        if shape.tower is None:
            return 0.0
        return patches * shape.tower.forward_ops() / size / (self.device.tflops * 1e12 * READING_SHARE)

    def _share_s(self, shape: ModelShape, tokens: float, size: int) -> float:
        """Return the seconds of communication between the `size` slots of one engine while it computes `tokens`: two
        all-reduces per layer (tensor parallel)."""
        if size == 1:
            return 0.0
        sent = 2 * tokens * shape.width * self.item * (size - 1) / size
        return 2 * shape.layers * (SEND_S + sent / (self.device.link_gb_s * 1e9 * SENDING_SHARE))

    def train_s(self, training: TrainWorkload, ranks: int) -> float:
        """Return the seconds of training on a step's samples: forward and backward passes, optimizer updates and the
        communication between `ranks` ranks."""
        device, total = self.device, 0.0
        tokens = training.samples * training.tokens
        for name, shape in training.models.items():
            passes = float((4 if training.recomputes else 3) * training.epochs)
            passes += training.forwards if name == "policy training" else 1.0
            if isinstance(shape, DenoiserShape):  # the second pass of a step has no gradient
                passes += (shape.passes - 1) * (training.epochs + training.forwards)
                forward = shape.pass_ops * training.rows / training.tokens
            else:
                forward = 2 * shape.computing + attention_ops(shape, training.tokens)
            total += tokens * forward * passes / ranks / (device.tflops * 1e12 * TRAINING_SHARE)
            updates = training.mini_batches * training.epochs
            micro = tokens / training.mini_batches / (ranks / training.together) / training.micro_tokens
            micro = max(1.0, micro) * updates
            total += micro * 4 * shape.layers * device.launch_s
            total += updates * UPDATE_BYTES * shape.parameters / ranks / (device.bandwidth_gb_s * 1e9 * DECODING_SHARE)
            total += self._exchange_s(shape, training, ranks, updates, micro)
            if isinstance(shape, ModelShape):
                total += self._heads_s(shape, training, tokens * passes / ranks, micro * passes)
                total += self._see_s(shape, training, ranks)
        return total

    def _see_s(self, shape: ModelShape, training: TrainWorkload, ranks: int) -> float:
        """Return the seconds of the vision tower's passes in the training on a step's samples. Frozen parts have forward
        passes only."""
        if shape.tower is None:
            return 0.0
        trained = [part for part in ("vision", "projector") if part not in training.frozen]
        backward = (3 if training.recomputes else 2) * training.epochs * shape.tower.forward_ops(trained)
        ops = (training.epochs + training.forwards) * shape.tower.forward_ops() + backward
        return training.encoded * ops / ranks / (self.device.tflops * 1e12 * TRAINING_SHARE)

    def _heads_s(self, shape: ModelShape, training: TrainWorkload, tokens: float, times: float) -> float:
        """Return the seconds in which the ranks of a sequence group exchange tokens for heads (Ulysses): two all-to-alls
        per layer. `tokens`: those that a rank computes in all passes; `times`: number of micro-batches in all passes."""
        together = training.together
        if together == 1:
            return 0.0
        kv_heads = math.lcm(shape.kv_heads, together)  # they are repeated where the group does not divide them
        numbers = 2 * (shape.heads + kv_heads) * shape.head_dim * (together - 1) / together
        sent = tokens * numbers * (2 if training.half else 4)
        return shape.layers * (sent / (self._between_ranks(together) * 1e9 * SENDING_SHARE) + 2 * times * SEND_S)

    def _exchange_s(
        self, shape: PolicyShape, training: TrainWorkload, ranks: int, updates: float, micro: float
    ) -> float:
        """Return the seconds of communication between ranks. At ZeRO stages 1 and 2 they exchange gradients and updated
        weights; at stage 3 also the weights for each pass. `updates`: optimizer updates; `micro`: micro-batches of a
        rank."""
        if ranks == 1:
            return 0.0
        weights = (2 if training.half else 4) * shape.parameters * (ranks - 1) / ranks
        times = 3 * micro if training.stage == 3 else 2 * updates + (updates if training.stage == 1 else micro)
        return times * (weights / (self._between_ranks(ranks) * 1e9 * SENDING_SHARE) + SEND_S * shape.layers)

    def _between_ranks(self, ranks: int) -> float:
        """Return the bandwidth between two ranks in GB/s. Ranks are placed round robin over the nodes, so if there are
        several nodes they communicate over the network."""
        link = self.device.link_gb_s
        return link if self.network_gb_s is None or ranks == 1 else min(link, self.network_gb_s)

    def publish_s(self, served: EngineWorkload) -> float:
        """Return the seconds to write new weights to the shared folder and read them on each node."""
        return 2 * self.item * served.shape.parameters / (self.storage_gb_s * 1e9)

    def transfer_s(self, blob_bytes: int, nodes: int) -> float:
        """Return the seconds in which blobs made on all nodes come to the controllers that hold their groups, and from there to
        the ranks that train them. On one node they stay where they are."""
        if self.network_gb_s is None:
            return 0.0
        return 2 * blob_bytes / nodes * (nodes - 1) / nodes / (self.network_gb_s * 1e9 * SENDING_SHARE)

    def switch_s(self, slept: float) -> float:
        """Return the seconds to move `slept` bytes of a slot's memory to host memory and back."""
        return 2 * slept / (SWITCH_GB_S * 1e9)


def attention_ops(shape: ModelShape, length: float) -> float:
    """Return the operations per token of attention in all layers, in a sequence of `length` tokens: with a causal mask
    a token attends to half of them on average."""
    return 2 * shape.layers * shape.heads * shape.head_dim * length


BETTER = 0.95
"""A hint is given only if it reduces the step time to at most this share."""


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """Predicted seconds of the parts of a step. `publishing`: weight sync. `switching`: sleep and wake at phase
    changes. `in_turn`: co-located, so the parts follow each other. `ahead`: the next responses are generated while this
    step trains. `transferring`: of the blobs of responses to other nodes."""

    rollout: float
    judging: float
    training: float
    publishing: float
    switching: float
    in_turn: bool
    ahead: bool
    transferring: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of a whole step, from commit to commit. Judges with slots of their own work concurrently with
        rollout, otherwise after it."""
        produced = self.rollout + self.judging if self.in_turn else max(self.rollout, self.judging)
        learned = self.transferring + self.training + self.publishing
        if self.ahead and not self.in_turn:
            return max(produced, learned)
        return produced + learned + self.switching


@dataclass(frozen=True, slots=True)
class FittingLayout:
    """A layout that fits (`way`), with its memory use (`room`) and predicted times."""

    way: PoolLayout
    room: MemoryFit
    times: PredictedTimes


@dataclass(frozen=True, slots=True)
class RejectedLayouts:
    """Layouts of one kind that do not fit: the one with the smallest excess of memory, and how many there are."""

    way: PoolLayout
    excess: MemoryExcess
    count: int


@dataclass(frozen=True, slots=True)
class LayoutSearchResult:
    """Result of a search. `fits`: layouts that fit, the fastest first. `misfits`: kinds of layouts that do not fit,
    smallest excess first. `hints`: sentences that name changes of the spec which would help."""

    fits: tuple[FittingLayout, ...]
    misfits: tuple[RejectedLayouts, ...]
    hints: tuple[str, ...]

    @property
    def first(self) -> FittingLayout | None:
        """The fastest layout with which the job can start without a change of its spec."""
        return next((fit for fit in self.fits if fit.way.starts), None)


def search_layouts(workload: Workload, cluster: ClusterSpec) -> LayoutSearchResult:
    """Check and rank all layouts of a job on a cluster."""
    fits, misfits = _tried(all_layouts(cluster, workload), workload, cluster)
    return LayoutSearchResult(fits, misfits, tuple(_hints(workload, cluster, fits)))


@dataclass(frozen=True, slots=True)
class FirstLayout:
    """The layout with which a job starts before any measurement: the fastest of `count` layouts that fit. `untimed`:
    why no times could be predicted, in which case it is just the first layout that fits; empty: times are predicted."""

    fit: FittingLayout
    count: int
    untimed: str = ""

    @property
    def split(self) -> Split:
        """The split of the layout."""
        return self.fit.way.split

    @property
    def expected_s(self) -> float | None:
        """Predicted seconds of a step."""
        return None if self.untimed else self.fit.times.step

    @property
    def reason(self) -> str:
        """Sentence that says why the layout was chosen."""
        if self.untimed:
            which = f"it is the first of {self.count} ways that fit" if self.count > 1 else "it alone fits"
            return f"nothing is measured yet, and {self.untimed}: {which}"
        which = f"of {self.count} ways that fit it" if self.count > 1 else "it alone fits, and"
        least = "least, " if self.count > 1 else ""
        return f"nothing is measured yet: {which} is predicted to take {least}{self.fit.times.step:.3g} s a step"

    @property
    def cut(self) -> str:
        """Warning that names engines whose KV cache must be smaller than their default, and the fields of the spec to
        set; empty if there are none."""
        cells, rows, bound = dict(self.fit.room.cells), dict(self.fit.room.rows), self.fit.room.bound
        rooms, settings = [], []
        for name in bound:
            if name not in cells:
                rooms.append(f"{name} has room for {count_noun(rows[name], 'picture')} at once")
                settings.append(f"rollout.batch_slots: {rows[name]}")
                continue
            key = "rollout.cache_tokens" if name == "rollout" else f"serving.cache_tokens of {name}"
            rooms.append(f"{name} has room for a cache of {cells[name]} tokens")
            settings.append(f"{key}: {cells[name]}")
        return (
            f"{', '.join(rooms)} and by default takes more memory than that: set {' and '.join(settings)}"
            if bound
            else ""
        )


def choose_first_layout(
    workload: Workload, cluster: ClusterSpec, bounds: SplitBounds, untimed: str = ""
) -> FirstLayout | RejectedLayouts | None:
    """Choose the layout with which a job starts under its present spec.

    Layouts in which an engine's default KV cache would not fit are chosen only if there is no other. `untimed`: why no
    times can be predicted; empty if they can. Return RejectedLayouts (the closest layout) if nothing fits, and None if
    there are too few slots for any layout.
    """
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
    """Return the layouts that fit, the fastest first, and the others by kind, smallest excess first."""
    memory, machine = SlotMemory.of(cluster), MachineSpeed.of(cluster)
    fits: list[FittingLayout] = []
    failed: dict[tuple[object, ...], RejectedLayouts] = {}
    for way in some:
        found = fit_memory(way, workload, cluster, memory)
        if isinstance(found, MemoryFit):
            times = predict_times(way, found, workload, machine, cluster.node_count)
            fits.append(FittingLayout(way, found, times))
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


def predict_times(
    way: PoolLayout, room: MemoryFit, workload: Workload, machine: MachineSpeed, nodes: int = 1
) -> PredictedTimes:
    """Predict the seconds of each part of a step with a layout. `room`: its memory use. `nodes`: of the cluster."""
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
        transferring=machine.transfer_s(workload.blob_bytes, nodes),
    )


def _hints(workload: Workload, cluster: ClusterSpec, fits: Sequence[FittingLayout]) -> Iterator[str]:
    """Yield sentences that name changes of the spec with which a layout would fit or be faster."""
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
        yield (
            "Only layouts with engines over several slots fit, and the spec's engines support none: set engine: "
            f"{having(ENGINES, 'several_slots')} and run gcore plan again"
        )


def _alternatives(training: TrainWorkload) -> Iterator[tuple[str, TrainWorkload]]:
    """Yield changes of the spec's `train` section that reduce memory or communication, with the resulting work."""
    for stage in (1, 2) if training.followed else (1, 2, 3):
        if stage != training.stage:
            yield f"train.zero_stage: {stage}", replace(training, stage=stage)
    drawn = isinstance(training.models["policy training"], DenoiserShape)
    if not training.recomputes and not drawn:
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
"""Keys of `placement.mapping.cluster.DEVICES`, by the device name that the driver reports."""

CORE = "cpu-core"

NO_FIGURES: dict[str, Any] = {"tflops": 1.0, "bandwidth_gb_s": 1.0, "link_gb_s": 1.0}
"""Placeholder figures of an accelerator whose speed is not known. Times predicted with them are not used."""


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """Description of the present nodes. `untimed`: why no times can be predicted for them; empty if they can."""

    cluster: ClusterSpec
    untimed: str = ""


def describe_nodes(nodes: Sequence[NodeSlots]) -> KnownNodes | str:
    """Describe the present nodes as a cluster, from the facts that they report. If facts are missing or contradictory,
    return a sentence that says which."""
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
            return f"{node.node} reports different devices or memory for its slots"
        device = _device(slots)
        kind = kinds.setdefault((len(slots), device, None in memories), {"count": 0})
        kind["count"] += 1
        _keep_least(kind, "host_memory_gib", node.facts.host_memory_gib)
        if None not in memories:
            _keep_least(kind, "memory_gib", min(memory for memory in memories if memory is not None))
    unknown = sorted({device for _, device, is_core in kinds if not is_core and device not in CALLED})
    tree = [_tree(*key) | kind for key, kind in kinds.items()]
    try:
        cluster = parse_cluster({"nodes": tree}, where="the present nodes")
    except UsageError as error:
        return error.what
    return KnownNodes(cluster, f"the speed of {unknown[0] or 'a GPU'} is not known" if unknown else "")


def describe_workload(spec: JobSpec, models: ModelConfigs | None) -> Workload | str:
    """Describe the work of one step of a job. `models`: configurations of its models. If they are missing or not
    supported, return a sentence that says so."""
    if models is None:
        return "the configurations of the job's models were not recorded"
    served = [judge.name for judge in spec.served_judges]
    try:
        shapes = JobShapes(
            policy=read_policy(models.policy, where="model.path"),
            critic=None if models.critic is None else read_shape(models.critic, where="train.critic.path"),
            judges={name: read_shape(models.judges.get(name, {}), where=f"judge {name}") for name in served},
        )
    except DataError as error:
        return f"{error.where}: {error.what}"
    return make_workload(spec, shapes, MeanLengths.guessed(spec, shapes.policy))


def _silent(nodes: Sequence[str]) -> str:
    """Return the sentence that names nodes which report no facts."""
    if len(nodes) < 2:
        return f"{nodes[0]} reports no memory" if nodes else "no node is present"
    more = f" and {len(nodes) - 2} more" if len(nodes) > 2 else ""
    return f"{nodes[0]}{',' if more else ' and'} {nodes[1]}{more} report no memory"


def _device(slots: Sequence[SlotFacts]) -> str:
    """Return the device name if all slots report the same one, else an empty string."""
    names = {slot.device for slot in slots}
    return names.pop() if len(names) == 1 else ""


def _keep_least(kind: dict[str, Any], name: str, value: float) -> None:
    kind[name] = min(kind.get(name, value), value)


def _tree(accelerators: int, device: str, is_core: bool) -> dict[str, Any]:
    base: dict[str, Any] = {"accelerators": accelerators}
    if is_core:
        return base | {"device": CORE}
    return base | ({"device": CALLED[device]} if device in CALLED else NO_FIGURES)
