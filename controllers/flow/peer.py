"""The flow's side of a controller: `JobPeer` implements `gcore.flows`' `Peer`.

It samples the prompts that are due, requests responses from an engine as their source says, scores them, and waits for the reconciler and the
other peers. A prompt that a source filters out, or that cannot be rendered, ends without a request. `controllers.flow.step` handles the
results of productions, `controllers.flow.evaluation` evaluations.

Below the peer: `LengthEstimates` predicts response lengths, which determine the order of prompts and their engines; `make_demonstration`
builds the groups of supervised training.
"""

from __future__ import annotations

import asyncio
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
from controllers.inference.pool import EnginePool
from controllers.inference.rules import LengthExpectation, VersionFollower
from controllers.rules.view import JobView
from controllers.telemetry.notices import EqualRewardsWatch, PluginErrorLog, WarningLog
from controllers.telemetry.step_stats import StepTimer
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
"""Number of recent groups of a source from which its lengths are estimated."""

EVERY = 8
"""Number of new groups after which the estimate is updated."""

MOST_PROMPTS = 65_536
"""Maximum number of prompts to remember; those answered the longest time ago are dropped first."""


class JobPeer:
    """The peer of one job on this controller; implements `gcore.flows.Peer`."""

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
        orders: CurriculumOrders,
        filters: tuple[CheckedFilter, ...],
        collectives: PeerCollectives,
        faults: PluginErrorLog,
        warnings: WarningLog,
        episodes: EpisodeRunner | None = None,
    ) -> None:
        """`episodes`: for a job with an environment or an agent."""
        self.data = data
        self.look = look
        self.changes = changes
        self.buffer = buffer
        self._engines = engines
        self._episodes = episodes
        self._evaluator = Evaluator(data, look, changes, engines, evaluations, clock, episodes)
        self.clock = clock
        self._stopwatch = stopwatch
        self._orders = orders
        self._filters = filters
        self._passed_filters: set[PromptRef] = set()
        """Prompts whose group has passed the filters and is not held yet."""
        self.collectives = collectives
        self.context = StepContext(look, changes, buffer, clock, data, collectives, faults, self.check_filtered)
        self._early: set[asyncio.Task[None]] = set()
        """Tasks that judge responses before their groups are finished."""
        self._equal_rewards = EqualRewardsWatch(data.spec.flow.groups_per_step, warnings)
        rollout = data.spec.rollout
        self._longest_first = rollout.order == "longest_first"
        self._weighs_tokens = rollout.balance == "tokens"
        expects = self._longest_first or self._weighs_tokens or data.spec.placement.lends
        self._lengths = LengthEstimates(self._prompt_entry) if expects else None

    async def steps(self) -> AsyncIterator[Step]:
        """Yield a step whenever the next batch is not sealed yet or being exchanged; end when the job has ended.

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
        """Yield due refs of my shards that no peer has offered and I have not started, oldest first, until the step takes no more."""
        assert isinstance(step, JobStep)
        while step.takes_prompts():
            seen, began = self.changes.count, self.clock.monotonic()
            room = max(self.data.spec.rollout.concurrency - len(self.buffer.in_flight), 0)
            due = [] if self.data.is_held_back else self._due_refs()[:room]
            rest = rest_s(self.clock.monotonic() - began)
            for ref in due:
                prompt = self._exhausted_outcome(ref) or self._render_prompt(ref)
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

    def _exhausted_outcome(self, ref: PromptRef) -> Outcome | None:
        """The failure of a prompt with too many attempts whose last group exceeded the staleness limit; None for other prompts."""
        tries = self.buffer.reissues.get(ref, 0)
        if ref not in self.buffer.went_stale or tries <= self.data.spec.flow.max_reissues:
            return None
        return Outcome(
            "failed",
            f"stale: sampled {tries} times; the last group exceeded the staleness limit before a step could use it",
        )

    def _render_prompt(self, ref: PromptRef) -> Prompt | Outcome:
        """The prompt, or its outcome if it cannot be sent to an engine. Raises DataChanged."""
        try:
            return self.data.stream.prompt(ref)
        except PromptFiltered as filtered:
            return Outcome("filtered", filtered.what)
        except DataChanged:
            raise  # otherwise every prompt of every epoch would fail
        except GcoreError as error:
            return Outcome("failed", str(error))

    async def rollout(self, prompt: Prompt, samples: int | None = None, *, greedy: bool = False) -> tuple[Sample, ...]:
        """Responses of head's version, sampled as the prompt's source says, or greedy; of several turns if the job has an environment. Raises
        EngineError, and RewardError for a failed environment."""
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
        decode = self.data.stream.found(prompt.ref)[0].renderer.tokenizer.decode
        follow = self._follow_head(prompt.ref) if self.data.spec.rollout.staleness else None
        ended = None if greedy else self._early_judge(prompt)
        expect = None if self._lengths is None else self._lengths.of(prompt.ref, weighs=self._weighs_tokens)
        made = await self._engines.generate(version, prompts, params, seeds, rid, follow, decode, ended, expect)
        if any(sample.finish_reason == "abort" for sample in made):
            raise EngineError(f"the engine aborted prompt {prompt.ref}", fix="The prompt is sampled again")
        if self._lengths is not None and not greedy:
            self._lengths.note(prompt.ref, [len(sample.token_ids) for sample in made])
        return made

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
        """Responses of several turns, made concurrently. Raises EngineError, and RewardError for a failed environment."""
        assert self._episodes is not None
        request = EpisodeRequest(
            version,
            prompt,
            self.data.stream.found(prompt.ref)[0].renderer,
            params,
            self._follow_head(prompt.ref) if self.data.spec.rollout.staleness else None,
        )
        made = await self._episodes.side_by_side(request, seeds, rid, None if greedy else self._early_judge(prompt))
        if self._lengths is not None and not greedy:
            self._lengths.note(prompt.ref, [sample.own_tokens for sample in made])
        return made

    def _early_judge(self, prompt: Prompt) -> Callable[[int, Sample], None] | None:
        """A function that sends each finished response to the source's judges; None without judges.

        Judgements that are not finished when the prompt's production ends are cancelled.
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
        """The task that produces the prompt's group. It may differ from the current task, because a flow may run several rollouts concurrently."""
        return self.buffer.in_flight.task_of(prompt.ref) or asyncio.current_task()

    def _forget_verdicts_at_end(self, prompt: Prompt) -> None:
        """At the end of the production, forget failed judgements of the prompt, so that they are requested again when it is sampled again."""
        pipeline, production = self.data.sources[prompt.source], self._production_task(prompt)
        if pipeline.has_judges and production is not None:
            production.add_done_callback(lambda _: pipeline.forget(prompt))

    def _finish_early_judgement(self, task: asyncio.Task[None]) -> None:
        self._early.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            self.buffer.in_flight.note_defect(defect)
            self.changes.notify()

    def _follow_head(self, ref: PromptRef) -> VersionFollower:
        """Has responses to `ref` start with head's current weights and continue with newer ones."""

        def wanted() -> Version:
            head = self.look().mirror.head
            assert head is not None
            return head.record.version

        return VersionFollower(wanted, lambda version: self.buffer.in_flight.note_version(ref, version))

    async def demonstrate(self, prompt: Prompt) -> Group | Outcome:
        """The answer in the prompt's entry as a group with head's version."""
        view = self.look()
        opened, _ = self.data.stream.found(prompt.ref)
        longest = self.data.sources[prompt.source].params.max_new_tokens
        return make_demonstration(prompt, opened, view.head.version, longest)

    async def score(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group | Outcome:
        """Score responses with the source's reward, and apply the spec's rule for truncated responses. Raises RewardError."""
        rollout, pipeline = self.data.spec.rollout, self.data.sources[prompt.source]
        outcome = drop_truncated(samples, rollout.truncated)
        if outcome is not None:
            return outcome
        self._forget_verdicts_at_end(prompt)
        results = await pipeline.scored(prompt, samples)
        group = make_scored_group(prompt, samples, results, rollout, pipeline.source.sampling)
        self.buffer.note_scores(group)
        rewards = [sample.reward for sample in group.samples]
        self._equal_rewards.note(prompt.source, prompt.ref, rewards, self.look().head.step)
        return group

    async def filter(self, prompt: Prompt, group: Group | Outcome) -> Group | Outcome:
        """Apply the spec's filters to the group. Raises FilterError."""
        if isinstance(group, Outcome):
            return group
        result = apply_filters(self._filters, group, prompt.fields)
        if isinstance(result, Group):
            self._passed_filters.add(prompt.ref)
        return result

    def check_filtered(self, group: Group) -> None:
        """Raise SpecError if the flow trains a group without calling the spec's filters."""
        if self._filters and group.ref not in self._passed_filters:
            raise SpecError(
                f"flow {self.data.spec.flow.name!r} trains a group without applying flow.filters",
                where="flow.filters",
                fix="Call peer.filter for every group in the flow, or remove flow.filters from the spec",
            )
        self._passed_filters.discard(group.ref)

    async def evaluate(self) -> None:
        """Take part in the evaluation of the version that is due, if any."""
        await self._evaluator.evaluate()

    def _due_refs(self) -> list[PromptRef]:
        view = self.look()
        if view.mirror.assign is None or view.leaving:
            return []
        mine = set(view.mirror.assign.record.shards_of(view.me))
        due = [ref for ref in view.due if ref.shard in mine]
        ready = self._orders.ready(due, view.epochs, mine, self.buffer.refs())
        fresh = [ref for ref in ready if not self.buffer.knows(ref)]
        if self._lengths is None or not self._longest_first:
            return fresh
        return self._lengths.in_turn(fresh, view.head.version)

    def _prompt_entry(self, ref: PromptRef) -> PromptEntry:
        opened, number = self.data.stream.found(ref)
        return PromptEntry(opened.name, number, self.data.sources[opened.name].params.max_new_tokens)


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """A prompt independent of the data epoch: an entry of a source, whose responses have at most `longest` tokens."""

    source: str
    number: int
    longest: int


@dataclass(frozen=True, slots=True)
class DuePrompt:
    """A prompt that is due. `since`: head's version when it became due; `tokens`: the expected response length at that time."""

    since: Version
    tokens: float


@dataclass
class _Source:
    newest: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=NEWEST_GROUPS))
    fresh: int = 0
    """Groups since the last update of `lengths`."""
    lengths: SourceLengths = field(default_factory=lambda: SourceLengths(()))


