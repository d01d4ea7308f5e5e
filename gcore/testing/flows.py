"""A cluster in memory for tests of flows: `FakeCluster`, and the `Peer`, `Step` and `Batch` that a flow gets from it.

They follow the rules of the real ones. A peer offers only what a flow can see; the cluster keeps the state of groups and prompts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gcore.config.load import new_spec
from gcore.config.spec import JobSpec, training_sources
from gcore.errors import EngineError, SpecError
from gcore.flows.api import Flow, Peer
from gcore.flows.filters import FilterError, apply_filters, check_production, find_filters
from gcore.ledger.collectives import check_contribution, exact_sum
from gcore.reward.api import Response, RewardError
from gcore.reward.pool import DirectScorer, FunctionScorer
from gcore.rollout.postprocess import drop_truncated, is_truncated, make_scored_group
from gcore.types import Group, Outcome, Prompt, PromptRef, Sample, Version, VersionSpan, entry_text, entry_value

MOST_ROUNDS = 30
"""A test fails when the number of filtered and failed prompts exceeds this multiple of the entries: no step would ever be full."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One response that a flow requested.

    `index`: number of the response among those to the prompt, from 0. `tries`: how often an engine error has ended an earlier try of the prompt.
    """

    prompt: Prompt
    index: int
    greedy: bool
    tries: int


@dataclass
class StepState:
    """The state of one step, shared by all peers. `closed`: the step has its quota of groups and takes no more.

    `gathered`: by the name of a `step.gather`, the value of each peer; `gave` is set when a peer adds one.
    """

    number: int
    closed: bool = False
    gathered: dict[str, dict[str, Any]] = field(default_factory=dict)
    gave: asyncio.Event = field(default_factory=asyncio.Event)
    through: set[str] = field(default_factory=set)
    """Names of the peers that called `step.train`."""
    published: set[str] = field(default_factory=set)
    """Names of the peers that called `step.publish`."""


class FakePeer:
    """A `gcore.flows.Peer` in memory. It gets every `peers`-th prompt of the stream, from prompt `number` on."""

    def __init__(self, cluster: FakeCluster, name: str, number: int, peers: int) -> None:
        self.cluster = cluster
        self.name = name
        self._number, self._peers = number, peers
        self._passed: set[PromptRef] = set()

    @property
    def version(self) -> Version:
        """Version of the weights that would generate now: the last trained step."""
        return Version(0, self.cluster.head)

    async def steps(self) -> AsyncIterator[FakeStep]:
        """Yield the steps from the next untrained one to `flow.steps`."""
        steps = self.cluster.steps_to_make
        number = 0
        while (number := max(self.cluster.head, number)) < steps:
            number += 1
            yield FakeStep(self, self.cluster.step(number))
            await asyncio.sleep(0)  # noqa: TID251 - yields to the event loop, so that a flow that does nothing blocks no other task

    async def prompts(self, step: Any) -> AsyncIterator[Prompt]:
        """Yield this peer's prompts, oldest first, until the step is full."""
        cluster, mine = self.cluster, step.state
        while not mine.closed:
            place = self._next_place()
            if place is None:
                await asyncio.sleep(0)  # noqa: TID251 - others go on
            else:
                prompt = cluster.prompt(place)
                cluster.taken.add(prompt.ref)
                cluster.in_flight.add(prompt.ref)
                step.handed_out = prompt
                yield prompt
                await asyncio.sleep(0)  # noqa: TID251 - what was started begins
                if step.handed_out is not None:
                    raise AssertionError(f"the flow got prompt {prompt.ref} and did not pass it to batch.start()")
            step.raise_defect()
            if len(cluster.outcomes) > MOST_ROUNDS * len(cluster.entries):
                raise AssertionError(
                    f"step {mine.number} does not get its {cluster.spec.flow.groups_per_step} groups: "
                    f"{len(cluster.outcomes)} prompts were filtered or failed"
                )

    def _next_place(self) -> int | None:
        """Return the oldest due prompt of this peer; None while the prompts in flight may suffice."""
        cluster = self.cluster
        if len(cluster.held) + len(cluster.in_flight) >= cluster.spec.flow.groups_per_step:
            return None
        mine = itertools.count(self._number, self._peers)
        return next(place for place in mine if cluster.prompt(place).ref not in cluster.taken)

    async def rollout(self, prompt: Prompt, samples: int | None = None, *, greedy: bool = False) -> tuple[Sample, ...]:
        """Return `samples` responses to the prompt from the cluster's script; None: `flow.samples_per_prompt`. Records each request in `asked`."""
        count = self.cluster.spec.flow.samples_per_prompt if samples is None else samples
        tries, version = self.cluster.tries.get(prompt.ref, 0), self.version
        made = []
        for index in range(count):
            asked = Asked(prompt, index, greedy, tries)
            self.cluster.asked.append(asked)
            made.append(sample_of(self.cluster.script(asked), version, self.cluster.spec.rollout.max_new_tokens))
        await asyncio.sleep(0)  # noqa: TID251 - an engine takes its time
        return tuple(made)

    async def demonstrate(self, prompt: Prompt) -> Group | Outcome:
        """Return a group whose only sample is the entry's answer; a failed outcome if it has none, or one that is too long."""
        field_ = training_sources(self.cluster.spec)[0].reward.answer
        if entry_value(prompt.fields, field_) is None:
            return Outcome("failed", f"the entry has no answer in field {field_!r} (reward.answer)")
        text = entry_text(prompt.fields, field_)
        longest = self.cluster.spec.rollout.max_new_tokens
        sample = sample_of(text, self.version, longest)
        if sample.finish_reason == "length":
            return Outcome("failed", f"the answer has {len(text) + 1} tokens, more than max_new_tokens ({longest})")
        return Group(prompt.ref, prompt.token_ids, (sample,), prompt.source, media=prompt.media)

    async def score(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group | Outcome:
        """Score with the spec's reward, and handle truncated samples. Raises RewardError."""
        rollout, source = self.cluster.spec.rollout, training_sources(self.cluster.spec)[0]
        if (outcome := drop_truncated(samples, rollout.truncated)) is not None:
            return outcome
        responses = [Response(s.text, s.own_tokens, is_truncated(s)) for s in samples]
        results = []
        for result in await self.cluster.scorer.score(source.reward, prompt.fields, responses):
            if isinstance(result, RewardError):
                raise result
            results.append(result)
        return make_scored_group(prompt, samples, results, rollout, source.sampling)

    async def filter(self, prompt: Prompt, group: Group | Outcome) -> Group | Outcome:
        """Apply the spec's filters. Raises FilterError."""
        if isinstance(group, Outcome):
            return group
        result = apply_filters(self.cluster.filters, group, prompt.fields)
        if isinstance(result, Group):
            self._passed.add(prompt.ref)
        return result

    def passed(self, ref: PromptRef) -> bool:
        """Whether a group of that prompt passed the filters since the last call."""
        there = ref in self._passed
        self._passed.discard(ref)
        return there

    async def evaluate(self) -> None:
        """Record that the flow requested an evaluation."""
        if self._number == 0:
            self.cluster.evaluated.append(self.cluster.head)


class FakeStep:
    """A `gcore.flows.Step` in memory, of one peer. `handed_out`: a prompt that the flow got and has not passed to `batch.start` yet."""

    def __init__(self, peer: FakePeer, state: StepState) -> None:
        self._peer, self._cluster = peer, peer.cluster
        self.state = state
        self.handed_out: Prompt | None = None
        self._defect: BaseException | None = None
        self._warned: set[str] = set()

    @property
    def number(self) -> int:
        """The step's number."""
        return self.state.number

    def fail(self, defect: BaseException) -> None:
        """Record an exception that a production (the coroutine that makes one group) raised and that does not end its prompt."""
        self._defect = self._defect or defect

    def raise_defect(self) -> None:
        """Raise the first exception that `fail` recorded, if any."""
        if self._defect is not None:
            raise self._defect

    @asynccontextmanager
    async def collect(self) -> AsyncIterator[FakeBatch]:
        """Yield the batch of this peer. At the end of the block, cancel productions that still run."""
        batch = FakeBatch(self._peer, self)
        try:
            yield batch
            self.raise_defect()
        finally:
            await batch.give_up()

    async def train(self) -> None:
        """Train the step at the first peer's call; later calls return at once. Raises AssertionError if its batch was not collected."""
        if not self.state.closed:
            raise AssertionError(f"step.train() in step {self.number}, but its batch was not collected")
        self.state.through.add(self._peer.name)
        if self._cluster.head < self.number:
            self._cluster.train()

    async def publish(self) -> None:
        """Record that this peer called it; there is no engine to update. Raises AssertionError if the step was not trained."""
        if self._cluster.head < self.number:
            raise AssertionError(f"step.publish() in step {self.number}, but it was not trained")
        self.state.published.add(self._peer.name)

    async def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Wait for the values that all peers give under `name`, and return them in the order of the peers' names. Raises ValueError."""
        check_contribution(name, value)
        if name in self._warned:
            raise ValueError(f"{name!r} was already used in this step; use another name")
        self._warned.add(name)
        given = self.state.gathered.setdefault(name, {})
        given.setdefault(self._peer.name, value)
        self.state.gave.set()
        while len(given) < len(self._cluster.peers):
            self.state.gave.clear()
            await self.state.gave.wait()
        return tuple(value for _, value in sorted(given.items()))

    async def sum(self, name: str, value: float) -> float:
        """Wait for the values that all peers give under `name`, and return their exact sum. Raises ValueError."""
        exact_sum([value])
        return exact_sum(await self.gather(name, value))


class FakeBatch:
    """A `gcore.flows.Batch` in memory: runs the productions of one peer in one step."""

    def __init__(self, peer: FakePeer, step: FakeStep) -> None:
        self._peer, self._cluster, self._step = peer, peer.cluster, step
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        """Run the coroutine `produce`, which makes the group of the last prompt that `peer.prompts` yielded, as a task.

        Raises RuntimeError if that prompt has a production already.
        """
        prompt, self._step.handed_out = self._step.handed_out, None
        if prompt is None:
            produce.close()
            raise RuntimeError("batch.start() was called twice for one prompt, or before peer.prompts() gave one")
        task = asyncio.create_task(self._produce(prompt, produce), name=f"prompt {prompt.ref}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def give_up(self) -> None:
        """Cancel running productions; their prompts are sampled again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._step.fail(defect)

    async def _produce(self, prompt: Prompt, produce: Coroutine[Any, Any, Group | Outcome]) -> None:
        cluster, ref = self._cluster, prompt.ref
        try:
            result = check_production(await produce, ref)
            if self._step.state.closed:
                cluster.taken.discard(ref)  # it was too late for the step
            elif isinstance(result, Group):
                if not self._peer.passed(ref):
                    cluster.unfiltered.add(ref)
                cluster.held[ref] = result if result.source else replace(result, source=prompt.source)
                cluster.close_if_full()
            else:
                cluster.outcomes[ref] = result
        except (RewardError, FilterError) as error:
            cluster.outcomes[ref] = Outcome("failed", str(error))
        except EngineError as error:
            cluster.tries[ref] = cluster.tries.get(ref, 0) + 1
            if cluster.tries[ref] > cluster.spec.flow.max_reissues:
                cluster.outcomes[ref] = Outcome("failed", str(error))
            else:
                cluster.taken.discard(ref)
        except asyncio.CancelledError:
            cluster.taken.discard(ref)
            raise
        finally:
            cluster.in_flight.discard(ref)


def _is_peer(peer: FakePeer) -> Peer:
    """Checked by the type checker only: a fake peer is a peer."""
    return peer


LONGEST = 64
"""Maximum tokens of a response; `rollout.max_new_tokens` of a generated spec."""

AnswerScript = Callable[[Asked], str]
"""Returns the text of a requested response; raises EngineError to simulate a failed engine."""


class FakeCluster:
    """Peers in memory that share prompts and quotas, for tests of flows. Follows the rules of a real cluster without store, engines and train ranks.

    `settings`: sections of a spec, as a user writes them. A `FakeCluster` has prompts, a script that responds to them,
    and some peers; `run` has each of them run the flow, as controllers do. A step ends when the peers together have the
    quota. A prompt without a response from an engine is sampled again; a prompt that cannot be scored has failed;
    groups are trained in the order of their refs. After the run, `asked`, `trained` and `outcomes` have the results.

        cluster = FakeCluster([{"prompt": "1+1=", "answer": "2"}], script=lambda asked: "2" if asked.greedy else "3")
        await cluster.run(my_flow)
        assert cluster.trained[0][0].samples[0].reward == 0.0

    A token is a character, and one more token ends each response. There is no staleness, no rollback, no loss of peers
    and no end of the prompts: a flow does not see them. Time is not simulated: a script that waits really waits.
    """

    def __init__(
        self,
        entries: Sequence[Mapping[str, Any]],
        script: AnswerScript | None = None,
        *,
        peers: int = 1,
        **settings: Mapping[str, Any],
    ) -> None:
        self.spec = make_spec(**settings)
        if not entries:
            raise SpecError("a cluster needs prompts", fix="Pass at least one entry")
        self.entries = entries
        self.script = script or (lambda asked: str(asked.prompt.fields.get("answer", "")))
        self.scorer: FunctionScorer = DirectScorer()
        self.filters = find_filters(self.spec.flow.filters)
        self.asked: list[Asked] = []
        """All responses that flows requested, in order."""
        self.trained: list[tuple[Group, ...]] = []
        """The groups of each step."""
        self.outcomes: dict[PromptRef, Outcome] = {}
        """Prompts that were not trained, with the reason."""
        self.evaluated: list[int] = []
        """Steps after which the flow requested an evaluation, as the first peer saw it."""
        self.unfiltered: set[PromptRef] = set()
        """Prompts whose group the flow gave to a batch without `peer.filter`."""
        self.held: dict[PromptRef, Group] = {}
        self.tries: dict[PromptRef, int] = {}
        self.in_flight: set[PromptRef] = set()
        self.taken: set[PromptRef] = set()
        self.steps: dict[int, StepState] = {}
        self.peers = tuple(FakePeer(self, f"peer-{number}", number, peers) for number in range(peers))

    @property
    def steps_to_make(self) -> int:
        """`flow.steps`. Raises SpecError for a spec limited by epochs, which are not counted here."""
        if self.spec.flow.steps is None:
            raise SpecError("a fake cluster does not support epochs", where="flow.epochs", fix="Set flow.steps")
        return self.spec.flow.steps

    @property
    def head(self) -> int:
        """The last trained step."""
        return len(self.trained)

    async def run(self, flow: Flow) -> None:
        """Run the flow on every peer to its end. Raises what a flow raises."""
        tasks = [asyncio.ensure_future(flow(peer)) for peer in self.peers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def step(self, number: int) -> StepState:
        """Return the state of the step with this number, created at the first call."""
        return self.steps.setdefault(number, StepState(number))

    def prompt(self, place: int) -> Prompt:
        """Return prompt number `place` (from 0) of the stream, which repeats the entries in every epoch."""
        epoch, seq = divmod(place, len(self.entries))
        fields = dict(self.entries[seq])
        text = str(fields.get("prompt", ""))
        return Prompt(PromptRef(epoch, 0, seq), text, tokens_of(text), fields, training_sources(self.spec)[0].name)

    def close_if_full(self) -> None:
        """Close the current step if the peers hold enough groups (`flow.groups_per_step`)."""
        step = self.step(self.head + 1)
        if not step.closed and len(self.held) >= self.spec.flow.groups_per_step:
            step.closed = True

    def train(self) -> None:
        """Count the step as trained, on the groups of the oldest prompts; discard the other groups and have their prompts sampled again."""
        refs = sorted(self.held)[: self.spec.flow.groups_per_step]
        self.trained.append(tuple(self.held.pop(ref) for ref in refs))
        # Strictly on-policy: remaining groups were generated with older weights, and are sampled again.
        self.taken -= self.held.keys()
        self.held.clear()


def make_spec(**settings: Mapping[str, Any]) -> JobSpec:
    """Return a small spec; by default two steps of four groups. `settings`: fields to set, by section. Raises SpecError."""
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


def tokens_of(text: str) -> tuple[int, ...]:
    """Return the code point of each character as its token; (1,) for an empty text, because a prompt has at least one token."""
    return tuple(ord(character) for character in text) or (1,)


def sample_of(text: str, version: Version, longest: int) -> Sample:
    """Return a response with this text and the end token 0, truncated at `longest` tokens."""
    tokens = (*(ord(character) for character in text), 0)
    cut = len(tokens) > longest
    tokens, text = (tokens[:longest], text[:longest]) if cut else (tokens, text)
    spans = (VersionSpan(version, 0, len(tokens)),)
    return Sample(tokens, (-1.0,) * len(tokens), text, "length" if cut else "stop", spans)


def group_of(rewards: Sequence[float], prompt: str = "a prompt") -> Group:
    """Return a group of the prompt text `prompt` with one sample for each of `rewards`."""
    made = (sample_of(f"response {number}", Version(0, 0), 64) for number in range(len(rewards)))
    samples = tuple(replace(sample, reward=reward) for sample, reward in zip(made, rewards, strict=True))
    return Group(PromptRef(0, 0, 0), tokens_of(prompt), samples, "data")
