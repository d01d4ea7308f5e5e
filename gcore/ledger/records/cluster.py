"""Records of a cluster that several jobs share: each job's claim and share, and facts about nodes and models.

`active/{uid}` holds a job's `Claim` (the slots that it requests) until the job ends. The one record `shares` holds the
slots of all jobs (`Share`), so that one transaction moves a slot from job to job and no slot belongs to two jobs. To
take a slot from a job, it is first removed from the job's `granted` slots. It is removed from the `held` slots only
when the job's plan no longer uses it and no worker of the job runs there. Until then no other job gets it. Every
transaction that writes a plan compares `shares`, so that no plan uses slots that were given back. `placement.shares`
decides how slots are shared, `controllers.rules.placement` when a job gives them back.

Facts about nodes and models are registered once; `placement.mapping` uses them.

`attention_equals_at` is the sequence length at which attention costs a model as much as its matrices. Per token and
layer the matrices take two operations per parameter. Attention takes four operations per head column and preceding
token. A causal kernel skips half of these, but runs the other half at about half the speed of a matrix product, so they
count in full. The costs are equal at (parameters of a layer) / (2 · width of its heads): six times the width for the
classic layer with 12·width² parameters. Embedding and output layer are excluded: prompts do not pass through the output
layer, and the embedding multiplies nothing. Names are those of Hugging Face configurations. Unknown values use the
default, because the result only weighs samples relative to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Field

from gcore.schema import Record, RecordPart
from gcore.store.keys import DEFAULT_NAMESPACE


class Slot(NamedTuple):
    """One accelerator: a node name and a slot name."""

    node: str
    slot: str

    def __str__(self) -> str:
        return f"{self.node}/{self.slot}"


PAUSES = "it pauses at its next commit"
"""Beginning of the displayed reason of a paused job that still has slots."""


class Claim(Record):
    """Record `active/{uid}`: the slots that a job requests from the cluster. Deleted when the job ends."""

    namespace: str = DEFAULT_NAMESPACE
    name: str = ""
    owner: str = ""
    priority: int = 0
    least: int = 1
    """Minimum number of slots; with fewer the job does not run."""
    most: int | None = None
    """Maximum number of slots; None: no maximum."""
    unit: int = 1
    """Slots that must be on one node: those of the widest engine."""
    created: float = 0.0
    """Seconds since the epoch. Of two jobs with equal priority the older is served first."""
    paused: bool = False
    """Whether the job is paused and gets no slots until it is resumed."""
    ends: str = ""
    """Why the job ends once it has given back all slots; empty: it does not end."""

    @property
    def wants(self) -> bool:
        """Whether the job requests slots now: it is neither paused nor about to end."""
        return not self.paused and not self.ends


class Share(RecordPart):
    """The slots that belong to one job, by node.

    `granted`: slots that it may plan with. `held`: slots that it may still use, a superset of `granted`.
    """

    granted: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    held: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @property
    def surplus(self) -> frozenset[Slot]:
        """Slots that the job must give back: held, but no longer granted."""
        return slots_of_share(self.held) - slots_of_share(self.granted)


class Shares(Record):
    """Record `shares`: the slots of each job that has any.

    Waiting jobs have no entry, so that a new job does not rewrite the record.
    """

    jobs: dict[str, Share] = Field(default_factory=dict)
    """By job uid."""

    @property
    def held(self) -> frozenset[Slot]:
        """Slots that belong to any job, including those that a job must give back."""
        return frozenset(slot for share in self.jobs.values() for slot in slots_of_share(share.held))

    def released(self, uid: str, slots: frozenset[Slot]) -> Shares:
        """The record after a job gave back `slots`. Raises ValueError for a slot that the job may still use."""
        share = self.jobs[uid]
        if not slots <= share.surplus:
            raise ValueError(
                f"job {uid} cannot give back {sorted(slots - share.surplus)}: they are granted to it or not its own"
            )
        left = share.model_copy(update={"held": group_by_node(slots_of_share(share.held) - slots)})
        others = {other: one for other, one in self.jobs.items() if other != uid}
        return self.model_copy(update={"jobs": dict(sorted({**others, uid: left}.items())) if left.held else others})


NOTHING = Share()


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Position in the queue of a job that waits for slots, from 1. `reason`: why it has no slots, for display."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class KnownShare:
    """The record `shares` as job `uid` last read it. `revision`: its store revision; 0: the key does not exist."""

    uid: str
    shares: Shares
    revision: int

    @property
    def share(self) -> Share:
        """The share of this job."""
        return self.shares.jobs.get(self.uid, NOTHING)

    @property
    def granted(self) -> frozenset[Slot]:
        """Slots that the job may plan with."""
        return slots_of_share(self.share.granted)


class Quotas(Record):
    """Record `pool/quotas`: maximum number of slots for all jobs of a namespace together, by namespace."""

    slots: dict[str, int] = Field(default_factory=dict)


class SickSlots(Record):
    """Record `pool/sick/{node}`, under the lease of the node's daemon: its unusable slots, and why, by slot name."""

    slots: dict[str, str] = Field(default_factory=dict)


