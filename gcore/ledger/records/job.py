"""Records of a job outside its chain: job, state, plan, placement, evaluations.

The placement records say which controller plans (`Leader`), what a person fixed (`Pin`), each placement change with its
reason and measured effect, and why nothing changed (`Moves`). A *move* is a change of which slots (accelerators) serve
which pool (rollout, reward, train). People and the next planner read these records; no step depends on them. A move
names the generation of the `Plan` that it created.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, NonNegativeInt, PositiveInt

from gcore.ledger.records.cluster import ATTENTION_EQUALS_AT, ModelConfigs, NodeFacts, Slot
from gcore.schema import Record, RecordPart, cut_text
from gcore.store.keys import DEFAULT_NAMESPACE, full_name
from gcore.types import Medium, MediumKind, ServingPool, Version

NEWEST_MOVES = 64
"""Number of moves kept in the store. The run folder has all of them."""

MOST_SLOTS_TOLD = 16
"""Maximum number of slots that a move lists by name. Further slots are only counted."""

METRICS_FILE = "metrics.jsonl"
"""File in the run folder, written by `gcore.observability.metrics_file`."""

MOST_REASON = 600
"""Maximum length of a reason in characters. Policy plug-ins write reasons."""

MOST_MOVE_BYTES = 4096
"""Maximum size of one encoded move in bytes."""

NEWEST_STAYS, MOST_STAY_BYTES = 16, 3072
"""Number of periods without a move (`HoldPeriod`) that the store keeps, and the maximum size of one in bytes."""

Reason = Annotated[str, cut_text(MOST_REASON)]


class Leader(Record):
    """Record `placement/leader`: the controller that plans the job's placement, under its lease."""

    called: ClassVar[str] = "placement leader"
    node: str
    incarnation: str


class SlotsOfPools(Protocol):
    """Number of slots of each pool, as stored (`SplitPart`) or as used by the planner (`placement.slots.Split`)."""

    @property
    def rollout(self) -> int: ...
    @property
    def reward(self) -> int: ...
    @property
    def train(self) -> int: ...


class Pin(Record):
    """Record `placement/pin`: what a person fixed of the job's placement.

    `frozen`: no slot changes its pool. `rollout`, `reward`, `train`: number of slots of that pool, regardless of the
    placement policy; None: not fixed.
    """

    called: ClassVar[str] = "placement pin"
    frozen: bool = False
    rollout: PositiveInt | None = None
    reward: PositiveInt | None = None
    train: PositiveInt | None = None
    by: str = ""
    """Node whose controller received the person's request."""
    time: float = 0.0
    """Seconds since the epoch, for display."""

    @property
    def sizes(self) -> dict[str, int]:
        """The fixed numbers of slots, by pool."""
        found = {"rollout": self.rollout, "reward": self.reward, "train": self.train}
        return {pool: size for pool, size in found.items() if size is not None}

    @property
    def fixes(self) -> bool:
        """Whether the pin fixes anything."""
        return self.frozen or bool(self.sizes)

    def off(self, split: SlotsOfPools) -> int:
        """Total number of slots by which `split` differs from the fixed sizes; 0 if it matches."""
        return sum(abs(getattr(split, pool) - size) for pool, size in self.sizes.items())

    def __str__(self) -> str:
        said = [f"{pool} has {size}" for pool, size in self.sizes.items()]
        return ", ".join(["nothing moves"] * self.frozen + said) or "nothing is fixed"


class MoveKind(StrEnum):
    """Kinds of placement changes.

    BEGIN: the first placement of the job. SPLIT: engines change pools between two steps. WORLD: the train world also
    gets another number of ranks; it restarts from head's state. LEND: elastic reassignment of slots from rollout to the
    judges within a step. RETURN: end of a LEND. MEND: not requested by the policy, but caused by nodes or workers that
    joined or left.
    """

    BEGIN = "begin"
    SPLIT = "split"
    WORLD = "world"
    LEND = "lend"
    RETURN = "return"
    MEND = "mend"


class SplitPart(RecordPart):
    """Number of slots of each pool, as stored (`placement.slots.Split`).

    `mode`: "colocated" if engines and train ranks are time-shared on the same slots; "coexisting" if each slot serves
    one pool.
    """

    mode: Literal["coexisting", "colocated"]
    rollout: NonNegativeInt
    reward: NonNegativeInt
    train: NonNegativeInt


