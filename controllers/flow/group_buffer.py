"""The finished groups and outcomes that this peer holds for a job, and the prompts that it has in flight.

A group is kept until head contains its ref or it can no longer be trained. Nothing is remembered about what to issue next: that is
computed at every look. All of it is lost with the process, and the prompts are issued again.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from controllers.telemetry.step_stats import group_parts
from gcore.ledger.records.chain import EndedRef, Head, OfferedGroup
from gcore.ledger.selection import StreamRules, is_acceptable, is_ancestor
from gcore.rollout.postprocess import is_truncated
from gcore.types import Group, Outcome, PromptRef, Version

REASON_CHARACTERS, REASON_BYTES = 200, 300
"""A reason is a sentence; whatever a plug-in or an engine says beyond that would fill the store, in which a character that is
not ASCII takes up to twelve bytes."""


@dataclass
class InFlightPrompt:
    """One prompt whose group is being produced. `issued`: head's version when it was begun; `since`: the monotonic clock then."""

    issued: Version
    since: float
    made_with: Version | None = None
    """The weights of its first token; None: it has none yet."""
    task: asyncio.Task[None] | None = None
    stale: bool = False
    """Whether it was given up because it takes too long."""

    def version(self, head: Head) -> Version:
        """The oldest weights that made, or may make, a token of it; or those of the cut-off lineage that it belongs to."""
        if self.made_with is not None:
            return self.made_with
        return head.version if is_ancestor(head, self.issued) else self.issued


class InFlightPrompts:
    """The prompts that this peer has begun and not finished: since when, for which step, and with which weights.

    At staleness 0 it empties with every step; otherwise what is in flight outlives the step it was begun for. A prompt that is given up is
    cancelled and issued again; `controllers.rules.decide` says which ones are given up.
    """

    def __init__(self) -> None:
        self._flights: dict[PromptRef, InFlightPrompt] = {}
        self._seen: tuple[Head, Mapping[PromptRef, Version]] | None = None
        """`versions` as it was last given out, while nothing has changed."""
        self._defect: BaseException | None = None
        """What one of them raised that is not an outcome: the flow or a plug-in is wrong."""

    def __contains__(self, ref: object) -> bool:
        return ref in self._flights

    def __iter__(self) -> Iterator[PromptRef]:
        return iter(self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, ref: PromptRef, issued: Version, now: float) -> None:
        """Note that `ref` is in flight from now on."""
        self._seen = None
        self._flights[ref] = InFlightPrompt(issued, now)

    def launch(self, ref: PromptRef, task: asyncio.Task[None]) -> None:
        """Note that `task` produces `ref`."""
        self._flights[ref].task = task

    def task_of(self, ref: PromptRef) -> asyncio.Task[None] | None:
        """The task that produces it; None if it is not in flight, or not begun."""
        flight = self._flights.get(ref)
        return None if flight is None else flight.task

    def note_version(self, ref: PromptRef, version: Version) -> None:
        """Note that an engine that serves `version` makes tokens for `ref` now."""
        flight = self._flights.get(ref)
        if flight is not None and flight.made_with is None:
            self._seen = None
            flight.made_with = version

    def remove(self, ref: PromptRef) -> bool:
        """Note that `ref` is not in flight any more; whether it was given up as stale."""
        self._seen = None
        flight = self._flights.pop(ref, None)
        return flight is not None and flight.stale

    def note_defect(self, defect: BaseException) -> None:
        """A production raised what is not an outcome: the flow or a plug-in is wrong. The first one counts."""
        self._defect = self._defect or defect

    def raise_defect(self) -> None:
        """Raise what a production raised, rather than issue its prompt for ever."""
        if self._defect is not None:
            raise self._defect

    def give_up(self, ref: PromptRef, *, stale: bool) -> None:
        """Cancel it. `stale`: it counts among the times that its prompt was issued in vain."""
        flight = self._flights.get(ref)
        if flight is not None and flight.task is not None:
            flight.stale = flight.stale or stale
            flight.task.cancel()

    async def give_up_all(self) -> None:
        """Cancel everything, and wait until it has ended."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def versions(self, head: Head) -> Mapping[PromptRef, Version]:
        """The oldest weights of each, as `InFlightPrompt.version` says; the same object while nothing changes."""
        if self._seen is None or self._seen[0] is not head:
            self._seen = head, {ref: flight.version(head) for ref, flight in self._flights.items()}
        return self._seen[1]

    def oldest_s(self, now: float) -> float:
        """Seconds for which the oldest of them has been in flight at the monotonic clock's `now`."""
        return max((now - flight.since for flight in self._flights.values()), default=0.0)


