"""Evaluation by several peers: distribution of the work, lost peers, and the written results."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from eval_crew import FIRST, KEYS, Crew, anonymous, coin

from controllers.flow.evaluation import score_answers
from controllers.flow.job_data import eval_seed
from controllers.rules.step import TAKEOVER_S
from gcore.errors import DataError
from gcore.ledger.evaluation import PART_RESPONSES, record_evaluation, record_part
from gcore.ledger.records.job import EvalPart, KeptPicture
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.media.pictures import PictureError
from gcore.reward.api import PictureFile, RewardResult
from gcore.testing import Call, Fate
from gcore.testing.store import PerfectNetwork
from gcore.types import DenoisingTrajectory, Medium, Prompt, Sample, Version, VersionSpan

SIZES = {"sums": 300, "words": 50}
DRAWN = {"samples": 4, "temperature": 0.8, "pass_k": [1, 2, 4]}


async def test_peers_share_the_prompts_and_one_record_stands_in_the_end() -> None:
    crew = Crew(SIZES, peers=("a", "b", "c"))
    crew.start()
    made = await crew.finish()
    assert made.count == 350
    assert sum(made.responses_by.values()) == 350
    assert set(made.responses_by) == {"a", "b", "c"}
    assert max(made.responses_by.values()) <= 350 / 3 + PART_RESPONSES, "as many parts for each"
    asked = [token for engines in crew.engines.values() for _, tokens, _ in engines.asked for token in tokens]
    assert len(asked) == 350, "nobody answered what another did"
    assert crew.parts == [], "the parts went with the record"
    expected = sum(coin(1 + i, 0) == "1" for i in range(300)) + sum(coin(1 + i, 0) == "1" for i in range(50))
    assert made.accuracy == pytest.approx(expected / 350)


async def test_the_same_is_recorded_whoever_answers() -> None:
    records = []
    for peers in (("a",), ("a", "b"), ("c", "d", "e", "f")):
        crew = Crew(SIZES, DRAWN, {"words": {"samples": 2, "pass_k": [2]}}, peers=peers)
        crew.start()
        records.append(anonymous(await crew.finish()).encode())
    assert len(set(records)) == 1


async def test_a_set_is_drawn_and_counted_as_it_says() -> None:
    sets = {
        "sums": {"samples": 8, "temperature": 1.0, "pass_k": [1, 4, 8]},
        "words": {"limit": 7, "threshold": 0.5},
    }
    crew = Crew(SIZES, {"limit": 20}, sets)
    crew.start()
    made = await crew.finish()
    sums, words = made.by_source["sums"], made.by_source["words"]
    assert (sums.count, sums.samples, words.count, words.samples) == (20, 8, 7, 1)
    assert set(sums.metrics) == {"mean@8", "pass@1", "pass@4", "pass@8"}
    assert set(words.metrics) == {"mean@1", "pass@1"}
    right = [sum(coin(1 + i, eval_seed(crew.data, FIRST, "sums", i, n)) == "1" for n in range(8)) for i in range(20)]
    assert sums.accuracy == sums.metrics["pass@1"] == pytest.approx(sum(right) / 160)
    assert sums.metrics["pass@8"] == pytest.approx(sum(c > 0 for c in right) / 20)
    assert sums.accuracy <= sums.metrics["pass@4"] <= sums.metrics["pass@8"]
    assert made.accuracy == pytest.approx((sums.accuracy * 20 + words.accuracy * 7) / 27)
    seeds = [seed for engines in crew.engines.values() for _, _, its in engines.asked for seed in its]
    assert len(set(seeds)) == 160 + 1, "one for each response, and 0 for what is greedy"


async def test_accuracy_is_the_share_of_responses_whose_reward_reaches_the_threshold_and_mean_is_of_rewards() -> None:
    crew = Crew({"sums": 4}, {"threshold": 0.75}, text=lambda token, seed: ["0", "0.5", "0.75", "2"][token - 1])
    crew.start()
    score = (await crew.finish()).by_source["sums"]
    assert (score.accuracy, score.metrics["mean@1"]) == (0.5, 0.8125)


async def test_responses_that_cannot_be_scored_are_in_no_mean_of_rewards() -> None:
    crew = Crew({"sums": 4}, text=lambda token, seed: ["?", "1", "1", "?"][token - 1])
    crew.start()
    made = await crew.finish()
    score = made.by_source["sums"]
    assert (score.accuracy, score.metrics["mean@1"], score.unscored, score.why_unscored) == (0.5, 1.0, 2, "odd")
    assert [sample.unscored for sample in made.samples] == ["odd", "", "", "odd"]


class Media:
    """Pictures of prompts, of which those of one prompt cannot be had: before its request, or before it is scored."""

    def __init__(self, damaged: int, when: str) -> None:
        self._damaged, self._when = damaged, when

    def _check(self, prompt: Prompt, when: str) -> None:
        if (prompt.ref.seq, when) == (self._damaged, self._when):
            raise PictureError("the picture has changed", where="a.png")

    async def in_request(self, prompt: Prompt, *, trained: bool) -> None:
        self._check(prompt, "request")

    @contextlib.asynccontextmanager
    async def files(self, prompt: Prompt) -> AsyncIterator[tuple[PictureFile, ...]]:
        self._check(prompt, "score")
        yield ()


@pytest.mark.parametrize("when", ["request", "score"])
async def test_responses_to_a_damaged_picture_are_unscored(when: str) -> None:
    crew = Crew({"e": 4}, media=Media(2, when), text=lambda token, seed: "1")
    crew.start()
    score = (await crew.finish()).by_source["e"]
    assert (score.accuracy, score.unscored, score.why_unscored) == (0.75, 1, "a.png: the picture has changed")


async def test_a_generated_picture_is_named_beside_its_reward_and_not_its_other_blobs() -> None:
    """The states of a trajectory are large, and no display uses them."""
    crew = Crew({"e": 1})
    pipeline, prompt = crew.data.evaluated["e"], crew.data.evaluation[0].prompt(0)
    states = Medium("trajectory", "ee" * 32, 4096, (5, 3, 8, 8), "float32")
    picture = Medium("decoded", "ab" * 32, 123, (8, 16, 3), "uint8")
    made = DenoisingTrajectory((), (1.0, 0.0), (), (VersionSpan(FIRST, 0, 1),), 7, (states, picture))

    async def scored(prompt: Prompt, samples: Any) -> tuple[RewardResult, ...]:
        return (RewardResult(0.5), RewardResult(1.0))

    text = Sample((7,), (0.0,), "yes", "stop", made.spans)
    pipeline = SimpleNamespace(source=pipeline.source, each_scored=scored)
    answers = [Sample(output=made, finish_reason="stop"), text]
    first, second = await score_answers(pipeline, 1.0, prompt, answers, FIRST)  # type: ignore[arg-type]
    assert first.shown.picture == KeptPicture(sha256="ab" * 32, size=123, height=8, width=16)
    assert (first.shown.response, first.shown.reward, first.shown.correct) == ("", 0.5, False)
    assert second.shown.picture is None
    assert b"picture" not in EvalPart(
        version=FIRST, number=0, parts=1, source="e", first=0, samples=1, correct=(1,), reward=1.0, shown=(first.shown,)
    ).encode(2)


async def test_more_responses_than_an_engine_takes_at_once_go_in_several_requests() -> None:
    crew = Crew({"sums": 2}, {"samples": 200, "temperature": 1.0, "pass_k": [100]}, peers=("a",))
    crew.start()
    made = await crew.finish()
    assert max(len(tokens) for _, tokens, _ in crew.engines["a"].asked) <= 64
    assert made.responses_by == {"a": 400}


async def test_the_parts_of_a_dead_peer_are_answered_at_once_by_the_others() -> None:
    crew = Crew(SIZES, DRAWN)
    crew.engines["b"].hangs = True
    crew.start()
    await crew.settle()
    assert crew.evaluations == {}
    crew.leave("b")
    made = await crew.finish(limit_s=2.0)
    assert set(made.responses_by) == {"a"}


async def test_the_parts_of_a_peer_that_hangs_are_taken_over_after_a_wait() -> None:
    whole = Crew(SIZES, DRAWN)
    whole.start()
    undisturbed = anonymous(await whole.finish())
    crew = Crew(SIZES, DRAWN)
    crew.engines["b"].hangs = True
    crew.start()
    await crew.settle()
    await crew.settle(TAKEOVER_S - 1.0)
    assert crew.evaluations == {}
    made = await crew.finish(limit_s=5.0)
    assert made.responses_by == {"a": 1400}
    assert anonymous(made) == undisturbed, "the seeds are those of who should have answered"


async def test_a_peer_whose_engines_have_other_weights_is_waited_for_and_then_helped() -> None:
    crew = Crew(SIZES)
    crew.engines["b"].version = None
    crew.start()
    await crew.settle(5.0)
    assert 0 < len(crew.parts) < len(crew.evaluator("a").plans)
    assert crew.engines["b"].asked == []
    crew.engines["b"].version = FIRST
    made = await crew.finish(limit_s=3.0)
    assert set(made.responses_by) == {"a", "b"}


async def test_a_node_without_engines_is_not_waited_for() -> None:
    crew = Crew(SIZES)
    plan = crew.mirror.plan
    assert plan is not None
    crew.put({KEYS.plan: plan.record.model_copy(update={"engines": plan.record.engines[:1]}).encode()})
    crew.engines["b"].version = None
    crew.start()
    made = await crew.finish(limit_s=3.0)
    assert made.responses_by == {"a": 350}


async def test_a_part_whose_engine_broke_is_asked_for_again_a_little_later() -> None:
    crew = Crew({"sums": 64}, peers=("a",))
    crew.engines["a"].errors = 3
    crew.start()
    await crew.settle()
    assert len(crew.engines["a"].asked) == 1, "not again and again"
    await crew.finish(limit_s=10.0)
    assert len(crew.engines["a"].asked) == 4


async def test_a_part_that_ends_in_a_cancellation_that_nobody_asked_for_is_asked_for_again_a_little_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew({"sums": 64}, peers=("a",))
    generate, begun = crew.engines["a"].generate, 0

    async def generated(*asked: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun <= 3:
            raise asyncio.CancelledError
        return await generate(*asked)

    monkeypatch.setattr(crew.engines["a"], "generate", generated)
    crew.start()
    await crew.settle()
    assert begun == 1, "not again and again"
    await crew.finish(limit_s=10.0)
    assert begun == 4


async def test_a_prompt_that_cannot_be_shown_ends_the_flow_with_its_error() -> None:
    crew = Crew({"sums": 64}, peers=("a",))

    def broken(index: int) -> None:
        raise DataError("prompt 7 does not render")

    crew.data.evaluation[0].prompt = broken
    crew.start()
    with pytest.raises(DataError, match="prompt 7"):
        await crew.finish()


class Forgetful(PerfectNetwork):
    """Loses the answers to the first few writes."""

    left = 3

    async def request(self, call: Call) -> Fate:
        if call.kind == "transact" and self.left:
            self.left -= 1
            return Fate.LOSE_REPLY if self.left % 2 else Fate.LOSE_REQUEST
        return Fate.DELIVER


async def test_writes_without_an_answer_are_made_again_and_count_once() -> None:
    crew = Crew({"sums": 200}, peers=("a",))
    crew.stores["a"].network = Forgetful(crew.clock)
    crew.start()
    made = await crew.finish(limit_s=60.0)
    assert (made.count, made.responses_by) == (200, {"a": 200})


async def test_after_a_rollback_the_weights_that_are_head_now_are_evaluated_and_old_parts_go() -> None:
    crew = Crew(SIZES)
    crew.to_version(Version(0, 2))
    crew.engines["b"].hangs = True
    crew.start()
    await crew.settle()
    assert {part.version for part in crew.parts} == {Version(0, 2)}
    crew.to_version(Version(1, 2))
    crew.engines["b"].hangs = False
    while not all(task.done() for task in crew.tasks.values()):
        await crew.settle(1.0)
    assert set(crew.evaluations) == {"1.2"}
    assert crew.parts == []


async def test_an_evaluation_that_is_there_is_not_made_again_and_no_part_comes_after_it() -> None:
    crew = Crew({"sums": 3}, peers=("a",))
    crew.start()
    made = await crew.finish()
    asked = len(crew.engines["a"].asked)
    await asyncio.wait_for(crew.evaluator("a").evaluate(), timeout=5.0)
    assert len(crew.engines["a"].asked) == asked
    ledger, head = TransactionExecutor(crew.stores["a"], KEYS), crew.mirror.head
    assert head is not None
    late = Crew({"sums": 3}, peers=("a",)).evaluator("a")
    part = await late._answer_part(FIRST, late.plans[0])
    assert (await ledger.run(record_part(KEYS, part))).outcome is TxnOutcome.STALE
    assert (await ledger.run(record_evaluation(KEYS, head, made))).outcome is TxnOutcome.STALE


async def test_an_evaluation_of_weights_that_are_head_no_more_is_not_written_down() -> None:
    crew = Crew({"sums": 3}, peers=("a",))
    crew.start()
    made = await crew.finish()
    head = crew.mirror.head
    assert head is not None
    crew.to_version(Version(1, 0))
    other = made.model_copy(update={"version": Version(0, 1)})
    report = await TransactionExecutor(crew.stores["a"], KEYS).run(record_evaluation(KEYS, head, other))
    assert report.outcome is TxnOutcome.STALE
    assert set(crew.evaluations) == {"0.0"}


async def test_without_at_start_the_first_weights_are_not_evaluated() -> None:
    crew = Crew({"sums": 3}, {"at_start": False}, peers=("a",))
    await asyncio.wait_for(crew.evaluator("a").evaluate(), timeout=5.0)
    assert crew.engines["a"].asked == []
    crew.to_version(Version(0, 4))
    crew.start()
    while not all(task.done() for task in crew.tasks.values()):
        await crew.settle(1.0)
    assert set(crew.evaluations) == {"0.4"}


class Unreliable(PerfectNetwork):
    """Loses requests and replies of writes, as its generator draws."""

    def __init__(self, crew: Crew, draw: random.Random) -> None:
        super().__init__(crew.clock)
        self._draw = draw

    async def request(self, call: Call) -> Fate:
        lost = [Fate.LOSE_REQUEST, Fate.LOSE_REPLY]
        return self._draw.choice(lost) if call.kind == "transact" and self._draw.random() < 0.3 else Fate.DELIVER


@pytest.mark.parametrize("seed", range(12))
async def test_evaluation_records_the_same_result_under_random_faults(seed: int) -> None:
    """Writes are lost, engines break, hang and lose their weights, peers die; in the end all is well again."""
    calm = Crew(SIZES, DRAWN)
    calm.start()
    undisturbed = anonymous(await calm.finish())
    draw = random.Random(seed)
    names = ["a", "b", "c", "d"]
    crew = Crew(SIZES, DRAWN, peers=names)
    for store in crew.stores.values():
        store.network = Unreliable(crew, draw)
    crew.start()
    for _ in range(8):
        for engines in crew.engines.values():
            engines.errors = draw.choice([0, 0, 2])
            engines.hangs = draw.random() < 0.4
            engines.version = draw.choice([FIRST, FIRST, None])
        if len(crew.tasks) > 1 and draw.random() < 0.2:
            crew.leave(draw.choice(sorted(crew.tasks)))
        await crew.settle(draw.choice([0.2, 1.0, TAKEOVER_S]))
        if crew.evaluations:
            break
    for engines in crew.engines.values():
        engines.errors, engines.hangs, engines.version = 0, False, FIRST
        engines.gives_up.set()
    for name in crew.tasks:
        crew.stores[name].network = PerfectNetwork(crew.clock)
    assert anonymous(await crew.finish()) == undisturbed
    assert crew.parts == []
