"""The numbers of a step, for its log entry, metrics, events and views. No decision depends on them.

- `StepTimer`: the phases of the step, as measured by this controller. `wait_for_batch_s` is the time in which train ranks had nothing to train: from
  the previous commit until every rank has its share, minus the time in which they already trained parts of a streamed step (`streamed_s`).
  Together with the idle time of engines (`controllers.accounting.attribution`) it shows the bottleneck.
- `sampling_stats`: the prompts that the step used, and how many were filtered.
- `source_stats`: numbers by source. A key is a name of `PER_SOURCE` and a source, as in "reward/sums". Omitted for a job with a single source,
  because they would equal the numbers of the step.
- `part_stats`: means of the reward parts. A group carries the means over its samples. A step's number is the mean over the groups of those
  sources whose rewards have the part. A part that a sample lacks (for example no length penalty) counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from controllers.accounting.attribution import StepWaits
from controllers.rules.view import JobView
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import EndedRef, Head, Seal, SealedGroup, SealState
from gcore.ledger.selection import StreamRules, issue_ratio
from gcore.ledger.staleness import staleness_stats
from gcore.ledger.statistics import add_outcomes
from gcore.types import Group

PER_SOURCE = ("reward", "response_length", "truncated", "groups", "filtered", "failed")
"""Mean reward, mean length in tokens, share of truncated responses; number of trained, filtered and failed prompts."""

MOSTLY = 0.5
"""Share of truncated responses in a step above which a warning is posted."""

PREFIX = "reward_part/"

MOST, LONGEST = 6, 32
"""Maximum number of parts of a group, in the order of its samples, and of characters of a name, because they go through the store."""

PHASES = ("cut", "reference", "old_logprobs", "values", "update", "saving", "copies")
"""Phases of a train rank in a step: after READY, or earlier in a streamed step."""


class StepTimer:
    """Measures the phases of a step: when the head moved, when the batch was sealed, and when it was ready. In seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._sealed: float | None = None
        self._ready: float | None = None
        self._producing: float | None = None
        self.engines = StepWaits()

    def note(self, before: JobMirror, after: JobMirror, now: float) -> None:
        """Process a change of the job's records."""
        if after.head is None:
            return
        slot = after.seals.get(after.head.record.step + 1)
        if before.head is None or before.head.record.version != after.head.record.version:
            # A controller that joins in the middle of a step does not know when the step began.
            is_late = before.head is None and slot is not None
            self._began, self._sealed, self._ready, self._producing = None if is_late else now, None, None, None
            self.engines.begin(now)
        if slot is None or slot.record.collects:
            self._sealed = self._ready = None
            return
        self._sealed = now if self._sealed is None else self._sealed
        if slot.record.state is SealState.READY and self._ready is None:
            self._ready = now

    def produced(self, now: float) -> None:
        """Note that the weight sync is complete and the first prompt of the step was sampled."""
        if self._producing is None:
            self._producing = now

    def stats(self, view: JobView, now: float) -> dict[str, float]:
        """The numbers for the log entry of the READY step, which is committed now."""
        seal = view.seal
        if seal is None or view.mirror.head is None:
            return {}
        sampled = sampling_stats(view.rules, view.mirror.head.record, seal)
        if not seal.groups:
            return sampled
        samples = [n for group in seal.groups for n in group.own_tokens]
        computed = sum(n for group in seal.groups for n in group.response_tokens)
        tokens = computed + sum(group.prompt_tokens * len(group.response_tokens) for group in seal.groups)
        stats = {
            "reward": sum(group.reward for group in seal.groups) / len(seal.groups),
            "samples": float(len(samples)),
            "tokens": float(tokens),
            "response_length": sum(samples) / len(samples),
            "truncated": truncated_share(seal.groups),
        } | sampled
        stats |= {"parts": float(len(seal.parts))} if seal.parts else {}
        stats |= staleness_stats(seal) if view.rules.staleness else {}
        stats |= source_stats(seal.groups, seal.outcomes, several=len(view.spec.data.sources) > 1)
        stats |= part_stats(seal.groups)
        if view.spec.train.loss == "sft":
            stats = drop_reward_stats(stats)
        ranks = [view.ranks[rank] for rank in sorted(view.ranks)]
        if ranks:
            stats = dict(ranks[0].metrics) | stats
        if self._began is not None and self._sealed is not None and self._ready is not None:
            # A batch of carried-over groups may be complete before a prompt of a later step is sampled.
            producing = min(self._producing if self._producing is not None else self._began, self._sealed)
            seconds = max(now - self._began, 1e-9)
            streamed = _streamed_s(stats, now - self._ready, self._ready - self._began) if seal.parts else 0.0
            stats |= {"streamed_s": streamed} if seal.parts else {}
            stats |= {
                "seconds": seconds,
                "publish_s": producing - self._began,
                "collect_s": self._sealed - producing,
                "exchange_s": self._ready - self._sealed,
                "train_s": now - self._ready,
                "wait_for_batch_s": self._ready - self._began - streamed,
                "tokens_per_second": tokens / seconds,
            } | self.engines.stats(now)
        return stats


def _streamed_s(stats: Mapping[str, float], after: float, before: float) -> float:
    """Seconds of training before the batch was READY. `before`, `after`: seconds of the step before and after READY."""
    trained = sum(stats.get(f"{phase}_seconds", 0.0) for phase in PHASES)
    return min(max(trained - after, 0.0), before)


