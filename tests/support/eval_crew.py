"""Several controllers that evaluate one job together, over a store in memory and a manual clock."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from controllers.changes import ChangeSignal
from controllers.flow.evaluation import Evaluator, LedgerEvaluations
from controllers.flow.job_data import SourcePipeline
from controllers.rules.view import JobView
from gcore.config import parse_spec
from gcore.config.data import EvalSet
from gcore.config.spec import eval_sets
from gcore.errors import EngineError
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Member
from gcore.ledger.records.job import EnginePlace, EvalPart, Evaluation, JobPhase, JobStatus, Plan
from gcore.ledger.transactions import TransactionExecutor
from gcore.reward.api import RewardError, RewardResult
from gcore.reward.scorer import Scorer
from gcore.rollout.client import SamplingParams
from gcore.store.keys import JobKeys
from gcore.store.types import Delete, Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryStore
from gcore.testing.store import MemoryCluster
from gcore.types import PictureRef, Prompt, PromptRef, Sample, Version, VersionSpan

KEYS = JobKeys("u")
FIRST = Version(0, 0)


class HeldOut:
    """A set of `size` prompts; prompt i has the one token 1 + i. `seen`: each has a picture."""

    def __init__(self, held_out: EvalSet, size: int, *, seen: bool) -> None:
        self.source = held_out.source
        self._size = size
        self._pictures = (PictureRef("/data/a.png", "ab" * 32, 32, 48, 32, 48),) if seen else ()

    def __len__(self) -> int:
        return self._size

    def prompt(self, index: int) -> Prompt:
        ids = (1 + index,)
        fields, pictures = {"answer": "1"}, self._pictures
        return Prompt(
            PromptRef(0, 0, index), f"prompt {index}", ids, fields, self.source.name, request_ids=ids, pictures=pictures
        )


class ByText:
    """The response is its reward; "?" cannot be scored."""

    async def warm(self) -> None: ...

    async def score(self, spec: Any, fields: Any, responses: Sequence[Any]) -> tuple[RewardResult | RewardError, ...]:
        return tuple(RewardError("odd") if one == "?" else RewardResult(float(one)) for one in responses)


def coin(token: int, seed: int) -> str:
    """A response that follows from prompt and seed alone."""
    return str(hashlib.blake2b(f"{token} {seed}".encode()).digest()[0] % 2)


class Engines:
    """Answers at once, hangs, or breaks."""

    def __init__(self, text: Callable[[int, int], str]) -> None:
        self.text = text
        self.asked: list[tuple[SamplingParams, list[int], list[int]]] = []
        self.hangs = False
        self.gives_up = asyncio.Event()
        """What hangs runs into its time limit."""
        self.errors = 0
        self.version: Version | None = FIRST

    def serves(self, version: Version) -> bool:
        return self.version == version

    async def generate(
        self, version: Version, prompts: Any, params: SamplingParams, seeds: Sequence[int], rid: str, *_: object
    ) -> tuple[Sample, ...]:
        tokens = [ids[0] for ids in prompts]
        self.asked.append((params, tokens, list(seeds)))
        if self.hangs:
            await self.gives_up.wait()
            raise EngineError("no answer in time")
        await asyncio.sleep(0)
        if self.errors:
            self.errors -= 1
            raise EngineError("broken")
        spans = (VersionSpan(version, 0, 1),)
        pairs = zip(tokens, seeds, strict=True)
        return tuple(Sample((7,), (0.0,), self.text(token, seed), "stop", spans) for token, seed in pairs)


class Crew:
    """`evaluation` is the spec's section with one source for each of `sizes`, whose fields stand in `sets`. `media`:
    stands for the pictures of prompts, which all prompts then have."""

    def __init__(
        self,
        sizes: dict[str, int],
        evaluation: dict[str, Any] | None = None,
        sets: dict[str, dict[str, Any]] | None = None,
        *,
        peers: Sequence[str] = ("a", "b"),
        media: Any = None,
        text: Callable[[int, int], str] = coin,
    ) -> None:
        sources = [{"name": name, "path": "x", **(sets or {}).get(name, {})} for name in sizes]
        self.spec = parse_spec(
            {
                "name": "job",
                "model": {"path": "m"},
                "data": {"path": "d"},
                "flow": {"steps": 4},
                "rollout": {"max_new_tokens": 8},
                "eval": {"every": 2, **(evaluation or {}), "sources": sources},
            }
        )
        self.media = media
        held_out = eval_sets(self.spec)
        params = SamplingParams(temperature=0.0, max_new_tokens=8)
        self.data: Any = SimpleNamespace(
            spec=self.spec,
            uid="u",
            pictures=None,
            evaluation=tuple(HeldOut(one, sizes[one.source.name], seen=media is not None) for one in held_out),
            evaluated={
                one.source.name: SourcePipeline(one.source, params, Scorer(ByText(), {}), media) for one in held_out
            },
        )
        self.clock = FakeClock()
        self.cluster = MemoryCluster(self.clock)
        self.changes = ChangeSignal()
        self._mirror = JobMirror(KEYS)
        self.engines = {name: Engines(text) for name in peers}
        head = chain.base_entry(1, "w", ChainWriter("a", "n")).head
        places = tuple(EnginePlace(node=f"node-{name}", slot="cpu:0") for name in peers)
        plan = Plan(generation=1, world="w", ranks=(), engines=places)
        running = JobStatus(phase=JobPhase.RUNNING)
        self.put({KEYS.head: head.encode(), KEYS.state: running.encode(), KEYS.plan: plan.encode()})
        for name in peers:
            self.put({KEYS.member(name): Member(incarnation=name, node=f"node-{name}", address="h:1").encode()})
        self.stores = {name: MemoryStore(self.cluster, name) for name in peers}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def mirror(self) -> JobMirror:
        """The present contents of the store, without a delay."""
        if self._mirror.revision != self.cluster.revision:
            kvs = self.cluster.listing(KEYS.prefix).kvs
            batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in kvs), self.cluster.revision)
            self._mirror = JobMirror(KEYS).fold(batch)
        return self._mirror

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        return {name: stored.record for name, stored in self.mirror.evaluations.items()}

    @property
    def parts(self) -> list[EvalPart]:
        return [stored.record for stored in self.mirror.eval_parts.values()]

    def put(self, records: dict[str, bytes]) -> None:
        self.cluster.transact((), [Put(key, value) for key, value in records.items()])
        self.changes.notify()

    def leave(self, name: str) -> None:
        """The member's lease ends, with its process."""
        self.tasks.pop(name).cancel()
        self.cluster.transact((), [Delete(KEYS.member(name))])
        self.changes.notify()

    def evaluator(self, name: str) -> Evaluator:
        def look() -> JobView:
            # A job that goes to a step is over there; nothing else is asked of the rules here.
            rules: Any = SimpleNamespace(steps=self.spec.flow.steps, epochs=None)
            return JobView(self.spec, rules, self.mirror, name, f"node-{name}", {}, {})

        book = LedgerEvaluations(TransactionExecutor(self.stores[name], KEYS), lambda: self.mirror)
        return Evaluator(self.data, look, self.changes, self.engines[name], book, self.clock, media=self.media)  # type: ignore[arg-type]

    def start(self, *names: str) -> None:
        for name in names or tuple(self.engines):
            self.tasks[name] = asyncio.create_task(self.evaluator(name).evaluate(), name=name)

    async def settle(self, seconds: float = 0.0) -> None:
        """Let everybody do what there is to do, `seconds` later."""
        await self.clock.advance(seconds)
        quiet = 0
        while quiet < 3 and not all(task.done() for task in self.tasks.values()):
            before = self.changes.count, self.cluster.revision
            self.changes.notify()
            await self.clock.settle()
            quiet = quiet + 1 if (self.changes.count, self.cluster.revision) == (before[0] + 1, before[1]) else 0

    async def finish(self, limit_s: float = 300.0) -> Evaluation:
        """The evaluation of the first weights, once all who started have ended. Raises what one of them raised."""
        waited = 0.0
        while not all(task.done() for task in self.tasks.values()):
            assert waited <= limit_s, f"not evaluated after {limit_s} s: {len(self.parts)} parts"
            await self.settle(1.0)
            waited += 1.0
            for task in self.tasks.values():
                if task.done():
                    task.result()
        return self.evaluations[str(FIRST)]

    def to_version(self, version: Version) -> None:
        """Head is `version` from now on, and all engines serve it."""
        head = self.mirror.head
        assert head is not None
        self.put(
            {KEYS.head: head.record.model_copy(update={"lineage": version.lineage, "step": version.step}).encode()}
        )
        for engines in self.engines.values():
            engines.version = version


def anonymous(evaluation: Evaluation) -> Evaluation:
    """Without who answered."""
    return evaluation.model_copy(update={"responses_by": {}})
