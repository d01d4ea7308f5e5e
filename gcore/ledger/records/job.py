"""Records of a job outside its chain: job, state, plan, placement, evaluations.

The placement records contain the controller that plans, what a person fixed, each move with its reason and result, and
why nothing moved. People and the next planner read them; no step depends on them. A move names the generation of the
`Plan` that it created.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, NonNegativeInt, PositiveInt

from gcore.ledger.records.cluster import ATTENTION_EQUALS_AT, ModelConfigs, NodeFacts, Slot
from gcore.schema import Record, RecordPart, cut_text
from gcore.store.keys import DEFAULT_NAMESPACE, full_name
from gcore.types import ServingPool, Version

NEWEST_MOVES = 64
"""Number of moves kept in the store. The run folder has all of them."""

MOST_SLOTS_TOLD = 16
"""Maximum number of slots that a move names. Further slots are counted."""

METRICS_FILE = "metrics.jsonl"
"""File in the run folder, written by `gcore.observability.metrics_file`."""

MOST_REASON = 600
"""Maximum length of a reason in characters. Policy plug-ins write reasons."""

MOST_MOVE_BYTES = 4096
"""Maximum size of a move in the record."""

NEWEST_STAYS, MOST_STAY_BYTES = 16, 3072
"""Number of periods without a move that the store keeps, and the maximum size of one."""

Reason = Annotated[str, cut_text(MOST_REASON)]


class Leader(Record):
    """`placement/leader`: the controller that plans the placement, under its lease."""

    called: ClassVar[str] = "placement leader"
    node: str
    incarnation: str


class SlotsOfPools(Protocol):
    """Slots per pool, as stored (`SplitPart`) or as used by the planner (`placement.slots.Split`)."""

    @property
    def rollout(self) -> int: ...
    @property
    def reward(self) -> int: ...
    @property
    def train(self) -> int: ...


class Pin(Record):
    """`placement/pin`: what a person fixed. `frozen`: no moves. A number: slots of that pool, regardless of the policy."""

    called: ClassVar[str] = "placement pin"
    frozen: bool = False
    rollout: PositiveInt | None = None
    reward: PositiveInt | None = None
    train: PositiveInt | None = None
    by: str = ""
    """Node that received the request."""
    time: float = 0.0
    """Seconds since the epoch, for display."""

    @property
    def sizes(self) -> dict[str, int]:
        """Pools with a fixed number of slots."""
        found = {"rollout": self.rollout, "reward": self.reward, "train": self.train}
        return {pool: size for pool, size in found.items() if size is not None}

    @property
    def fixes(self) -> bool:
        """Whether it fixes anything."""
        return self.frozen or bool(self.sizes)

    def off(self, split: SlotsOfPools) -> int:
        """Number of slots by which a split differs from the fixed sizes; 0 if it matches."""
        return sum(abs(getattr(split, pool) - size) for pool, size in self.sizes.items())

    def __str__(self) -> str:
        said = [f"{pool} has {size}" for pool, size in self.sizes.items()]
        return ", ".join(["nothing moves"] * self.frozen + said) or "nothing is fixed"


class MoveKind(StrEnum):
    """Kinds of placement changes.

    SPLIT: engines change pools between two steps. WORLD: the train world also gets another size, by a rollback to
    head's own state. LEND: elastic reassignment within a step, from rollout to the judges; RETURN: its end. MEND: not
    requested by a policy; nodes or workers joined or left. BEGIN: the first placement of the job.
    """

    BEGIN = "begin"
    SPLIT = "split"
    WORLD = "world"
    LEND = "lend"
    RETURN = "return"
    MEND = "mend"


class SplitPart(RecordPart):
    """Slots per pool (`placement.slots.Split`)."""

    mode: Literal["coexisting", "colocated"]
    rollout: NonNegativeInt
    reward: NonNegativeInt
    train: NonNegativeInt


class MoveOutcome(RecordPart):
    """Measured effect of a move; None: not known.

    `took_s`: seconds until the woken engines served requests again, or the new world trained. `step_s`: mean seconds
    per step over the `steps` steps after the move; `before_s`: over the steps before. The work in these steps: `tokens`
    is the mean response length in tokens, `question_s` the mean seconds of judge-engine time per question.
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
    """One placement change, or one that the policy considered worthwhile.

    Numbers are as known at the decision; None: not known.
    """

    generation: NonNegativeInt
    """Generation of the plan that it creates."""
    step: NonNegativeInt
    """Head's step at the decision."""
    within: bool = False
    """Whether the move happened within the step after `step`."""
    seq: NonNegativeInt = 0
    """Head's sequence number at the decision. A move of the train world applies to that head only."""
    kind: MoveKind
    before: SplitPart
    after: SplitPart
    slots: tuple[str, ...] = ()
    """`NODE/SLOT was -> is`."""
    more_slots: NonNegativeInt = 0
    """Number of further slots that are not named."""
    reason: Reason = ""
    idle: dict[str, float] = Field(default_factory=dict)
    """Idle share of each pool's slot-seconds, 0 to 1. Within a step: computed from current requests and slots."""
    gain_s: float | None = None
    cost_s: float | None = None
    expected_s: float | None = None
    """Expected seconds per step on the new split."""
    before_s: float | None = None
    """Expected seconds per step on the old split."""
    by: str = ""
    """Node that decided."""
    time: float = 0.0
    """Seconds since the epoch, for display."""
    state: Literal["done", "wanted", "lapsed", "would"] = "done"
    """WANTED: the world is not formed yet. LAPSED: it was never formed, because the next step or another plan came
    first. WOULD: decided with `dry_run`, not applied.
    """
    outcome: MoveOutcome | None = None


