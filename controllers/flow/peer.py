"""The interface between a flow (the user's program of a step) and the controller: `JobPeer` implements
`gcore.flows.Peer`.

It hands out the prompts that are due, requests responses from the engines as the prompt's source says, and scores and
filters them. A prompt that its source filters out, or that cannot be rendered, ends without a request.
`controllers.flow.step` handles the results of productions (one task per prompt), `controllers.flow.evaluation`
evaluations.

Also here: `LengthEstimates` predicts response lengths, by which prompts are ordered and engines are chosen;
`make_demonstration` builds the groups of supervised training.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from controllers.changes import ChangeSignal, rest_s
from controllers.flow.curriculum_orders import CurriculumOrders
from controllers.flow.episodes import EpisodeRequest, EpisodeRunner
from controllers.flow.evaluation import Evaluator, LedgerEvaluations
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.job_data import JobData, sample_seed
from controllers.flow.peer_collectives import PeerCollectives
from controllers.flow.step import JobStep, StepContext
from controllers.identity import node_of
from controllers.inference.pool import EnginePool
from controllers.inference.rules import LengthExpectation, VersionFollower
from controllers.rules.step import stream_position
from controllers.rules.view import JobView
from controllers.telemetry.notices import EqualRewardsWatch, PluginErrorLog, WarningLog
from controllers.telemetry.step_stats import StepTimer
from controllers.workers.job_media import JobMedia
from gcore.data.dataset import DataChanged
from gcore.data.stream import PromptFiltered, PromptSource
from gcore.errors import DataError, EngineError, GcoreError, SpecError
from gcore.flows.api import Step
from gcore.flows.filters import CheckedFilter, apply_filters
from gcore.rollout.client import SamplingParams
from gcore.rollout.length_prediction import NONE, SiblingLengths, SourceLengths, expected_length, tokens_left
from gcore.rollout.postprocess import drop_truncated, make_scored_group
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all
from gcore.types import Group, Outcome, Prompt, PromptRef, Sample, Version, VersionSpan, entry_text, entry_value

NEWEST_GROUPS = 64
"""Number of newest groups of a source from which its response lengths are estimated."""

EVERY = 8
"""Number of new groups after which the estimate of a source is updated."""

MOST_PROMPTS = 65_536
"""Maximum number of prompts whose response lengths are remembered; those answered the longest time ago are dropped
first."""


log = logging.getLogger(__name__)

ROOM_RETRY_S = 1.0
"""Seconds after which a prompt is tried again for which the blob store had no room."""

STALLED_S = 5.0
"""Seconds without a byte after which room is made for the blobs that train ranks lack."""

NO_ROOM = "blob-store-full"
"""Topic of the warning that the blob store has no room."""


class JobPeer:
    """Implements `gcore.flows.Peer` for one job on this controller."""

    def __init__(
        self,
        data: JobData,
        look: Callable[[], JobView],
        changes: ChangeSignal,
        engines: EnginePool,
        buffer: GroupBuffer,
        evaluations: LedgerEvaluations,
        clock: Clock,
        stopwatch: StepTimer,
        orders: CurriculumOrders | None,
        filters: tuple[CheckedFilter, ...],
        collectives: PeerCollectives,
        faults: PluginErrorLog,
        warnings: WarningLog,
        episodes: EpisodeRunner | None = None,
        media: JobMedia | None = None,
    ) -> None:
        """`look`: returns the present view of the job. `episodes`: makes multi-turn responses, for a job with an
        environment or an agent. `media`: provides the pictures of prompts; None: they have none."""
        self.media = media
        self.data = data
        self.look = look
        self.changes = changes
        self.buffer = buffer
        self._engines = engines
        self._episodes = episodes
        self._evaluator = Evaluator(data, look, changes, engines, evaluations, clock, episodes, media)
        self.clock = clock
        self._stopwatch = stopwatch
        self._orders = orders
        self._filters = filters
        self._passed_filters: set[PromptRef] = set()
        """Prompts whose group has passed the spec's filters and is not in the buffer yet."""
        self.collectives = collectives
        self.context = StepContext(look, changes, buffer, clock, data, collectives, faults, self.check_filtered)
        self._early: set[asyncio.Task[None]] = set()
        """Tasks that judge responses before their groups are finished."""
        self._warnings = warnings
        self._equal_rewards = EqualRewardsWatch(data.spec.flow.groups_per_step, warnings)
        rollout = data.spec.rollout
        self._longest_first = rollout.order == "longest_first"
        self._weighs_tokens = rollout.balance == "tokens"
        expects = self._longest_first or self._weighs_tokens or data.spec.placement.lends
        expects = expects and data.pictures is None  # all pictures have equally many steps
        self._lengths = LengthEstimates(self._prompt_entry) if expects else None

    async def steps(self) -> AsyncIterator[Step]:
        """Yield the next step of the job, again and again, until the job has ended or all steps are done.

        In an ended job no step waits for anything, so yielding another one would loop forever.
        """
        while True:
            await self.changes.until(lambda: self.look().mirror.head is not None)
            mirror = self.look().mirror
            assert mirror.head is not None
            head = mirror.head.record
            self.collectives.begin(head.version)
            if self.look().is_over or mirror.has_ended:
                await self.buffer.in_flight.give_up_all()
                return
            yield JobStep(self.context, head.version)

    async def close(self) -> None:
        """Cancel everything in flight, and wait until it has ended."""
        await self.buffer.in_flight.give_up_all()
        await cancel_all(self._early)

    async def prompts(self, step: Step) -> AsyncIterator[Prompt]:
        """Yield the prompts of this peer's shards that are due and that no peer has produced or started, oldest first,
        until the step takes no more."""
        assert isinstance(step, JobStep)
        while step.takes_prompts():
            seen, began = self.changes.count, self.clock.monotonic()
            room = max(self.data.spec.rollout.concurrency - len(self.buffer.in_flight), 0)
            due = [] if self.data.is_held_back else self._due_refs()[:room]
            rest = rest_s(self.clock.monotonic() - began)
            for ref in due:
                prompt = self._exhausted_outcome(ref) or self._render_prompt(ref)
                if isinstance(prompt, Prompt) and not await self._has_room(prompt, due):
                    await self.clock.sleep(ROOM_RETRY_S)
                    break
                if isinstance(prompt, Prompt):
                    step.hand_out(prompt)
                    self._stopwatch.produced(self.clock.monotonic())
                    yield prompt
                else:
                    step.record_outcome(ref, prompt, self.data.stream.found(ref)[0].name)
                    self.changes.notify()
                # Lets started productions and the reconciler run while there are more prompts to hand out.
                await self.clock.sleep(0)
                self.buffer.in_flight.raise_defect()
                if not step.takes_prompts():
                    return
                if self.look().leaving:
                    break
            step.put_back()
            # Changes that happened while prompts were handed out have not been processed yet.
            if step.takes_prompts() and self.changes.count == seen:
                await self.changes.wait()
                if rest > 0:
                    await self.clock.sleep(rest)
            self.buffer.in_flight.raise_defect()

    async def _has_room(self, prompt: Prompt, due: Sequence[PromptRef]) -> bool:
        """Reserve room for the blobs of a prompt; return whether the node's store has any.

        It gets the room of duplicates. The oldest prompt of `due` also gets that of younger groups, the youngest first:
        groups that are in no seal are dropped, and their prompts sampled again.
        """
        if self.media is None:
            return True
        view = self.look()
        position = partial(stream_position, view)
        while not await self.media.reserve(prompt, self.data.made_bytes):
            duplicate, held = self._duplicate(view), self._youngest_unsealed(view)
            if duplicate is not None:
                await self._give_up_room(duplicate)
                continue
            if held is None or prompt.ref != min(due, key=position) or position(held) < position(prompt.ref):
                self._warnings.hold(
                    NO_ROOM, "the blob store of this node has no room for the pictures of further prompts"
                )
                return False
            await self._give_up_room(held)
        self._warnings.hold(NO_ROOM, "")
        return True

    def _duplicate(self, view: JobView) -> PromptRef | None:
        """A prompt whose group an open seal takes from another peer (`JobView.duplicates`); None if there is none."""
        return next((group.ref for group in view.duplicates if group.ref in self.buffer.offers), None)

    def _youngest_unsealed(self, view: JobView) -> PromptRef | None:
        """The youngest prompt whose group is in no seal; None if there is none."""
        held = (group.ref for group in view.unsealed if group.ref in self.buffer.offers)
        return max(held, key=partial(stream_position, view), default=None)

    async def _give_up_room(self, held: PromptRef) -> None:
        """Drop a group and its blobs to make room; its prompt is sampled again."""
        assert self.media is not None
        self.buffer.drop_group(held, failed=False)
        await self.media.release(held)
        self.changes.notify()

    async def make_room_for_ranks(self) -> None:
        """Make room in the store of this node for blobs that its train ranks lack; never returns.

        Groups that this peer holds, and prompts that it samples, may take all the room. Then no rank here gets the blobs of
        other nodes, and the step never ends. If the ranks lack the same bytes for `STALLED_S`, room is reserved for their
        transfers. Duplicates are dropped for it, and then groups in no seal, the youngest first.
        """
        assert self.media is not None
        lacking, since, reserved = 0, self.clock.monotonic(), False
        while True:
            await self.clock.sleep(ROOM_RETRY_S)
            view = self.look()
            before, lacking = lacking, view.lacking_bytes(node_of(view.me))
            if lacking != before or not lacking:
                since = self.clock.monotonic()
            if reserved and not lacking:
                reserved = not await self.media.reserve_for_ranks(0)
            if self.clock.monotonic() - since < STALLED_S:
                continue
            reserved = await self.media.reserve_for_ranks(lacking)
            if reserved:
                continue
            duplicate = self._duplicate(view)
            held = self._youngest_unsealed(view) if duplicate is None else duplicate
            if held is not None:
                log.info("group %s is dropped: a train rank of this node has no room for blobs of other nodes", held)
                await self._give_up_room(held)
                reserved = await self.media.reserve_for_ranks(lacking)

    def _exhausted_outcome(self, ref: PromptRef) -> Outcome | None:
        """The outcome "failed" for a prompt that was sampled too often and whose last group exceeded the staleness
        limit; None for other prompts."""
        tries = self.buffer.reissues.get(ref, 0)
        if ref not in self.buffer.went_stale or tries <= self.data.spec.flow.max_reissues:
            return None
        return Outcome(
            "failed",
            f"stale: sampled {tries} times; the last group exceeded the staleness limit before a step could use it",
        )

    def _render_prompt(self, ref: PromptRef) -> Prompt | Outcome:
        """Render the prompt `ref`; return its outcome instead if its source filters it out or it cannot be rendered.
        Raises DataChanged."""
        try:
            return self.data.stream.prompt(ref)
        except PromptFiltered as filtered:
            return Outcome("filtered", filtered.what)
        except DataChanged:
            raise  # otherwise every prompt of every epoch would fail
        except GcoreError as error:
            return Outcome("failed", str(error))

    async def rollout(self, prompt: Prompt, samples: int | None = None, *, greedy: bool = False) -> tuple[Sample, ...]:
        """Generate responses to a prompt with the newest committed weights, sampled as the prompt's source says.
        `samples`: their number; None: that of the spec. `greedy`: with temperature 0. They have several turns if the
        job has an environment or an agent. Raises EngineError, and RewardError if an environment failed."""
        view = self.look()
        count = self.data.spec.flow.samples_per_prompt if samples is None else samples
        reissue = self.buffer.reissues.get(prompt.ref, 0)
        seeds = tuple(sample_seed(self.data, prompt.ref, index, reissue) for index in range(count))
        rid = f"{self.data.uid}/{prompt.ref}/{reissue}/{view.me}{'/greedy' if greedy else ''}"
        version = view.head.version
        params = self.data.sources[prompt.source].params
        if greedy:
            params = replace(params, temperature=0.0, top_p=1.0, top_k=None, min_p=0.0)
        if self._episodes is not None:
            return await self._play_episodes(prompt, version, params, seeds, rid, greedy=greedy)
        prompts = [prompt.token_ids] * count
        if self.data.pictures is not None:
            denoising = self.data.pictures.params(prompt.text, version.step, seeds)
            params = replace(params, denoising=replace(denoising, blob_holder=view.me))
        if self.media is not None and prompt.pictures:
            params = replace(params, pictures=await self.media.in_request(prompt, trained=True))
            prompts = [prompt.request_ids] * count
        # A picture is not continued by another engine.
        decode = self._decode_of(prompt) if self.data.pictures is None else None
        follow = self._follow_head(prompt.ref) if self.data.spec.rollout.staleness else None
        ended = None if greedy else self._early_judge(prompt)
        expect = None if self._lengths is None else self._lengths.of(prompt.ref, weighs=self._weighs_tokens)
        made = await self._engines.generate(version, prompts, params, seeds, rid, follow, decode, ended, expect)
        if any(sample.finish_reason == "abort" for sample in made):
            raise EngineError(f"the engine aborted prompt {prompt.ref}", fix="The prompt is sampled again")
        if self.data.pictures is not None:
            made = self.data.pictures.finished(made, version.step, seeds)
        if self.media is not None:
            await self.media.keep_made(prompt.ref, [medium for sample in made for medium in sample.media])
        if self._lengths is not None and not greedy:
            self._lengths.note(prompt.ref, [sample.length for sample in made])
        return made

    def _decode_of(self, prompt: Prompt) -> Callable[[Sequence[int]], str]:
        return self.data.stream.found(prompt.ref)[0].renderer.tokenizer.decode

    async def _play_episodes(
        self,
        prompt: Prompt,
        version: Version,
        params: SamplingParams,
        seeds: tuple[int, ...],
        rid: str,
        *,
        greedy: bool,
    ) -> tuple[Sample, ...]:
        """Make multi-turn responses to a prompt, one per seed, concurrently. Raises EngineError, and RewardError if an
        environment failed."""
        assert self._episodes is not None
        request = EpisodeRequest(
            version,
            prompt,
            self.data.stream.found(prompt.ref)[0],
            params,
            self._follow_head(prompt.ref) if self.data.spec.rollout.staleness else None,
            trained=True,
        )
        made = await self._episodes.side_by_side(request, seeds, rid, None if greedy else self._early_judge(prompt))
        if self._lengths is not None and not greedy:
            self._lengths.note(prompt.ref, [sample.own_tokens for sample in made])
        return made

    def _early_judge(self, prompt: Prompt) -> Callable[[int, Sample], None] | None:
        """Return a callback that sends each response to the judges as soon as it is finished; None if the source has no
        judges.

        Judgements that are not finished when the production of the prompt ends are cancelled.
        """
        pipeline, production = self.data.sources[prompt.source], self._production_task(prompt)
        if not pipeline.has_judges or production is None:
            return None
        self._forget_verdicts_at_end(prompt)

        def judge(place: int, sample: Sample) -> None:
            if sample.finish_reason == "abort" or production.done():
                return
            task = asyncio.create_task(pipeline.judge_early(prompt, sample), name=f"judge {prompt.ref} {place}")
            self._early.add(task)
            task.add_done_callback(self._finish_early_judgement)
            production.add_done_callback(lambda _: task.cancel())

        return judge

    def _production_task(self, prompt: Prompt) -> asyncio.Task[Any] | None:
        """The task that produces the prompt's group. It may differ from the current task, because a flow may run
        several rollouts of a prompt in tasks of its own."""
        return self.buffer.in_flight.task_of(prompt.ref) or asyncio.current_task()

    def _forget_verdicts_at_end(self, prompt: Prompt) -> None:
        """When the production of the prompt ends, forget its failed judgements, so that they are requested again if it
        is sampled again."""
        pipeline, production = self.data.sources[prompt.source], self._production_task(prompt)
        if pipeline.has_judges and production is not None:
            production.add_done_callback(lambda _: pipeline.forget(prompt))

    def _finish_early_judgement(self, task: asyncio.Task[None]) -> None:
        self._early.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            self.buffer.in_flight.note_defect(defect)
            self.changes.notify()

    def _follow_head(self, ref: PromptRef) -> VersionFollower:
        """Return the rule by which responses to `ref` start with the newest weights when an engine is chosen, and
        continue with newer ones."""

        def wanted() -> Version:
            head = self.look().mirror.head
            assert head is not None
            return head.record.version

        return VersionFollower(wanted, lambda version: self.buffer.in_flight.note_version(ref, version))

    async def demonstrate(self, prompt: Prompt) -> Group | Outcome:
        """Return the answer in the prompt's data entry as a group, for supervised training; or the outcome "failed"."""
        view = self.look()
        opened, _ = self.data.stream.found(prompt.ref)
        longest = self.data.sources[prompt.source].params.max_new_tokens
        return make_demonstration(await self._with_media(prompt), opened, view.head.version, longest)

    async def _with_media(self, prompt: Prompt) -> Prompt:
        """The prompt with the media of its pictures. Raises EngineError."""
        if self.media is None or not prompt.pictures:
            return prompt
        return replace(prompt, media=await self.media.of(prompt))

    async def score(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group | Outcome:
        """Score the responses to a prompt with its source's reward, and apply the spec's rule for truncated responses.
        Raises RewardError."""
        rollout, pipeline = self.data.spec.rollout, self.data.sources[prompt.source]
        outcome = drop_truncated(samples, rollout.truncated)
        if outcome is not None:
            return outcome
        self._forget_verdicts_at_end(prompt)
        results = await pipeline.scored(prompt, samples)
        seen = await self._with_media(prompt)
        group = make_scored_group(seen, samples, results, rollout, pipeline.source.sampling)
        if self.media is not None:
            await self.media.end_sampling(prompt.ref)
        self.buffer.note_scores(group)
        rewards = [sample.reward for sample in group.samples]
        self._equal_rewards.note(prompt.source, prompt.ref, rewards, self.look().head.step)
        return group

    async def filter(self, prompt: Prompt, group: Group | Outcome) -> Group | Outcome:
        """Apply the spec's filters to a group. Return the group, or the outcome "filtered". Raises FilterError."""
        if isinstance(group, Outcome):
            return group
        result = apply_filters(self._filters, group, prompt.fields)
        if isinstance(result, Group):
            self._passed_filters.add(prompt.ref)
        return result

    def check_filtered(self, group: Group) -> None:
        """Raise SpecError if the flow delivers a group to which it has not applied the spec's filters."""
        if self._filters and group.ref not in self._passed_filters:
            raise SpecError(
                f"flow {self.data.spec.flow.name!r} trains a group without applying flow.filters",
                where="flow.filters",
                fix="Call peer.filter for every group in the flow, or remove flow.filters from the spec",
            )
        self._passed_filters.discard(group.ref)

    async def evaluate(self) -> None:
        """Take part in the evaluation that is due, if any, until its result is recorded."""
        await self._evaluator.evaluate()

    def _due_refs(self) -> list[PromptRef]:
        """The prompts of this peer's shards that are due and not started or finished here, in the order in which they
        are started."""
        view = self.look()
        if view.mirror.assign is None or view.leaving:
            return []
        mine = set(view.mirror.assign.record.shards_of(view.me))
        due = [ref for ref in view.due if ref.shard in mine]
        ready = due if self._orders is None else self._orders.ready(due, view.epochs, mine, self.buffer.refs())
        fresh = [ref for ref in ready if not self.buffer.knows(ref)]
        if self._lengths is None or not self._longest_first:
            return fresh
        return self._lengths.in_turn(fresh, view.head.version)

    def _prompt_entry(self, ref: PromptRef) -> PromptEntry:
        opened, number = self.data.stream.found(ref)
        return PromptEntry(opened.name, number, self.data.sources[opened.name].params.max_new_tokens)


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """An entry of a source, which is the same prompt in every data epoch. `longest`: maximum tokens of a response to
    it."""

    source: str
    number: int
    longest: int


@dataclass(frozen=True, slots=True)
class DuePrompt:
    """Sort key of a due prompt. `since`: the newest weight version when it became due. `tokens`: its expected response
    length at that time."""

    since: Version
    tokens: float


@dataclass
class _Source:
    """Response lengths of one source: of its newest groups, and the estimate made from them."""

    newest: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=NEWEST_GROUPS))
    fresh: int = 0
    """Number of groups since the last update of `lengths`."""
    lengths: SourceLengths = field(default_factory=lambda: SourceLengths(()))


