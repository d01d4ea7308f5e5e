"""The flow's side of a controller: `Peer`, `Step` and `Batch` as `gcore.flows` promises them.

It issues what is due, holds what is finished, and waits for what the driver and the other peers do. It writes nothing to
the store but an evaluation.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from controllers.changes import Changes
from controllers.engines import EngineBook
from controllers.holdings import Holdings
from controllers.stopwatch import Stopwatch
from controllers.turns import turn
from controllers.view import JobView
from gcore.clock import Clock
from gcore.config import JobSpec
from gcore.errors import EngineError, GcoreError
from gcore.flows import Step
from gcore.ledger.ancestry import is_acceptable, is_ancestor
from gcore.ledger.job import EvalSample, Evaluation
from gcore.ledger.records import SealState
from gcore.ledger.stream import due
from gcore.prompts.dataset import DataChanged, Dataset
from gcore.prompts.render import PromptRenderer
from gcore.prompts.stream import PromptStream, make_prompt
from gcore.reward.registry import Reward, RewardError
from gcore.rollout.client import SamplingParams
from gcore.types import Group, Outcome, Prompt, PromptRef, Sample, Version

log = logging.getLogger(__name__)
T = TypeVar("T")

EVAL_BATCH = 64
"""Evaluation prompts in one request."""
EVAL_TAKEOVER_S = 20.0
"""An evaluation that its peer has not delivered by then is made by the next."""


class Look(Protocol):
    """Where the present view of the job comes from."""

    def __call__(self) -> JobView:
        """The view now."""
        ...


@dataclass(frozen=True)
class Material:
    """What a job is made of, opened once."""

    spec: JobSpec
    uid: str
    stream: PromptStream
    evaluation: Dataset | None
    renderer: PromptRenderer
    limit: int | None
    """Most tokens of a prompt."""
    reward: Reward


class RecordEvaluation(Protocol):
    """Writes an evaluation down, unless someone has."""

    async def __call__(self, evaluation: Evaluation) -> None:
        """Returns when it was tried; the view tells what stands."""
        ...


class JobPeer:
    """Implements `gcore.flows.Peer`."""

    def __init__(
        self,
        material: Material,
        look: Look,
        changes: Changes,
        engines: EngineBook,
        holdings: Holdings,
        record_evaluation: RecordEvaluation,
        clock: Clock,
        stopwatch: Stopwatch,
    ) -> None:
        self.material = material
        self.look = look
        self.changes = changes
        self.holdings = holdings
        self._engines = engines
        self._record_evaluation = record_evaluation
        self._clock = clock
        self._stopwatch = stopwatch
        spec = material.spec
        self._params = SamplingParams(
            temperature=spec.rollout.temperature,
            top_p=spec.rollout.top_p,
            top_k=spec.rollout.top_k,
            max_new_tokens=spec.rollout.max_new_tokens,
            stop=spec.rollout.stop,
        )

    async def steps(self) -> AsyncIterator[Step]:
        """A step for each look at which the next batch is not sealed yet, or is on its way; none of an ended job.

        Of an ended job no step waits for anything: to give it one more would be a loop that never lets go.
        """
        while True:
            await self.changes.until(lambda: self.look().mirror.head is not None)
            mirror = self.look().mirror
            assert mirror.head is not None
            head = mirror.head.record
            if head.step >= self.material.spec.flow.steps or (mirror.status and mirror.status.record.phase.ended):
                return
            yield JobStep(self, head.version)

    async def prompts(self, step: Step) -> AsyncIterator[Prompt]:
        """Due refs of my shards that nobody has offered and I have not begun, oldest first."""
        assert isinstance(step, JobStep)
        while step.is_open():
            seen = self.changes.count
            room = max(self.material.spec.rollout.concurrency - len(self.holdings.in_flight), 0)
            for ref in self._due()[:room]:
                try:
                    prompt = self.material.stream.prompt(ref)
                except DataChanged:
                    raise  # or every prompt of every epoch would fail, one after the other, for ever
                except GcoreError as error:
                    step.end(ref, Outcome("failed", str(error)))
                    self.changes.notify()
                    continue
                step.hand_out(prompt)
                self._stopwatch.produced(self._clock.monotonic())
                yield prompt
                # Lets what was started begin, and the driver keep up, while there is more to hand out.
                await self._clock.sleep(0)
                step.raise_defect()
                if not step.is_open():
                    return
            step.put_back()
            # What changed while prompts were handed out was not looked at yet.
            if step.is_open() and self.changes.count == seen:
                await self.changes.wait()
            step.raise_defect()

    async def rollout(self, prompt: Prompt) -> tuple[Sample, ...]:
        """The group's samples, all of head's version. Raises EngineError."""
        view = self.look()
        assert view.mirror.head is not None
        count = self.material.spec.flow.samples_per_prompt
        reissue = self.holdings.reissues.get(prompt.ref, 0)
        seeds = tuple(sample_seed(self.material, prompt.ref, index, reissue) for index in range(count))
        rid = f"{self.material.uid}/{prompt.ref}/{reissue}/{view.me}"
        version = view.mirror.head.record.version
        samples = await self._engines.generate(version, [prompt.token_ids] * count, self._params, seeds, rid)
        if any(sample.finish_reason == "abort" for sample in samples):
            raise EngineError(f"the engine gave up on prompt {prompt.ref}", fix="It is issued again")
        return samples

    async def score(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group:
        """Rule rewards, sample by sample. Raises RewardError."""
        scored = []
        for sample in samples:
            result = self.material.reward(sample.text, prompt.fields, self.material.spec.reward)
            scored.append(replace(sample, reward=result.value, reward_parts=result.parts))
        return Group(prompt.ref, prompt.token_ids, tuple(scored))

    async def evaluate(self) -> None:
        """Greedy answers to the held-out prompts, once for a version that is due. The others wait for the first peer."""
        began = self._clock.monotonic()
        while (version := self._eval_missing()) is not None:
            view = self.look()
            place = turn(view.mirror.members, view.me, f"eval {version}")
            if self._clock.monotonic() - began < place * EVAL_TAKEOVER_S:
                await self.changes.wait(timeout=1.0)
                continue
            if not self._engines.ready(version):
                await self.changes.wait(timeout=1.0)
                continue
            try:
                await self._record_evaluation(await self._evaluate(version))
            except EngineError as error:
                log.warning("evaluation of %s: %s", version, error)
            await self.changes.wait(timeout=1.0)

    def _eval_missing(self) -> Version | None:
        """Head's version, if it is to be evaluated and is not yet."""
        mirror = self.look().mirror
        if mirror.head is None or mirror.status is None or mirror.status.record.phase.ended:
            return None
        version = mirror.head.record.version
        due_now = version.step in self.material.spec.eval_due and self.material.evaluation is not None
        return version if due_now and str(version) not in mirror.evaluations else None

    async def _evaluate(self, version: Version) -> Evaluation:
        dataset = self.material.evaluation
        assert dataset is not None
        spec = self.material.spec
        greedy = SamplingParams(
            temperature=0.0, top_p=1.0, top_k=None, max_new_tokens=spec.rollout.max_new_tokens, stop=spec.rollout.stop
        )
        count = min(len(dataset), spec.eval.limit)

        async def answer(first: int) -> list[EvalSample]:
            indexes = range(first, min(first + EVAL_BATCH, count))
            prompts = [
                make_prompt(dataset, self.material.renderer, index, PromptRef(0, 0, index), self.material.limit)
                for index in indexes
            ]
            rid = f"{self.material.uid}/eval/{version}/{first}/{self.look().me}"
            token_ids = [prompt.token_ids for prompt in prompts]
            samples = await self._engines.generate(version, token_ids, greedy, [0] * len(prompts), rid)
            return [self._judge(prompt, sample, version) for prompt, sample in zip(prompts, samples, strict=True)]

        batches = await all_or_none(answer(first) for first in range(0, count, EVAL_BATCH))
        answers = [answer for batch in batches for answer in batch]
        return Evaluation(
            version=version,
            accuracy=sum(a.reward for a in answers) / count,
            count=count,
            by=self.look().me,
            samples=tuple(answers[: spec.eval.show]),
        )

    def _judge(self, prompt: Prompt, sample: Sample, version: Version) -> EvalSample:
        """An evaluation answer and what it is worth. Raises EngineError if other weights had a part in it."""
        spec = self.material.spec
        if sample.oldest != version or sample.finish_reason == "abort":
            raise EngineError(
                f"an evaluation answer was made by {sample.oldest}, not {version}", fix="It is made again"
            )
        result = self.material.reward(sample.text, prompt.fields, spec.reward)
        expected = str(prompt.fields.get(spec.reward.answer, ""))
        return EvalSample(prompt=prompt.text, response=sample.text, answer=expected, reward=result.value)

    def _due(self) -> list[PromptRef]:
        view = self.look()
        assert view.mirror.head is not None
        if view.mirror.assign is None:
            return []
        head = view.mirror.head.record
        seals = [stored.record for stored in view.mirror.seals.values()]
        mine = set(view.mirror.assign.record.shards_of(view.me))
        refs = due(view.rules, head, seals, view.offered)
        return [ref for ref in refs if ref.shard in mine and not self.holdings.knows(ref)]