class ForecastAccuracy(RecordPart):
    """Accuracy of the forecast step times.

    `expected_s`, `took_s` and `off_s` (absolute error) are sums in seconds over `steps` steps.
    """

    steps: NonNegativeInt = 0
    newest: NonNegativeInt = 0
    """The newest of these steps."""
    expected_s: float = 0.0
    took_s: float = 0.0
    off_s: float = 0.0


class HoldPeriod(RecordPart):
    """A period of steps after which the policy was asked and nothing moved.

    `since` and `step`: the first and the newest step. `began`: time of the first decision, which identifies the period.
    `reason`: of the newest decision. `expected_s`: the step time that it expected; None if the policy gives none.
    """

    since: NonNegativeInt
    step: NonNegativeInt
    seq: NonNegativeInt = 0
    """Head's sequence number at the newest decision."""
    reason: Reason = ""
    by: str = ""
    """Node of the newest decision."""
    began: float = 0.0
    time: float = 0.0
    """Time of the newest decision in seconds since the epoch, for display."""
    expected_s: float | None = None
    foretold: ForecastAccuracy = ForecastAccuracy()


class Moves(Record):
    """`placement/moves`: the newest moves, oldest first; their total number; and the newest periods without a move."""

    called: ClassVar[str] = "moves of a job"
    moves: tuple[Move, ...] = ()
    total: NonNegativeInt = 0
    stays: tuple[HoldPeriod, ...] = ()

    @property
    def newest(self) -> Move | None:
        """The newest move, or None."""
        return self.moves[-1] if self.moves else None

    def plus(self, move: Move) -> Moves:
        """With `move` added; drops the oldest beyond `NEWEST_MOVES`."""
        return self.model_copy(update={"moves": (*self.moves, move)[-NEWEST_MOVES:], "total": self.total + 1})


MOST_SAID = 8192
"""Maximum length of an error text in a record, in characters."""

ErrorText = Annotated[str, cut_text(MOST_SAID)]