class MoveOutcome(RecordPart):
    """Measured effect of a placement change; None: not known.

    `took_s`: seconds from the decision until the moved engines served requests, or the new train world trained.
    `step_s`: mean seconds per step over the `steps` steps after the change; `before_s`: over the steps before it. How
    much work these steps had: `tokens` is the mean response length in tokens, `question_s` the mean seconds of
    judge-engine time per question; `before_tokens` and `before_question_s` are those of the steps before.
    """

    took_s: float | None = None
    steps: NonNegativeInt = 0
    step_s: float | None = None
    before_s: float | None = None
    tokens: float | None = None
    before_tokens: float | None = None
    question_s: float | None = None
    before_question_s: float | None = None


class Move(RecordPart):
    """One placement change, or one that the policy wanted but that was not carried out (`state`).

    Numbers are as known at the decision; None: not known. `before` and `after`: slots per pool.
    """

    generation: NonNegativeInt
    """Generation of the plan that the move creates."""
    step: NonNegativeInt
    """Head's step at the decision."""
    within: bool = False
    """Whether the move happened within the step after `step`."""
    seq: NonNegativeInt = 0
    """Head's log number at the decision. A move of the train world applies to that head only."""
    kind: MoveKind
    before: SplitPart
    after: SplitPart
    slots: tuple[str, ...] = ()
    """The moved slots, each as `NODE/SLOT was -> is`."""
    more_slots: NonNegativeInt = 0
    """Number of moved slots that `slots` does not list."""
    reason: Reason = ""
    idle: dict[str, float] = Field(default_factory=dict)
    """Idle share of each pool's slot-seconds, 0 to 1. Within a step: computed from current requests and slots."""
    gain_s: float | None = None
    """Seconds that the policy expects to save in total, over the steps that it considers."""
    cost_s: float | None = None
    """Seconds that the policy expects the change itself to cost, once."""
    expected_s: float | None = None
    """Expected seconds per step with the slots of `after`."""
    before_s: float | None = None
    """Expected seconds per step with the slots of `before`."""
    by: str = ""
    """Node whose controller decided."""
    time: float = 0.0
    """Seconds since the epoch, for display."""
    state: Literal["done", "wanted", "lapsed", "would"] = "done"
    """`wanted`: the new train world is not formed yet. `lapsed`: it was never formed, because the next step or another
    plan came first. `would`: decided with `dry_run`, not applied.
    """
    outcome: MoveOutcome | None = None


class ForecastAccuracy(RecordPart):
    """Accuracy of the step times that the placement policy forecast.

    Sums in seconds over `steps` steps: `expected_s` of the forecasts, `took_s` of the measured times, `off_s` of the
    absolute errors.
    """

    steps: NonNegativeInt = 0
    newest: NonNegativeInt = 0
    """The newest of these steps."""
    expected_s: float = 0.0
    took_s: float = 0.0
    off_s: float = 0.0


class HoldPeriod(RecordPart):
    """A period of consecutive steps after which the placement policy decided to change nothing.

    `since` and `step`: the first and the newest step. `began`: time of the first decision in seconds since the epoch,
    which identifies the period. `reason` and `expected_s` (forecast seconds per step; None if the policy gives none):
    those of the newest decision. `foretold`: accuracy of the forecasts in this period.
    """

    since: NonNegativeInt
    step: NonNegativeInt
    seq: NonNegativeInt = 0
    """Head's log number at the newest decision."""
    reason: Reason = ""
    by: str = ""
    """Node whose controller made the newest decision."""
    began: float = 0.0
    time: float = 0.0
    """Time of the newest decision in seconds since the epoch, for display."""
    expected_s: float | None = None
    foretold: ForecastAccuracy = ForecastAccuracy()


class Moves(Record):
    """Record `placement/moves`: the newest placement changes, and the newest periods without one (`stays`).

    Both are ordered from old to new. `total`: number of moves that the job ever had.
    """

    called: ClassVar[str] = "moves of a job"
    moves: tuple[Move, ...] = ()
    total: NonNegativeInt = 0
    stays: tuple[HoldPeriod, ...] = ()

    @property
    def newest(self) -> Move | None:
        """The newest placement change, or None."""
        return self.moves[-1] if self.moves else None

    def plus(self, move: Move) -> Moves:
        """Return the record with `move` added. Drops the oldest moves beyond `NEWEST_MOVES`."""
        return self.model_copy(update={"moves": (*self.moves, move)[-NEWEST_MOVES:], "total": self.total + 1})


MOST_SAID = 8192
"""Maximum length of an error text in a record, in characters."""

ErrorText = Annotated[str, cut_text(MOST_SAID)]


