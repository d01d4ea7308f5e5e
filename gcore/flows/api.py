"""Interface of flows.

A flow is `async def flow(peer: Peer) -> None`. Every controller (the daemon on a node) runs it on its shards of the
prompts, and all of them work on the same training step. A flow needs no persistent state: if its controller dies, other
controllers sample the prompts whose groups it had not yet offered to the cluster.

A group is all samples of one prompt. An outcome says that a prompt was filtered or failed instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from gcore.types import Group, Outcome, Prompt, Sample


class Batch(Protocol):
    """The groups of one step that this controller produces."""

    def start(self, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        """Run `produce` concurrently, and offer its group or outcome to the cluster for the step.

        After an EngineError the prompt is sampled again, at most `flow.max_reissues` times. After a RewardError or
        FilterError the prompt fails with that reason.
        """
        ...


class Step(Protocol):
    """One training step of the cluster, as this controller sees it.

    A step is repeated if the job went back to a checkpoint, or if its batch was given up before training.
    """

    @property
    def number(self) -> int:
        """Number of the step. The last committed step is `number - 1`."""
        ...

    def collect(self) -> AbstractAsyncContextManager[Batch]:
        """Context in which this controller generates groups.

        It ends when the whole cluster has the step's number of groups, and aborts what is still being generated.
        """
        ...

    async def train(self) -> None:
        """Wait until the train ranks have trained the step and it is committed, or until it is given up."""
        ...

    async def publish(self) -> None:
        """Wait until this controller's engines serve the new weights (weight sync)."""
        ...

    async def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Collect each controller's value for `name` in this step, ordered by controller name; all get the same result.

        Every controller's flow must call it. `value`: a number, a text, or a list or mapping of these, at most 4 KiB as
        JSON. A controller that dies before is left out; one that repeats the step or calls late gets the same result.
        Use a name once per step. Raises ValueError for an invalid value or name.
        """
        ...

    async def sum(self, name: str, value: float) -> float:
        """Sum of all controllers' values for `name` in this step, see `gather`. Raises ValueError."""
        ...


class Peer(Protocol):
    """Interface of a flow to its job on one controller: steps, prompts, engines, rewards."""

    def steps(self) -> AsyncIterator[Step]:
        """Yield the next training steps, until the job has trained all of its steps."""
        ...

    def prompts(self, step: Step) -> AsyncIterator[Prompt]:
        """Yield the prompts of this controller's shards to sample for `step`, oldest first, until the step's batch is
        fixed.
        """
        ...

    async def rollout(self, prompt: Prompt, samples: int | None = None, *, greedy: bool = False) -> tuple[Sample, ...]:
        """Generate responses to a prompt with the sampling parameters of its data source.

        `samples`: their number; by default `flow.samples_per_prompt`. They have several turns if the job has an
        environment or an agent. Agents may change the prompt; `score` then determines the prompt of the group. With
        `greedy` decoding is greedy; such responses are for comparison, not for training. Raises
        EngineError if no engine responds: do not catch it, and the prompt is sampled again. Raises RewardError if one
        of the responses failed: do not catch it, and the prompt fails with that reason.
        """
        ...

    async def demonstrate(self, prompt: Prompt) -> Group | Outcome:
        """Make a group of one sample, with reward 0, from the answer in the prompt's entry (field `reward.answer`).

        The outcome is failed if the entry has no answer, or the answer exceeds the maximum response length; it is never
        truncated.
        """
        ...

    async def score(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group | Outcome:
        """Score the samples and return their group, or a filtered outcome if the spec filters truncated responses.

        Raises RewardError if a response cannot be scored: do not catch it, and the prompt fails with that reason.
        """
        ...

    async def filter(self, prompt: Prompt, group: Group | Outcome) -> Group | Outcome:
        """Apply the filters of `flow.filters`: return the group, or a filtered outcome with the reason of the first refusal.

        Outcomes are returned unchanged. A flow must call it for every group; otherwise the user's filters have no
        effect. Raises FilterError.
        """
        ...

    async def evaluate(self) -> None:
        """Evaluate the current weights if an evaluation is due.

        The controllers share the work and all wait for the result.
        """
        ...


Flow = Callable[[Peer], Awaitable[None]]
"""A flow: the function that every controller runs for a job."""
