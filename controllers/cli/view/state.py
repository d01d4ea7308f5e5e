"""The state of the job views, computed from the job's events.

`ViewState.apply(event)` accepts every event: unknown kinds and fields are ignored, and an event that was already applied changes nothing.
Values that are missing, of another type or not finite count as absent. A rollback removes the steps and evaluations of the discarded
branch. `observe` adds what events do not contain: the name of the job and its wait reports.

Each step copies a tuple, so n steps copy n² pointers; a hundred thousand steps take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from gcore.ledger.records.restart_reasons import is_restart, restart_sentence
from gcore.observability.events import JobEvent

PHASES = ("collect", "exchange", "train", "publish")
PHASE_NAMES = {"collect": "generate", "exchange": "transfer", "train": "train", "publish": "weight sync"}
"""The displayed names of the phases of a step."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One committed step. `stats`: its metrics by name (those that are finite). `filtered`, `failed`: number of its
    prompts with this outcome."""

    step: int
    lineage: int
    time: float
    stats: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    """Trained groups, by the node that generated them."""
    filtered: int = 0
    failed: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, as reported or computed from tokens and seconds; None of a policy that generates pictures."""
        if self.denoising_steps is not None:
            return None
        reported, tokens, seconds = (self.stats.get(key) for key in ("tokens_per_second", "tokens", "seconds"))
        if reported is None and tokens is not None and seconds:
            return tokens / seconds
        return reported

    @property
    def denoising_steps(self) -> float | None:
        """Mean number of trained denoising steps of a generated picture; None if the policy writes text."""
        return self.stats.get("denoising_steps")

    @property
    def pictures_per_second(self) -> float | None:
        """Pictures per second; None if unknown, or if the policy writes text."""
        return self.stats.get("pictures_per_second")

    @property
    def phases(self) -> dict[str, float]:
        """Duration of each phase of the step in seconds, as far as reported."""
        return {p: max(0.0, self.stats[f"{p}_s"]) for p in PHASES if f"{p}_s" in self.stats}


@dataclass(frozen=True, slots=True)
class AnswerPoint:
    """One response to a held-out prompt. `answer`: the expected answer."""

    prompt: str
    response: str
    answer: str
    reward: float
    correct: bool | None = None
    """Whether the reward reaches the set's threshold; None if the cluster does not report it."""
    unscored: str = ""
    """Why the response could not be scored; empty if it was scored."""
    picture: str = ""
    """File of the picture that the policy generated, or its SHA-256 if none is kept; empty: the response is a text."""

    @property
    def right(self) -> bool:
        """Whether the response counts as correct."""
        return self.reward > 0 if self.correct is None else self.correct


@dataclass(frozen=True, slots=True)
class SetPoint:
    """Result of one evaluation on one evaluation set. `count`: prompts; `samples`: responses per prompt; `unscored`:
    responses without a score.

    `metrics`: `mean@N`, `pass@1`, `pass@K` and means of reward parts, as far as known.
    """

    count: int = 0
    samples: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    unscored: int = 0


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """One evaluation on held-out prompts (`count`). `samples`: some of the responses. `accuracy`: 0 to 1. `is_graded`:
    rewards are not only 0 and 1, so `mean_reward` differs from the accuracy."""

    step: int
    lineage: int
    accuracy: float
    count: int
    samples: tuple[AnswerPoint, ...] = ()
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Accuracy (0 to 1) by the name of the evaluation set."""
    sets: Mapping[str, SetPoint] = field(default_factory=dict)
    unscored: int = 0
    mean_reward: float | None = None
    is_graded: bool = False

    def limited(self, limit: int) -> EvalPoint:
        """The same with at most `limit` responses; 0: all."""
        return replace(self, samples=self.samples[:limit]) if limit else self

    @property
    def measured(self) -> str:
        """The result as text: `accuracy 20.0%`, or with graded rewards `accuracy 20.0%, mean reward 0.367`."""
        told = self.is_graded and self.mean_reward is not None
        return f"accuracy {self.accuracy:.1%}" + (f", mean reward {self.mean_reward:.3f}" if told else "")


@dataclass(frozen=True, slots=True)
class BestPoint:
    """The best evaluated step of a job. `checkpoint`: folder of its checkpoint; empty if there is none."""

    step: int
    metric: str
    value: float
    checkpoint: str = ""
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """Numbers of one data source, from the API: prompts by outcome, means over its trained groups, and its newest
    evaluation. None: unknown."""

    name: str
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    mean_reward: float | None = None
    mean_length: float | None = None
    truncated: float | None = None
    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation of the set of that name."""
    eval_samples: int = 0
    eval_unscored: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the job. `alive`: whether its controller takes part, according to the events. `shards`: those that it
    generates for."""

    name: str
    alive: bool = True
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogPoint:
    """One line of the event log. `time`: seconds since the epoch."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class WaitPoint:
    """A wait report: `who` waits for `what`, since `since` (seconds since the epoch)."""

    who: str
    what: str
    since: float
    cause: str = ""
    """A cause from docs/operate/failures.md; empty if the command itself detected the wait."""


