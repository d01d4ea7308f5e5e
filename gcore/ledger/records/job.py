"""The records of a job beside its chain: what it is, how it stands, its plan and placement, how it was evaluated.

Of its placement it keeps who plans, what a person has fixed, each move with its reason and result, and why nothing moved. People
and the next planner read that; no step rests on it. A move names the generation of the `Plan` that it made.
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
"""Moves that the store keeps; all of them stand in the run's folder."""

MOST_SLOTS_TOLD = 16
"""Slots of one move that are named; of more it is told how many."""

METRICS_FILE = "metrics.jsonl"
"""In a run's folder; written by `gcore.observability.metrics_file`."""

MOST_REASON = 600
"""Characters of a reason, which policies of anybody's write."""

MOST_MOVE_BYTES = 4096
"""Of a move in the record."""

NEWEST_STAYS, MOST_STAY_BYTES = 16, 3072
"""Stretches without a move that the store keeps, and what one of them takes at most."""

Reason = Annotated[str, cut_text(MOST_REASON)]


class Leader(Record):
    """`placement/leader`: the controller that plans, under its lease."""

    called: ClassVar[str] = "placement leader"
    node: str
    incarnation: str


class SlotsOfPools(Protocol):
    """A split, stored (`SplitPart`) or planned with (`placement.slots.Split`)."""

    @property
    def rollout(self) -> int: ...
    @property
    def reward(self) -> int: ...
    @property
    def train(self) -> int: ...


class Pin(Record):
    """`placement/pin`: what a person has fixed. `frozen`: nothing moves. A number: so many slots for that pool, whatever the policy
    says."""

    called: ClassVar[str] = "placement pin"
    frozen: bool = False
    rollout: PositiveInt | None = None
    reward: PositiveInt | None = None
    train: PositiveInt | None = None
    by: str = ""
    """The node that was asked."""
    time: float = 0.0
    """Seconds since the epoch, for people."""

    @property
    def sizes(self) -> dict[str, int]:
        """The slots of each pool whose number is fixed."""
        found = {"rollout": self.rollout, "reward": self.reward, "train": self.train}
        return {pool: size for pool, size in found.items() if size is not None}

    @property
    def fixes(self) -> bool:
        """Whether it fixes anything."""
        return self.frozen or bool(self.sizes)

    def off(self, split: SlotsOfPools) -> int:
        """Slots by which a split is off what is fixed; 0: it is as was asked."""
        return sum(abs(getattr(split, pool) - size) for pool, size in self.sizes.items())

    def __str__(self) -> str:
        said = [f"{pool} has {size}" for pool, size in self.sizes.items()]
        return ", ".join(["nothing moves"] * self.frozen + said) or "nothing is fixed"


class MoveKind(StrEnum):
    """SPLIT: engines change over between two steps. WORLD: the train world gets another size too, by a rollback to head's own state.
    LEND: within a step, from rollout to the judges; RETURN: back. MEND: no policy asked for it, nodes or workers came or went. BEGIN: what the job began
    with, before which there was nothing."""

    BEGIN = "begin"
    SPLIT = "split"
    WORLD = "world"
    LEND = "lend"
    RETURN = "return"
    MEND = "mend"


class SplitPart(RecordPart):
    """Slots of each pool (`placement.slots.Split`)."""

    mode: Literal["coexisting", "colocated"]
    rollout: NonNegativeInt
    reward: NonNegativeInt
    train: NonNegativeInt


class MoveOutcome(RecordPart):
    """What came of a move. `took_s`: until the engines that woke were asked again, or the new world served; `steps`: over which
    `step_s`, the mean seconds of a step after it, was measured; `before_s`: of the steps before it. What the work of these steps was:
    `tokens` of a response, `question_s` that a question took of a judge's engine, on average. None: not known."""

    took_s: float | None = None
    steps: NonNegativeInt = 0
    step_s: float | None = None
    before_s: float | None = None
    tokens: float | None = None
    before_tokens: float | None = None
    question_s: float | None = None
    before_question_s: float | None = None


