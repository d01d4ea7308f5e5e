"""Records of a cluster that several jobs share: what each job claims and has, and facts of nodes and models.

`active/{uid}` holds the job's `Claim` while it has not ended. `shares` holds for all jobs which slots each has (`Share`), so that
one transaction moves a slot, and no slot is two jobs'. A slot that a job is to give back leaves its `granted` first, and its
`held` only when its plan uses it no more and nothing of it runs there; until then no other job is granted it. Every transaction
that writes a plan compares `shares`, so that no plan uses slots that were given back meanwhile. `placement.shares` decides how
slots are shared out, `controllers.rules.placement` when a job gives them back.

Facts of nodes and of a job's models are registered once; `placement.mapping` decides what follows from them. The cost of
attention says at what length it costs a model as much as its matrices. Per token and layer the matrices take two operations a
parameter, and attention four a column of its heads for every token before it. A causal kernel skips half of those and is about
half as fast as a matrix product at the other half, so they are counted in full: the two are equal at half the layer's
parameters divided by the width of its heads, six times the width for the classic layer of 12·width² parameters. The embedding
and the output layer are left out: prompts do not go through the one, and the other multiplies nothing. The names are those of
Hugging Face configurations; what is not known stays at the default, because the result only weighs samples against one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Field

from gcore.schema import Record, RecordPart
from gcore.store.keys import DEFAULT_NAMESPACE


class Slot(NamedTuple):
    """One accelerator: a node's name, and a slot of it."""

    node: str
    slot: str

    def __str__(self) -> str:
        return f"{self.node}/{self.slot}"


PAUSES = "it pauses at its next commit"
"""How the reason of a job's state begins that is paused and still has slots."""


class Claim(Record):
    """`active/{uid}`: what a job wants of the cluster."""

    namespace: str = DEFAULT_NAMESPACE
    name: str = ""
    owner: str = ""
    priority: int = 0
    least: int = 1
    """Slots; with fewer it does not run."""
    most: int | None = None
    """Slots; None: all there are."""
    unit: int = 1
    """Slots that go together, on one node: those of its widest engine."""
    created: float = 0.0
    """Seconds since the epoch: of two equals the older goes first."""
    paused: bool = False
    """Whether it is to have none until it is resumed."""
    ends: str = ""
    """Why it is to end as soon as it has given all its slots back; empty: it is not."""

    @property
    def wants(self) -> bool:
        """Whether it is to have slots at all."""
        return not self.paused and not self.ends


class Share(RecordPart):
    """A job's slots, by node. `granted`: what it may plan with; `held`: what it may still be using. The first is within the second."""

    granted: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    held: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @property
    def surplus(self) -> frozenset[Slot]:
        """What it has to give back."""
        return slots_of_share(self.held) - slots_of_share(self.granted)


class Shares(Record):
    """`shares`: of every job that has slots. Of those that wait nothing is written, or each that comes would be a write of all."""

    jobs: dict[str, Share] = Field(default_factory=dict)
    """By uid."""

    @property
    def held(self) -> frozenset[Slot]:
        """The slots that some job has."""
        return frozenset(slot for share in self.jobs.values() for slot in slots_of_share(share.held))

    def released(self, uid: str, slots: frozenset[Slot]) -> Shares:
        """After a job has given these back. Raises ValueError if it may still use one."""
        share = self.jobs[uid]
        if not slots <= share.surplus:
            raise ValueError(
                f"job {uid} is granted {sorted(slots - share.surplus)}, and gives back only what it is not"
            )
        left = share.model_copy(update={"held": group_by_node(slots_of_share(share.held) - slots)})
        others = {other: one for other, one in self.jobs.items() if other != uid}
        return self.model_copy(update={"jobs": dict(sorted({**others, uid: left}.items())) if left.held else others})


NOTHING = Share()


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A job that waits for slots. `position`: from 1 on. `reason`: why it has none, for people."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class KnownShare:
    """What a job has, and the revision of `shares` that says so; 0: there is none."""

    uid: str
    shares: Shares
    revision: int

    @property
    def share(self) -> Share:
        """The job's."""
        return self.shares.jobs.get(self.uid, NOTHING)

    @property
    def granted(self) -> frozenset[Slot]:
        """What may be planned with."""
        return slots_of_share(self.share.granted)


class Quotas(Record):
    """`pool/quotas`: the most slots that all jobs of a namespace may have together."""

    slots: dict[str, int] = Field(default_factory=dict)


class SickSlots(Record):
    """`pool/sick/{node}`: slots that cannot be used, and why, as the node's daemon found, under its lease."""

    slots: dict[str, str] = Field(default_factory=dict)


class Drained(Record):
    """`pool/drained/{node}`: nothing is to be placed on the node."""

    by: str = ""
    since: float = 0.0
    """Seconds since the epoch."""


def slots_of_share(share: Mapping[str, Iterable[str]]) -> frozenset[Slot]:
    """One by one."""
    return frozenset(Slot(node, slot) for node, slots in share.items() for slot in slots)


def group_by_node(slots: Iterable[Slot]) -> dict[str, tuple[str, ...]]:
    """Sorted, so that the same slots are the same record."""
    found: dict[str, list[str]] = {}
    for node, slot in sorted(slots):
        found.setdefault(node, []).append(slot)
    return {node: tuple(of_node) for node, of_node in found.items()}


ConfigValue = bool | int | float | str


class SlotFacts(RecordPart):
    """A slot. `memory_gib`: of its own, as the driver says it; None: it has a part of its host's. `device`: what the driver calls it;
    empty of a CPU, and where that is not known."""

    slot: str
    memory_gib: float | None = None
    device: str = ""


class NodeFacts(RecordPart):
    """A node. `host_memory_gib`: what of its host's memory is the node's."""

    host_memory_gib: float
    slots: tuple[SlotFacts, ...]


class ModelConfigs(RecordPart):
    """What of the models' configurations says how large they are, as they were when the job was created. `critic` None: it has none, or
    starts from the policy's; `judges`: by name, those that the cluster serves."""

    policy: dict[str, ConfigValue]
    critic: dict[str, ConfigValue] | None = None
    judges: dict[str, dict[str, ConfigValue]] = Field(default_factory=dict)


ATTENTION_EQUALS_AT = 24_576
"""For a model that tells nothing: six times a width of 4096. Never to be changed: it is the value of records that were
written without one, and ranks that read another would deal a sealed batch differently."""

LARGEST = 1 << 24


def attention_equals_at(config: Mapping[str, Any]) -> int:
    """The length in tokens, at least 1. `config`: a model's config.json."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = nested
    width = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head")
    if not width or not heads:
        return ATTENTION_EQUALS_AT
    columns = heads * (_first(config, "head_dim") or max(1, width // heads))
    shared = (_first(config, "num_key_value_heads") or heads) / heads
    attention = 2 * width * columns * (1 + shared)
    inner = _first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * width
    experts = _first(config, "num_experts_per_tok")
    if experts:
        inner = experts * (_first(config, "moe_intermediate_size") or inner)
    gated = "hidden_act" in config  # nearly all models with a gate call their activation so
    parameters = attention + (3 if gated else 2) * width * inner
    return max(1, min(LARGEST, round(parameters / (2 * columns))))


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a number above 0; 0 if none is."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