class JobPhase(StrEnum):
    """Phase of a job's life. PENDING: created, not started.

    SUCCEEDED, FAILED and CANCELLED are final. Only a job in phase SUCCEEDED can continue, with a higher goal
    (`gcore.ledger.transactions.extend`).
    """

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """Whether the phase is final."""
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)


class JobRecord(Record):
    """Record `job`: what was submitted. Written once; later only the goal may be raised, and an unfinished job may change
    its execution settings (`gcore.config.train`).

    `spec`: the job spec with all defaults filled in. `run_dir`: path of the run folder. Every node sees this folder; if
    nodes share no folder, each node has its own under this path (`controllers.storage.run_folder`).
    """

    came_with: ClassVar[Mapping[str, int]] = {"adapter_digests": 3, "picture_settings": 3}

    uid: str
    name: str
    spec: dict[str, Any]
    run_dir: str
    created: float
    request_id: str = ""
    prompts: int
    """Number of dataset entries when the job was created. The lengths of the shards follow from it and never change."""
    data_digest: str = ""
    """Digest of the dataset's content at creation: a prompt ref must always mean the same prompt."""
    held_out_digest: str = ""
    """Digest of the evaluation data, so that accuracies of one job are comparable; empty without evaluation."""
    picture_settings: str = ""
    """`PictureRule.settings` of the model's image processor at creation, so that engines and ranks of all nodes make the same
    tensors of a picture; empty for jobs without pictures and of earlier releases."""
    model_revision: str = ""
    """Commit of a hub model at creation, so that all nodes load the same weights. Empty for a folder."""
    remote_code: tuple[str, ...] = ()
    """Python files of the model that run in engines and ranks because the spec trusts them."""
    judge_revisions: dict[str, str] = Field(default_factory=dict)
    """Commit of each judge's hub model, by judge name; a judge from a folder has no entry."""
    adapter_digests: dict[str, str] = Field(default_factory=dict)
    """Digest of each judge's adapter at creation (`gcore.models.layout.adapter_digest`), by judge name; jobs of earlier
    releases have none."""
    attention_equals_at: PositiveInt = ATTENTION_EQUALS_AT
    """Sequence length in tokens at which attention costs as much as the matrix products. Copied into each seal."""
    models: ModelConfigs | None = None
    """Configuration entries that determine the size of the models; None: not determined."""
    namespace: str = DEFAULT_NAMESPACE
    owner: str = ""
    """User who created the job; empty if the cluster does not distinguish users."""

    @property
    def full_name(self) -> str:
        """Name with namespace, as displayed."""
        return full_name(self.name, self.namespace)

    def with_goal(self, what: str, goal: int) -> JobRecord:
        """Return the same job with another goal. `what`: "steps" or "epochs", the field of `flow` that is replaced."""
        return self.model_copy(update={"spec": {**self.spec, "flow": {**self.spec["flow"], what: goal}}})


class JobStatus(Record):
    """Record `state`: phase of the job, and why it is in this phase."""

    phase: JobPhase
    reason: str = ""
    changed: float = 0.0
    """Seconds since the epoch, for display."""


class EnginePlace(RecordPart):
    """An inference engine of a plan, and the slots on which it runs. Several engines may be resident on one slot.

    It belongs to the rollout pool or, with `judge`, to the reward pool. All of its slots are on one node.
    """

    node: str
    slot: str
    judge: str = ""
    """Name of the judge that the engine serves; empty: it serves the policy."""
    asleep: bool = False
    """Whether the engine's process runs but has released its device memory: it gets no requests and no weight sync
    (`controllers.rules.memory`).
    """
    further: tuple[str, ...] = ()
    """Slots that the engine uses in addition to `slot` (tensor parallelism), in order."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the engine within a plan: node, first slot and judge."""
        return self.node, self.slot, self.judge

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of all slots that the engine uses."""
        return (self.slot, *self.further)

    @property
    def on(self) -> tuple[Slot, ...]:
        """All slots that the engine uses, with the node."""
        return tuple(Slot(self.node, slot) for slot in self.slots)

    @property
    def pool(self) -> ServingPool:
        """Pool to which the engine belongs."""
        return "reward" if self.judge else "rollout"


class RankPlace(RecordPart):
    """A train rank of a plan, and the slot on which it runs."""

    rank: int
    node: str
    slot: str

    @property
    def on(self) -> Slot:
        """The rank's slot."""
        return Slot(self.node, self.slot)


