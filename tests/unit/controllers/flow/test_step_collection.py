"""Responses in flight when a step's batch is sealed at staleness 0: the engines abort them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_workers import ServingEngine

from controllers.changes import ChangeSignal
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.step import JobStep
from controllers.inference.pool import EnginePool
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import SealState
from gcore.rollout.client import SamplingParams
from gcore.testing import FakeClock
from gcore.types import Group, Outcome, Prompt, PromptRef, Version

HEAD = Version(0, 0)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


class NeverDone(ServingEngine):
    """An engine that answers nothing, and notes what it is asked and what it is to give up."""

    def __init__(self) -> None:
        super().__init__(HEAD)
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.aborted: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Any, ...]:
        self.asked.put_nowait(rid)
        await asyncio.Event().wait()
        return ()

    async def abort(self, rid: str, count: int) -> None:
        self.aborted.put_nowait((rid, count))


class Peer:
    """One peer, whose seal is set by hand."""

    def __init__(self) -> None:
        self.changes, self.buffer, self.clock = ChangeSignal(), GroupBuffer(), FakeClock()
        self.data = SimpleNamespace(spec=SimpleNamespace(rollout=SimpleNamespace(staleness=0)))
        self.seal: Any = None
        self._head = chain.base_entry(2, "w", ChainWriter("a", "n")).head

    def look(self) -> Any:
        mirror = SimpleNamespace(head=SimpleNamespace(record=self._head), has_ended=False)
        return SimpleNamespace(head=self._head, me="a", mirror=mirror, seal=self.seal)


async def test_when_a_batch_is_sealed_whatever_is_in_flight_is_aborted_at_its_engine(tmp_path: Path) -> None:
    engine, peer = NeverDone(), Peer()
    engines = EnginePool(peer.changes, timeout_s=1.0, connect=lambda *_, **__: engine)  # type: ignore[arg-type, return-value]
    await engines.aim({"e": SimpleNamespace(address="h:1", node="n")})  # type: ignore[dict-item]
    await engines.publish("e", HEAD, tmp_path)
    step = JobStep(peer, HEAD)  # type: ignore[arg-type]

    async def group(prompt: Prompt) -> Group | Outcome:
        await engines.generate(HEAD, [(1,), (1,)], PARAMS, (0, 1), f"r{prompt.ref.seq}")
        raise AssertionError("it is never answered")

    async with step.collect() as batch:
        for seq in range(3):
            step.hand_out(Prompt(PromptRef(0, 0, seq), "", (1,), {}))
            batch.start(group(Prompt(PromptRef(0, 0, seq), "", (1,), {})))
        asked = [await engine.asked.get() for _ in range(3)]
        assert step.is_open()
        assert engine.aborted.empty()
        peer.seal = SimpleNamespace(state=SealState.SEALED, collects=False)  # by whichever controller
        assert not step.is_open()
    aborted = [await engine.aborted.get() for _ in range(3)]
    assert sorted(aborted) == sorted((rid, 2) for rid in asked)
    assert not any(peer.buffer.knows(PromptRef(0, 0, seq)) for seq in range(3)), "they are issued again"
