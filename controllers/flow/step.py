"""One step as a flow on this controller sees it, and the tasks that produce its groups: implements `gcore.flows.Step`
and `gcore.flows.Batch`.

A finished group goes into the group buffer if it can still be trained. If a prompt failed because of an engine, the
peer that owns its shard samples it again, with increasing delays if no engine was reachable (otherwise a broken engine
would use up all attempts at once). Any other exception is a defect of the flow or a plug-in and ends the flow.
`controllers.flow.peer` chooses prompts and calls engines. Except for the values of collective operations, this module
writes nothing to the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from controllers.changes import ChangeSignal
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.job_data import JobData
from controllers.flow.peer_collectives import PeerCollectives
from controllers.rules.view import JobView
from controllers.telemetry.notices import PluginErrorLog
from gcore.errors import EngineError, EngineUnreachable
from gcore.flows.filters import FilterError, check_production
from gcore.ledger.selection import is_acceptable, is_ancestor
from gcore.media.pictures import PictureError
from gcore.plugins import plugin_trace
from gcore.reward.api import RewardError
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import is_cancelled
from gcore.types import Group, Outcome, Prompt, PromptRef, Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the steps of a peer share. `look`: returns the present view of the job."""

    look: Callable[[], JobView]
    changes: ChangeSignal
    buffer: GroupBuffer
    clock: Clock
    data: JobData
    collectives: PeerCollectives
    faults: PluginErrorLog
    check_filtered: Callable[[Group], None]
    """Raises SpecError for a group to which the flow has not applied the spec's filters."""


