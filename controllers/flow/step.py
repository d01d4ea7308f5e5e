"""One step as a peer lives through it, and the productions under way in it: `gcore.flows`' `Step` and `Batch`.

A finished group goes into the group buffer if it can still be trained. A prompt that failed because of an engine is issued again by the
peer that owns the shard, later and later if no engine could be reached (a broken one would burn all tries of a prompt in a moment).
Any other exception is a defect of the flow or a plug-in and ends the flow. Nothing here issues prompts or asks an engine
(`controllers.flow.peer`), and nothing is written to the store but what peers exchange (`controllers.flow.peer_collectives`).
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
    """The parts of a peer that its steps work with."""

    look: Callable[[], JobView]
    changes: ChangeSignal
    buffer: GroupBuffer
    clock: Clock
    data: JobData
    collectives: PeerCollectives
    faults: PluginErrorLog
    check_filtered: Callable[[Group], None]
    """Raises SpecError for a group that the spec's filters have not seen."""


class JobStep:
    """Implements `gcore.flows.Step`: the step after `version`, in its lineage."""

    def __init__(self, context: StepContext, version: Version) -> None:
        self._context = context
        self.version = version
        self._handed_out: Prompt | None = None
        self._told: set[str] = set()
        """Names that were given something under."""

    @property
    def number(self) -> int:
        """The step's number."""
        return self.version.step + 1

    def is_current(self) -> bool:
        """Whether head still is where this step begins."""
        head = self._context.look().mirror.head
        return head is not None and head.record.version == self.version and not self._ended()

    def is_open(self) -> bool:
        """Whether its batch still wants groups."""
        seal = self._context.look().seal
        return self.is_current() and (seal is None or seal.collects)

    def takes_prompts(self) -> bool:
        """Whether prompts may be begun: for its own batch, and for later ones where some staleness is allowed, until it is committed."""
        return self.is_open() or (self.is_current() and self._context.data.spec.rollout.staleness > 0)

    def _ended(self) -> bool:
        return self._context.look().mirror.has_ended

    def hand_out(self, prompt: Prompt) -> None:
        """`prompt` is the flow's now; the next `start` is for it."""
        self.put_back()
        self._handed_out = prompt
        self._context.buffer.in_flight.begin(prompt.ref, self.version, self._context.clock.monotonic())

    def take(self) -> Prompt:
        """The prompt handed out last, once. Raises RuntimeError if there is none."""
        if self._handed_out is None:
            raise RuntimeError("batch.start() was called twice for one prompt, or before peer.prompts() gave one")
        prompt, self._handed_out = self._handed_out, None
        return prompt

    def put_back(self) -> None:
        """A prompt that the flow did not start is not in flight."""
        if self._handed_out is not None:
            self._context.buffer.in_flight.remove(self._handed_out.ref)
            self._handed_out = None

    def keep_group(self, group: Group) -> None:
        """Hold a finished group, unless it can no longer be trained.

        What is held is not issued again, so nothing may be held that no seal would take; nor what was issued in a lineage
        that was cut off meanwhile, whatever made it: with a curriculum the ref may stand for another prompt by now.
        Raises EngineError if head is where it was and other weights had a part in the group, and where some staleness is
        allowed also if the group has become too old: it was issued in vain, and counts.
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
            why = f"stale: prompt {group.ref} was made by {made_by}, too old for step {head.step + 1}"
            raise EngineError(why, fix="It is issued again")
        if not view.rules.staleness and self.is_current():
            raise EngineError(f"prompt {group.ref} was made by {made_by}, not {self.version}", fix="It is issued again")

    def record_outcome(self, ref: PromptRef, outcome: Outcome, source: str, trace: str = "") -> None:
        """Hold an outcome, unless it belongs to a lineage that was cut off meanwhile: then `ref` is issued again.

        Why a prompt failed is an event too, once for each reason, with the plug-in's own `trace`: a count alone would say
        nothing to whoever follows the job.
        """
        if outcome.kind == "failed":
            self._context.faults.note(outcome.reason, trace)
        view = self._context.look()
        if is_ancestor(view.head, self.version):
            self._context.buffer.record_outcome(ref, outcome, view.me, self.version, source)

    @asynccontextmanager
    async def collect(self) -> AsyncIterator[JobBatch]:
        """Leaves when the batch is sealed, and gives up what is in flight then.

        Where some staleness is allowed it leaves when the step is committed, or is not to come, for until then prompts of later
        steps are begun; what is in flight goes on.
        """
        batch = JobBatch(self._context, self)
        try:
            yield batch
        finally:
            self.put_back()
            if not self._context.data.spec.rollout.staleness:
                await batch.give_up()

    async def train(self) -> None:
        """Until head moved, or the batch is open again."""
        await self._context.changes.until(lambda: not self.is_current() or self.is_open())

    async def publish(self) -> None:
        """Until one of my engines serves head's version, or there is nothing to wait for."""

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
        # The second value would be passed over, for what is given is never changed.
        if name in self._told:
            raise ValueError(f"{name!r} was used in this step; give what is told again another name")
        self._told.add(name)


class JobBatch:
    """Implements `gcore.flows.Batch`: productions under way, one task each."""

    def __init__(self, context: StepContext, step: JobStep) -> None:
        self._context = context
        self._step = step
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        """Produce the prompt that `peer.prompts` handed out last."""
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
        """Cancel what is under way; whatever is still due is issued again."""
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
                    raise RewardError(why, fix="Correct the flow, or choose another for this estimator")
                self._context.check_filtered(result)
                # A flow that makes its groups itself need not know of sources.
                self._step.keep_group(result if result.source else replace(result, source=prompt.source))
            else:
                self._step.record_outcome(ref, result, prompt.source)
        except (RewardError, FilterError) as error:
            self._step.record_outcome(ref, Outcome("failed", str(error)), prompt.source, plugin_trace(error))
        except EngineError as error:
            tries = self._reissue_failed(prompt, error.what)  # not its "It is issued again"
            if isinstance(error, EngineUnreachable) and tries <= self._context.data.spec.flow.max_reissues:
                await self._context.clock.sleep(retry_delay(tries))  # still in flight, so not issued meanwhile
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._reissue_failed(prompt, "a task that it waited for was cancelled")  # else for ever, without a word
        except SystemExit as error:  # let through, it would end this process
            self._context.buffer.in_flight.note_defect(error)
        finally:
            if buffer.in_flight.remove(ref):
                self._reissue_stale(prompt)
            self._context.changes.notify()

    def _reissue_failed(self, prompt: Prompt, why: str) -> int:
        """Have a prompt that failed issued again, or fail it after too many tries. The number of tries."""
        tries = self._context.buffer.count_reissue(prompt.ref)
        log.info("prompt %s, try %d: %s", prompt.ref, tries, why)
        if tries > self._context.data.spec.flow.max_reissues:
            self._step.record_outcome(
                prompt.ref, Outcome("failed", f"issued {tries} times, the last: {why}"), prompt.source
            )
        return tries

    def _reissue_stale(self, prompt: Prompt) -> None:
        """Have a prompt issued again whose weights became too old while it was produced, or fail it after too many tries."""
        tries = self._context.buffer.count_reissue(prompt.ref)
        log.info("prompt %s, try %d: given up, for its weights became too old", prompt.ref, tries)
        if tries > self._context.data.spec.flow.max_reissues:
            reason = f"stale: issued {tries} times, the last one took more than rollout.staleness allows"
            self._step.record_outcome(prompt.ref, Outcome("failed", reason), prompt.source)
