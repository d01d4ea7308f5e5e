"""Why a job fails whose step has used up its prompts, or those in the windows, without enough groups: one sentence. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from gcore.ledger.records import EndedRef, Head, LogEntry
from gcore.ledger.rules import StreamRules
from gcore.ledger.stream import Short
from gcore.ledger.tally import commonest_reason, gathered


def why_short(rules: StreamRules, head: Head, short: Short, log: Iterable[LogEntry]) -> str:
    """The sentence. `log`: entries that the store still has; those since the newest step tell the reasons."""
    used = gathered(head.tally.since_step, short.outcomes)
    common = commonest_reason((*_since_step(log), *short.outcomes))
    reason = f"; the commonest reason, {common[1]} times: {common[0]}" if common is not None else ""
    over = "its {} prompts (flow.max_prompts_per_step)"
    if short.exhausted:
        over = "the prompts in the shards' windows (data.window), {} in all,"
        fix = "raise data.window or data.shards, or set flow.on_limit: train_smaller to go on with fewer groups"
    elif short.groups:
        fix = "raise flow.max_prompts_per_step, or set flow.on_limit: train_smaller to go on with fewer groups"
    else:
        shown = " (gcore samples)" * (head.step > 0)  # which are kept of steps
        fix = f"there is nothing to train on: see what the reward and the filter say of the responses{shown}"
    return (
        f"step {head.step + 1} has used up {over.format(used.ended + short.groups)} with "
        f"{short.groups} of {rules.quota} groups kept ({used.filtered} were filtered, {used.failed} failed){reason}; {fix}"
    )


def _since_step(log: Iterable[LogEntry]) -> list[EndedRef]:
    """What the account entries after the newest step ended."""
    newest_first = sorted(log, key=lambda entry: -entry.seq)
    accounts = takewhile(lambda entry: entry.kind == "account", newest_first)
    return [ended for entry in accounts for ended in entry.delta]
