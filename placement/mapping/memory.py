"""What engines and train ranks take of a slot's memory: weights, gradients, optimizer, cache, activations. Pure.

Of a rank, as gcore trains (`gcore.train.trained`): DeepSpeed divides the optimizer's state among the ranks at stage 1, gradients too
at stage 2, and weights too at stage 3, where they are gathered while they are used. A bucket for gradients on their way is as
large as the model, up to `BUCKET`. Activations are those of a decoder of transformers, layer by layer, as autograd keeps them.

`make bench-memory` compares these numbers with real processes. Does not know which slots there are (`search`).
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.mapping.shapes import ModelShape
from placement.mapping.workload import Served, Training

BUCKET = 500_000_000
"""Numbers that DeepSpeed sends at once, at most."""
GATHERED = 1_000_000_000
"""Parameters that stage 3 keeps gathered at once, at most (DeepSpeed's `stage3_max_live_parameters`)."""
MASTER, MOMENTS = 4, 8
"""Bytes a parameter of the optimizer's own weights, and of Adam's two moments."""
PIECE = 1 << 22
"""Logits of which log-probabilities are made together, in float32."""
IDLE_TOKENS = 8192
"""Prompt tokens that the torch engine reads at once, at most."""
SGLANG_CPU_TOKENS = 65536
"""Cells of SGLang's cache on a CPU, for which none were said, at least."""
COLUMNS = 64
"""Columns of the torch engine's table beyond twice the longest row."""
SLACK = 32
"""Of them, those that it has at least beyond the longest."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one process takes of its slot: `stays` whatever it does, `works` on top of that while it computes."""

    name: str
    stays: int
    works: int


@dataclass(frozen=True, slots=True)
class Trained:
    """Bytes of a model that is trained, on one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def need(self) -> tuple[int, int]:
        """What stays, and what is there while it computes."""
        return self.weights + self.optimizer, self.gradients + self.activations


def trained(shape: ModelShape, training: Training, ranks: int, *, gpu: bool) -> Trained:
    """A model of the ranks', on one of them."""
    item, count = 2 if training.half else 4, shape.parameters
    part = -(-count // ranks)
    bucket = item * min(count, BUCKET)
    if training.stage == 3:
        weights = item * part
        gradients = item * (part + min(count, GATHERED)) + bucket
        if ranks > 1:  # what is sent is a flat copy; gloo makes one more for itself
            gradients += bucket if gpu else 2 * bucket
    else:
        weights = item * count
        gradients = item * (count if training.stage == 1 else part) + bucket
    gradients += 4 * part  # as the optimizer takes them
    working = activations(shape, training, ranks)
    if training.half and not gpu:  # while it loads, its weights are there in float32 as well
        working = max(working, 4 * count)
    return Trained(weights, gradients, (MASTER + MOMENTS) * part, working)


def activations(shape: ModelShape, training: Training, ranks: int) -> int:
    """What the backward pass of the largest micro-batch needs, and its logits."""
    item = 2 if training.half else 4
    tokens = micro_tokens(training, ranks)
    layer = item * (6 * shape.width + 4 * shape.inner + _attention_numbers(shape))
    kept = item * shape.width * shape.layers + layer if training.recomputes else layer * shape.layers
    scored = tokens * training.scored
    # Logits, their gradient, and a few rows of either in float32.
    logits = scored * shape.outputs * item * 2 + 2 * 4 * min(PIECE, scored * shape.outputs)
    return int(tokens * (kept + 3 * item * shape.width) + logits)


def _attention_numbers(shape: ModelShape) -> int:
    """Of a token in one layer: queries, keys and values as they are attended with, what comes out; norms of heads keep them once more."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 3 * queries + 2 * keys + 2 * (queries + keys) * shape.head_norms


def micro_tokens(training: Training, ranks: int) -> int:
    """Tokens of the largest micro-batch: what the spec allows, if a rank has as many; never less than the longest sample."""
    own = -(-training.samples // (ranks * training.mini_batches)) * training.longest
    return max(training.longest, min(training.micro_tokens, own))


def reference_bytes(shape: ModelShape, training: Training, ranks: int) -> int:
    """The frozen model that the policy is held against, on one rank."""
    item = 2 if training.half else 4
    return item * (-(-shape.parameters // ranks) if training.stage == 3 else shape.parameters)


def rank_needs(training: Training, ranks: int, *, gpu: bool) -> tuple[Need, ...]:
    """One rank: each model that it trains, and the reference, which on a GPU may lie in host memory until it is used."""
    needs = [Need(name, *trained(shape, training, ranks, gpu=gpu).need) for name, shape in training.models.items()]
    if training.reference:
        size = reference_bytes(training.models["policy training"], training, ranks)
        needs.append(Need("reference", 0, size) if gpu and training.offloads else Need("reference", size, 0))
    return tuple(needs)


def rank_host_bytes(training: Training) -> int:
    """Host memory that a rank of GPUs takes while it loads, all of its models whole in float32, and its reference besides."""
    loading = sum(4 * shape.parameters for shape in training.models.values())
    return loading + (
        4 * training.models["policy training"].parameters if training.reference and training.offloads else 0
    )


def checkpoint_bytes(training: Training) -> int:
    """Host memory of rank 0, for the copy that goes to the disk beside the steps: twelve bytes a parameter."""
    return sum((MASTER + MOMENTS) * shape.parameters for shape in training.models.values())


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """An engine's memory on one of the slots that it spans, in bytes. `cell`: one token's place in the cache.

    `least` and `wanted`: cells with which it serves one longest request, and all that it may run at once.
    """

    name: str
    weights: int
    works: int
    cell: int
    least: int
    wanted: int

    def stays(self, cells: int) -> int:
        """With a cache of so many cells."""
        return self.weights + self.cell * cells


def engine_need(served: Served, *, size: int, rows: int, gpu: bool) -> EngineNeed:
    """An engine over `size` slots that runs at most `rows` requests at once."""
    item, shape = 2 if gpu else 4, served.shape
    if served.longest_written == 0:  # it reads a question and keeps nothing
        least = wanted = 0
    elif served.engine == "torch":
        least, wanted = served.longest + SLACK, rows * (2 * served.longest + COLUMNS)
    elif gpu:
        least, wanted = served.longest, rows * served.longest
    else:  # all of it, from its start
        least = wanted = served.cache_tokens or max(SGLANG_CPU_TOKENS, served.longest)
    if served.cache_tokens is not None:
        wanted = max(least, min(wanted, served.cache_tokens))
    read = min(IDLE_TOKENS, max(served.longest, rows * int(served.read + 1)))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    reading = read * item * (4 * shape.width + 3 * shape.inner + 2 * queries + 2 * keys + shape.cache_numbers)
    drawing = rows * shape.outputs * (item + 3 * 4) if served.longest_written else 0
    weights = -(-item * shape.parameters // size)
    cell = -(-item * (shape.cache_numbers + shape.kv_heads * (served.engine == "torch")) // size)
    # In host memory the file that is read is there beside the weights, while no request is.
    loading = 0 if gpu else weights - cell * wanted
    return EngineNeed(
        served.name,
        weights=weights,
        works=max(reading // size, drawing // size, loading),
        cell=cell,
        least=least,
        wanted=wanted,
    )


def rows_in(served: Served, cells: int, rows: int) -> int:
    """Requests that run at once in a cache of so many cells."""
    if served.longest_written == 0:
        return rows
    if served.engine == "torch":
        return max(1, min(rows, cells // (served.longest + SLACK)))
    return max(1, min(rows, int(cells / max(1.0, served.read + served.written))))