class LengthEstimates:
    """Estimates response lengths, and orders due prompts by them. `entry`: returns the data entry of a ref.

    For each source it keeps the lengths of the newest groups. For each prompt that was answered here it keeps how long
    its responses were compared with its source's at that time (`gcore.rollout.length_prediction`), which predicts its
    length in later data epochs. In the first epoch, and for a prompt that another controller answered, only the
    source's lengths are known. All of it is lost with the process. It affects only the order in which prompts are
    started and the choice of engines.

    With `rollout.order: longest_first`, prompts that became due at the same step are started in the order of expected
    length, longest first. Prompts that became due at an earlier step come before them, so that no prompt is passed over
    forever. The order does not affect which prompts are trained.
    """

    def __init__(self, entry: Callable[[PromptRef], PromptEntry]) -> None:
        self._entry = entry
        self._sources: dict[str, _Source] = {}
        self._prompts: OrderedDict[tuple[str, int], SiblingLengths] = OrderedDict()
        self._turns: dict[PromptRef, DuePrompt] = {}
        """The sort keys of the due prompts. The length of each is estimated once, when it becomes due."""

    def note(self, ref: PromptRef, lengths: Sequence[int]) -> None:
        """Record the lengths in tokens of the finished responses to a prompt."""
        entry = self._entry(ref)
        source = self._sources.setdefault(entry.source, _Source())
        source.newest.append(tuple(lengths))
        source.fresh += 1
        if source.fresh >= EVERY or len(source.newest) <= EVERY:
            source.lengths, source.fresh = SourceLengths.of(source.newest), 0
        self._prompts[entry.source, entry.number] = SiblingLengths.of(source.lengths, lengths)
        self._prompts.move_to_end((entry.source, entry.number))
        while len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)

    def tokens(self, ref: PromptRef) -> float:
        """The expected length of a response to a prompt, in tokens."""
        entry = self._entry(ref)
        return expected_length(self._lengths(entry), self._siblings(entry), 0, entry.longest)

    def of(self, ref: PromptRef, *, weighs: bool = True) -> LengthExpectation:
        """Return a function that estimates the remaining tokens of the responses to a prompt as they grow. `weighs`:
        whether engines are chosen by it (else it is only reported)."""
        return LengthExpectation(partial(self._left, self._entry(ref)), weighs)

    def in_turn(self, due: Sequence[PromptRef], head: Version) -> list[PromptRef]:
        """Sort the due prompts into the order in which they are started. `head`: the newest weight version."""
        self._turns = {ref: self._turns.get(ref) or DuePrompt(head, self.tokens(ref)) for ref in due}
        return sort_longest_first(due, self._turns)

    def _left(self, entry: PromptEntry, finished: Sequence[int], growing: Sequence[int]) -> float:
        return tokens_left(self._lengths(entry), self._siblings(entry), finished, growing, entry.longest)

    def _lengths(self, entry: PromptEntry) -> SourceLengths:
        known = self._sources.get(entry.source)
        return known.lengths if known is not None else SourceLengths(())

    def _siblings(self, entry: PromptEntry) -> SiblingLengths:
        return self._prompts.get((entry.source, entry.number), NONE)


