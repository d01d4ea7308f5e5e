"""Peers in memory, for tests of flows: no store, no engine, no train rank; the same interface, and the same rules.

A `FakeCluster` has prompts, a script that answers them, and some peers; `run` has each of them run the flow, as controllers
do. Steps end when the peers together hold the quota; what an engine did not answer is issued again; what cannot be scored
has failed; groups are trained in the order of their refs. What was asked and trained stands in the cluster afterwards.

    cluster = FakeCluster([{"prompt": "1+1=", "answer": "2"}], script=lambda asked: "2" if asked.greedy else "3")
    await cluster.run(my_flow)
    assert cluster.trained[0][0].samples[0].reward == 0.0

A token is a character, and one more ends each response. There is no staleness, no rollback, no death and no limit of prompts
here: those are the cluster's, and no flow sees them. Time is not simulated: a script that waits, waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore.config import JobSpec, new_spec
from gcore.config.sources import training_sources
from gcore.errors import SpecError
from gcore.flows.api import Flow
from gcore.flows.filters import find_filters
from gcore.reward.scoring import DirectScorer, Scorer
from gcore.testing.fake_peer import Asked, FakePeer, StepState
from gcore.testing.fake_samples import tokens_of
from gcore.types import Group, Outcome, Prompt, PromptRef

LONGEST = 64
"""Tokens of a response, at most; `rollout.max_new_tokens` of a made-up spec."""


Script = Callable[[Asked], str]
"""Answers; raises EngineError where no engine would."""


class FakeCluster:
    """Peers that share prompts and quotas. `settings`: sections of a spec, as a user writes them."""

    def __init__(
        self,
        entries: Sequence[Mapping[str, Any]],
        script: Script | None = None,
        *,
        peers: int = 1,
        **settings: Mapping[str, Any],
    ) -> None:
        self.spec = made_spec(**settings)
        if not entries:
            raise SpecError("a cluster needs prompts", fix="Give at least one entry")
        self.entries = entries
        self.script = script or (lambda asked: str(asked.prompt.fields.get("answer", "")))
        self.scorer: Scorer = DirectScorer()
        self.filters = find_filters(self.spec.flow.filters)
        self.asked: list[Asked] = []
        """Every response that was asked for, in order."""
        self.trained: list[tuple[Group, ...]] = []
        """The groups of each step."""
        self.outcomes: dict[PromptRef, Outcome] = {}
        """What was not trained, and why."""
        self.evaluated: list[int] = []
        """At which steps the flow asked for an evaluation; of the first peer."""
        self.unfiltered: set[PromptRef] = set()
        """Groups that were given to a batch without having passed `peer.filter`."""
        self.held: dict[PromptRef, Group] = {}
        self.tries: dict[PromptRef, int] = {}
        self.in_flight: set[PromptRef] = set()
        self.taken: set[PromptRef] = set()
        self.steps: dict[int, StepState] = {}
        self.peers = tuple(FakePeer(self, f"peer-{number}", number, peers) for number in range(peers))

    @property
    def steps_to_make(self) -> int:
        """`flow.steps`. Raises SpecError for a spec that goes by epochs, which are not counted here."""
        if self.spec.flow.steps is None:
            raise SpecError("a fake cluster goes by steps", where="flow.epochs", fix="Give flow.steps")
        return self.spec.flow.steps

    @property
    def head(self) -> int:
        """The last step that was trained."""
        return len(self.trained)

    async def run(self, flow: Flow) -> None:
        """Every peer runs it to its end. Raises what a flow raises."""
        tasks = [asyncio.ensure_future(flow(peer)) for peer in self.peers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def step(self, number: int) -> StepState:
        """The step of that number."""
        return self.steps.setdefault(number, StepState(number))

    def prompt(self, place: int) -> Prompt:
        """The prompt at that place of the endless stream."""
        epoch, seq = divmod(place, len(self.entries))
        fields = dict(self.entries[seq])
        text = str(fields.get("prompt", ""))
        return Prompt(PromptRef(epoch, 0, seq), text, tokens_of(text), fields, training_sources(self.spec)[0].name)

    def close_if_full(self) -> None:
        """End the step that is open, if the quota is there."""
        step = self.step(self.head + 1)
        if not step.closed and len(self.held) >= self.spec.flow.groups_per_step:
            step.closed = True

    def train(self) -> None:
        """Take the quota, oldest first."""
        refs = sorted(self.held)[: self.spec.flow.groups_per_step]
        self.trained.append(tuple(self.held.pop(ref) for ref in refs))
        # Strictly on-policy: what is left was made with the weights before, and is issued again.
        self.taken -= self.held.keys()
        self.held.clear()


def made_spec(**settings: Mapping[str, Any]) -> JobSpec:
    """A small spec with `settings` in it; two steps of two groups, if nothing is said. Raises SpecError."""
    made: dict[str, Any] = {
        "name": "fake",
        "model": {"path": "no-model"},
        "data": {"path": "no-data"},
        "flow": {"steps": 2, "groups_per_step": 4},
        "rollout": {"max_new_tokens": LONGEST},
        "reward": {"name": "exact"},
    }
    for section, values in settings.items():
        made[section] = {**made.get(section, {}), **values}
    return new_spec(made)
