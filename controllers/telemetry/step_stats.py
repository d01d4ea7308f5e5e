"""The metrics of a step (rewards, lengths, times), for its log entry, the metrics file, events and views. No decision
depends on them.

- `StepTimer`: the phases of the step, as measured by this controller. `wait_for_batch_s` is the time in which train ranks had nothing to train: from
  the previous commit until every rank has its share, minus the time in which they already trained parts of a streamed step (`streamed_s`).
  Together with the idle time of engines (`controllers.accounting.attribution`) it shows the bottleneck.
- `sampling_stats`: the prompts that the step used, and how many were filtered.
- `source_stats`: numbers by data source. A key is a name of `PER_SOURCE` and a source, as in "reward/sums". Omitted for
  a job with a single source, because they would equal the numbers of the step.
- `denoising_steps`, `pictures_per_second`: only of policies that generate pictures. There the numbers that others have in tokens
  count trained denoising steps: `response_length` is their mean per picture too. `tokens` counts the image tokens of these steps,
  which ranks compute.
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
"""Metrics that each data source has: mean reward, mean response length in tokens, share of truncated responses (0 to
1); number of trained, filtered and failed prompts."""

MOSTLY = 0.5
"""Share of truncated responses in a step above which a warning is posted."""

PREFIX = "reward_part/"
"""Prefix of the metrics of reward parts."""

MOST, LONGEST = 6, 32
"""`MOST`: maximum number of reward parts of a group; `LONGEST`: maximum characters of a part's name. Both are limited
because offers and seals in the store contain them."""

PHASES = ("cut", "reference", "old_logprobs", "values", "update", "saving", "copies")
"""Timed phases of a train rank in a step. They follow READY, or in a streamed step (trained while the rest is
generated) begin earlier."""


class StepTimer:
    """Measures the phases of the current step on this controller.

    Notes when the previous step was committed, when the batch was sealed (its groups were fixed), and when it was READY
    (every train rank had its share), in monotonic seconds.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._sealed: float | None = None
        self._ready: float | None = None
        self._producing: float | None = None
        self.engines = StepWaits()

    def note(self, before: JobMirror, after: JobMirror, now: float) -> None:
        """Note the phase changes that a change of the job's records shows. `now`: monotonic seconds."""
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
        """Note that generation has begun: the weight sync is complete and the first prompt of the step was sampled."""
        if self._producing is None:
            self._producing = now

    def stats(self, view: JobView, now: float) -> dict[str, float]:
        """Compute the metrics of the READY step that is committed now. Times in seconds; empty without a seal.

        Times are omitted if this controller joined in the middle of the step.
        """
        seal = view.seal
        if seal is None or view.mirror.head is None:
            return {}
        sampled = sampling_stats(view.rules, view.mirror.head.record, seal)
        if not seal.groups:
            return sampled
        samples = [n for group in seal.groups for n in group.own_tokens]
        computed = sum(n for group in seal.groups for n in group.response_tokens)
        tokens = computed + sum(group.prompt_tokens * len(group.response_tokens) for group in seal.groups)
        pictures = any(group.step_tokens for group in seal.groups)
        if pictures:
            tokens = sum(group.step_tokens * n for group in seal.groups for n in group.response_tokens)
        stats = {
            "reward": sum(group.reward for group in seal.groups) / len(seal.groups),
            "samples": float(len(samples)),
            "tokens": float(tokens),
            "response_length": sum(samples) / len(samples),
            "truncated": truncated_share(seal.groups),
        } | sampled
        stats |= {"denoising_steps": stats["response_length"]} if pictures else {}
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
            stats |= {"pictures_per_second": len(samples) / seconds} if pictures else {}
        return stats


def _streamed_s(stats: Mapping[str, float], after: float, before: float) -> float:
    """Seconds in which train ranks trained parts of the batch before it was READY. `stats`: has the seconds of each
    train phase.

    `after`, `before`: seconds from READY to the commit, and from the previous commit to READY.
    """
    trained = sum(stats.get(f"{phase}_seconds", 0.0) for phase in PHASES)
    return min(max(trained - after, 0.0), before)


def sampling_stats(rules: StreamRules, head: Head, seal: Seal) -> dict[str, float]:
    """Prompts that the step of `seal` used, and what became of them. `head`: the state before the step.

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
    """The key of a data source's metric in the metrics of a step: `reward/sums`."""
    return f"{name}/{source}"


def split_source_key(key: str) -> tuple[str, str] | None:
    """Split a key into metric and data source (the inverse of `source_key`); None for a key without a source."""
    name, slash, source = key.partition("/")
    return (name, source) if slash and source and name in PER_SOURCE else None


def truncated_share(groups: Sequence[SealedGroup]) -> float:
    """Share of the groups' responses that reached their maximum length, 0 to 1."""
    samples = sum(len(group.response_tokens) for group in groups)
    return sum(group.truncated for group in groups) / samples if samples else 0.0


def source_stats(groups: Sequence[SealedGroup], outcomes: Sequence[EndedRef], *, several: bool) -> dict[str, float]:
    """The metrics of a step for each data source; empty unless the job has several.

    `groups`: the trained groups of the step. `outcomes`: its prompts that were filtered or failed. `several`: whether
    the job has several sources.
    """
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
    """Remove the rewards from the metrics of a step, for supervised training: its groups are not scored, and a reward
    of 0 would be misleading."""
    unscored = {"reward", "reward_before_filter"}
    return {
        key: value
        for key, value in stats.items()
        if key not in unscored and ((found := split_source_key(key)) is None or found[0] not in unscored)
    }


IN_TOKENS = frozenset({"response_length", "response_length_before_filter", "truncated", "tokens_per_second"})
"""Metrics of responses in tokens."""


def drop_token_stats(stats: Mapping[str, float]) -> dict[str, float]:
    """Remove what counts tokens of responses from the metrics of a step whose responses are generated pictures, for display.
    Metrics of other steps are returned unchanged."""
    pictures = "denoising_steps" in stats
    return {key: value for key, value in stats.items() if not pictures or key.partition("/")[0] not in IN_TOKENS}


def truncated_sources(stats: Mapping[str, float], only: str) -> list[str]:
    """Names of the data sources with more than half of their responses truncated in a step.

    `stats`: the metrics of the step. `only`: name of the source of a job with a single one, whose metrics have no
    source in their key.
    """
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
    """The mean of each reward part over the groups of a step, by `reward_part/NAME`."""
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
    """Select the means of the reward parts from the metrics of a step, by the name of the part."""
    return {key.removeprefix(PREFIX): value for key, value in stats.items() if key.startswith(PREFIX)}