class JobPhase(StrEnum):
    """PENDING: created, not started.

    Final: SUCCEEDED, FAILED or CANCELLED. Only a job in phase SUCCEEDED can continue, with a higher goal
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
    """`job`: written once, except for a goal that is raised later.

    `spec` is the resolved spec. `run_dir` is visible to every node; if nodes share no folder, each node has one of that
    name (`controllers.storage.run_folder`).
    """

    uid: str
    name: str
    spec: dict[str, Any]
    run_dir: str
    created: float
    request_id: str = ""
    prompts: int
    """Number of dataset entries when the job was created. Shards are cut by this number permanently."""
    data_digest: str = ""
    """Digest of the dataset's content at creation: a prompt ref must always mean the same prompt."""
    held_out_digest: str = ""
    """Digest of the evaluation data, so that accuracies of one job are comparable; empty without evaluation."""
    model_revision: str = ""
    """Commit of a hub model at creation, so that all nodes load the same weights. Empty for a folder."""
    remote_code: tuple[str, ...] = ()
    """Python files of the model that run in engines and ranks because the spec trusts them."""
    judge_revisions: dict[str, str] = Field(default_factory=dict)
    """Commit of each judge's hub model, by judge name; a judge from a folder has no entry."""
    attention_equals_at: PositiveInt = ATTENTION_EQUALS_AT
    """Sequence length in tokens at which attention costs as much as the model's matrices. Copied into every seal."""
    models: ModelConfigs | None = None
    """Configurations that determine the size of the models; None: not determined."""
    namespace: str = DEFAULT_NAMESPACE
    owner: str = ""
    """Creator of the job; empty if users are not distinguished."""

    @property
    def full_name(self) -> str:
        """Name with namespace, as displayed."""
        return full_name(self.name, self.namespace)

    def with_goal(self, what: str, goal: int) -> JobRecord:
        """The same job with `flow.steps` or `flow.epochs` at `goal`."""
        return self.model_copy(update={"spec": {**self.spec, "flow": {**self.spec["flow"], what: goal}}})


class JobStatus(Record):
    """`state`: phase of the job, and why."""

    phase: JobPhase
    reason: str = ""
    changed: float = 0.0
    """Seconds since the epoch, for display."""


class EnginePlace(RecordPart):
    """An engine replica of the rollout pool or the reward pool. It is on one node; several may be resident on one slot."""

    node: str
    slot: str
    judge: str = ""
    """Judge that the engine serves; empty: it serves the policy."""
    asleep: bool = False
    """Whether the engine is resident without its memory: it gets no requests and no weight sync
    (`controllers.rules.memory`).
    """
    further: tuple[str, ...] = ()
    """Further slots that it spans after `slot`, in order."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the engine within a plan, independent of the slots that it spans."""
        return self.node, self.slot, self.judge

    @property
    def slots(self) -> tuple[str, ...]:
        """All slots that it spans."""
        return (self.slot, *self.further)

    @property
    def on(self) -> tuple[Slot, ...]:
        """All slots that it spans, with the node."""
        return tuple(Slot(self.node, slot) for slot in self.slots)

    @property
    def pool(self) -> ServingPool:
        """Pool of the engine."""
        return "reward" if self.judge else "rollout"


class RankPlace(RecordPart):
    """A train rank on one slot."""

    rank: int
    node: str
    slot: str

    @property
    def on(self) -> Slot:
        """Its slot."""
        return Slot(self.node, self.slot)


class Plan(Record):
    """`plan`: which slot serves the job in which role. The ranks are those of world `world`."""

    generation: int
    world: str
    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]
    reason: str = ""
    lent_from: SplitPart | None = None
    """During elastic reassignment within a step: the split at its start. Any other change of the plan makes the current
    split permanent.
    """
    stands_still: bool = False
    """Whether nothing is placed because the job has too few slots. Another world follows when it has enough."""

    @property
    def rollout_nodes(self) -> frozenset[str]:
        """Nodes with rollout engines: those with awake engines, or all if every engine is asleep."""
        rollout = [place for place in self.engines if not place.judge]
        return frozenset(place.node for place in rollout if not place.asleep) or frozenset(p.node for p in rollout)

    @property
    def nodes(self) -> frozenset[str]:
        """All nodes in the plan."""
        return frozenset({place.node for place in self.ranks} | {place.node for place in self.engines})


class EvalSample(RecordPart):
    """One held-out response, for display."""

    prompt: str
    response: str
    answer: str
    reward: float
    source: str = ""
    unscored: str = ""
    """Why the reward could not score it; it then counts as incorrect. Empty if it was scored."""
    correct: bool | None = None
    """Whether the reward reaches the set's threshold; None in records from versions without thresholds."""


