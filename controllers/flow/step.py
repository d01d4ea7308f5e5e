"""One step from a peer's point of view, and its running productions: `gcore.flows`' `Step` and `Batch`.

A finished group goes into the group buffer if it can still be trained. If a prompt failed because of an engine, the peer that owns the shard
samples it again, with increasing delays if no engine was reachable (otherwise a broken engine would use up all attempts at once). Any other
exception is a defect of the flow or a plug-in and ends the flow. This module neither samples prompts nor calls engines
(`controllers.flow.peer`), and writes nothing to the store but collective values (`controllers.flow.peer_collectives`).
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
from gcore.flows.filters import FilterError, check_production, untrainable_reason
from gcore.ledger.selection import is_acceptable, is_ancestor
from gcore.plugins import plugin_trace
from gcore.reward.api import RewardError
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import is_cancelled
from gcore.types import Group, Outcome, Prompt, PromptRef, Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepContext:
    """The parts of a peer that its steps use."""

    look: Callable[[], JobView]
    changes: ChangeSignal
    buffer: GroupBuffer
    clock: Clock
    data: JobData
    collectives: PeerCollectives
    faults: PluginErrorLog
    check_filtered: Callable[[Group], None]
    """Raises SpecError for a group to which the spec's filters were not applied."""


class JobStep:
    """Implements `gcore.flows.Step`: the step after `version`, in its lineage."""

    def __init__(self, context: StepContext, version: Version) -> None:
        self._context = context
        self.version = version
        self._handed_out: Prompt | None = None
        self._told: set[str] = set()
        """Names already used in collectives of this step."""

    @property
    def number(self) -> int:
        """The step's number."""
        return self.version.step + 1

    def is_current(self) -> bool:
        """Whether head is still at the start of this step."""
        head = self._context.look().mirror.head
        return head is not None and head.record.version == self.version and not self._ended()

    def is_open(self) -> bool:
        """Whether its batch still needs groups."""
        seal = self._context.look().seal
        return self.is_current() and (seal is None or seal.collects)

    def takes_prompts(self) -> bool:
        """Whether prompts may be started: while its batch is open, and, if staleness is allowed, for later batches until it is committed."""
        return self.is_open() or (self.is_current() and self._context.data.spec.rollout.staleness > 0)

    def _ended(self) -> bool:
        return self._context.look().mirror.has_ended

    def hand_out(self, prompt: Prompt) -> None:
        """Hand `prompt` to the flow; the next `start` is for it."""
        self.put_back()
        self._handed_out = prompt
        self._context.buffer.in_flight.begin(prompt.ref, self.version, self._context.clock.monotonic())

    def take(self) -> Prompt:
        """The prompt handed out last, once. Raises RuntimeError if there is none."""
        if self._handed_out is None:
            raise RuntimeError("batch.start() was called twice for one prompt, or before peer.prompts() yielded one")
        prompt, self._handed_out = self._handed_out, None
        return prompt

    def put_back(self) -> None:
        """Remove a prompt from flight that the flow did not start."""
        if self._handed_out is not None:
            self._context.buffer.in_flight.remove(self._handed_out.ref)
            self._handed_out = None

    def keep_group(self, group: Group) -> None:
        """Hold a finished group, unless it can no longer be trained.

        A held prompt is not sampled again, so no group may be held that no seal would take, nor a group from a discarded branch, regardless of its
        weights: with a curriculum, the ref may name another prompt by now. Raises EngineError if head is unchanged and other weights made
        part of the group, and, if staleness is allowed, if the group exceeds the limit; this counts as a failed attempt.
        """
        view = self._context.look()
        head = view.head
        if not is_ancestor(head, self.version):
            return
        if is_acceptable(head, head.step + 1, group.versions, view.rules.staleness):
            self._context.buffer.add_group(group)
            return
        made_by = ", ".join(map(str, group.versions))
        if view.rules.staleness and all(is_ancestor(head, version) for version in group.versions):
            why = f"stale: prompt {group.ref} was made by {made_by}, which exceeds the staleness limit of step {head.step + 1}"
            raise EngineError(why, fix="The prompt is sampled again")
        if not view.rules.staleness and self.is_current():
            raise EngineError(
                f"prompt {group.ref} was made by {made_by}, not {self.version}", fix="The prompt is sampled again"
            )

    def record_outcome(self, ref: PromptRef, outcome: Outcome, source: str, trace: str = "") -> None:
        """Hold an outcome, unless it belongs to a discarded branch; then `ref` is sampled again.

        The reason of a failure also becomes an event, once per reason, with the plug-in's `trace`, because a count alone would not tell users why.
        """
        if outcome.kind == "failed":
            self._context.faults.note(outcome.reason, trace)
        view = self._context.look()
        if is_ancestor(view.head, self.version):
            self._context.buffer.record_outcome(ref, outcome, view.me, self.version, source)

    @asynccontextmanager
    async def collect(self) -> AsyncIterator[JobBatch]:
        """End when the batch is sealed, and give up the prompts in flight then.

        If staleness is allowed, end when the step is committed or will not come, because prompts of later steps are started until then; prompts in
        flight continue.
        """
        batch = JobBatch(self._context, self)
        try:
            yield batch
        finally:
            self.put_back()
            if not self._context.data.spec.rollout.staleness:
                await batch.give_up()

    async def train(self) -> None:
        """Wait until head has moved or the batch is open again."""
        await self._context.changes.until(lambda: not self.is_current() or self.is_open())

    async def publish(self) -> None:
        """Wait until one of my engines serves head's version, or there is nothing to wait for."""

        def served() -> bool:
            view = self._context.look()
            version = view.head.version
            return self._ended() or not view.engines or any(e.version == version for e in view.engines.values())

        await self._context.changes.until(served)

    async def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Gather the values that all peers give under `name`. Raises ValueError."""
        self._use(name)
        return await self._context.collectives.gather(self.version, name, value)

    async def sum(self, name: str, value: float) -> float:
        """The sum of the values that all peers give under `name`. Raises ValueError."""
        self._use(name)
        return await self._context.collectives.sum(self.version, name, value)

    def _use(self, name: str) -> None:
        # A second value would be ignored, because contributions never change.
        if name in self._told:
            raise ValueError(f"{name!r} was already used in this step; use another name")
        self._told.add(name)


class JobBatch:
    """Implements `gcore.flows.Batch`: running productions, one task each."""

    def __init__(self, context: StepContext, step: JobStep) -> None:
        self._context = context
        self._step = step
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        """Produce the prompt that `peer.prompts` yielded last."""
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
                if (why := untrainable_reason(result, self._context.data.spec.train)) is not None:
                    raise RewardError(why, fix="Correct the flow, or choose another flow for this estimator")
                self._context.check_filtered(result)
                # A flow that builds its groups itself may leave the source empty.
                self._step.keep_group(result if result.source else replace(result, source=prompt.source))
            else:
                self._step.record_outcome(ref, result, prompt.source)
        except (RewardError, FilterError) as error:
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
        """Have a failed prompt sampled again, or fail it after too many attempts. Returns the number of attempts."""
        tries = self._context.buffer.count_reissue(prompt.ref)
        log.info("prompt %s, attempt %d failed: %s", prompt.ref, tries, why)
        if tries > self._context.data.spec.flow.max_reissues:
            self._step.record_outcome(
                prompt.ref, Outcome("failed", f"sampled {tries} times; the last error: {why}"), prompt.source
            )
        return tries

    def _reissue_stale(self, prompt: Prompt) -> None:
        """Have a prompt sampled again that exceeded the staleness limit during production, or fail it after too many attempts."""
        tries = self._context.buffer.count_reissue(prompt.ref)
        log.info("prompt %s, attempt %d was given up: it exceeded the staleness limit", prompt.ref, tries)
        if tries > self._context.data.spec.flow.max_reissues:
            reason = f"stale: sampled {tries} times; the last attempt exceeded rollout.staleness"
            self._step.record_outcome(prompt.ref, Outcome("failed", reason), prompt.source)
