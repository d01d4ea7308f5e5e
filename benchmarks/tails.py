"""The gain of shorter tails (`tails`): over-provisioning, longest first, and routing by expected tokens.

Production's controllers over emulated engines, in simulated time. Response lengths are as in the field: half below 440 tokens, one in a hundred
above 2,400, up to 15 times the median. A pair is the same seed without and with a setting: the same prompts in each data epoch, the
same lengths, engines and messages; so the ratio of a pair is the effect of the setting, independent of the machine's load. The
first data epoch does not count, because nothing is known of new prompts. A further row sends each response of a group to the
engine with the fewest outstanding tokens, which gcore does not do (docs/develop/adr/0032). Another result is
the accuracy of length prediction: the mean absolute error of `gcore.rollout.length_prediction` beside that of the source's mean, on samples of
the same distribution, for several numbers of finished siblings.

The cluster is the simulation of `tests/support/simulated_cluster.py` without faults: daemons, drivers, peers, routing, offers, seals and
commits are production's, messages take 20 ms. Its ends are replaced. Engines are `gcore.engines.emulated.device`s, with rows, a queue,
prefill and decode by the timing model. Ranks take the model's time. Prompts are few, so that each comes again in every data epoch. A
response's length depends on its prompt and its seed alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import math
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import simulated_cluster
import simulated_controller
from simulated_ends import SOURCE, SimulatedClient
from simulated_network import Weather
from simulated_story import Story
from simulated_workers import Engine, Rank

from benchmarks.harness import Benchmark, Result, spread
from controllers.inference.requests import Requests
from gcore.config import JobSpec, NodeConfig, parse_spec
from gcore.data.order import entry_index, shard_lengths
from gcore.engines.emulated.device import EmulatedDevice
from gcore.engines.emulated.law import ReplicaTiming, TimingModel, named_generator
from gcore.engines.emulated.responses import EmulatedResponse
from gcore.engines.request import Finish, GenerationRequest, RequestOutput, RequestSampling
from gcore.rollout.client import ProgressCallback, SamplingParams
from gcore.rollout.length_prediction import SiblingLengths, SourceLengths, expected_length
from gcore.train.rank.feed import StepInput
from gcore.types import FinishReason, Group, Outcome, Prompt, PromptRef, Sample, Version, VersionSpan

LONGEST = 6600
SHARDS = 16


@dataclass(frozen=True)
class TailStory(Story):
    """A job whose responses have long tails. `rollout`: what is measured."""

    rows: int = 16
    """Sequences that an engine decodes at once."""
    engines: int = 2
    """Of each node."""
    groups: int = 16
    samples: int = 8
    likeness: float = 0.4
    rollout: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> JobSpec:
        """The job's. Nothing in it is given up for the time that it takes."""
        patient = {"timeout_s": 1e6, "silent_s": 1e6, "watchdog_s": 1e6}
        return parse_spec(
            {
                "name": f"tails-{self.seed}",
                "seed": self.seed,
                "model": {"path": "m"},
                "data": {"path": "d", "shards": SHARDS, "window": 64},
                "flow": {"groups_per_step": self.groups, "samples_per_prompt": self.samples, "steps": self.steps},
                "rollout": {"max_new_tokens": LONGEST, "batch_slots": self.rows, **patient, **self.rollout},
                "train": {"ranks": 1, "old_logprobs": "engine", "copies_gb": 0},
                "checkpoint": {"every": 1000},
                "reward": {"name": "exact"},
            }
        )

    @property
    def law(self) -> TimingModel:
        """Lengths as the field has them: half below 440 tokens, one in a hundred above 2,400; replicas that are alike."""
        return TimingModel(
            seed=self.seed,
            response_tokens=440,
            response_spread=0.73,
            response_likeness=self.likeness,
            replica_noise=0.02,
            train_s=5.0,
            train_tokens_per_s=5_000.0,
        )


@dataclass
class TailRun:
    """What a run came to."""

    commits: list[float] = field(default_factory=list)
    """The simulated seconds of each step's commit."""
    generated: int = 0
    lengths: list[int] = field(default_factory=list)


