"""What a view is made of: one step, one evaluation, one node, one line; and how they are read from events.

An event's data is another version's, perhaps: what is missing or of another type than expected is treated as absent, and
nothing here raises. Numbers that are not finite are absent too, so that no view and no sum has to think of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("collect", "exchange", "train", "publish")


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One committed step on the chain. `stats` are its finite numbers; seconds, tokens, or plain values."""

    step: int
    lineage: int
    time: float
    stats: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups trained, by the node that made them."""
    filtered: int = 0
    failed: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """As reported, or worked out."""
        reported, tokens, seconds = (self.stats.get(key) for key in ("tokens_per_second", "tokens", "seconds"))
        if reported is None and tokens is not None and seconds:
            return tokens / seconds
        return reported

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase of the step, those that are known."""
        return {p: max(0.0, self.stats[f"{p}_s"]) for p in PHASES if f"{p}_s" in self.stats}


@dataclass(frozen=True, slots=True)
class Answer:
    """One held-out answer."""

    prompt: str
    response: str
    answer: str
    reward: float
    correct: bool | None = None
    """Whether the reward reaches the set's threshold; None from a cluster that does not tell."""
    unscored: str = ""
    """Why the reward could not score it; empty if it could."""

    @property
    def right(self) -> bool:
        """Whether it counts as correct."""
        return self.reward > 0 if self.correct is None else self.correct


@dataclass(frozen=True, slots=True)
class SetPoint:
    """What one evaluation says of one set. `metrics`: `mean@N`, `pass@1`, `pass@K`, those that are known."""

    count: int = 0
    samples: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    unscored: int = 0


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """One evaluation. `accuracy` is between 0 and 1."""

    step: int
    lineage: int
    accuracy: float
    count: int
    samples: tuple[Answer, ...] = ()
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Accuracies, by set."""
    sets: Mapping[str, SetPoint] = field(default_factory=dict)
    unscored: int = 0


@dataclass(frozen=True, slots=True)
class BestPoint:
    """The best evaluated state of a job. `checkpoint` is its folder; empty if it has none."""

    step: int
    metric: str
    value: float
    checkpoint: str = ""
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """What came of a source's prompts along the chain, as the API answers it; None where nothing is known."""

    name: str
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    mean_reward: float | None = None
    mean_length: float | None = None
    truncated: float | None = None
    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the newest evaluation of the set of that name."""
    eval_samples: int = 0
    eval_unscored: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """A controller's node. `alive`: as far as the events say."""

    name: str
    alive: bool = True
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogLine:
    """Something a person wants to have seen. `time` is seconds since the epoch."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Wait:
    """What somebody waits for, since when (seconds since the epoch)."""

    who: str
    what: str
    since: float


@dataclass(frozen=True, slots=True)
class WarningPoint:
    """What last went wrong of one kind beside the steps. `time`: seconds since the epoch, 0 if that is not known."""

    topic: str
    node: str
    sentence: str
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class RollbackPoint:
    """The newest rollback of a job: to which step, the lineage that began with it, and why."""

    step: int
    lineage: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job as the API answers it. `created` and `ended`: seconds since the epoch; `ended` 0 while it has not."""

    name: str
    uid: str
    state: str
    reason: str = ""
    step: int = 0
    steps: int = 0
    lineage: int = 0
    run_dir: str = ""
    checkpoint: str = ""
    created: float = 0.0
    ended: float = 0.0
    spec: Mapping[str, Any] = field(default_factory=dict)
    shares: tuple[NodeView, ...] = ()
    waiting: tuple[Wait, ...] = ()
    sources: tuple[SourceFigures, ...] = ()
    best: BestPoint | None = None
    warnings: tuple[WarningPoint, ...] = ()
    """The newest first; like `rollback`, of one job that was asked for, and not in a list of all."""
    rollback: RollbackPoint | None = None
    namespace: str = "default"
    owner: str = ""
    priority: int = 0
    slots: int = 0
    """That it may use now; `slots_min`: fewer it does not begin with; `slots_max`: more it does not take, 0: all."""
    slots_min: int = 0
    slots_max: int = 0
    queue_position: int = 0
    """Among those that wait for slots; 0: it waits for none."""

    @property
    def full_name(self) -> str:
        """`NAME`, or `NAMESPACE/NAME` outside the default one."""
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"

    @property
    def steps_estimated(self) -> bool:
        """Whether `steps` follows from what remains of the data epochs and what a group has taken lately."""
        flow = self.spec.get("flow")
        by_prompts = isinstance(flow, Mapping) and flow.get("steps") is None and flow.get("count") == "prompts"
        return by_prompts and self.ended == 0

    @property
    def of_steps(self) -> str:
        """`40`, or `~40` where it is estimated."""
        return f"{'~' if self.steps_estimated else ''}{self.steps}"

    @property
    def shard_count(self) -> int:
        """How many shards the job's prompt stream has; 0 if that is unknown."""
        data = self.spec.get("data")
        return whole_of(data, "shards") or 0 if isinstance(data, Mapping) else 0


def answer_of(data: Mapping[str, Any]) -> Answer:
    """An evaluation's sample."""
    correct = data.get("correct")
    return Answer(
        text_of(data, "prompt"),
        text_of(data, "response"),
        text_of(data, "answer"),
        finite(data.get("reward")) or 0.0,
        correct if isinstance(correct, bool) else None,
        text_of(data, "unscored"),
    )


def set_of(score: Mapping[str, Any]) -> SetPoint:
    """What an evaluation says of one set."""
    metrics = {name: n for name, value in mapping_of(score, "metrics").items() if (n := finite(value)) is not None}
    return SetPoint(
        whole_of(score, "count") or 0, whole_of(score, "samples") or 1, metrics, whole_of(score, "unscored") or 0
    )


def mapping_of(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`; empty if there is none."""
    value = data.get(key)
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def text_of(data: Mapping[str, Any], key: str) -> str:
    """What stands under `key`, as text; empty if there is nothing."""
    value = data.get(key)
    return "" if value is None else str(value)


def finite(value: Any) -> float | None:
    """A number that is one; None for anything else, infinities and NaN too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond what a float holds
        return None


def whole_of(data: Mapping[str, Any], key: str) -> int | None:
    """A count: whole, not negative; JSON may have brought it as a float."""
    number = finite(data.get(key))
    return int(number) if number is not None and number >= 0 and number == int(number) else None
