"""Results of this peer for a job that are not committed yet: finished groups, outcomes of prompts without a group,
and prompts in flight.

A group is kept until a commit includes its prompt, or the group can no longer be trained. Which prompts to sample next
is not stored here; it is computed from the view. All of this is lost with the process; other peers then sample the
prompts again.
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
"""Maximum length of the reason of an outcome in the store, in characters and in bytes of JSON (which takes up to twelve
for a non-ASCII character). Longer reasons of plug-ins and engines are cut off."""


@dataclass
class InFlightPrompt:
    """A prompt whose group is being produced. `issued`: the newest weight version when it was started. `since`: start
    in monotonic seconds."""

    issued: Version
    since: float
    made_with: Version | None = None
    """The version that generated its first token; None: it has none yet."""
    task: asyncio.Task[None] | None = None
    stale: bool = False
    """Whether it was given up because of its age."""

    def version(self, head: Head) -> Version:
        """The oldest weight version that has generated, or may generate, one of its tokens. If a rollback came after
        its start: the version with which it was started."""
        if self.made_with is not None:
            return self.made_with
        return head.version if is_ancestor(head, self.issued) else self.issued


class InFlightPrompts:
    """The prompts that this peer has started and not finished, each with its task.

    At staleness 0 all of them are given up at the end of a step; otherwise they continue across steps. A prompt that is
    given up is cancelled and sampled again; `controllers.rules.step` decides which ones are.
    """

    def __init__(self) -> None:
        self._flights: dict[PromptRef, InFlightPrompt] = {}
        self._seen: tuple[Head, Mapping[PromptRef, Version]] | None = None
        """The last result of `versions`; None after a change."""
        self._defect: BaseException | None = None
        """The first exception of a production that is a defect of the flow or a plug-in and not an outcome of a
        prompt."""

    def __contains__(self, ref: object) -> bool:
        return ref in self._flights

    def __iter__(self) -> Iterator[PromptRef]:
        return iter(self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, ref: PromptRef, issued: Version, now: float) -> None:
        """Record that the prompt `ref` is in flight from now on, started at version `issued`."""
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
        """Record that an engine with the weights `version` starts to generate for `ref`. Only the first call for a
        prompt counts."""
        flight = self._flights.get(ref)
        if flight is not None and flight.made_with is None:
            self._seen = None
            flight.made_with = version

    def remove(self, ref: PromptRef) -> bool:
        """Record that `ref` is no longer in flight. Return whether it was given up because of its age."""
        self._seen = None
        flight = self._flights.pop(ref, None)
        return flight is not None and flight.stale

    def note_defect(self, defect: BaseException) -> None:
        """Record an exception that is a defect of the flow or a plug-in. The first one is kept."""
        self._defect = self._defect or defect

    def raise_defect(self) -> None:
        """Raise the recorded defect, if there is one. Without this its prompt would be sampled again forever."""
        if self._defect is not None:
            raise self._defect

    def give_up(self, ref: PromptRef, *, stale: bool) -> None:
        """Cancel the production of `ref`. `stale`: it exceeded the staleness limit, which counts as a failed
        attempt."""
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
        """The oldest weight version of each prompt (`InFlightPrompt.version`). Returns the same object while nothing
        changes, for `Memo`."""
        if self._seen is None or self._seen[0] is not head:
            self._seen = head, {ref: flight.version(head) for ref, flight in self._flights.items()}
        return self._seen[1]

    def oldest_s(self, now: float) -> float:
        """Seconds for which the oldest prompt has been in flight at monotonic time `now`."""
        return max((now - flight.since for flight in self._flights.values()), default=0.0)


class GroupBuffer:
    """This peer's finished groups and outcomes that are not committed yet, and its prompts in flight."""

    def __init__(self) -> None:
        self._groups: dict[PromptRef, Group] = {}
        self._offers: dict[PromptRef, OfferedGroup] = {}
        self._outcomes: dict[PromptRef, EndedRef] = {}
        self._seen: tuple[Mapping[PromptRef, OfferedGroup], Mapping[PromptRef, EndedRef]] | None = None
        """The last results of `offers` and `outcomes`; None after a change."""
        self.in_flight = InFlightPrompts()
        self.reissues: dict[PromptRef, int] = {}
        """Number of failed attempts of each prompt."""
        self.went_stale: set[PromptRef] = set()
        """Prompts whose last group was finished, but exceeded the staleness limit while it waited here for a step."""
        self._scores: dict[PromptRef, tuple[float, float]] = {}
        """Mean reward and mean length of the responses to each scored prompt, for the outcomes of prompts that are
        filtered afterwards."""

    @property
    def offers(self) -> Mapping[PromptRef, OfferedGroup]:
        """The held groups as an offer describes them. Returns the same object while nothing changes."""
        return self._look()[0]

    @property
    def outcomes(self) -> Mapping[PromptRef, EndedRef]:
        """The filtered and failed prompts that are not committed yet. Returns the same object while nothing changes."""
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
        """Whether `ref` is in flight here, or has a group or an outcome here, so that it need not be sampled."""
        return ref in self.in_flight or ref in self._groups or ref in self._outcomes

    def group(self, digest: str) -> Group | None:
        """The held group with that digest, or None."""
        for ref, offered in self._offers.items():
            if offered.digest == digest:
                return self._groups[ref]
        return None

    def drop_group(self, ref: PromptRef, *, failed: bool = True) -> None:
        """Drop the held group of `ref`, so that its prompt is sampled again. `failed`: because a blob of it is lost, which
        counts as a failed attempt."""
        if self._groups.pop(ref, None) is not None:
            self._seen = None
            del self._offers[ref]
            if failed:
                self.count_reissue(ref)

    def note_scores(self, group: Group) -> None:
        """Record the mean reward and length of a prompt's responses, before filters run."""
        count = max(len(group.samples), 1)
        lengths = sum(sample.own_tokens for sample in group.samples)
        self._scores[group.ref] = (math.fsum(sample.reward for sample in group.samples) / count, lengths / count)

    def add_group(self, group: Group, patches: int = 0, picture_tokens: int = 0, step_tokens: int = 0) -> None:
        """Hold a finished group. `patches`, `picture_tokens`, `step_tokens`: as in its offer."""
        self._seen = None
        self._scores.pop(group.ref, None)
        self._groups[group.ref] = group
        self._offers[group.ref] = OfferedGroup(
            ref=group.ref,
            digest=group.digest(),
            prompt_tokens=len(group.prompt_ids),
            response_tokens=tuple(sample.length for sample in group.samples),
            versions=group.versions,
            reward=math.fsum(sample.reward for sample in group.samples) / len(group.samples),
            source=group.source,
            masked=tuple(index for index, sample in enumerate(group.samples) if sample.masked),
            truncated=sum(is_truncated(sample) for sample in group.samples),
            parts=group_parts(group),
            observed=_observed(group),
            patches=patches,
            picture_tokens=picture_tokens,
            step_tokens=step_tokens,
            media_bytes=sum({medium.sha256: medium.size for medium in group.all_media}.values()),
        )

    def record_outcome(self, ref: PromptRef, outcome: Outcome, holder: str, version: Version, source: str) -> None:
        """Hold the outcome of a prompt of `source` that ended without a group (filtered or failed). `holder`: this
        peer. `version`: the version that the outcome is based on."""
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
        """Count a failed attempt of `ref`. Return the number of its failed attempts."""
        self.reissues[ref] = self.reissues.get(ref, 0) + 1
        self.went_stale.discard(ref)
        return self.reissues[ref]

    def prune(self, rules: StreamRules, head: Head) -> None:
        """Drop what can no longer be used: groups and outcomes whose prompt has an outcome at `head`, those of a branch
        that a rollback discarded, and groups that exceed the staleness limit. The last count as a failed attempt of
        their prompt if staleness is allowed.
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
    """The beginning of `text`, within `REASON_CHARACTERS` and `REASON_BYTES`."""
    text = text[:REASON_CHARACTERS]
    while len(json.dumps(text)) > REASON_BYTES:
        text = text[: len(text) * 3 // 4]
    return text


def _observed(group: Group) -> tuple[int, ...]:
    """The number of tokens in each sample that the policy did not generate (texts of an environment); empty if it
    generated all."""
    observed = tuple(sample.length - sample.own_tokens for sample in group.samples)
    return observed if any(observed) else ()
