"""How long the parts of a step take on given devices, by what they compute, read and send. Pure.

A device's figures are its maker's; real programs reach a part of them, and those parts are assumptions that stand here by name. So
a predicted time is good for putting ways in order, and its absolute value is to be taken as a guess: what a job measures of
itself replaces it from its first steps on. Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.mapping.cluster import Cluster
from placement.mapping.devices import Device
from placement.mapping.shapes import ModelShape
from placement.mapping.workload import Served, Training

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
class Replica:
    """An engine: slots that it spans, rows that it runs at once."""

    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is, as far as time depends on it. `network_gb_s`: between ranks of different nodes, None where there is one node."""

    device: Device
    network_gb_s: float | None
    storage_gb_s: float

    @classmethod
    def of(cls, cluster: Cluster) -> Machine:
        """The weakest of its devices."""
        network = cluster.network_gb_s if cluster.node_count > 1 else None
        return cls(cluster.device, network, cluster.storage_gb_s)

    @property
    def item(self) -> int:
        """Bytes of a served weight."""
        return 2 if self.device.is_gpu else 4

    def serve_s(self, served: Served, replicas: int, replica: Replica) -> float:
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
        return tokens * (2 * body + attention(shape, length)) / size / speed + self._share_s(shape, tokens, size)

    def _share_s(self, shape: ModelShape, tokens: float, size: int) -> float:
        """What slots of one replica tell each other of `tokens`: two sums a layer."""
        if size == 1:
            return 0.0
        sent = 2 * tokens * shape.width * self.item * (size - 1) / size
        return 2 * shape.layers * (SEND_S + sent / (self.device.link_gb_s * 1e9 * SENDING_SHARE))

    def train_s(self, training: Training, ranks: int) -> float:
        """A step's passes and updates on so many ranks."""
        device, total = self.device, 0.0
        tokens = training.samples * training.tokens
        for name, shape in training.models.items():
            forward = 2 * shape.computing + attention(shape, training.tokens)
            passes = float((4 if training.recomputes else 3) * training.epochs)
            passes += training.forwards if name == "policy training" else 1.0
            total += tokens * forward * passes / ranks / (device.tflops * 1e12 * TRAINING_SHARE)
            updates = training.mini_batches * training.epochs
            micro = max(1.0, tokens / training.mini_batches / ranks / training.micro_tokens) * updates
            total += micro * 4 * shape.layers * device.launch_s
            total += updates * UPDATE_BYTES * shape.parameters / ranks / (device.bandwidth_gb_s * 1e9 * DECODING_SHARE)
            total += self._exchange_s(shape, training, ranks, updates, micro)
        return total

    def _exchange_s(self, shape: ModelShape, training: Training, ranks: int, updates: float, micro: float) -> float:
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

    def publish_s(self, served: Served) -> float:
        """New weights to the shared folder, and from there to each node."""
        return 2 * self.item * served.shape.parameters / (self.storage_gb_s * 1e9)

    def switch_s(self, slept: float) -> float:
        """To put so many bytes of a slot to sleep and to wake them again."""
        return 2 * slept / (SWITCH_GB_S * 1e9)


def attention(shape: ModelShape, length: float) -> float:
    """Operations of a token's attention over half of `length` tokens, in all layers."""
    return 2 * shape.layers * shape.heads * shape.head_dim * length