class TimedEngine(Engine):
    """A replica that is an emulated device."""

    story: TailStory

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        number = sum(isinstance(engine, TimedEngine) for engine in self.floor.engines.values())
        timing = ReplicaTiming(self.story.law, f"replica {number}")
        self.device = EmulatedDevice(timing, self._respond, rows=self.story.rows, version=str(self.version))
        self._numbers = itertools.count()
        self._ended: dict[int, Callable[[RequestOutput], None]] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def _respond(self, task: GenerationRequest, version: str) -> EmulatedResponse:
        law, about = self.story.law, task.key.hex()
        common = float(named_generator("length", law.seed, about).standard_normal())
        own = float(named_generator("sample", task.sampling.seed, about).standard_normal())
        likeness = law.response_likeness
        deviation = math.sqrt(likeness) * common + math.sqrt(1.0 - likeness) * own
        count = min(max(1, round(law.response_tokens * math.exp(law.response_spread * deviation))), LONGEST)
        # Their number matters, and not what they are.
        return EmulatedResponse((7,) * count, (-1.0,) * count, Finish("length" if count == LONGEST else "stop"))

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def publish(self, version: Version) -> None:
        super().publish(version)
        self._deliver(self.device.call_weights(str(self.version), self._now))

    def admit(
        self, prompts: Any, params: Any, seeds: Any, rid: str, hear: Callable[[int, RequestOutput], None]
    ) -> None:
        """A request; `hear` is called with each response, and its place."""
        tasks = []
        each = [params] * len(seeds) if isinstance(params, SamplingParams) else params
        for place, (prompt, own, seed) in enumerate(zip(prompts, each, seeds, strict=True)):
            sampling = RequestSampling(own.max_new_tokens, seed)
            task = GenerationRequest(next(self._numbers), rid, tuple(prompt), sampling)
            self._ended[task.number] = lambda delivery, place=place: hear(place, delivery)  # type: ignore[misc]
            tasks.append(task)
        self._deliver(self.device.submit(tasks, self._now))

    def abort(self, rid: str) -> None:
        """Nobody wants it any more."""
        self._deliver(self.device.abort(lambda task: task.rid == rid, self._now))

    def _deliver(self, deliveries: Sequence[RequestOutput]) -> None:
        for delivery in deliveries:
            self._ended.pop(delivery.number)(delivery)
        if self._alarm is not None:
            self._alarm.cancel()
        at = self.device.wake_at()
        loop = asyncio.get_running_loop()
        self._alarm = None if at is None else loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._deliver(self.device.advance(self._now))


class TimedRank(Rank):
    """A rank whose step takes the law's time."""

    story: TailStory

    async def _train(self) -> None:
        law = self.story.law
        while True:
            work = await self._work.get()
            assert isinstance(work, StepInput), "no step of this comes in parts"
            await self._gather(work.seal.token)
            tokens = sum(sum(group.response_tokens) for group in work.seal.groups)
            await asyncio.sleep(law.train_s + tokens / law.train_tokens_per_s)
            self._finish(work)


class TimedClient(SimulatedClient):
    """Its requests reach the device, and its responses come one by one."""

    @property
    def base_url(self) -> str:
        """For the log."""
        return self._engine.spec.instance

    async def scheduler_state(self) -> None:
        """It answers."""

    async def abort(self, rid: str, count: int) -> None:
        engine = self._timed
        await self._ask(lambda reply: (engine.abort(rid), reply(None))[1])  # type: ignore[func-returns-value]

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: ProgressCallback | None = None
    ) -> tuple[Sample, ...]:
        made: dict[int, Sample] = {}
        done = asyncio.Event()

        def arrives(place: int, sample: Sample) -> None:
            made[place] = sample
            if growing is not None and len(made) < len(seeds):
                growing.tell(place, sample)
            if len(made) == len(seeds):
                done.set()

        engine, network = self._timed, self._land.network

        def hear(place: int, delivery: RequestOutput) -> None:
            network.send(engine.node, self._node, lambda: arrives(place, _sample(delivery)))

        def admit(reply: Callable[[Any], None]) -> None:
            engine.admit(prompts, params, seeds, rid, hear)
            reply(None)

        await self._ask(admit)
        await done.wait()
        return tuple(made[place] for place in range(len(seeds)))

    @property
    def _timed(self) -> TimedEngine:
        assert isinstance(self._engine, TimedEngine)
        return self._engine


class Prompts:
    """The same few in every data epoch, in another order."""

    story: TailStory

    def prompt(self, ref: PromptRef) -> Prompt:
        """Its tokens name its entry."""
        return Prompt(ref, "", (1, 100 + self._entry(ref)), {}, SOURCE)

    def found(self, ref: PromptRef) -> tuple[Any, int]:
        """Source and entry."""
        tokenizer = SimpleNamespace(decode=lambda tokens: "x" * len(tokens))
        return SimpleNamespace(name=SOURCE, renderer=SimpleNamespace(tokenizer=tokenizer)), self._entry(ref)

    def _entry(self, ref: PromptRef) -> int:
        return entry_index(shard_lengths(self.story.prompts, SHARDS), self.story.seed, ref)


