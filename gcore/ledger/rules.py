"""A job's constants, as the ledger needs them, and what follows from them and head alone: how far the job goes, and how
many prompts are issued for each group that is still wanted.

A job goes to a step, or through whole data epochs. In the second case the number of its steps is not known before the
end: they are estimated, the last one is known when it is sealed, and nothing beyond the epochs is ever issued.

Pure, and the same for every controller, because it reads nothing but the chain; a rollback takes it back too.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass

from gcore.config import JobSpec, stored_spec
from gcore.config.flow import OnLimit
from gcore.config.sources import training_sources
from gcore.config.spec import RewardSpec
from gcore.ledger.job import JobRecord
from gcore.ledger.records import Head
from gcore.prompts.cursor import StreamShape, shard_lengths

MOST_BYTES = 1 << 20
"""The record of a sealed step, or of an offer, must stay well under the store's 1.5 MiB a request."""
GROUP_BYTES, SAMPLE_BYTES, PART_BYTES = 260, 11, 32
"""What a group, beside its source's name, a sample, and a part of a reward, beside its own, take in a record, generously."""
OBSERVED_BYTES = 7
"""What else a sample takes that is shown something between its turns: how many tokens of it that is."""


@dataclass(frozen=True, slots=True)
class StreamRules:
    """The job's constants that the order and the size of a step depend on."""

    shape: StreamShape
    window: int
    quota: int
    staleness: int = 0
    steps: int | None = None
    """The last step, if it is known from the beginning."""
    epochs: int | None = None
    """Data epochs after which nothing is issued; None: it goes on and on, until the last step."""
    issue_cap: float = 1.0
    """Prompts that are issued at once for each group still wanted, at most."""
    limit: int | None = None
    """Prompts that one step may use up."""
    on_limit: OnLimit = "train_smaller"
    part: int | None = None
    """Groups from which on a part of the next step is sealed by itself; None: steps are sealed as a whole."""
    over_provision: float | None = None
    """Quotas that may be offered or in flight at once, at some staleness; None: as many as the staleness allows."""

    @property
    def quotas(self) -> float:
        """How many quotas may be offered or in flight at once."""
        return self.staleness + 1 if self.over_provision is None else min(self.over_provision, self.staleness + 1)


def rules_of(job: JobRecord) -> StreamRules:
    """The rules of a job, as it was created: they never change."""
    spec = stored_spec(job.spec)
    flow = spec.flow
    by_prompts = flow.steps is None and flow.count == "prompts"
    return StreamRules(
        shape=shard_lengths(job.prompts, spec.data.shards),
        window=spec.data.window,
        quota=flow.groups_per_step,
        staleness=spec.rollout.staleness,
        steps=flow.last_step(job.prompts),
        epochs=flow.epochs if by_prompts else None,
        # One peer may come to hold all that was issued, and must be able to offer it.
        issue_cap=max(1.0, min(flow.issue_cap, MOST_BYTES / offer_bytes(spec))),
        limit=flow.prompt_limit,
        on_limit=flow.on_limit,
        part=spec.train.part_of(flow.groups_per_step),
        over_provision=spec.rollout.over_provision,
    )


def cursor_bytes(spec: JobSpec) -> int:
    """At most what the cursors take in head, and in each entry of the log: of each shard a bit for each place of its window."""
    return spec.data.shards * (24 + spec.data.window // 4)


def offer_bytes(spec: JobSpec) -> int:
    """About what the groups that one controller may hold at once take in its offer: k + 1 quotas at staleness k."""
    return seal_bytes(spec) * (spec.rollout.staleness + 1)


def seal_bytes(spec: JobSpec) -> int:
    """What the groups of a whole step take in its record, generously."""
    group = GROUP_BYTES + max(len(source.name) + _parts_bytes(source.reward) for source in training_sources(spec))
    sample = SAMPLE_BYTES + (0 if spec.environment is None else OBSERVED_BYTES)
    return spec.flow.groups_per_step * (group + sample * spec.flow.samples_per_prompt)


def _parts_bytes(reward: RewardSpec) -> int:
    """What the parts of a group's reward take; of what they are themselves made of there is no telling."""
    return sum(len(part.shown_as) + PART_BYTES for part in reward.parts) or 2 * PART_BYTES


def last_position(rules: StreamRules, shard: int) -> int | None:
    """The first position of `shard` that is never issued; None if there is none."""
    return None if rules.epochs is None else rules.epochs * rules.shape.lengths[shard]


def prompts_left(rules: StreamRules, head: Head) -> int | None:
    """Prompts of the job's epochs without an outcome; None for a job that goes by steps."""
    if rules.epochs is None:
        return None
    return rules.epochs * sum(rules.shape.lengths) - head.cursors.terminal_count


def is_over(rules: StreamRules, head: Head) -> bool:
    """Whether there is no step after head's."""
    if rules.steps is not None:
        return head.step >= rules.steps
    return prompts_left(rules, head) == 0


def is_last(rules: StreamRules, head: Head, groups: Sized, outcomes: Sized) -> bool:
    """Whether no step follows the one after head's, if it takes `groups` and `outcomes`."""
    if rules.steps is not None:
        return head.step + 1 >= rules.steps
    return prompts_left(rules, head) == len(groups) + len(outcomes)


def planned_steps(rules: StreamRules, head: Head) -> int | None:
    """How many steps the job will have had: known, or estimated from what a kept group has taken lately."""
    if rules.steps is not None:
        return rules.steps
    left = prompts_left(rules, head)
    return None if left is None else head.step + math.ceil(left / (rules.quota * head.tally.issue_ratio))


def issue_ratio(rules: StreamRules, head: Head) -> float:
    """Prompts issued at once for each group that is still wanted."""
    return min(rules.issue_cap, max(1.0, head.tally.issue_ratio))