class JobStep:
    """Implements `gcore.flows.Step`: the step after `version`, in its lineage."""

    def __init__(self, peer: JobPeer, version: Version) -> None:
        self._peer = peer
        self.version = version
        self._handed_out: Prompt | None = None
        self._defect: BaseException | None = None

    @property
    def number(self) -> int:
        """The step's number."""
        return self.version.step + 1

    def is_current(self) -> bool:
        """Whether head still is where this step begins."""
        head = self._peer.look().mirror.head
        return head is not None and head.record.version == self.version and not self._ended()

    def is_open(self) -> bool:
        """Whether its batch still wants groups."""
        seal = self._peer.look().seal
        return self.is_current() and (seal is None or seal.state is SealState.OPEN)

    def _ended(self) -> bool:
        status = self._peer.look().mirror.status
        return status is not None and status.record.phase.ended

    def hand_out(self, prompt: Prompt) -> None:
        """`prompt` is the flow's now; the next `start` is for it."""
        self.put_back()
        self._handed_out = prompt
        self._peer.holdings.in_flight.add(prompt.ref)

    def take(self) -> Prompt:
        """The prompt handed out last, once. Raises RuntimeError if there is none."""
        if self._handed_out is None:
            raise RuntimeError("batch.start() was called twice for one prompt, or before peer.prompts() gave one")
        prompt, self._handed_out = self._handed_out, None
        return prompt

    def put_back(self) -> None:
        """A prompt that the flow did not start is not in flight."""
        if self._handed_out is not None:
            self._peer.holdings.in_flight.discard(self._handed_out.ref)
            self._handed_out = None

    def keep(self, group: Group) -> None:
        """Hold a finished group, unless it can no longer be trained.

        What is held is not issued again, so nothing may be held that no seal would take. Raises EngineError if head is
        where it was and other weights had a part in the group.
        """
        view = self._peer.look()
        assert view.mirror.head is not None
        head = view.mirror.head.record
        if is_acceptable(head, head.step + 1, group.versions, view.rules.staleness):
            self._peer.holdings.keep(group)
        elif self.is_current():
            made_by = ", ".join(map(str, group.versions))
            raise EngineError(f"prompt {group.ref} was made by {made_by}, not {self.version}", fix="It is issued again")

    def end(self, ref: PromptRef, outcome: Outcome) -> None:
        """Hold an outcome, unless it belongs to a lineage that was cut off meanwhile: then `ref` is issued again."""
        view = self._peer.look()
        assert view.mirror.head is not None
        if is_ancestor(view.mirror.head.record, self.version):
            self._peer.holdings.end(ref, outcome, view.me, self.version)

    def fail(self, defect: BaseException) -> None:
        """A production raised what is not an outcome: the flow or a plug-in is wrong."""
        self._defect = self._defect or defect

    def raise_defect(self) -> None:
        """Raise what a production raised, rather than issue its prompt for ever."""
        if self._defect is not None:
            raise self._defect

    @asynccontextmanager
    async def collect(self) -> AsyncIterator[JobBatch]:
        """Leaves when the batch is sealed; what is in flight then is given up."""
        batch = JobBatch(self._peer, self)
        try:
            yield batch
        finally:
            self.put_back()
            await batch.give_up()

    async def train(self) -> None:
        """Until head moved, or the batch is open again."""
        await self._peer.changes.until(lambda: not self.is_current() or self.is_open())

    async def publish(self) -> None:
        """Until one of my engines serves head's version, or there is nothing to wait for."""

        def served() -> bool:
            view = self._peer.look()
            assert view.mirror.head is not None
            version = view.mirror.head.record.version
            return self._ended() or not view.engines or any(e.version == version for e in view.engines.values())

        await self._peer.changes.until(served)