def _sample(delivery: RequestOutput) -> Sample:
    spans = tuple(VersionSpan(Version.parse(span.version), span.start, span.end) for span in delivery.spans)
    assert delivery.ending is not None
    kinds: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    reason = kinds.get(delivery.ending.kind, "abort")
    return Sample(delivery.tokens, delivery.logprobs, "", reason, spans)


def play(story: TailStory) -> TailRun:
    """The run, to its end. Raises SystemExit if anything was wrong."""
    run = TailRun()

    def timed_flow(land: Any) -> Any:
        async def flow(peer: Any) -> None:
            async for step in peer.steps():
                async with step.collect() as batch:
                    async for prompt in peer.prompts(step):
                        batch.start(produce(peer, prompt))
                await step.train()
                await step.publish()

        async def produce(peer: Any, prompt: Prompt) -> Group | Outcome:
            samples = await peer.rollout(prompt)
            if random.Random(f"{story.seed} {prompt.ref}").random() < story.filter_rate:
                return Outcome("filtered", "constant")
            return Group(prompt.ref, prompt.token_ids, samples, prompt.source)

        return flow

    class Told(simulated_cluster.SimulatedCluster):
        def tell(self, what: str) -> None:
            if " commit: won" in what:
                run.commits.append(self.loop.now)
            super().tell(what)

        async def _calm(self) -> None:
            await super()._calm()
            engines = [engine for engine in self.floor.engines.values() if isinstance(engine, TimedEngine)]
            run.generated = sum(engine.device.generated_tokens for engine in engines)

    def node(**values: Any) -> NodeConfig:
        return NodeConfig(**(values | {"slots": tuple(f"cpu:{number}" for number in range(story.engines))}))

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (simulated_cluster, "Engine", type("OwnEngine", (TimedEngine,), {"story": story})),
            (simulated_cluster, "Rank", type("OwnRank", (TimedRank,), {"story": story})),
            (simulated_cluster, "SimulatedCluster", Told),
            (simulated_cluster, "NodeConfig", node),
            (simulated_cluster, "LONGEST_CALM_S", 1e9),
            (simulated_controller, "SimulatedClient", TimedClient),
            (simulated_controller, "Stream", type("OwnPrompts", (Prompts,), {"story": story})),
            (simulated_controller, "flow", timed_flow),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        ended = simulated_cluster.tell_story(story)
    if ended.wrong:
        raise SystemExit(ended.why)
    return run


def story_of(seed: int, **settings: Any) -> TailStory:
    """A story in fair weather."""
    fair: dict[str, Any] = {"nodes": 2, "faults_s": 0.0, "weather": Weather(), "hasty": 0.0, "filter_rate": 0.0}
    return TailStory(**({"seed": seed, "prompts": 128, "steps": 24} | fair | settings))


# What is compared -----------------------------------------------------------------------------------------------------

TAIL_WARM, TAIL_STEPS, PROMPTS = 4, 12, 64
"""A data epoch is as long as the steps that are not counted."""
FEW_ROWS, MANY_ROWS = 8, 64
"""Of each engine: four responses for each row, and a row for each response."""
LIKENESS = (0.15, 0.4, 0.7, 0.93)
"""The field's correlations within a prompt."""
ORDER, BALANCE = {"order": "longest_first"}, {"balance": "tokens"}


@dataclass(frozen=True)
class TailCase:
    """What is compared with what."""

    mechanism: str
    regime: str
    off: dict[str, Any]
    on: dict[str, Any]
    story: dict[str, Any] = field(default_factory=dict)
    split: bool = False
    """Whether, with it, each response goes to an engine of its own choice."""


def tail_cases() -> list[TailCase]:
    """All of them."""
    found = []
    for staleness, over, filtered in ((1, 1.5, 0.0), (1, 2.0, 0.0), (2, 3.0, 0.0), (1, 2.0, 0.5)):
        regime = f"staleness {staleness}, {filtered:.0%} filtered: {over:g} times beside 1"
        off, on = ({"staleness": staleness, "over_provision": times} for times in (1.0, over))
        found.append(TailCase("over_provision", regime, off, on, {"rows": MANY_ROWS, "filter_rate": filtered}))
    for rows, likeness in ((FEW_ROWS, 0.4), (FEW_ROWS, 0.93), (MANY_ROWS, 0.4)):
        regime = f"{'4 responses a row' if rows == FEW_ROWS else 'a row for each'}, likeness {likeness:g}"
        story = {"rows": rows, "likeness": likeness}
        found.append(TailCase("order: longest_first", regime, {}, ORDER, story))
        found.append(TailCase("balance: tokens", regime, {}, BALANCE, story))
        found.append(TailCase("both", regime, {}, ORDER | BALANCE, story))
        found.append(TailCase("groups split over engines", regime, {}, {}, story, split=True))
    return found