def sampling_stats(rules: StreamRules, head: Head, seal: Seal) -> dict[str, float]:
    """Sampling numbers of the step of `seal`, which follows `head`.

    prompts_used         prompts with an outcome in this step, or since the previous step without training
    filter_rate          share of them that were filtered
    prompts_per_group    prompts used per trained group
    issue_ratio          prompts sampled at once per group still needed
    groups_lacking       groups missing from the quota; only for a smaller step
    reward_before_filter, response_length_before_filter
                         mean over all scored groups, including filtered ones, with equal weight per group; lengths in tokens.
                         `reward` and `response_length` are means over trained groups only
    planned_steps        estimated total number of steps, if it is not fixed
    """
    used = add_outcomes(head.tally.since_step, seal.outcomes)
    groups = len(seal.groups)
    prompts = used.ended + groups
    stats = {"prompts_used": float(prompts), "issue_ratio": issue_ratio(rules, head)}
    if prompts:
        stats["filter_rate"] = used.filtered / prompts
    if groups:
        stats["prompts_per_group"] = prompts / groups
    if groups < rules.quota:
        stats["groups_lacking"] = float(rules.quota - groups)
    if scored := used.scored + groups:
        lengths = math.fsum(sum(g.own_tokens) / len(g.own_tokens) for g in seal.groups if g.response_tokens)
        stats["reward_before_filter"] = (used.reward + math.fsum(g.reward for g in seal.groups)) / scored
        stats["response_length_before_filter"] = (used.length + lengths) / scored
    if rules.steps is None and seal.planned_steps is not None:
        stats["planned_steps"] = float(seal.planned_steps)
    return stats


def source_key(name: str, source: str) -> str:
    """The key of a number of a source."""
    return f"{name}/{source}"


def split_source_key(key: str) -> tuple[str, str] | None:
    """Inverse of `source_key`; None for a key without a source."""
    name, slash, source = key.partition("/")
    return (name, source) if slash and source and name in PER_SOURCE else None


def truncated_share(groups: Sequence[SealedGroup]) -> float:
    """Share of truncated responses, 0 to 1."""
    samples = sum(len(group.response_tokens) for group in groups)
    return sum(group.truncated for group in groups) / samples if samples else 0.0


def source_stats(groups: Sequence[SealedGroup], outcomes: Sequence[EndedRef], *, several: bool) -> dict[str, float]:
    """The numbers of a sealed step by source. `several`: whether the job has more than one source."""
    return dict(_numbers(groups, outcomes)) if several else {}


def _numbers(groups: Sequence[SealedGroup], outcomes: Sequence[EndedRef]) -> Iterator[tuple[str, float]]:
    for source in sorted({group.source for group in groups}):
        its = [group for group in groups if group.source == source]
        lengths = [tokens for group in its for tokens in group.own_tokens]
        yield source_key("reward", source), math.fsum(group.reward for group in its) / len(its)
        yield source_key("response_length", source), sum(lengths) / len(lengths)
        yield source_key("truncated", source), truncated_share(its)
        yield source_key("groups", source), float(len(its))
    for source, kind in sorted({(ended.source, ended.kind) for ended in outcomes}):
        count = sum(ended.source == source and ended.kind == kind for ended in outcomes)
        yield source_key(kind, source), float(count)


def drop_reward_stats(stats: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a step without rewards, for supervised training: its groups were not scored, and a reward of 0 would be misleading."""
    unscored = {"reward", "reward_before_filter"}
    return {
        key: value
        for key, value in stats.items()
        if key not in unscored and ((found := split_source_key(key)) is None or found[0] not in unscored)
    }


def truncated_sources(stats: Mapping[str, float], only: str) -> list[str]:
    """The sources with more than half of their responses truncated in a step. `only`: the source of a job with a single source."""
    shares = {
        found[1]: value for key, value in stats.items() if (found := split_source_key(key)) and found[0] == "truncated"
    }
    if not shares and "truncated" in stats:
        shares = {only: stats["truncated"]}
    return sorted(source for source, share in shares.items() if share > MOSTLY)


def group_parts(group: Group) -> dict[str, float]:
    """The mean of each reward part over the group's samples."""
    names = dict.fromkeys(name for sample in group.samples for name, _ in sample.reward_parts)
    shown = list(names)[:MOST]
    count = len(group.samples)
    totals = {name: math.fsum(dict(sample.reward_parts).get(name, 0.0) for sample in group.samples) for name in shown}
    # Six digits are sufficient for people, and each digit takes space in every offer and seal.
    return {name[:LONGEST]: float(f"{total / count:.6g}") for name, total in totals.items()}


def part_stats(groups: Sequence[SealedGroup]) -> dict[str, float]:
    """The reward parts of a sealed step: `reward_part/NAME`."""
    having: dict[str, set[str]] = {}
    for group in groups:
        for name in group.parts:
            having.setdefault(name, set()).add(group.source)
    stats = {}
    for name, sources in having.items():
        of_it = [group.parts.get(name, 0.0) for group in groups if group.source in sources]
        stats[PREFIX + name] = math.fsum(of_it) / len(of_it)
    return stats


def parts_by_name(stats: Mapping[str, float]) -> dict[str, float]:
    """The reward parts among a step's numbers, by name."""
    return {key.removeprefix(PREFIX): value for key, value in stats.items() if key.startswith(PREFIX)}