def sort_longest_first(due: Sequence[PromptRef], turns: Mapping[PromptRef, DuePrompt]) -> list[PromptRef]:
    """Sort due prompts: those that became due earlier first; among equal ones those with the longest expected responses
    first. `turns`: their sort keys."""
    return sorted(due, key=lambda ref: (turns[ref].since, -turns[ref].tokens))


def make_demonstration(prompt: Prompt, opened: PromptSource, version: Version, max_new_tokens: int) -> Group | Outcome:
    """Make the group of a prompt for supervised training: one sample, the answer of the data entry, with reward 0 and
    log-probabilities of 0, under `version`. Return the outcome "failed" if there is no answer or it is longer than
    `max_new_tokens`.

    The answer is the field that the reward of the prompt's source names (`reward.answer`): text as it is, other values
    as JSON. The end token that the chat template writes after an answer, or else the tokenizer's, is appended. An
    answer is never cut off, because half of it would be wrong.
    """
    field = opened.source.reward.answer
    if entry_value(prompt.fields, field) is None:
        return Outcome("failed", f"the entry has no answer in field {field!r} (reward.answer)")
    text = entry_text(prompt.fields, field)
    try:
        tokens = opened.renderer.tokenizer.encode(text, add_special_tokens=False)
    except DataError as error:
        return Outcome("failed", error.what)
    end = opened.renderer.answer_end(prompt.fields)
    tokens = tokens if end is None else (*tokens, end)
    if not tokens:
        return Outcome("failed", f"the answer in field {field!r} has no tokens, and the tokenizer has no end token")
    if len(tokens) > max_new_tokens:
        return Outcome("failed", f"the answer has {len(tokens)} tokens, more than max_new_tokens ({max_new_tokens})")
    spans = (VersionSpan(version, 0, len(tokens)),)
    sample = Sample(tokens, (0.0,) * len(tokens), text, "stop", spans)
    return Group(prompt.ref, prompt.token_ids, (sample,), prompt.source, media=prompt.media)
