"""What this peer holds of a job: finished groups, outcomes, and what is in flight.

A group is kept until head contains its ref or it can no longer be trained; nothing is remembered about what to issue
next, which is computed anew at every look. All of it is lost with the process, and issued again by someone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from controllers.flights import Flights
from controllers.reward_parts import group_parts
from gcore.ledger.ancestry import is_acceptable, is_ancestor
from gcore.ledger.records import EndedRef, Head, OfferedGroup
from gcore.ledger.stream import StreamRules
from gcore.rollout.truncated import is_truncated
from gcore.types import Group, Outcome, PromptRef, Version

REASON_CHARACTERS, REASON_BYTES = 200, 300
"""A reason is a sentence; whatever a plug-in or an engine says beyond that would fill the store, in which a character that is
not ASCII takes up to twelve bytes."""


def as_reason(text: str) -> str:
    """The beginning of `text` that fits into a record."""
    text = text[:REASON_CHARACTERS]
    while len(json.dumps(text)) > REASON_BYTES:
        text = text[: len(text) * 3 // 4]
    return text


class Holdings:
    """Mutable; one event loop."""

    def __init__(self) -> None:
        self._groups: dict[PromptRef, Group] = {}
        self._offers: dict[PromptRef, OfferedGroup] = {}
        self._outcomes: dict[PromptRef, EndedRef] = {}
        self._seen: tuple[Mapping[PromptRef, OfferedGroup], Mapping[PromptRef, EndedRef]] | None = None
        """`offers` and `outcomes` as they were last given out, while nothing has changed."""
        self.in_flight = Flights()
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
        """Of what is held or in flight."""
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
        """What the responses to a prompt are worth, before a filter sees them."""
        count = max(len(group.samples), 1)
        lengths = sum(sample.own_tokens for sample in group.samples)
        self._scores[group.ref] = (math.fsum(sample.reward for sample in group.samples) / count, lengths / count)

    def keep(self, group: Group) -> None:
        """A finished group."""
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

    def end(self, ref: PromptRef, outcome: Outcome, holder: str, version: Version, source: str) -> None:
        """A ref of `source` that ended without a group."""
        self._seen = None
        reward, length = self._scores.pop(ref, (None, None))
        self._outcomes[ref] = EndedRef(
            ref=ref,
            kind=outcome.kind,
            reason=as_reason(outcome.reason),
            holder=holder,
            versions=(version,),
            source=source,
            reward=reward if reward is not None and math.isfinite(reward) else None,
            length=length,
        )

    def lose(self, ref: PromptRef) -> int:
        """`ref` was issued in vain; how often so far."""
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
                    self.lose(ref)
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


def _observed(group: Group) -> tuple[int, ...]:
    """Of each sample: the tokens that the policy did not make; nothing if it made all of them."""
    told = tuple(len(sample.token_ids) - sample.own_tokens for sample in group.samples)
    return told if any(told) else ()
