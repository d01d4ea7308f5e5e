"""What a flow is written against.

A flow is `async def flow(peer: Peer) -> None`. Every controller runs it; what it says of a step, it says for the whole
cluster. It holds no state that matters: whatever it has not offered is issued again by someone when it dies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from gcore.types import Group, Outcome, Prompt, Sample


class Batch(Protocol):
    """The part of a step that this peer produces."""

    def start(self, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        """Run `produce` beside others. Its group is offered, its outcome is offered, its failure is issued again."""
        ...


class Step(Protocol):
    """One step, as this peer lives through it. A step that was rolled back or resealed simply comes again."""

    @property
    def number(self) -> int:
        """The step's number; head is at `number - 1`."""
        ...

    def collect(self) -> AbstractAsyncContextManager[Batch]:
        """Produce until the whole cluster has the step's quota; then what is still in flight is given up."""
        ...

    async def train(self) -> None:
        """Until the step is committed, or it is known that it will not be."""
        ...

    async def publish(self) -> None:
        """Until this peer's engines serve the committed weights."""
        ...

    async def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """What every peer gives under `name` in this step, in the order of the peers' names; the same answer for all.

        Every peer's flow must come to it. `value`: a number, a text or a list or mapping of such, small (4 KiB as JSON).
        A peer that dies before all have given is left out, and one that repeats the step, or comes late, is told what was
        agreed. A name serves once in a step. Raises ValueError for a value or name that is not so.
        """
        ...

    async def sum(self, name: str, value: float) -> float:
        """The sum of what every peer gives under `name`, as `gather` has it. Raises ValueError."""
        ...


class Peer(Protocol):
    """A controller's side of one job."""

    def steps(self) -> AsyncIterator[Step]:
        """The steps to come, until the job has all of them."""
        ...

    def prompts(self, step: Step) -> AsyncIterator[Prompt]:
        """The prompts of this peer's shards that are due for `step`, oldest first, until its batch is sealed."""
        ...

    async def rollout(self, prompt: Prompt, samples: int | None = None, *, greedy: bool = False) -> tuple[Sample, ...]:
        """Responses, sampled as the prompt's source says; `samples` of them, or `flow.samples_per_prompt`. Of several turns, if the
        job has an environment, or an agent makes them: then `score` finds out what their prompt is.

        With `greedy` each is the likeliest token by token; it is made for comparison, not to be trained. Raises EngineError
        if no engine answers: let it through, and the prompt is issued again. Raises RewardError if one of these failed: let
        it through, and the prompt has failed, with that reason.
        """
        ...

    async def demonstrate(self, prompt: Prompt) -> Group | Outcome:
        """The answer that the prompt's entry holds (the field `reward.answer`) as a group of one sample, with reward 0.

        Failed, if the entry has none, or it is longer than a response may be: it is never cut.
        """
        ...

    async def score(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group | Outcome:
        """The samples with their rewards; or that the prompt is filtered, where the spec says so of cut-off responses.

        Raises RewardError if one cannot be scored: let it through, and the prompt has failed, with that reason.
        """
        ...

    async def filter(self, prompt: Prompt, group: Group | Outcome) -> Group | Outcome:
        """The group, or that a filter of `flow.filters` refuses it, and why. An outcome is given back as it is.

        Every group that is trained must have been here, or filters that a user names would do nothing. Raises FilterError.
        """
        ...

    async def evaluate(self) -> None:
        """Evaluate the published weights if that is due; one peer does it, the others wait for the result."""
        ...


Flow = Callable[[Peer], Awaitable[None]]