class Plan(Record):
    """Record `plan`: the job's placement, which slot runs which engine or train rank.

    `generation` increases with every change. `ranks`: all ranks of train world `world`. `reason`: why this plan
    replaced the previous one.
    """

    generation: int
    world: str
    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]
    reason: str = ""
    lent_from: SplitPart | None = None
    """During elastic reassignment within a step: slots per pool at the start of the step, to which they return. Any
    other change of the plan makes the current numbers permanent.
    """
    stands_still: bool = False
    """Whether nothing is placed because the job has too few slots. When it has enough, a new train world starts."""

    @property
    def rollout_nodes(self) -> frozenset[str]:
        """Nodes with rollout engines: those with awake engines, or all if every engine is asleep."""
        rollout = [place for place in self.engines if not place.judge]
        return frozenset(place.node for place in rollout if not place.asleep) or frozenset(p.node for p in rollout)

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes on which the plan places anything."""
        return frozenset({place.node for place in self.ranks} | {place.node for place in self.engines})


class KeptPicture(RecordPart):
    """A picture that the run folder keeps: SHA-256 of its blob, its size in bytes, height and width in pixels."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size: int
    height: int
    width: int

    @classmethod
    def of(cls, media: Iterable[Medium], kind: MediumKind = "picture") -> tuple[KeptPicture, ...]:
        """The pictures of this kind among media, in their order: `picture` of prompts and tools, `decoded` of the policy."""
        return tuple(
            cls(sha256=one.sha256, size=one.size, height=one.shape[0], width=one.shape[1])
            for one in media
            if one.kind == kind
        )


class EvalSample(RecordPart):
    """One response to a prompt of an evaluation, for display."""

    came_with: ClassVar[Mapping[str, int]] = {"picture": 3}

    prompt: str
    response: str
    answer: str
    reward: float
    source: str = ""
    unscored: str = ""
    """Why the reward could not score it; it then counts as incorrect. Empty if it was scored."""
    correct: bool | None = None
    """Whether the reward reaches the set's threshold; None in records of gcore versions without thresholds."""
    picture: KeptPicture | None = None
    """The picture that the policy generated; None: the response is a text."""


class SourceScore(RecordPart):
    """Result of an evaluation on one held-out set."""

    accuracy: float
    """Share of responses whose reward reaches the set's threshold, 0 to 1."""
    count: int
    """Number of prompts."""
    samples: PositiveInt = 1
    """Responses per prompt."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """`mean@N` (mean reward of the scored responses; absent if none was scored), `pass@1`, `pass@K` as configured, and
    `part:LABEL`, the mean of each part of the set's reward.
    """
    unscored: int = 0
    """Number of responses that the reward could not score. They count as incorrect and are not part of any mean reward.
    """
    why_unscored: str = ""
    """The reward function's error for the first unscored response."""

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the scored responses; None if none was scored."""
        return self.metrics.get(f"mean@{self.samples}")

    @property
    def is_graded(self) -> bool:
        """Whether rewards are graded: the mean reward of the scored responses is not what 1 for each correct response
        and 0 for the others would give.
        """
        responses = self.count * self.samples
        rewards = (self.mean_reward or 0.0) * (responses - self.unscored)
        return self.mean_reward is not None and not math.isclose(rewards, self.accuracy * responses, abs_tol=1e-6)


class Evaluation(Record):
    """Record `eval/{version}`: the evaluation of one policy version, composed from its parts and written once.

    `accuracy` is the share of correct responses, averaged over the prompts of all sets. `count` is the number of
    prompts.
    """

    version: Version
    accuracy: float
    count: int
    by: str = ""
    """Only in records of gcore versions in which one controller made the complete evaluation: that controller."""
    samples: tuple[EvalSample, ...] = ()
    by_source: dict[str, SourceScore] = Field(default_factory=dict)
    unscored: int = 0
    responses_by: dict[str, int] = Field(default_factory=dict)
    """Number of responses by controller incarnation."""
    asked: bool = False
    """Whether a person requested it out of schedule. It never counts as the best, because its step may have no
    checkpoint.
    """

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the scored responses, averaged over the prompts of all sets; None if there are none."""
        scored = [(one.count, one.mean_reward) for one in self.by_source.values() if one.mean_reward is not None]
        count = sum(prompts for prompts, _ in scored)
        return math.fsum(prompts * mean for prompts, mean in scored) / count if count else None

    @property
    def is_graded(self) -> bool:
        """Whether the rewards of any set are graded (`SourceScore.is_graded`)."""
        return any(score.is_graded for score in self.by_source.values())