class GroupBuffer:
    """The finished groups and outcomes of one peer that head does not contain yet, and its prompts in flight."""

    def __init__(self) -> None:
        self._groups: dict[PromptRef, Group] = {}
        self._offers: dict[PromptRef, OfferedGroup] = {}
        self._outcomes: dict[PromptRef, EndedRef] = {}
        self._seen: tuple[Mapping[PromptRef, OfferedGroup], Mapping[PromptRef, EndedRef]] | None = None
        """`offers` and `outcomes` as they were last given out, while nothing has changed."""
        self.in_flight = InFlightPrompts()
        self.reissues: dict[PromptRef, int] = {}
        self.went_stale: set[PromptRef] = set()
        """Prompts whose last group was finished, and became too old while it was held."""
        self._scores: dict[PromptRef, tuple[float, float]] = {}
        """Mean reward and mean length of what was scored: known of a filtered prompt too, whose group is gone."""

    @property
    def offers(self) -> Mapping[PromptRef, OfferedGroup]:
        """The held groups as an offer names them; the same object while nothing changes."""
        return self._look()[0]

    @property
    def outcomes(self) -> Mapping[PromptRef, EndedRef]:
        """Filtered and failed refs that head does not have yet; the same object while nothing changes."""
        return self._look()[1]

    def _look(self) -> tuple[Mapping[PromptRef, OfferedGroup], Mapping[PromptRef, EndedRef]]:
        if self._seen is None:
            self._seen = dict(self._offers), dict(self._outcomes)
        return self._seen

    def refs(self) -> Iterator[PromptRef]:
        """The refs of the groups that are held, and of the prompts in flight."""
        yield from self._groups
        yield from self.in_flight

    def knows(self, ref: PromptRef) -> bool:
        """Whether nothing need be started for `ref` here."""
        return ref in self.in_flight or ref in self._groups or ref in self._outcomes

    def group(self, digest: str) -> Group | None:
        """The held group of that digest."""
        for ref, offered in self._offers.items():
            if offered.digest == digest:
                return self._groups[ref]
        return None

    def note_scores(self, group: Group) -> None:
        """Note the mean reward and length of a prompt's responses, before a filter sees them."""
        count = max(len(group.samples), 1)
        lengths = sum(sample.own_tokens for sample in group.samples)
        self._scores[group.ref] = (math.fsum(sample.reward for sample in group.samples) / count, lengths / count)

    def add_group(self, group: Group) -> None:
        """Hold a finished group."""
        self._seen = None
        self._scores.pop(group.ref, None)
        self._groups[group.ref] = group
        self._offers[group.ref] = OfferedGroup(
            ref=group.ref,
            digest=group.digest(),
            prompt_tokens=len(group.prompt_ids),
            response_tokens=tuple(len(sample.token_ids) for sample in group.samples),
            versions=group.versions,
            reward=math.fsum(sample.reward for sample in group.samples) / len(group.samples),
            source=group.source,
            masked=tuple(index for index, sample in enumerate(group.samples) if sample.masked),
            truncated=sum(is_truncated(sample) for sample in group.samples),
            parts=group_parts(group),
            observed=_observed(group),
        )

    def record_outcome(self, ref: PromptRef, outcome: Outcome, holder: str, version: Version, source: str) -> None:
        """Hold the outcome of a ref of `source` that ended without a group."""
        self._seen = None
        reward, length = self._scores.pop(ref, (None, None))
        self._outcomes[ref] = EndedRef(
            ref=ref,
            kind=outcome.kind,
            reason=clip_reason(outcome.reason),
            holder=holder,
            versions=(version,),
            source=source,
            reward=reward if reward is not None and math.isfinite(reward) else None,
            length=length,
        )

    def count_reissue(self, ref: PromptRef) -> int:
        """Count that `ref` was issued in vain; how often so far."""
        self.reissues[ref] = self.reissues.get(ref, 0) + 1
        self.went_stale.discard(ref)
        return self.reissues[ref]

    def prune(self, rules: StreamRules, head: Head) -> None:
        """Drop what is terminal, of a cut-off lineage, or too old for the next step.

        What has become too old where some staleness is allowed was issued in vain, and counts.
        """
        self._seen = None
        for ref, offered in list(self._offers.items()):
            gone = head.cursors.is_terminal(rules.shape, ref)
            if gone or not is_acceptable(head, head.step + 1, offered.versions, rules.staleness):
                del self._groups[ref], self._offers[ref]
                if rules.staleness and not gone and all(is_ancestor(head, version) for version in offered.versions):
                    self.count_reissue(ref)
                    self.went_stale.add(ref)
        for ref, ended in list(self._outcomes.items()):
            gone = head.cursors.is_terminal(rules.shape, ref)
            if gone or not all(is_ancestor(head, version) for version in ended.versions):
                del self._outcomes[ref]
        for ref in [r for r in self.reissues if head.cursors.is_terminal(rules.shape, r)]:
            del self.reissues[ref]
            self.went_stale.discard(ref)
        for ref in [r for r in self._scores if head.cursors.is_terminal(rules.shape, r)]:
            del self._scores[ref]


def clip_reason(text: str) -> str:
    """The beginning of `text` that fits into a record."""
    text = text[:REASON_CHARACTERS]
    while len(json.dumps(text)) > REASON_BYTES:
        text = text[: len(text) * 3 // 4]
    return text


def _observed(group: Group) -> tuple[int, ...]:
    """The tokens of each sample that the policy did not make; empty if it made all of them."""
    told = tuple(len(sample.token_ids) - sample.own_tokens for sample in group.samples)
    return told if any(told) else ()