class Drained(Record):
    """Record `pool/drained/{node}`: marks a drained node, on which nothing is placed. `by`: who drained it."""

    by: str = ""
    since: float = 0.0
    """Seconds since the epoch."""


def slots_of_share(share: Mapping[str, Iterable[str]]) -> frozenset[Slot]:
    """Set of all slots in a mapping from node to slots."""
    return frozenset(Slot(node, slot) for node, slots in share.items() for slot in slots)


def group_by_node(slots: Iterable[Slot]) -> dict[str, tuple[str, ...]]:
    """Group slots by node, sorted, so that equal sets give equal records."""
    found: dict[str, list[str]] = {}
    for node, slot in sorted(slots):
        found.setdefault(node, []).append(slot)
    return {node: tuple(of_node) for node, of_node in found.items()}


ConfigValue = bool | int | float | str


class SlotFacts(RecordPart):
    """Hardware of one slot (accelerator or CPU core).

    `memory_gib`: device memory as reported by the driver; None: the slot uses host memory. `device`: the driver's name
    of the device; empty for a CPU or if unknown.
    """

    slot: str
    memory_gib: float | None = None
    device: str = ""


class NodeFacts(RecordPart):
    """Hardware of one node. `host_memory_gib`: the memory that the node's processes may use."""

    host_memory_gib: float
    slots: tuple[SlotFacts, ...]


class ModelConfigs(RecordPart):
    """The entries of the models' config.json that determine their size, as they were when the job was created.

    `critic`: None if the job has no critic, or one initialized from the policy. `judges`: by judge name, only those
    that the cluster's own engines serve.
    """

    policy: dict[str, ConfigValue]
    critic: dict[str, ConfigValue] | None = None
    judges: dict[str, dict[str, ConfigValue]] = Field(default_factory=dict)


ATTENTION_EQUALS_AT = 24_576
"""Default for a model without known sizes: six times a width of 4096. Never change it: records without the field mean
this value, and ranks with another value would split a sealed batch differently.
"""

LARGEST = 1 << 24


def attention_equals_at(config: Mapping[str, Any]) -> int:
    """Sequence length in tokens, at least 1, at which attention costs a model as much as its matrix products.

    `config`: content of the model's config.json. `ATTENTION_EQUALS_AT` if it lacks the sizes. The formula is in the
    module's docstring.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = nested
    columns, parameters = _layer(config)
    return max(1, min(LARGEST, round(parameters / (2 * columns)))) if columns else ATTENTION_EQUALS_AT


def patch_cost(config: Mapping[str, Any]) -> float:
    """Cost of a patch in the vision tower, in tokens of the language model: the ratio of the parameters of their layers.

    `config`: content of the model's config.json. 0 for a text model, or if sizes are unknown.
    """
    vision, text = config.get("vision_config"), config.get("text_config", config)
    if not isinstance(vision, Mapping) or not isinstance(text, Mapping):
        return 0.0
    tower, language = (_first(one, "num_hidden_layers", "depth", "n_layer") * _layer(one)[1] for one in (vision, text))
    return tower / language if language else 0.0


def _layer(config: Mapping[str, Any]) -> tuple[int, float]:
    """Columns of all attention heads, and parameters of the matrices that a token is multiplied with in a layer; zeros
    for unknown sizes.
    """
    width = _first(config, "hidden_size", "n_embd", "d_model", "embed_dim")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads")
    if not width or not heads:
        return 0, 0.0
    columns = heads * (_first(config, "head_dim") or max(1, width // heads))
    shared = (_first(config, "num_key_value_heads") or heads) / heads
    attention = 2 * width * columns * (1 + shared)
    inner = _first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * width
    experts = _first(config, "num_experts_per_tok")
    if experts:
        inner = experts * (_first(config, "moe_intermediate_size") or inner)
    # Nearly all models with a gate call their activation so; a vision tower may too, and has none.
    gated = "hidden_act" in config and "patch_size" not in config
    return columns, attention + (3 if gated else 2) * width * inner


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Value of the first of the keys `names` that has an integer above 0; 0 if there is none."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