class Move(RecordPart):
    """One change of the plan, or one that was held to be worth it. Numbers are what was known when it was decided; None: not known."""

    generation: NonNegativeInt
    """Of the plan that it makes."""
    step: NonNegativeInt
    """Head's, when it was decided."""
    within: bool = False
    """Whether it was within the step after that one."""
    seq: NonNegativeInt = 0
    """Head's sequence number then: a move of the train world is for that head only."""
    kind: MoveKind
    before: SplitPart
    after: SplitPart
    slots: tuple[str, ...] = ()
    """`NODE/SLOT was -> is`."""
    more_slots: NonNegativeInt = 0
    """Beyond those."""
    reason: Reason = ""
    idle: dict[str, float] = Field(default_factory=dict)
    """What was not used of each pool's slot-seconds, 0 to 1; within a step, requests and slots as they were."""
    gain_s: float | None = None
    cost_s: float | None = None
    expected_s: float | None = None
    """A step on the new split."""
    before_s: float | None = None
    """And on the one there was."""
    by: str = ""
    """The node that decided."""
    time: float = 0.0
    """Seconds since the epoch, for people."""
    state: Literal["done", "wanted", "lapsed", "would"] = "done"
    """WANTED: a world that is still to be formed; LAPSED: it never was, for the next step or another plan came first; WOULD: with `dry_run`."""
    outcome: MoveOutcome | None = None


class ForecastAccuracy(RecordPart):
    """How well steps were foretold, of which the decision before each told what it expected. Seconds, of all of them: `off_s`, by how much
    each was off, whichever way."""

    steps: NonNegativeInt = 0
    newest: NonNegativeInt = 0
    """The newest of them."""
    expected_s: float = 0.0
    took_s: float = 0.0
    off_s: float = 0.0


class HoldPeriod(RecordPart):
    """A stretch of steps after each of which the policy was asked, and nothing moved. `since`, `step`: the first and the newest of them;
    `began`: when the policy was asked after the first, by which the stretch is known; `reason`: that of the newest decision;
    `expected_s`: what that expected of the next step, None where the policy says nothing of it."""

    since: NonNegativeInt
    step: NonNegativeInt
    seq: NonNegativeInt = 0
    """Head's sequence number at the newest decision."""
    reason: Reason = ""
    by: str = ""
    """The node that decided last."""
    began: float = 0.0
    time: float = 0.0
    """Of the newest decision, in seconds since the epoch, for people."""
    expected_s: float | None = None
    foretold: ForecastAccuracy = ForecastAccuracy()


class Moves(Record):
    """`placement/moves`: the newest moves, oldest first; how many there were in all; and the newest stretches of steps without any."""

    called: ClassVar[str] = "moves of a job"
    moves: tuple[Move, ...] = ()
    total: NonNegativeInt = 0
    stays: tuple[HoldPeriod, ...] = ()

    @property
    def newest(self) -> Move | None:
        """The last one."""
        return self.moves[-1] if self.moves else None

    def plus(self, move: Move) -> Moves:
        """With one more, and without the oldest where there are too many."""
        return self.model_copy(update={"moves": (*self.moves, move)[-NEWEST_MOVES:], "total": self.total + 1})


MOST_SAID = 8192
"""Characters of what was wrong, in a record."""

ErrorText = Annotated[str, cut_text(MOST_SAID)]


class JobPhase(StrEnum):
    """PENDING: created, nothing of it has started. Ended: SUCCEEDED, FAILED or CANCELLED. Only a job that has SUCCEEDED
    can go on, with a higher goal (`gcore.ledger.transactions.extend`)."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)


class JobRecord(Record):
    """`job`: written once, but for a goal that is raised later. `spec` is the resolved spec; `run_dir` is seen by every node; where nodes share no folder,
    each has one of that name (`controllers.storage.run_folder`)."""

    uid: str
    name: str
    spec: dict[str, Any]
    run_dir: str
    created: float
    request_id: str = ""
    prompts: int
    """Entries of the dataset when the job was created; the shards are cut by it for ever."""
    data_digest: str = ""
    """Names the dataset's content then: a prompt ref must mean the same prompt for ever."""
    held_out_digest: str = ""
    """Names the content of what is evaluated, so that accuracies of one job can be compared; empty if nothing is."""
    model_revision: str = ""
    """The commit of a hub's model, as it was then: all nodes load the same weights. Empty for a folder."""
    remote_code: tuple[str, ...] = ()
    """Python files that come with the model and run in engines and ranks, because the spec trusts them."""
    judge_revisions: dict[str, str] = Field(default_factory=dict)
    """The same of each judge's model, by the judge's name; none for a folder."""
    attention_equals_at: PositiveInt = ATTENTION_EQUALS_AT
    """The length, in tokens, at which attention costs the model as much as its matrices; goes into every seal."""
    models: ModelConfigs | None = None
    """What the models' sizes follow from; None: nobody looked."""
    namespace: str = DEFAULT_NAMESPACE
    owner: str = ""
    """Who created it; empty where nobody is told apart."""

    @property
    def full_name(self) -> str:
        """As people write it."""
        return full_name(self.name, self.namespace)

    def with_goal(self, what: str, goal: int) -> JobRecord:
        """The same job with `flow.steps` or `flow.epochs` at `goal`."""
        return self.model_copy(update={"spec": {**self.spec, "flow": {**self.spec["flow"], what: goal}}})


