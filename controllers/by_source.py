"""A step's numbers, source by source. For people: log entry, metrics, events, views. Pure.

A key is a name of `PER_SOURCE` and the source's, as in "reward/sums". A job with one source has none of them: they would
say again what the step's own numbers say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from gcore.ledger.records import EndedRef, SealedGroup

PER_SOURCE = ("reward", "response_length", "truncated", "groups", "filtered", "failed")
"""Mean reward, mean length in tokens, share of responses that were cut off; prompts that were trained, filtered, failed."""
MOSTLY = 0.5
"""Above this share of cut-off responses in a step a person is warned."""


def key_of(name: str, source: str) -> str:
    """The name of a source's number."""
    return f"{name}/{source}"


def split_key(key: str) -> tuple[str, str] | None:
    """Inverse of `key_of`; None for a number that is no source's."""
    name, slash, source = key.partition("/")
    return (name, source) if slash and source and name in PER_SOURCE else None


def truncated_share(groups: Sequence[SealedGroup]) -> float:
    """Share of responses that were cut off, 0 to 1."""
    samples = sum(len(group.response_tokens) for group in groups)
    return sum(group.truncated for group in groups) / samples if samples else 0.0


def by_source(groups: Sequence[SealedGroup], outcomes: Sequence[EndedRef], *, several: bool) -> dict[str, float]:
    """The numbers of a sealed step. `several`: whether the job has more than one source."""
    return dict(_numbers(groups, outcomes)) if several else {}


def _numbers(groups: Sequence[SealedGroup], outcomes: Sequence[EndedRef]) -> Iterator[tuple[str, float]]:
    for source in sorted({group.source for group in groups}):
        its = [group for group in groups if group.source == source]
        lengths = [tokens for group in its for tokens in group.own_tokens]
        yield key_of("reward", source), math.fsum(group.reward for group in its) / len(its)
        yield key_of("response_length", source), sum(lengths) / len(lengths)
        yield key_of("truncated", source), truncated_share(its)
        yield key_of("groups", source), float(len(its))
    for source, kind in sorted({(ended.source, ended.kind) for ended in outcomes}):
        count = sum(ended.source == source and ended.kind == kind for ended in outcomes)
        yield key_of(kind, source), float(count)


def without_rewards(stats: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a step whose groups are demonstrations: nothing was scored, and a reward of 0 would say that it was."""
    unscored = {"reward", "reward_before_filter"}
    return {
        key: value
        for key, value in stats.items()
        if key not in unscored and ((found := split_key(key)) is None or found[0] not in unscored)
    }


def mostly_truncated(stats: Mapping[str, float], only: str) -> list[str]:
    """The sources of which more than half the responses of a step were cut off. `only`: the source of a job with one."""
    shares = {found[1]: value for key, value in stats.items() if (found := split_key(key)) and found[0] == "truncated"}
    if not shares and "truncated" in stats:
        shares = {only: stats["truncated"]}
    return sorted(source for source, share in shares.items() if share > MOSTLY)
