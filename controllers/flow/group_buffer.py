"""The finished groups and outcomes that this peer holds for a job, and its prompts in flight.

A group is kept until head contains its ref or it can no longer be trained. Which prompts to sample next is not stored here: it is computed
from the view. All of it is lost with the process, and the prompts are sampled again.
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
"""Maximum length of a reason in the store, in characters and in JSON bytes: a non-ASCII character takes up to twelve bytes. Plug-ins and
engines may give longer ones."""


@dataclass
class InFlightPrompt:
    """A prompt whose group is being produced. `issued`: head's version when it was started; `since`: monotonic time at the start."""

    issued: Version
    since: float
    made_with: Version | None = None
    """The version of its first token; None: it has none yet."""
    task: asyncio.Task[None] | None = None
    stale: bool = False
    """Whether it was given up because of its age."""

    def version(self, head: Head) -> Version:
        """The oldest version that made, or may make, one of its tokens; or the version of the discarded branch to which it belongs."""
        if self.made_with is not None:
            return self.made_with
        return head.version if is_ancestor(head, self.issued) else self.issued


class InFlightPrompts:
    """The prompts that this peer has started and not finished: start time, step, and version.

    At staleness 0 it is emptied with every step; otherwise prompts in flight continue across steps. A prompt that is given up is cancelled and
    sampled again; `controllers.rules.decide` decides which ones are given up.
    """

    def __init__(self) -> None:
        self._flights: dict[PromptRef, InFlightPrompt] = {}
        self._seen: tuple[Head, Mapping[PromptRef, Version]] | None = None
        """The last result of `versions`, while nothing has changed."""
        self._defect: BaseException | None = None
        """An exception of a production that is not an outcome: a defect of the flow or a plug-in."""

    def __contains__(self, ref: object) -> bool:
        return ref in self._flights

    def __iter__(self) -> Iterator[PromptRef]:
        return iter(self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, ref: PromptRef, issued: Version, now: float) -> None:
        """Record that `ref` is in flight from now on."""
        self._seen = None
        self._flights[ref] = InFlightPrompt(issued, now)

    def launch(self, ref: PromptRef, task: asyncio.Task[None]) -> None:
        """Record that `task` produces `ref`."""
        self._flights[ref].task = task

    def task_of(self, ref: PromptRef) -> asyncio.Task[None] | None:
        """The task that produces `ref`; None if it is not in flight or has no task yet."""
        flight = self._flights.get(ref)
        return None if flight is None else flight.task

    def note_version(self, ref: PromptRef, version: Version) -> None:
        """Record that an engine that serves `version` now makes tokens for `ref`."""
        flight = self._flights.get(ref)
        if flight is not None and flight.made_with is None:
            self._seen = None
            flight.made_with = version

    def remove(self, ref: PromptRef) -> bool:
        """Record that `ref` is no longer in flight; return whether it was given up as stale."""
        self._seen = None
        flight = self._flights.pop(ref, None)
        return flight is not None and flight.stale

    def note_defect(self, defect: BaseException) -> None:
        """Record an exception of a production that is not an outcome. The first one is kept."""
        self._defect = self._defect or defect

    def raise_defect(self) -> None:
        """Raise the recorded exception of a production. Otherwise its prompt would be sampled forever."""
        if self._defect is not None:
            raise self._defect

    def give_up(self, ref: PromptRef, *, stale: bool) -> None:
        """Cancel the production of `ref`. `stale`: count it as a failed attempt because of its age."""
        flight = self._flights.get(ref)
        if flight is not None and flight.task is not None:
            flight.stale = flight.stale or stale
            flight.task.cancel()

    async def give_up_all(self) -> None:
        """Cancel all productions, and wait until they have ended."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def versions(self, head: Head) -> Mapping[PromptRef, Version]:
        """The version of each prompt, as in `InFlightPrompt.version`; the same object while nothing changes."""
        if self._seen is None or self._seen[0] is not head:
            self._seen = head, {ref: flight.version(head) for ref, flight in self._flights.items()}
        return self._seen[1]

    def oldest_s(self, now: float) -> float:
        """Seconds for which the oldest prompt has been in flight at monotonic time `now`."""
        return max((now - flight.since for flight in self._flights.values()), default=0.0)


class GroupBuffer:
    """One peer's finished groups and outcomes that head does not contain yet, and its prompts in flight."""

    def __init__(self) -> None:
        self._groups: dict[PromptRef, Group] = {}
        self._offers: dict[PromptRef, OfferedGroup] = {}
        self._outcomes: dict[PromptRef, EndedRef] = {}
        self._seen: tuple[Mapping[PromptRef, OfferedGroup], Mapping[PromptRef, EndedRef]] | None = None
        """The last results of `offers` and `outcomes`, while nothing has changed."""
        self.in_flight = InFlightPrompts()
        self.reissues: dict[PromptRef, int] = {}
        self.went_stale: set[PromptRef] = set()
        """Prompts whose last group was finished but exceeded the staleness limit while it was held."""
        self._scores: dict[PromptRef, tuple[float, float]] = {}
        """Mean reward and mean length of scored prompts. Kept for filtered prompts too, whose groups are dropped."""

    @property
    def offers(self) -> Mapping[PromptRef, OfferedGroup]:
        """The held groups in the form of an offer; the same object while nothing changes."""
        return self._look()[0]

    @property
    def outcomes(self) -> Mapping[PromptRef, EndedRef]:
        """Filtered and failed refs that head does not contain yet; the same object while nothing changes."""
        return self._look()[1]

    def _look(self) -> tuple[Mapping[PromptRef, OfferedGroup], Mapping[PromptRef, EndedRef]]:
        if self._seen is None:
            self._seen = dict(self._offers), dict(self._outcomes)
        return self._seen

    def refs(self) -> Iterator[PromptRef]:
        """The refs of held groups and of prompts in flight."""
        yield from self._groups
        yield from self.in_flight

    def knows(self, ref: PromptRef) -> bool:
        """Whether `ref` needs no production here."""
        return ref in self.in_flight or ref in self._groups or ref in self._outcomes

    def group(self, digest: str) -> Group | None:
        """The held group with that digest, or None."""
        for ref, offered in self._offers.items():
            if offered.digest == digest:
                return self._groups[ref]
        return None

    def note_scores(self, group: Group) -> None:
        """Record the mean reward and length of a prompt's responses, before filters run."""
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
        """Count a failed attempt of `ref`; return the number so far."""
        self.reissues[ref] = self.reissues.get(ref, 0) + 1
        self.went_stale.discard(ref)
        return self.reissues[ref]

    def prune(self, rules: StreamRules, head: Head) -> None:
        """Drop everything that is terminal, of a discarded branch, or too old for the next step.

        If staleness is allowed, a group that exceeds the limit counts as a failed attempt of its prompt.
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
    """The start of `text`, as much as fits into a record."""
    text = text[:REASON_CHARACTERS]
    while len(json.dumps(text)) > REASON_BYTES:
        text = text[: len(text) * 3 // 4]
    return text


def _observed(group: Group) -> tuple[int, ...]:
    """The number of tokens of each sample that the policy did not make; empty if it made all."""
    told = tuple(len(sample.token_ids) - sample.own_tokens for sample in group.samples)
    return told if any(told) else ()