@dataclass(frozen=True, slots=True)
class WarningPoint:
    """The newest warning of one topic, with the node that reported it. `time`: seconds since the epoch, 0 if unknown."""

    topic: str
    node: str
    sentence: str
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class RollbackPoint:
    """The newest rollback of a job: its target step, the new lineage, and the reason."""

    step: int
    lineage: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job as returned by the API. `created` and `ended`: seconds since the epoch; `ended` is 0 until the job ends."""

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
    """Newest first. Like `rollback`, only set for a single job, not in a list of jobs."""
    rollback: RollbackPoint | None = None
    namespace: str = "default"
    owner: str = ""
    priority: int = 0
    slots: int = 0
    """Slots that the job holds now. `slots_min`: minimum to start; `slots_max`: maximum, 0: no limit."""
    slots_min: int = 0
    slots_max: int = 0
    queue_position: int = 0
    """Position among the jobs that wait for slots; 0: not waiting."""

    @property
    def full_name(self) -> str:
        """`NAME`, or `NAMESPACE/NAME` outside the default namespace."""
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"

    @property
    def steps_estimated(self) -> bool:
        """Whether `steps` is an estimate from the remaining prompts and the recent number of prompts per group."""
        flow = self.spec.get("flow")
        by_prompts = isinstance(flow, Mapping) and flow.get("steps") is None and flow.get("count") == "prompts"
        return by_prompts and self.ended == 0

    @property
    def of_steps(self) -> str:
        """The total number of steps as text: `40`, or `~40` if estimated."""
        return f"{'~' if self.steps_estimated else ''}{self.steps}"

    @property
    def generates_pictures(self) -> bool:
        """Whether the policy generates pictures."""
        rollout = self.spec.get("rollout")
        return isinstance(rollout, Mapping) and rollout.get("diffusion") is not None

    @property
    def shard_count(self) -> int:
        """Number of shards of the job's prompt stream; 0 if unknown."""
        data = self.spec.get("data")
        return get_count(data, "shards") or 0 if isinstance(data, Mapping) else 0


def parse_answer(data: Mapping[str, Any]) -> AnswerPoint:
    """Parse a sample of an evaluation event; missing fields become empty."""
    correct, picture = data.get("correct"), get_mapping(data, "picture")
    return AnswerPoint(
        get_text(data, "prompt"),
        get_text(data, "response"),
        get_text(data, "answer"),
        finite_or_none(data.get("reward")) or 0.0,
        correct if isinstance(correct, bool) else None,
        get_text(data, "unscored"),
        get_text(picture, "file") or (f"sha256:{get_text(picture, 'sha256')}" if picture else ""),
    )


def parse_set(score: Mapping[str, Any]) -> SetPoint:
    """Parse the result for one evaluation set of an evaluation event."""
    metrics = {
        name: n for name, value in get_mapping(score, "metrics").items() if (n := finite_or_none(value)) is not None
    }
    return SetPoint(
        get_count(score, "count") or 0, get_count(score, "samples") or 1, metrics, get_count(score, "unscored") or 0
    )


