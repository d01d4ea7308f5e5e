"""What is kept of a job's placement beside its plan: who plans, what a person has fixed, each move with its reason and what came
of it, and why nothing moved. Told and read by people and by whoever plans next; no step rests on any of it.

The plan itself is `gcore.ledger.job.Plan`; a move names the plan's generation that it made.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field, NonNegativeInt, PositiveInt

from gcore.schema import Part, Record, cut_to

NEWEST_MOVES = 64
"""Moves that the store keeps; all of them stand in the run's folder."""
MOST_SLOTS_TOLD = 16
"""Slots of one move that are named; of more it is told how many."""
MOST_REASON = 600
"""Characters of a reason, which policies of anybody's write."""
MOST_MOVE_BYTES = 4096
"""Of a move in the record."""
NEWEST_STAYS, MOST_STAY_BYTES = 16, 3072
"""Stretches without a move that the store keeps, and what one of them takes at most."""


Reason = Annotated[str, cut_to(MOST_REASON)]


class Leader(Record):
    """`placement/leader`: the controller that plans, under its lease."""

    called: ClassVar[str] = "placement leader"
    node: str
    incarnation: str


class SlotsOfPools(Protocol):
    """A split, stored (`SplitPart`) or planned with (`placement.split.Split`)."""

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


class SplitPart(Part):
    """Slots of each pool (`placement.split.Split`)."""

    mode: Literal["coexisting", "colocated"]
    rollout: NonNegativeInt
    reward: NonNegativeInt
    train: NonNegativeInt


class MoveOutcome(Part):
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


class Move(Part):
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


class Foretold(Part):
    """How well steps were foretold, of which the decision before each told what it expected. Seconds, of all of them: `off_s`, by how much
    each was off, whichever way."""

    steps: NonNegativeInt = 0
    newest: NonNegativeInt = 0
    """The newest of them."""
    expected_s: float = 0.0
    took_s: float = 0.0
    off_s: float = 0.0


class Stay(Part):
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
    foretold: Foretold = Foretold()


class Moves(Record):
    """`placement/moves`: the newest moves, oldest first; how many there were in all; and the newest stretches of steps without any."""

    called: ClassVar[str] = "moves of a job"
    moves: tuple[Move, ...] = ()
    total: NonNegativeInt = 0
    stays: tuple[Stay, ...] = ()

    @property
    def newest(self) -> Move | None:
        """The last one."""
        return self.moves[-1] if self.moves else None

    def plus(self, move: Move) -> Moves:
        """With one more, and without the oldest where there are too many."""
        return self.model_copy(update={"moves": (*self.moves, move)[-NEWEST_MOVES:], "total": self.total + 1})