@dataclass(frozen=True)
class Wanted:
    """A run. `settings`: of its story and of the section `rollout`, as JSON: what is the same is played once."""

    seed: int
    settings: str
    split: bool


def wanted(case: TailCase, seed: int, *, on: bool) -> Wanted:
    """One side of a pair."""
    rollout = case.on if on else case.off
    return Wanted(seed, json.dumps(case.story | {"rollout": rollout}, sort_keys=True), on and case.split)


def step_seconds(run: Wanted) -> float:
    """Made-up seconds of a counted step, in the mean."""
    logging.disable(logging.CRITICAL)

    settings = {"engines": 2, "groups": 16, "prompts": PROMPTS, "steps": TAIL_STEPS} | json.loads(run.settings)
    whole = Requests.generate

    async def each(self: Requests, version: Any, prompts: Any, params: Any, seeds: Any, rid: str, *more: Any) -> Any:
        asked = [
            whole(self, version, [prompt], params, (one,), f"{rid}/{place}", *more)
            for place, (prompt, one) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return tuple(sample for made in await asyncio.gather(*asked) for sample in made)

    with mock.patch.object(Requests, "generate", each if run.split else whole):
        commits = play(story_of(run.seed, **settings)).commits
    return (commits[-1] - commits[TAIL_WARM - 1]) / (len(commits) - TAIL_WARM)


def tail_rows(pairs: int, processes: int) -> list[dict[str, Any]]:
    """Every case."""
    rows, seeds = [], range(1, pairs + 1)
    with ProcessPoolExecutor(processes) as pool:
        sides = {wanted(case, seed, on=on): None for case in tail_cases() for seed in seeds for on in (False, True)}
        begun = {run: pool.submit(step_seconds, run) for run in sides}
        for case in tail_cases():
            off, on = ([begun[wanted(case, seed, on=on)].result() for seed in seeds] for on in (False, True))
            row = {
                "mechanism": case.mechanism,
                "regime": case.regime,
                "off_s": spread(off, 1),
                "on_s": spread(on, 1),
                "ratio": spread([after / before for before, after in zip(off, on, strict=True)], 3),
            }
            print(f"{case.mechanism}, {case.regime}: {row['ratio']}", flush=True)
            rows.append(row)
    return rows


def expectations(draws: int = 3000) -> list[dict[str, Any]]:
    """How far expectations are off beside the source's mean, by likeness and the number of finished siblings."""
    chance, rows = random.Random(1), []

    def group(likeness: float, count: int) -> list[int]:
        common = chance.gauss(0.0, 1.0)
        own = [math.sqrt(likeness) * common + math.sqrt(1.0 - likeness) * chance.gauss(0.0, 1.0) for _ in range(count)]
        return [min(max(round(440 * math.exp(0.73 * deviation)), 1), 6600) for deviation in own]

    for likeness in LIKENESS:
        for siblings in (1, 4, 7):
            missed, by_mean = [], []
            for _ in range(5):
                recent = [group(likeness, 8) for _ in range(64)]
                source = SourceLengths.of(recent)
                mean = statistics.fmean(length for one in recent for length in one)
                for _ in range(draws // 5):
                    *others, own = group(likeness, siblings + 1)
                    missed.append(abs(own - expected_length(source, SiblingLengths.of(source, others), 0, 6600)))
                    by_mean.append(abs(own - mean))
            ratio = statistics.fmean(missed) / statistics.fmean(by_mean)
            rows.append({"likeness": likeness, "siblings": siblings, "error_beside_the_mean": round(ratio, 3)})
    return rows


def measure_tails(arguments: argparse.Namespace, taken: Result) -> Result:
    """Every case, and the expectations."""
    sizes = {
        "pairs": arguments.pairs,
        "controllers": 2,
        "engines": 4,
        "groups": 16,
        "samples": 8,
        "steps_counted": TAIL_STEPS - TAIL_WARM,
    }
    result = taken | {"what": "production's controllers, emulated engines, made-up time"} | sizes
    return result | {"cases": tail_rows(arguments.pairs, arguments.processes), "expectations": expectations()}


def tail_options(parser: argparse.ArgumentParser) -> None:
    """Processes."""
    parser.add_argument("--processes", type=int, default=1, help="runs at once; they do not change the figures")


BENCHMARKS = (Benchmark("tails", "tails", measure_tails, pairs=5, options=tail_options),)
