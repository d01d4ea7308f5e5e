"""What a step took and what was filtered on the way, in numbers. For people: log entry, metrics, events, views. Pure.

prompts_used         prompts that ended in the step or, since the step before, without one
filter_rate          share of them that were filtered
prompts_per_group    prompts used for a trained group
issue_ratio          prompts that were issued at once for each group still wanted
groups_lacking       groups that the quota lacks; only where the step is smaller than it
reward_before_filter, response_length_before_filter
                     mean over all groups whose responses were scored, the filtered ones too; groups count alike,
                     lengths are in tokens. `reward` and `response_length` are those of what was trained
planned_steps        how many steps the job will have had, where that is an estimate
"""

from __future__ import annotations

import math

from gcore.ledger.records import Head, Seal
from gcore.ledger.rules import StreamRules, issue_ratio
from gcore.ledger.tally import gathered


def sampling_stats(rules: StreamRules, head: Head, seal: Seal) -> dict[str, float]:
    """Of the step that `seal` closes, which follows `head`."""
    used = gathered(head.tally.since_step, seal.outcomes)
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