def get_mapping(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`; empty if absent."""
    value = data.get(key)
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def get_text(data: Mapping[str, Any], key: str) -> str:
    """The value under `key` as text; empty if absent."""
    value = data.get(key)
    return "" if value is None else str(value)


def finite_or_none(value: Any) -> float | None:
    """The value as a float; None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # An integer beyond the range of float.
        return None


def get_count(data: Mapping[str, Any], key: str) -> int | None:
    """A non-negative integer under `key` (JSON may hold it as a float); None otherwise."""
    number = finite_or_none(data.get(key))
    return int(number) if number is not None and number >= 0 and number == int(number) else None


LOG_LINES = 40
RECENT_STEPS = 20

PACED_STEPS = 2
"""Minimum number of steps for an estimate of the remaining time."""

ENDED_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


@dataclass(frozen=True, slots=True)
class ViewState:
    """Everything that a view shows of one job. Immutable; `apply` and `observe` return the next state."""

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
    """Shards that changed their owner in the newest assignment, at `moved_at`."""
    moved_at: float = 0.0
    log: tuple[LogPoint, ...] = ()
    rollbacks: int = 0
    checkpoint: str = ""
    waiting: tuple[WaitPoint, ...] = ()
    best: BestPoint | None = None
    """The best evaluated step, as the API last returned it."""
    started: float | None = None
    """Time of the first event, in seconds since the epoch."""
    last_time: float | None = None
    sequence: int = 0
    """Sequence number of the last event."""

    @property
    def ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in ENDED_STATES

    @property
    def of_steps(self) -> str:
        """The total number of steps as text: `40`, `~40` if estimated, `?` if unknown."""
        return f"{'~' if self.steps_estimated else ''}{self.steps}" if self.steps else "?"

    @property
    def groups_by_node(self) -> dict[str, int]:
        """Trained groups by the node that generated them, for every node that ever took part."""
        totals = {node.name: 0 for node in self.nodes}
        for point in self.points:
            for name, count in point.groups.items():
                totals[name] = totals.get(name, 0) + count
        return totals

    @property
    def is_graded(self) -> bool:
        """Whether evaluations have rewards other than 0 and 1."""
        return any(one.is_graded for one in self.evals)

    @property
    def eval_before(self) -> EvalPoint | None:
        """The evaluation before the first step; None without one (`eval.at_start: false`)."""
        return self.evals[0] if self.evals and self.evals[0].step == 0 else None

    @property
    def eval_after(self) -> EvalPoint | None:
        """The last evaluation after a step; None before it."""
        return self.evals[-1] if self.evals and self.evals[-1].step > 0 else None

    @property
    def accuracy_before(self) -> float | None:
        """Accuracy before the first step, 0 to 1; None if it is not known."""
        return self.eval_before.accuracy if self.eval_before else None

    @property
    def accuracy_after(self) -> float | None:
        """Accuracy of the last evaluation after a step, 0 to 1; None before it."""
        return self.eval_after.accuracy if self.eval_after else None

    @property
    def tokens_per_second(self) -> float | None:
        """Mean throughput over all steps with known tokens and seconds; None if there is none, or if the policy generates
        pictures."""
        return None if self.generates_pictures else self._mean_rate("tokens")

    @property
    def pictures_per_second(self) -> float | None:
        """Mean number of generated pictures per second; None if it is not known, or if the policy writes text."""
        return self._mean_rate("samples") if self.generates_pictures else None

    def _mean_rate(self, name: str) -> float | None:
        known = [p.stats for p in self.points if name in p.stats and p.stats.get("seconds", 0.0) > 0]
        seconds = sum(stats["seconds"] for stats in known)
        return sum(stats[name] for stats in known) / seconds if seconds > 0 else None

    @property
    def generates_pictures(self) -> bool:
        """Whether the policy generates pictures, as far as steps have shown."""
        return any(point.denoising_steps is not None for point in self.points)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds from the newest step to the last one; None while unknown.

        Uses the median of recent steps without the first step: the first includes the start of engines and train ranks, and some later ones
        include an evaluation or a restart.
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
        """The state after the API returned `job`. Information that events have too is taken from the events."""
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
        """The state with a wait report: `who` waits because of `why`; an empty `why` removes it. `now`: seconds since
        the epoch."""
        since = next((wait.since for wait in self.waiting if wait.who == who), now)
        others = tuple(wait for wait in self.waiting if wait.who != who)
        return replace(self, waiting=(*others, WaitPoint(who, why, since)) if why else others)

    def _logged(self, event: JobEvent, text: str) -> ViewState:
        line = LogPoint(event.time, event.kind, event.message or text)
        return replace(self, log=(*self.log, line)[-LOG_LINES:]) if line.text else self

    def _node(self, name: str, *, alive: bool, shards: tuple[int, ...]) -> ViewState:
        """The state with this node replaced, or appended if new."""
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
    lineage = state.lineage + 1 if lineage is None else lineage
    text = restart_sentence(to_step, lineage, reason, max(state.step - to_step, 0))
    state = replace(
        state,
        points=_up_to(state.points, to_step),
        evals=tuple(e for e in state.evals if e.step <= to_step),
        step=to_step,
        lineage=lineage,
        rollbacks=state.rollbacks + (is_restart(reason) and "raised" not in event.data),
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
    counts = ", ".join(f"{name} has {len(shards)}" for name, shards in sorted(shares.items()))
    state = replace(state, moved=moved, moved_at=event.time, shard_count=max(state.shard_count, count))
    what = f"{len(moved)} of {count} prompt shards moved; now " if before else "prompt shards assigned: "
    return state._logged(event, what + counts)


def _member(state: ViewState, event: JobEvent) -> ViewState:
    name, joined = get_text(event.data, "node"), event.data.get("joined") is True
    if not name:
        return state._logged(event, "")
    shards = next((node.shards for node in state.nodes if node.name == name), ())
    state = state._node(name, alive=joined, shards=shards)
    what = "is leaving" if event.data.get("leaving") is True else "has joined" if joined else "has left"
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
    """The points of the steps up to and including `step`. The points are ascending by step, and usually all of them
    remain."""
    end = len(points)
    while end and points[end - 1].step > step:
        end -= 1
    return points[:end]