class JobStatus(Record):
    """`state`."""

    phase: JobPhase
    reason: str = ""
    changed: float = 0.0
    """Seconds since the epoch, for people."""


class EnginePlace(RecordPart):
    """A replica that generates: of the rollout pool, or of the reward pool. It lies on one node; several may be resident on one slot."""

    node: str
    slot: str
    judge: str = ""
    """The judge whose engine it is; empty: it serves the policy."""
    asleep: bool = False
    """Whether it is resident there without its memory: nobody asks it, and nothing is published to it (`controllers.rules.memory`)."""
    further: tuple[str, ...] = ()
    """The slots that it spans behind `slot`, in their order."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is told apart by from the others of a plan, whatever it spans."""
        return self.node, self.slot, self.judge

    @property
    def slots(self) -> tuple[str, ...]:
        """All that it spans."""
        return (self.slot, *self.further)

    @property
    def on(self) -> tuple[Slot, ...]:
        """The same with the node."""
        return tuple(Slot(self.node, slot) for slot in self.slots)

    @property
    def pool(self) -> ServingPool:
        """Whose it is."""
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
    """While slots are lent within a step: what pools had when it began. Whatever else changes a plan makes what there is its own."""
    stands_still: bool = False
    """Whether nothing is placed, because the job has too few slots; another world follows when it has enough."""

    @property
    def rollout_nodes(self) -> frozenset[str]:
        """The nodes that have engines of the rollout pool, awake ones if any is awake."""
        rollout = [place for place in self.engines if not place.judge]
        return frozenset(place.node for place in rollout if not place.asleep) or frozenset(p.node for p in rollout)

    @property
    def nodes(self) -> frozenset[str]:
        """Every node it uses."""
        return frozenset({place.node for place in self.ranks} | {place.node for place in self.engines})


class EvalSample(RecordPart):
    """One held-out answer, shown to people."""

    prompt: str
    response: str
    answer: str
    reward: float
    source: str = ""
    unscored: str = ""
    """Why its reward could not score it; it is not correct then. Empty if it could."""
    correct: bool | None = None
    """Whether the reward reaches the set's threshold; None in records of a time without thresholds."""


class SourceScore(RecordPart):
    """How the prompts of one held-out set were answered."""

    accuracy: float
    """The share of all responses that are correct: whose reward reaches the set's threshold. 0 to 1."""
    count: int
    """Prompts."""
    samples: PositiveInt = 1
    """Responses to each."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """`mean@N` (the mean reward of the scored responses; absent if none was scored), `pass@1`, `pass@K` as asked for, and
    `part:LABEL`, the mean of each part that the set's reward has."""
    unscored: int = 0
    """Responses that the reward could not score. They count as not correct, and in no mean of rewards."""
    why_unscored: str = ""
    """What the reward said of the first of those."""

    @property
    def mean_reward(self) -> float | None:
        """Of the scored responses; None if none was scored."""
        return self.metrics.get(f"mean@{self.samples}")

    @property
    def is_graded(self) -> bool:
        """Whether the mean reward says more than the accuracy: not every scored response has reward 1 if correct, and 0 if not."""
        responses = self.count * self.samples
        rewards = (self.mean_reward or 0.0) * (responses - self.unscored)
        return self.mean_reward is not None and not math.isclose(rewards, self.accuracy * responses, abs_tol=1e-6)


