"""The step protocol under random faults (`step_simulation`): many seeds, each another story."""

from __future__ import annotations

import asyncio
import os

import pytest
from step_simulation import KEYS, RULES, SMALL, BadNetwork, Simulation

from gcore.ledger import chain, transactions
from gcore.ledger.chain import Writer
from gcore.ledger.guarded import Ledger, TxnOutcome
from gcore.ledger.records import EndedRef
from gcore.testing import Call, Fate, MemoryStore
from gcore.types import PromptRef

FIRST = int(os.environ.get("GCORE_SIM_FIRST", "0"))
SEEDS = int(os.environ.get("GCORE_SIM_SEEDS", "200"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_nothing_is_lost_and_nothing_trained_twice(seed: int) -> None:
    async def story() -> int:
        simulation = Simulation(seed)
        simulation.start()
        await simulation.faulty(250)
        head = simulation.fresh().head
        assert head is not None
        await simulation.calm(head.record.step + 3)
        return simulation.fresh().head.record.step

    assert asyncio.run(story()) >= 3


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, SEEDS // 8)))
def test_with_a_curriculum_every_epoch_goes_by_one_record(seed: int) -> None:
    async def story() -> tuple[int, int]:
        simulation = Simulation(seed, SMALL, curriculum=True)
        simulation.start()
        await simulation.faulty(250)
        head = simulation.fresh().head
        assert head is not None
        await simulation.calm(head.record.step + 6)
        return simulation.fresh().head.record.step, simulation.begun

    steps, begun = asyncio.run(story())
    assert steps >= 6
    assert begun >= 2


def test_the_ledger_recognises_its_own_commit_after_a_lost_reply() -> None:
    async def story() -> TxnOutcome:
        simulation = Simulation(0)
        simulation.network.bad = False
        simulation.start()

        class LoseReply(BadNetwork):
            async def request(self, call: Call) -> Fate:
                return Fate.LOSE_REPLY if call.kind == "transact" else Fate.DELIVER

        store = MemoryStore(simulation.cluster, network=LoseReply(simulation.chance), timeout_s=0.0)
        slots = simulation.fresh().open_slots
        assert slots is not None
        outcomes = (EndedRef(ref=PromptRef(0, 0, 0), kind="failed"),)
        advance = chain.accounted(slots.head.record, outcomes, RULES.shape, Writer("a", "mine"))
        return (await Ledger(store, KEYS).run(transactions.account(KEYS, slots, advance))).outcome

    assert asyncio.run(story()) is TxnOutcome.WON