class JobBatch:
    """Implements `gcore.flows.Batch`: productions under way, one task each."""

    def __init__(self, peer: JobPeer, step: JobStep) -> None:
        self._peer = peer
        self._step = step
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        """Produce the prompt that `peer.prompts` handed out last."""
        try:
            prompt = self._step.take()
        except RuntimeError:
            produce.close()
            raise
        task = asyncio.create_task(self._produce(prompt.ref, produce), name=f"prompt {prompt.ref}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def give_up(self) -> None:
        """Cancel what is under way; whatever is still due is issued again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._step.fail(defect)
            self._peer.changes.notify()

    async def _produce(self, ref: PromptRef, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        holdings = self._peer.holdings
        try:
            result = await produce
            if isinstance(result, Group):
                self._step.keep(result)
            else:
                self._step.end(ref, result)
        except RewardError as error:
            self._step.end(ref, Outcome("failed", str(error)))
        except EngineError as error:
            tries = holdings.reissues.get(ref, 0) + 1
            holdings.reissues[ref] = tries
            log.info("prompt %s, try %d: %s", ref, tries, error)
            if tries > self._peer.material.spec.flow.max_reissues:
                reason = f"issued {tries} times, the last: {error}"
                self._step.end(ref, Outcome("failed", reason))
        finally:
            holdings.in_flight.discard(ref)
            self._peer.changes.notify()


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; when one fails, the others are cancelled, and have ended, before its error is raised.

    Left to themselves they would load the engines beside the next try, or wait for a version that nobody serves again.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def sample_seed(material: Material, ref: PromptRef, index: int, reissue: int) -> int:
    """A sample's seed: a hash of (job's name and seed, prompt ref, sample index, re-issue), 63 bits.

    The name and the seed, not the uid: the same spec started anew draws the same samples.
    """
    text = f"{material.spec.name}|{material.spec.seed}|{ref}|{index}|{reissue}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
