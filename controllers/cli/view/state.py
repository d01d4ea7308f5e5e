"""The view of a job as a fold over its events.

`ViewState.apply(event)` is total: an event of an unknown kind, or with unknown fields, gives a state; an event that was applied
already changes nothing. Values that are missing, of another type or not finite count as absent. A rollback removes the steps
and evaluations that it undoes, so that the view shows what is on the job's chain. `observe` adds what events do not say: the name,
and what the job waits for now.

A step copies a tuple, so n steps copy n² pointers; a hundred thousand steps take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from gcore.observability.events import JobEvent

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
class AnswerPoint:
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
    """One evaluation. `accuracy` is between 0 and 1; `mean_reward` says more than that if it `is_graded`."""

    step: int
    lineage: int
    accuracy: float
    count: int
    samples: tuple[AnswerPoint, ...] = ()
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Accuracies, by set."""
    sets: Mapping[str, SetPoint] = field(default_factory=dict)
    unscored: int = 0
    mean_reward: float | None = None
    is_graded: bool = False

    @property
    def measured(self) -> str:
        """`accuracy 20.0%`, and with rewards that are not only 0 and 1 `accuracy 20.0%, mean reward 0.367`."""
        told = self.is_graded and self.mean_reward is not None
        return f"accuracy {self.accuracy:.1%}" + (f", mean reward {self.mean_reward:.3f}" if told else "")


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
class LogPoint:
    """Something a person wants to have seen. `time` is seconds since the epoch."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class WaitPoint:
    """What somebody waits for, since when (seconds since the epoch)."""

    who: str
    what: str
    since: float
    cause: str = ""
    """One of the words in docs/operate/failures.md; empty where the command itself found it."""


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
    waiting: tuple[WaitPoint, ...] = ()
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
        return get_count(data, "shards") or 0 if isinstance(data, Mapping) else 0


def parse_answer(data: Mapping[str, Any]) -> AnswerPoint:
    """An evaluation's sample."""
    correct = data.get("correct")
    return AnswerPoint(
        get_text(data, "prompt"),
        get_text(data, "response"),
        get_text(data, "answer"),
        finite_or_none(data.get("reward")) or 0.0,
        correct if isinstance(correct, bool) else None,
        get_text(data, "unscored"),
    )


def parse_set(score: Mapping[str, Any]) -> SetPoint:
    """What an evaluation says of one set."""
    metrics = {
        name: n for name, value in get_mapping(score, "metrics").items() if (n := finite_or_none(value)) is not None
    }
    return SetPoint(
        get_count(score, "count") or 0, get_count(score, "samples") or 1, metrics, get_count(score, "unscored") or 0
    )


