"""The step protocol under random faults (`step_simulation`), for many seeds."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
from step_simulation import KEYS, RULES, SMALL, BadNetwork, Simulation

from gcore.config.train import OnLimit
from gcore.ledger import chain, transactions
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import EndedRef
from gcore.ledger.records.job import JobPhase
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.testing import Call, Fate, MemoryStore
from gcore.types import PromptRef

FIRST = int(os.environ.get("GCORE_SIM_FIRST", "0"))
SEEDS = int(os.environ.get("GCORE_SIM_SEEDS", "16"))
"""make test-large plays 120, make sim thousands."""


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


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, SEEDS * 3 // 5)))
def test_nor_where_steps_come_in_parts(seed: int) -> None:
    """A READY part survives any death; any other part is abandoned like a seal."""
    limited = replace(
        RULES, quota=(3, 5)[seed % 2], part=1 + seed // 2 % 2, issue_cap=3.0, limit=(None, 11)[seed // 4 % 2]
    )

    async def story() -> Simulation:
        simulation = Simulation(seed, limited, filter_rate=(0.0, 0.2, 0.7)[seed % 3])
        simulation.start()
        await simulation.faulty(250)
        head = simulation.fresh().head
        assert head is not None
        await simulation.calm(head.record.step + 3)
        simulation.check_quotas()
        return simulation

    simulation = asyncio.run(story())
    assert simulation.phase is JobPhase.FAILED or simulation.fresh().head.record.step >= 3
    assert simulation.parts or seed % 3 or seed % 4 > 1, "where nothing is filtered and one is enough there are some"


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, SEEDS // 8)))
def test_nor_where_what_a_step_leaves_over_goes_on(seed: int, staleness: int) -> None:
    """What is in flight outlives steps, changes of weights and rollbacks; what is trained is within the bound."""

    async def story() -> tuple[int, int]:
        simulation = Simulation(seed, replace(RULES, staleness=staleness))
        simulation.start()
        await simulation.faulty(250)
        head = simulation.fresh().head
        assert head is not None
        await simulation.calm(head.record.step + 6)
        return simulation.fresh().head.record.step, simulation.mixed

    steps, mixed = asyncio.run(story())
    assert steps >= 6
    assert mixed >= 1


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


CHOICES: tuple[OnLimit, ...] = ("train_smaller", "pad_masked", "fail")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, SEEDS * 3 // 4)))
def test_with_most_prompts_filtered_every_step_has_its_quota_or_what_its_limit_says_and_the_job_ends_with_its_epochs(
    seed: int,
) -> None:
    rules = replace(RULES, epochs=2, issue_cap=4.0, limit=(None, 6, 11)[seed % 3], on_limit=CHOICES[seed // 3 % 3])

    async def story() -> Simulation:
        simulation = Simulation(seed, rules, filter_rate=(0.3, 0.7, 0.9)[seed // 9 % 3])
        simulation.start()
        await simulation.faulty(150)
        simulation.check_quotas()
        await simulation.calm()
        return simulation

    simulation = asyncio.run(story())
    simulation.check_quotas()
    mirror = simulation.fresh()
    assert mirror.head is not None
    assert mirror.status is not None
    head = mirror.head.record
    if simulation.phase is JobPhase.FAILED:
        reached = (f" has used up its {rules.limit} prompts", " has used up the prompts in the shards' windows")
        assert any(one in mirror.status.record.reason for one in reached)
        assert " with 0 of 3 groups kept" in mirror.status.record.reason or rules.on_limit == "fail"
    else:
        assert head.cursors.terminal_count == 2 * 17
        assert head.step > 0 or head.tally.trained_epoch is None


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
        advance = chain.account_entry(slots.head.record, outcomes, RULES.shape, ChainWriter("a", "mine"))
        return (await TransactionExecutor(store, KEYS).run(transactions.account(KEYS, slots, advance))).outcome

    assert asyncio.run(story()) is TxnOutcome.WON