class LengthEstimates:
    """Estimates lengths of responses, and orders due prompts by them. `entry`: returns the prompt of a ref.

    For each source it keeps the newest groups, and for each prompt answered here how its responses compared with its source's at that time
    (`gcore.rollout.length_prediction`), which predicts later data epochs. In the first epoch, and for a prompt whose shard was on another
    controller, only the source's lengths are known. All of it is lost with the process; it affects only the order of prompts and the choice
    of engines.

    With `rollout.order: longest_first`, prompts that became due at the same head are ordered by expected length, longest first; prompts that
    became due at an earlier head go before them, so that no prompt is passed over forever. All due prompts are produced in any case, and
    other rules choose those of a seal: the order changes when a prompt is started, not whether.
    """

    def __init__(self, entry: Callable[[PromptRef], PromptEntry]) -> None:
        self._entry = entry
        self._sources: dict[str, _Source] = {}
        self._prompts: OrderedDict[tuple[str, int], SiblingLengths] = OrderedDict()
        self._turns: dict[PromptRef, DuePrompt] = {}
        """The due prompts; each is estimated once."""

    def note(self, ref: PromptRef, lengths: Sequence[int]) -> None:
        """Record the lengths of the responses to a prompt."""
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
        """The expected number of tokens of a response to a prompt."""
        entry = self._entry(ref)
        return expected_length(self._lengths(entry), self._siblings(entry), 0, entry.longest)

    def of(self, ref: PromptRef, *, weighs: bool = True) -> LengthExpectation:
        """The expected number of tokens still to come for the responses to a prompt, updated as they grow."""
        return LengthExpectation(partial(self._left, self._entry(ref)), weighs)

    def in_turn(self, due: Sequence[PromptRef], head: Version) -> list[PromptRef]:
        """The due refs in the order in which they are started."""
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
    """Sort due prompts: those due for longer first, among them the longest first; equal ones keep their order."""
    return sorted(due, key=lambda ref: (turns[ref].since, -turns[ref].tokens))


def make_demonstration(prompt: Prompt, opened: PromptSource, version: Version, max_new_tokens: int) -> Group | Outcome:
    """The answer of a prompt's entry as a group of one sample, with reward 0 and log-probabilities of 0, under `version`; or a failure.

    The answer is the field that the reward of the prompt's source names: text as it is, other values as JSON, followed by the end token that the
    chat template writes after an answer, or the tokenizer's. It is never cut, because half an answer would be a wrong one.
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
    return Group(prompt.ref, prompt.token_ids, (sample,), prompt.source)