def get_mapping(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`; empty if there is none."""
    value = data.get(key)
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def get_text(data: Mapping[str, Any], key: str) -> str:
    """What stands under `key`, as text; empty if there is nothing."""
    value = data.get(key)
    return "" if value is None else str(value)


def finite_or_none(value: Any) -> float | None:
    """A number that is one; None for anything else, infinities and NaN too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond what a float holds
        return None


def get_count(data: Mapping[str, Any], key: str) -> int | None:
    """A count: whole, not negative; JSON may have brought it as a float."""
    number = finite_or_none(data.get(key))
    return int(number) if number is not None and number >= 0 and number == int(number) else None


LOG_LINES = 40
RECENT_STEPS = 20

PACED_STEPS = 2
"""So many steps make a pace."""

ENDED_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


@dataclass(frozen=True, slots=True)
class ViewState:
    """Everything a view shows."""

    job: str = ""
    uid: str = ""
    state: str = "PENDING"
    reason: str = ""
    step: int = 0
    steps: int = 0
    steps_estimated: bool = False
    lineage: int = 0
    shard_count: int = 0
    points: tuple[StepPoint, ...] = ()
    evals: tuple[EvalPoint, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    moved: frozenset[int] = frozenset()
    """The shards that got another owner when shards last moved, at `moved_at`."""
    moved_at: float = 0.0
    log: tuple[LogPoint, ...] = ()
    rollbacks: int = 0
    checkpoint: str = ""
    waiting: tuple[WaitPoint, ...] = ()
    best: BestPoint | None = None
    """As the API last said."""
    started: float | None = None
    """The first event's time."""
    last_time: float | None = None
    sequence: int = 0
    """The last event's."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.state in ENDED_STATES

    @property
    def of_steps(self) -> str:
        """`40`, `~40` where it is estimated, `?` while it is unknown."""
        return f"{'~' if self.steps_estimated else ''}{self.steps}" if self.steps else "?"

    @property
    def groups_by_node(self) -> dict[str, int]:
        """Groups on the chain, by the node that made them; every node that was ever there."""
        totals = {node.name: 0 for node in self.nodes}
        for point in self.points:
            for name, count in point.groups.items():
                totals[name] = totals.get(name, 0) + count
        return totals

    @property
    def is_graded(self) -> bool:
        """Whether rewards of evaluations are not only 0 and 1."""
        return any(one.is_graded for one in self.evals)

    @property
    def accuracy_before(self) -> float | None:
        """The first evaluation's."""
        return self.evals[0].accuracy if self.evals else None

    @property
    def accuracy_after(self) -> float | None:
        """The last evaluation's, if it is of a later step than the first."""
        later = self.evals and self.evals[-1].step > self.evals[0].step
        return self.evals[-1].accuracy if later else None

    @property
    def tokens_per_second(self) -> float | None:
        """Over all steps on the chain that say how many tokens they trained in how many seconds."""
        known = [p.stats for p in self.points if "tokens" in p.stats and p.stats.get("seconds", 0.0) > 0]
        seconds = sum(stats["seconds"] for stats in known)
        return sum(stats["tokens"] for stats in known) / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """To the last step at the pace of the recent ones, after the newest step; None while the pace is unknown.

        The first step of a run has the start of engines and ranks in it, and a step now and then an evaluation or a world
        that started again: so the first does not count, and of the others the median does.
        """
        paced = self.points[max(1, len(self.points) - RECENT_STEPS) :]
        recent = [p.stats["seconds"] for p in paced if p.stats.get("seconds", 0.0) > 0]
        if len(recent) < PACED_STEPS or self.steps <= 0:
            return None
        return max(0, self.steps - self.step) * median(recent)

    def apply(self, event: JobEvent) -> ViewState:
        """The state after `event`."""
        if event.sequence <= self.sequence:
            return self
        state = replace(
            self,
            sequence=event.sequence,
            last_time=event.time,
            started=event.time if self.started is None else self.started,
        )
        fold = _FOLDS.get(event.kind)
        return fold(state, event) if fold else state._logged(event, event.message)

    def observe(self, job: JobSnapshot) -> ViewState:
        """With what the API says of the job beside its events. Events win where both speak."""
        state = replace(
            self,
            job=job.name,
            uid=job.uid,
            steps=job.steps or self.steps,
            steps_estimated=job.steps_estimated if job.steps else self.steps_estimated,
            shard_count=job.shard_count or self.shard_count,
            waiting=job.waiting,
            best=job.best,
        )
        if self.sequence == 0:
            state = replace(state, state=job.state, reason=job.reason, step=job.step, lineage=job.lineage)
        if not any(node.shards for node in self.nodes):
            for share in job.shares:
                state = state._node(share.name, alive=True, shards=share.shards)
        return state

    def with_trouble(self, who: str, why: str, now: float) -> ViewState:
        """Waiting also for `who`, because of `why`; nothing: no longer."""
        since = next((wait.since for wait in self.waiting if wait.who == who), now)
        others = tuple(wait for wait in self.waiting if wait.who != who)
        return replace(self, waiting=(*others, WaitPoint(who, why, since)) if why else others)

    def _logged(self, event: JobEvent, text: str) -> ViewState:
        line = LogPoint(event.time, event.kind, event.message or text)
        return replace(self, log=(*self.log, line)[-LOG_LINES:]) if line.text else self

    def _node(self, name: str, *, alive: bool, shards: tuple[int, ...]) -> ViewState:
        """With this node as given, in its place, or as the last."""
        new = NodeView(name, alive, shards)
        if any(node.name == name for node in self.nodes):
            return replace(self, nodes=tuple(new if node.name == name else node for node in self.nodes))
        return replace(self, nodes=(*self.nodes, new))

    def _known_nodes(self, names: Mapping[str, Any]) -> ViewState:
        state = self
        known = {node.name for node in self.nodes}
        for name in sorted(set(names) - known):
            state = state._node(name, alive=True, shards=())
        return state


def _state(state: ViewState, event: JobEvent) -> ViewState:
    name, reason = get_text(event.data, "state"), get_text(event.data, "reason")
    state = replace(state, state=name or state.state, reason=reason)
    return state._logged(event, f"{name}: {reason}" if reason else name)


def _step(state: ViewState, event: JobEvent) -> ViewState:
    step = get_count(event.data, "step")
    if step is None:
        return state._logged(event, "")
    lineage = get_count(event.data, "lineage")
    lineage = state.lineage if lineage is None else lineage
    groups = {
        name: count
        for name, value in get_mapping(event.data, "groups_by_node").items()
        if (count := get_count({"n": value}, "n"))
    }
    stats = {
        name: number
        for name, value in get_mapping(event.data, "stats").items()
        if (number := finite_or_none(value)) is not None
    }
    point = StepPoint(
        step,
        lineage,
        event.time,
        stats,
        groups,
        get_count(event.data, "filtered") or 0,
        get_count(event.data, "failed") or 0,
    )
    state = state._known_nodes(groups)
    return replace(
        state,
        points=(*_up_to(state.points, step - 1), point),
        step=step,
        steps=get_count(event.data, "steps") or state.steps,
        steps_estimated=event.data.get("steps_estimated") is True,
        lineage=lineage,
    )


def _rollback(state: ViewState, event: JobEvent) -> ViewState:
    to_step = get_count(event.data, "to_step")
    if to_step is None:
        return state._logged(event, "")
    lineage = get_count(event.data, "lineage")
    reason = get_text(event.data, "reason")
    back = f"rollback from step {state.step} to step {to_step}"
    on = f"a new train world goes on from step {to_step}, no step is lost"
    text = (on if to_step == state.step else back) + (f": {reason}" if reason else "")
    state = replace(
        state,
        points=_up_to(state.points, to_step),
        evals=tuple(e for e in state.evals if e.step <= to_step),
        step=to_step,
        lineage=state.lineage + 1 if lineage is None else lineage,
        rollbacks=state.rollbacks + ("raised" not in event.data),
    )
    return state._logged(event, text)


def _shards(state: ViewState, event: JobEvent) -> ViewState:
    before = {shard: node.name for node in state.nodes for shard in node.shards}
    shares = {
        name: tuple(sorted(s for s in shards if isinstance(s, int) and not isinstance(s, bool) and s >= 0))
        for name, shards in get_mapping(event.data, "shares").items()
        if isinstance(shards, list | tuple)
    }
    state = state._known_nodes(shares)
    state = replace(state, nodes=tuple(replace(node, shards=shares.get(node.name, ())) for node in state.nodes))
    owned = {shard: name for name, shards in shares.items() for shard in shards}
    moved = frozenset(shard for shard, name in owned.items() if before and before.get(shard) != name)
    count = max(owned, default=-1) + 1
    counts = ", ".join(f"{name} {len(shards)}" for name, shards in sorted(shares.items()))
    state = replace(state, moved=moved, moved_at=event.time, shard_count=max(state.shard_count, count))
    return state._logged(event, f"{len(moved)} shards moved; now {counts}" if before else f"shards dealt out: {counts}")


def _member(state: ViewState, event: JobEvent) -> ViewState:
    name, joined = get_text(event.data, "node"), event.data.get("joined") is True
    if not name:
        return state._logged(event, "")
    shards = next((node.shards for node in state.nodes if node.name == name), ())
    state = state._node(name, alive=joined, shards=shards)
    what = "is leaving" if event.data.get("leaving") is True else "joined" if joined else "left"
    return state._logged(event, f"{name} {what}")


def _eval(state: ViewState, event: JobEvent) -> ViewState:
    step, accuracy = get_count(event.data, "step"), finite_or_none(event.data.get("accuracy"))
    if step is None or accuracy is None:
        return state._logged(event, "")
    samples = event.data.get("samples")
    by_source = {n: score for n, score in get_mapping(event.data, "by_source").items() if isinstance(score, Mapping)}
    point = EvalPoint(
        step,
        get_count(event.data, "lineage") or 0,
        accuracy,
        get_count(event.data, "count") or 0,
        tuple(parse_answer(s) for s in samples if isinstance(s, Mapping)) if isinstance(samples, list | tuple) else (),
        {
            name: share
            for name, score in by_source.items()
            if (share := finite_or_none(score.get("accuracy"))) is not None
        },
        {name: parse_set(score) for name, score in by_source.items()},
        get_count(event.data, "unscored") or 0,
        finite_or_none(event.data.get("mean_reward")),
        event.data.get("graded") is True,
    )
    evals = (*(e for e in state.evals if e.step < step), point)
    text = f"{point.measured} on {point.count} held-out prompts after step {step}"
    return replace(state, evals=evals)._logged(event, text)


def _checkpoint(state: ViewState, event: JobEvent) -> ViewState:
    file = get_text(event.data, "file")
    state = replace(state, checkpoint=file or state.checkpoint)
    return state._logged(event, f"checkpoint {file}" if file else "")


_FOLDS = {
    "state": _state,
    "step": _step,
    "rollback": _rollback,
    "shards": _shards,
    "member": _member,
    "eval": _eval,
    "checkpoint": _checkpoint,
}


def _up_to(points: tuple[StepPoint, ...], step: int) -> tuple[StepPoint, ...]:
    """The points of steps up to `step`. They are in order, and nearly always all of them stay."""
    end = len(points)
    while end and points[end - 1].step > step:
        end -= 1
    return points[:end]
