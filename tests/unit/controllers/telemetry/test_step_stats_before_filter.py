"""A step's statistics of its prompts and their rewards before the filter."""

from __future__ import annotations

import pytest

from controllers.flow.group_buffer import GroupBuffer
from controllers.telemetry.events import EventLog
from controllers.telemetry.step_stats import sampling_stats
from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import EndedRef, LogEntry, OfferedGroup
from gcore.ledger.selection import SealStep, StreamRules, sealed_group
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.types import Group, Outcome, PromptRef, Sample, Version, VersionSpan

RULES = StreamRules(shard_lengths(40, 4), 8, 4, epochs=1, issue_cap=2.0)
HEAD = chain.base_entry(4, "w", ChainWriter("a", "n")).head
FIRST = Version(0, 0)


def group(seq: int, reward: float, *lengths: int) -> OfferedGroup:
    ref = PromptRef(0, 0, seq)
    return OfferedGroup(
        ref=ref, digest=str(ref), prompt_tokens=1, response_tokens=lengths, versions=(FIRST,), reward=reward
    )


def filtered(seq: int, reward: float | None = None, length: float | None = None) -> EndedRef:
    return EndedRef(ref=PromptRef(0, 1, seq), kind="filtered", reason="r", reward=reward, length=length)


def test_rewards_and_lengths_before_the_filter_are_of_all_groups_that_were_scored() -> None:
    accounted = chain.account_entry(
        HEAD, (filtered(0, 1.0, 10.0), filtered(1)), RULES.shape, ChainWriter("a", "m")
    ).head
    failed = EndedRef(ref=PromptRef(0, 2, 0), kind="failed", reason="no engine")
    groups = tuple(sealed_group(one, "a") for one in (group(0, 0.5, 2, 4), group(1, 0.5, 3, 3)))
    chosen = SealStep(groups, (filtered(2, 0.0, 6.0), failed))
    seal = chain.seal_slot(None, accounted, chosen, world_size=1, mini_batches=1, sealer="a")
    stats = sampling_stats(RULES, accounted, seal)
    assert stats["prompts_used"] == 6
    assert stats["filter_rate"] == pytest.approx(3 / 6)
    assert stats["prompts_per_group"] == pytest.approx(3.0)
    assert stats["groups_lacking"] == 2
    assert stats["reward_before_filter"] == pytest.approx((1.0 + 0.0 + 0.5 + 0.5) / 4)
    assert stats["response_length_before_filter"] == pytest.approx((10.0 + 6.0 + 3.0 + 3.0) / 4)
    assert stats["issue_ratio"] == 1.0


def test_a_last_step_without_groups_still_says_what_was_filtered() -> None:
    chosen = SealStep((), (filtered(0, 1.0, 4.0),), last=True, planned=1)
    seal = chain.seal_slot(None, HEAD, chosen, world_size=1, mini_batches=1, sealer="a")
    stats = sampling_stats(RULES, HEAD, seal)
    assert (stats["filter_rate"], stats["reward_before_filter"], stats["planned_steps"]) == (1.0, 1.0, 1.0)
    assert "prompts_per_group" not in stats


def test_filtered_outcome_has_its_reward_and_length() -> None:
    buffer = GroupBuffer()
    spans = (VersionSpan(FIRST, 0, 2),)
    samples = tuple(Sample((1,) * n, (0.0,) * n, "", "stop", spans, reward=r) for n, r in ((2, 1.0), (4, 0.0)))
    made = Group(PromptRef(0, 0, 0), (1,), samples)
    buffer.note_scores(made)
    buffer.record_outcome(made.ref, Outcome("filtered", "why"), "me", FIRST, "data")
    buffer.record_outcome(PromptRef(0, 0, 1), Outcome("filtered", "too long"), "me", FIRST, "data")
    (one, other) = buffer.outcomes.values()
    assert (one.reward, one.length) == (0.5, 3.0)
    assert (other.reward, other.length) == (None, None)


@pytest.mark.parametrize(("planned", "warned"), [(None, True), (9.0, True), (3.0, False)])
def test_a_smaller_step_is_told_unless_it_is_the_last(planned: float | None, warned: bool) -> None:
    keys = JobKeys("u")
    ended = (EndedRef(ref=PromptRef(0, 0, 0), kind="trained", holder="node-0.x"),)
    stats = {"groups_lacking": 5.0, "prompts_used": 80.0} | ({"planned_steps": planned} if planned else {})
    entry = LogEntry(seq=3, parent=2, kind="train", lineage=0, step=3, world="w", nonce="n", delta=ended, stats=stats)
    batch = WatchBatch((WatchEvent("put", KeyValue(keys.log(3), entry.encode(), 5, 5)),), 5)
    log = EventLog(keys)
    log.note(JobMirror(keys), batch, JobMirror(keys), 0.0)
    said = [event.message for event in log.events if event.kind == "warning"]
    assert bool(said) == warned
    if warned:
        assert said[0].startswith("step 3 trained 1 of 6 groups: no more were available after 80 prompts")