class JobStep:
    """Implements `gcore.flows.Step`: the step that follows the committed weights `version`."""

    def __init__(self, context: StepContext, version: Version) -> None:
        self._context = context
        self.version = version
        self._handed_out: Prompt | None = None
        self._reported: set[str] = set()
        """Names of collective operations that were already used in this step."""

    @property
    def number(self) -> int:
        """The number of the step, from 1."""
        return self.version.step + 1

    def is_current(self) -> bool:
        """Whether the step is neither committed nor rolled back, and the job has not ended."""
        head = self._context.look().mirror.head
        return head is not None and head.record.version == self.version and not self._ended()

    def is_open(self) -> bool:
        """Whether the batch of the step is not sealed yet, so that it still needs groups."""
        seal = self._context.look().seal
        return self.is_current() and (seal is None or seal.collects)

    def takes_prompts(self) -> bool:
        """Whether prompts may be started in this step: until its batch is sealed; if staleness is allowed until it is
        committed, because later batches use the groups too."""
        return self.is_open() or (self.is_current() and self._context.data.spec.rollout.staleness > 0)

    def _ended(self) -> bool:
        return self._context.look().mirror.has_ended

    def hand_out(self, prompt: Prompt) -> None:
        """Record that `prompt` is given to the flow. The next call of `JobBatch.start` belongs to it."""
        self.put_back()
        self._handed_out = prompt
        self._context.buffer.in_flight.begin(prompt.ref, self.version, self._context.clock.monotonic())

    def take(self) -> Prompt:
        """Return the prompt that was handed out last. Raises RuntimeError if there is none, or it was taken already."""
        if self._handed_out is None:
            raise RuntimeError("batch.start() was called twice for one prompt, or before peer.prompts() yielded one")
        prompt, self._handed_out = self._handed_out, None
        return prompt

    def put_back(self) -> None:
        """Record that the flow did not start the prompt that was handed out last, so that it can be handed out
        again."""
        if self._handed_out is not None:
            self._context.buffer.in_flight.remove(self._handed_out.ref)
            self._handed_out = None

    def keep_group(self, group: Group) -> None:
        """Put a finished group into the buffer, unless it can no longer be trained.

        A prompt whose group is held is not sampled again. So a group that no seal would include must not be held, nor a
        group of a branch that a rollback discarded, whatever its weights: with a curriculum, its ref may name another
        prompt by now. Raises EngineError, which counts as a failed attempt, if the group exceeds the staleness limit;
        at staleness 0, if weights other than the step's generated a part of it.
        """
        view = self._context.look()
        head = view.head
        if not is_ancestor(head, self.version):
            return
        if is_acceptable(head, head.step + 1, group.versions, view.rules.staleness):
            work = self._context.data.picture_work(group) if group.all_media else ()
            self._context.buffer.add_group(group, *work)
            return
        made_by = ", ".join(map(str, group.versions))
        if view.rules.staleness and all(is_ancestor(head, version) for version in group.versions):
            why = f"stale: prompt {group.ref} was generated with weights {made_by}, too old for step {head.step + 1} (rollout.staleness)"
            raise EngineError(why, fix="The prompt is sampled again")
        if not view.rules.staleness and self.is_current():
            raise EngineError(
                f"prompt {group.ref} was generated with weights {made_by}, not {self.version}",
                fix="The prompt is sampled again",
            )

    def record_outcome(self, ref: PromptRef, outcome: Outcome, source: str, trace: str = "") -> None:
        """Put the outcome of a prompt that ended without a group into the buffer, unless a rollback discarded the step;
        then `ref` is sampled again.

        The reason of a failure also becomes an event, once per reason, with the plug-in's traceback `trace`, because a
        count alone would not tell users why.
        """
        if outcome.kind == "failed":
            self._context.faults.note(outcome.reason, trace)
        view = self._context.look()
        if is_ancestor(view.head, self.version):
            self._context.buffer.record_outcome(ref, outcome, view.me, self.version, source)

    @asynccontextmanager
    async def collect(self) -> AsyncIterator[JobBatch]:
        """Provide the batch in which the flow produces groups. When the flow leaves the block, prompts in flight are
        given up.

        If staleness is allowed, prompts in flight continue, because later steps can use them.
        """
        batch = JobBatch(self._context, self)
        try:
            yield batch
        finally:
            self.put_back()
            if not self._context.data.spec.rollout.staleness:
                await batch.give_up()

    async def train(self) -> None:
        """Wait until the step is committed or rolled back, or its sealed batch was given up, so that it needs groups
        again."""
        await self._context.changes.until(lambda: not self.is_current() or self.is_open())

    async def publish(self) -> None:
        """Wait for weight sync: until one of this controller's engines serves the newest weights. Return at once if it
        has no engines or the job has ended."""

        def served() -> bool:
            view = self._context.look()
            version = view.head.version
            return self._ended() or not view.engines or any(e.version == version for e in view.engines.values())

        await self._context.changes.until(served)

    async def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Contribute `value` under `name`, and return the values of all peers. Raises ValueError if the name was used
        in this step already."""
        self._use(name)
        return await self._context.collectives.gather(self.version, name, value)

    async def sum(self, name: str, value: float) -> float:
        """Contribute `value` under `name`, and return the sum of the values of all peers. Raises ValueError if the name
        was used in this step already."""
        self._use(name)
        return await self._context.collectives.sum(self.version, name, value)

    def _use(self, name: str) -> None:
        # A second value would be ignored, because contributions never change.
        if name in self._reported:
            raise ValueError(f"{name!r} was already used in this step; use another name")
        self._reported.add(name)


class JobBatch:
    """Implements `gcore.flows.Batch`: runs the flow's coroutines that produce groups, one task per prompt."""

    def __init__(self, context: StepContext, step: JobStep) -> None:
        self._context = context
        self._step = step
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        """Start the coroutine `produce` as the production of the prompt that `peer.prompts` yielded last."""
        try:
            prompt = self._step.take()
        except RuntimeError:
            produce.close()
            raise
        task = asyncio.create_task(self._produce(prompt, produce), name=f"prompt {prompt.ref}")
        self._tasks.add(task)
        self._context.buffer.in_flight.launch(prompt.ref, task)
        task.add_done_callback(self._done)

    async def give_up(self) -> None:
        """Cancel all running productions; prompts that are still due are sampled again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._context.buffer.in_flight.note_defect(defect)
            self._context.changes.notify()

    async def _produce(self, prompt: Prompt, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        buffer, ref = self._context.buffer, prompt.ref
        try:
            result = check_production(await produce, ref)
            if isinstance(result, Group):
                if (why := self._context.data.why_untrainable(result)) is not None:
                    raise RewardError(why, fix="Correct the flow, or choose another flow for this estimator")
                self._context.check_filtered(result)
                # A flow that builds its groups itself may leave the source empty.
                self._step.keep_group(result if result.source else replace(result, source=prompt.source))
            else:
                self._step.record_outcome(ref, result, prompt.source)
        except (RewardError, FilterError, PictureError) as error:
            self._step.record_outcome(ref, Outcome("failed", str(error)), prompt.source, plugin_trace(error))
        except EngineError as error:
            tries = self._reissue_failed(prompt, error.what)  # without its fix, "The prompt is sampled again"
            if isinstance(error, EngineUnreachable) and tries <= self._context.data.spec.flow.max_reissues:
                await self._context.clock.sleep(retry_delay(tries))  # still in flight, so it is not sampled meanwhile
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._reissue_failed(prompt, "an inner task was cancelled")  # otherwise it would be in flight forever
        except SystemExit as error:  # uncaught, it would end this process
            self._context.buffer.in_flight.note_defect(error)
        finally:
            if buffer.in_flight.remove(ref):
                self._reissue_stale(prompt)
            self._context.changes.notify()

    def _reissue_failed(self, prompt: Prompt, why: str) -> int:
        """Count a failed attempt of a prompt, which is then sampled again; after too many attempts record its outcome
        "failed". Return the number of attempts."""
        tries = self._context.buffer.count_reissue(prompt.ref)
        log.info("prompt %s, attempt %d failed: %s", prompt.ref, tries, why)
        if tries > self._context.data.spec.flow.max_reissues:
            self._step.record_outcome(
                prompt.ref, Outcome("failed", f"sampled {tries} times; the last error: {why}"), prompt.source
            )
        return tries

    def _reissue_stale(self, prompt: Prompt) -> None:
        """Count an attempt of a prompt that was given up because of the staleness limit. It is then sampled again;
        after too many attempts record its outcome "failed"."""
        tries = self._context.buffer.count_reissue(prompt.ref)
        log.info("prompt %s, attempt %d was given up: it exceeded the staleness limit", prompt.ref, tries)
        if tries > self._context.data.spec.flow.max_reissues:
            reason = f"stale: sampled {tries} times; the last attempt exceeded rollout.staleness"
            self._step.record_outcome(prompt.ref, Outcome("failed", reason), prompt.source)
