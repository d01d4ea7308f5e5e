"""Interface of flows.

A flow is `async def flow(peer: Peer) -> None`. Every controller runs it; each call refers to the step of the whole
cluster. A flow needs no persistent state: if its controller dies, other controllers sample the prompts that it has not
offered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from gcore.types import Group, Outcome, Prompt, Sample


class Batch(Protocol):
    """The part of a step that this controller produces."""

    def start(self, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        """Run `produce` concurrently. Its group or outcome is offered; if it fails, its prompt is sampled again."""
        ...


class Step(Protocol):
    """One step of this controller. A step that was rolled back or resealed is repeated."""

    @property
    def number(self) -> int:
        """Number of the step; head is at `number - 1`."""
        ...

    def collect(self) -> AbstractAsyncContextManager[Batch]:
        """Generate until the whole cluster has the step's quota, then abort what is in flight."""
        ...

    async def train(self) -> None:
        """Wait until the step is committed, or will not be."""
        ...

    async def publish(self) -> None:
        """Wait until this controller's engines serve the committed weights."""
        ...

    async def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Collect each controller's value for `name` in this step, ordered by controller name; all get the same result.

        Every controller's flow must call it. `value`: a number, a text, or a list or mapping of these, at most 4 KiB as
        JSON. A controller that dies first is left out; one that repeats the step or comes late gets the agreed result.
        Use a name once per step. Raises ValueError for an invalid value or name.
        """
        ...

    async def sum(self, name: str, value: float) -> float:
        """Sum of each controller's value for `name`, see `gather`. Raises ValueError."""
        ...


class Peer(Protocol):
    """A controller's interface to one job."""

    def steps(self) -> AsyncIterator[Step]:
        """The next steps, until the job has all of them."""
        ...

    def prompts(self, step: Step) -> AsyncIterator[Prompt]:
        """Prompts of this controller's shards to sample for `step`, oldest first, until its batch is sealed."""
        ...

    async def rollout(self, prompt: Prompt, samples: int | None = None, *, greedy: bool = False) -> tuple[Sample, ...]:
        """Generate responses with the sampling of the prompt's source: `samples` of them, or `flow.samples_per_prompt`.

        They have several turns if the job has an environment or an agent; for an agent, `score` then determines their
        prompt. With `greedy` decoding is greedy; such responses are for comparison, not for training. Raises
        EngineError if no engine responds: do not catch it, and the prompt is sampled again. Raises RewardError if one
        of the responses failed: do not catch it, and the prompt fails with that reason.
        """
        ...

    async def demonstrate(self, prompt: Prompt) -> Group | Outcome:
        """The answer in the prompt's entry (field `reward.answer`) as a group of one sample, with reward 0.

        Failed if the entry has none, or it exceeds the maximum response length; it is never truncated.
        """
        ...

    async def score(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group | Outcome:
        """The samples with their rewards, or a filtered outcome if the spec filters groups with truncated responses.

        Raises RewardError if a response cannot be scored: do not catch it, and the prompt fails with that reason.
        """
        ...

    async def filter(self, prompt: Prompt, group: Group | Outcome) -> Group | Outcome:
        """The group, or a filtered outcome with its reason if a filter of `flow.filters` refuses it.

        Outcomes are returned unchanged.

        Every trained group must pass through here, otherwise the user's filters have no effect. Raises FilterError.
        """
        ...

    async def evaluate(self) -> None:
        """Evaluate the current weights if an evaluation is due.

        The controllers share the work and all wait for the result.
        """
        ...


Flow = Callable[[Peer], Awaitable[None]]