class Evaluation(Record):
    """`eval/{version}`: written once for a policy version, from its parts, whoever made them.

    `accuracy` is the mean over all prompts of all sets of the share of correct responses; `count` is of prompts.
    """

    version: Version
    accuracy: float
    count: int
    by: str = ""
    """Who made all of it: in records of a time when one peer did."""
    samples: tuple[EvalSample, ...] = ()
    by_source: dict[str, SourceScore] = Field(default_factory=dict)
    unscored: int = 0
    responses_by: dict[str, int] = Field(default_factory=dict)
    """Responses, by the incarnation of the controller that had them made."""
    asked: bool = False
    """Whether it was made out of turn, because a person asked for it. It is never the best: its step may have no checkpoint."""

    @property
    def mean_reward(self) -> float | None:
        """The mean over all prompts of all sets of the mean reward of the scored responses; None without any."""
        scored = [(one.count, one.mean_reward) for one in self.by_source.values() if one.mean_reward is not None]
        count = sum(prompts for prompts, _ in scored)
        return math.fsum(prompts * mean for prompts, mean in scored) / count if count else None

    @property
    def is_graded(self) -> bool:
        """Whether the mean reward says more than the accuracy."""
        return any(score.is_graded for score in self.by_source.values())


class EvalAsked(Record):
    """`evalask`: the step whose weights a person wants to have evaluated out of turn, the newest that was asked for. Written
    before that step is committed, so whoever hears of the commit has heard of this."""

    called: ClassVar[str] = "request for an evaluation"

    step: PositiveInt
    by: str = ""
    """Who asked, as far as that is known."""
    time: float = 0.0


class EvalPart(Record):
    """`evalpart/{version}/{number}`: some prompts of one set, answered and scored by one controller; written once.

    Part `number` of `parts`; deleted with the transaction that writes the evaluation. Prompts `first` and following of the
    set, as many as `correct` has numbers: how many of the `samples` responses to each are correct.
    """

    version: Version
    number: int
    parts: PositiveInt
    source: str
    first: int
    samples: PositiveInt
    correct: tuple[int, ...]
    reward: float
    """The sum over the responses that were scored."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """The same of each part of the set's reward, by its label."""
    unscored: int = 0
    why_unscored: str = ""
    """What the reward said of the first of those, for people."""
    shown: tuple[EvalSample, ...] = ()
    """First responses, to the set's first prompts."""
    by: str = ""


class FaultRecord(Record):
    """`fault/{name}`: something that was wrong with a plug-in (a reward, a flow), for people; written once."""

    node: str
    """Where it was seen first."""
    what: ErrorText
    trace: ErrorText = ""
    """The traceback of the plug-in's own code."""


class RankClaim(Record):
    """`world/{world}/rank/{rank}`: the one worker instance that is this rank, written once."""

    instance: str


class ModelFetch(Record):
    """`fetch/{node}`: how far a node is with fetching the job's model, under its controller's lease. In bytes."""

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
    """`storage/{node}`: what a node wrote into the run's folder, for the others to see there (`controllers.storage`)."""

    node: str
    nonce: str


class Trouble(Record):
    """`trouble/{topic}`: what last went wrong beside the run, such as with a tracker; the run itself is none the worse."""

    topic: str
    node: str
    sentence: ErrorText
    time: float = 0.0
    """Seconds since the epoch, for people; 0 if whoever wrote it was of a version that did not say."""

    @property
    def is_of_a_node(self) -> bool:
        """Whether it is one of the node's own, which its name in the topic shows, and not one that it tells for all."""
        return f"-{self.node}" in self.topic


class NodeRecord(Record):
    """`nodes/{name}`: a daemon that is there, under its lease."""

    name: str
    incarnation: str
    address: str
    """Where it answers people."""
    peer_address: str = ""
    """Where it answers other nodes, which show their certificates there; empty: in the same place."""
    metrics_address: str = ""
    slots: tuple[str, ...]
    pid: int
    started: float = 0.0
    sglang: bool = False
    """Whether SGLang can be started there."""
    facts: NodeFacts | None = None
    """What its slots are; None: not known, or they are emulated."""

    @property
    def for_peers(self) -> str:
        """Where it answers other nodes."""
        return self.peer_address or self.address