class SourceScore(RecordPart):
    """Scores of one held-out set."""

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
    """The reward's error for the first of them."""

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the scored responses; None if none was scored."""
        return self.metrics.get(f"mean@{self.samples}")

    @property
    def is_graded(self) -> bool:
        """Whether the mean reward differs from the accuracy: rewards of scored responses are not just 1 if correct and
        0 if not.
        """
        responses = self.count * self.samples
        rewards = (self.mean_reward or 0.0) * (responses - self.unscored)
        return self.mean_reward is not None and not math.isclose(rewards, self.accuracy * responses, abs_tol=1e-6)


class Evaluation(Record):
    """`eval/{version}`: written once per policy version from its parts.

    `accuracy` is the share of correct responses, averaged over the prompts of all sets. `count` is the number of
    prompts.
    """

    version: Version
    accuracy: float
    count: int
    by: str = ""
    """The controller, in records from versions in which one controller made the whole evaluation."""
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
        """Whether the mean reward of any set differs from its accuracy."""
        return any(score.is_graded for score in self.by_source.values())


class EvalAsked(Record):
    """`evalask`: the newest step for which a person requested an evaluation out of schedule.

    It is written before that step is committed, so every controller that sees the commit also sees the request.
    """

    called: ClassVar[str] = "request for an evaluation"

    step: PositiveInt
    by: str = ""
    """Who requested it, if known."""
    time: float = 0.0


class EvalPart(Record):
    """`evalpart/{version}/{number}`: prompts of one set, answered and scored by one controller; written once.

    Part `number` of `parts`. The transaction that writes the evaluation deletes it. It covers the set's prompts from
    `first`; `correct` has one number per prompt: how many of its `samples` responses are correct.
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
    """The same sum for each part of the set's reward, by its label."""
    unscored: int = 0
    why_unscored: str = ""
    """The reward's error for the first unscored response, for display."""
    shown: tuple[EvalSample, ...] = ()
    """First responses to the first prompts of the set."""
    by: str = ""


class FaultRecord(Record):
    """`fault/{name}`: an error of a plug-in (a reward, a flow), for display; written once."""

    node: str
    """Node that saw it first."""
    what: ErrorText
    trace: ErrorText = ""
    """Traceback of the plug-in's own code."""


class RankClaim(Record):
    """`world/{world}/rank/{rank}`: the worker instance that runs this rank, written once."""

    instance: str


class ModelFetch(Record):
    """`fetch/{node}`: download progress of the job's model on a node, in bytes, under its controller's lease."""

    node: str
    path: str
    done: int
    total: int

    @property
    def sentence(self) -> str:
        """`downloading model hf://owner/name, 1.2 of 3.4 GB`"""
        unit, size = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        return f"downloading model {self.path}, {self.done / size:.1f} of {self.total / size:.1f} {unit}"


class StorageMark(Record):
    """`storage/{node}`: what a node wrote into the run folder, for the other nodes to find there
    (`controllers.storage`).
    """

    node: str
    nonce: str


class Trouble(Record):
    """`trouble/{topic}`: the newest warning of a topic, for example about a tracker. It does not affect the run."""

    topic: str
    node: str
    sentence: ErrorText
    time: float = 0.0
    """Seconds since the epoch, for display; 0 in records from versions without it."""

    @property
    def is_of_a_node(self) -> bool:
        """Whether the warning concerns its own node, as the topic shows, and not the whole job."""
        return f"-{self.node}" in self.topic


class NodeRecord(Record):
    """`nodes/{name}`: a running daemon, under its lease."""

    name: str
    incarnation: str
    address: str
    """Address for users."""
    peer_address: str = ""
    """Address for other nodes, which authenticate with certificates; empty: the same as `address`."""
    metrics_address: str = ""
    slots: tuple[str, ...]
    pid: int
    started: float = 0.0
    sglang: bool = False
    """Whether SGLang is installed there."""
    facts: NodeFacts | None = None
    """Devices of its slots; None: not known, or emulated."""

    @property
    def for_peers(self) -> str:
        """Address for other nodes."""
        return self.peer_address or self.address