class EvalAsked(Record):
    """Record `evalask`: the newest step for which a person requested an evaluation out of schedule.

    It is written before that step is committed, so every controller that sees the commit also sees the request.
    """

    called: ClassVar[str] = "request for an evaluation"

    step: PositiveInt
    by: str = ""
    """User who requested it, if known."""
    time: float = 0.0


class EvalPart(Record):
    """Record `evalpart/{version}/{number}`: the result of one of the `parts` parts of an evaluation.

    One controller answered and scored its prompts; it is written once. It covers the prompts of set `source` from index
    `first`. `correct` has one number per prompt: how many of its `samples` responses are correct. `unscored`: number of
    responses that the reward could not score. The transaction that writes the evaluation deletes all parts.
    """

    version: Version
    number: int
    parts: PositiveInt
    source: str
    first: int
    samples: PositiveInt
    correct: tuple[int, ...]
    reward: float
    """Sum of the rewards of the scored responses."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """The same sum for each component of the set's reward, by its label."""
    unscored: int = 0
    why_unscored: str = ""
    """The reward's error for the first unscored response, for display."""
    shown: tuple[EvalSample, ...] = ()
    """First responses to the first prompts of the set, for display."""
    by: str = ""
    """Incarnation of the controller that answered the part."""


class FaultRecord(Record):
    """Record `fault/{name}`: an error of a plug-in (a reward, a flow), for display; written once."""

    node: str
    """Node on which the error occurred first."""
    what: ErrorText
    trace: ErrorText = ""
    """Traceback of the plug-in's own code."""


class RankClaim(Record):
    """Record `world/{world}/rank/{rank}`: the worker instance that runs this rank of a train world; written once."""

    instance: str


class ModelFetch(Record):
    """Record `fetch/{node}`: download progress of a model on a node, in bytes, under its controller's lease."""

    node: str
    path: str
    done: int
    total: int

    @property
    def sentence(self) -> str:
        """The progress as text, for example `downloading model hf://owner/name, 1.2 of 3.4 GB`."""
        unit, size = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        return f"downloading model {self.path}, {self.done / size:.1f} of {self.total / size:.1f} {unit}"


class StorageMark(Record):
    """Record `storage/{node}`: a nonce that the node also wrote into a file of the run folder.

    Other nodes look for that file, to find out whether they see the same folder (`controllers.storage`).
    """

    node: str
    nonce: str


class Trouble(Record):
    """Record `trouble/{topic}`: the newest warning of one topic, for example about a tracker.

    `node`: the node that warned. `sentence`: the text. It does not affect the run.
    """

    topic: str
    node: str
    sentence: ErrorText
    time: float = 0.0
    """Seconds since the epoch, for display; 0 in records from versions without it."""

    @property
    def is_of_a_node(self) -> bool:
        """Whether the warning concerns only its node, and not the job as a whole: the topic then contains `-NODE`."""
        return f"-{self.node}" in self.topic


class NodeRecord(Record):
    """Record `nodes/{name}`: a running daemon and what its node offers, under the daemon's lease."""

    came_with: ClassVar[Mapping[str, int]] = {"sglang_diffusion": 3, "vllm": 3, "blobs": 3, "blob_bytes": 3}

    name: str
    incarnation: str
    address: str
    """gRPC address for users."""
    peer_address: str = ""
    """gRPC address for other nodes, which authenticate with certificates; empty: the same as `address`."""
    metrics_address: str = ""
    slots: tuple[str, ...]
    pid: int
    started: float = 0.0
    sglang: bool = False
    """Whether SGLang is installed on the node."""
    sglang_diffusion: bool = False
    """Whether the packages of SGLang's diffusion server are installed there too."""
    vllm: bool = False
    """Whether vLLM is installed on the node."""
    blobs: str = ""
    """Base URL of the node's blob store, which runs as soon as a job needs it; empty: the node has none."""
    blob_bytes: int = 0
    """Maximum size of all blobs in the store; 0: not known."""
    facts: NodeFacts | None = None
    """Hardware of the node and its slots; None: not known, or the slots are emulated."""

    def has_engine(self, engine: str) -> bool:
        """Whether an engine that has an environment of its own is installed on the node. `engine`: its name in a spec."""
        return {"sglang": self.sglang, "sglang-diffusion": self.sglang_diffusion, "vllm": self.vllm}[engine]

    @property
    def for_peers(self) -> str:
        """Address at which other nodes call this daemon."""
        return self.peer_address or self.address
