"""Emulated judges beside the policy's engines in one process: their answers, speed, start and stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from emulated_hosts import Scene, hosting, launch_of, make_vocabulary

from gcore.config.reward import VerdictSpec
from gcore.data.order import Cursors
from gcore.engines.emulated.launch import LaunchQueue, PlacedEngine, ServedJudge
from gcore.engines.emulated.law import TimingModel
from gcore.ledger.records.chain import Head
from gcore.reward.judges.parsers import find_parser
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.store import keys
from gcore.store.types import Put

VERDICT = {"parser": "words", "after": ":", "words": {"Y": 1.0, "N": 0.0}}
PLACES = (
    PlacedEngine(instance="e0", slot="emulated:0"),
    PlacedEngine(instance="j0", slot="emulated:0", judge="tutor"),
)
ASKED = SamplingParams(temperature=0.0, max_new_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vocabulary(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedJudge, ...]:
    folder = make_vocabulary(tmp_path_factory.mktemp("judge"), "0123456789abcYN :")
    return (ServedJudge(name="tutor", model=str(folder), rows=16, longest=40, verdict=VERDICT),)


def verdict_in(text: str) -> float:
    spec = VerdictSpec.model_validate(VERDICT)
    return find_parser(spec.parser)(text, spec)


async def timed(client: EngineClient, length: int, rid: str) -> float:
    """Emulated seconds that a response of so many tokens takes."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    params = SamplingParams(temperature=1.0, max_new_tokens=length, min_new_tokens=length)
    await client.generate((3,), params, seeds=(1,), rid=rid)
    return (loop.time() - began) * 10.0


async def test_a_judge_answers_each_question_with_a_verdict_that_the_jobs_parser_reads(
    model: Path, judges: tuple[ServedJudge, ...]
) -> None:
    law = TimingModel(speedup=200.0, judge_positive=0.3)
    async with hosting(model, law, PLACES, judges=judges) as scene:
        records, (_, judge) = scene.records(), scene.clients
        assert (records["j0"].role, records["j0"].judge, records["e0"].role) == ("reward", "tutor", "rollout")
        answers = [
            (await judge.generate((3, 4 + number % 9, 3 + number // 9), ASKED, seeds=(0,), rid=f"q{number}"))[0]
            for number in range(60)
        ]
        values = [verdict_in(answer.text) for answer in answers]
        assert set(values) == {0.0, 1.0}
        assert sum(values) < 30
        again = await judge.generate((3, 4, 3), ASKED, seeds=(9,), rid="again")
        assert again[0].text == answers[0].text
        assert {answer.finish_reason for answer in answers} == {"stop"}


async def test_a_judge_and_an_engine_of_one_slot_go_half_as_fast_while_both_compute(
    model: Path, judges: tuple[ServedJudge, ...]
) -> None:
    law = TimingModel(speedup=10.0, replica_noise=0.0, event_noise=0.0, decode_s=0.1, judge_decode_s=0.1, sleep_s=0.1)
    async with hosting(model, law, PLACES, judges=judges) as scene:
        engine, judge = scene.clients
        alone = await timed(engine, 30, "alone")
        together = await asyncio.gather(timed(engine, 30, "both"), timed(judge, 30, "both"))
        assert alone == pytest.approx(3.0, rel=0.25)
        assert min(together) == pytest.approx(6.0, rel=0.25)


async def test_a_judge_that_becomes_slow_does_so_at_the_step_that_the_job_has_come_to(
    model: Path, judges: tuple[ServedJudge, ...]
) -> None:
    law = TimingModel(
        speedup=10.0, replica_noise=0.0, event_noise=0.0, judge_decode_s=0.1, judge_slow_at=2, judge_slow=3.0
    )

    async def at(scene: Scene, step: int, rid: str) -> float:
        head = Head(
            seq=step, parent=None, lineage=0, step=step, cursors=Cursors.start(1), lineages=(), world="w", nonce="n"
        )
        await scene.store.transact((), (Put(keys.JobKeys("job").head, head.encode()),))
        await asyncio.sleep(0.1)
        return await timed(scene.clients[1], 10, rid)

    async with hosting(model, law, PLACES, judges=judges) as scene:
        assert await at(scene, 1, "a") == pytest.approx(1.0, rel=0.4)
        assert await at(scene, 2, "b") == pytest.approx(3.0, rel=0.4)


async def test_a_judge_that_cannot_say_its_verdicts_has_failed_with_the_reason_and_the_others_serve(
    model: Path, tmp_path: Path
) -> None:
    mute = make_vocabulary(tmp_path / "mute", "01")
    judges = (ServedJudge(name="tutor", model=str(mute), rows=16, longest=40, verdict=VERDICT),)
    async with hosting(model, TimingModel(speedup=50.0), PLACES, serving=1, judges=judges) as scene:
        records = await scene.until(1, "failed")
        assert "accepts no verdict that judge 'tutor' can express" in records["j0"].reason
        assert records["e0"].state == "serving"
        await scene.until(0, "failed")  # it does not stay for ever


async def test_engines_that_are_placed_later_come_to_the_process_that_there_is_and_it_ends_with_the_last(
    model: Path, judges: tuple[ServedJudge, ...], tmp_path: Path
) -> None:
    inbox, other = LaunchQueue(tmp_path / "inbox"), LaunchQueue(tmp_path / "inbox")
    assert inbox.claim()
    assert not other.claim()
    async with hosting(model, TimingModel(speedup=100.0), 1, inbox) as scene:
        later: Any = launch_of(model, PLACES[1:], "later", judges=judges)
        document = other.put(later)
        records = await scene.until(2)
        assert not document.exists()
        assert records["j0"].address != records["e0"].address
        for record in records.values():
            os.kill(record.pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            await asyncio.shield(scene.running)
    assert scene.records() == {}
