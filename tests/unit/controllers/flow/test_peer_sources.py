"""A peer and the sources of its job: sampling, rewards, truncated responses, filtered prompts, evaluation, patience."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_judges import FakeJudge, RecordingObserver
from tokenizers import Tokenizer, models, pre_tokenizers

from controllers.changes import ChangeSignal
from controllers.flow.curriculum_orders import CurriculumOrders
from controllers.flow.evaluation import SHOWN_CHARACTERS, clip_for_record, meets_threshold, score_answers
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.job_data import make_job_data, rewards_of
from controllers.flow.peer import JobPeer
from controllers.flow.peer_collectives import PeerCollectives
from controllers.flow.step import JobBatch, JobStep
from controllers.rules.view import JobView
from controllers.telemetry.notices import EqualRewardsWatch, PluginErrorLog, WarningLog
from controllers.telemetry.step_stats import StepTimer
from gcore.config import JobSpec
from gcore.config.load import stored_spec
from gcore.config.reward import JudgeSpec, RewardSpec
from gcore.config.spec import training_sources
from gcore.data.stream import open_prompts
from gcore.errors import EngineError, EngineUnreachable
from gcore.flows import find_filters
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.evaluation import interleave_samples
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment, Checkpoint, Checkpoints, Member
from gcore.ledger.records.job import EvalPart, EvalSample, Evaluation, JobPhase, JobStatus, Plan
from gcore.ledger.selection import StreamRules
from gcore.ledger.transactions import Versioned
from gcore.reward.api import RewardError
from gcore.reward.judges.judge import Judge
from gcore.reward.pool import DirectScorer
from gcore.reward.scorer import Scorer
from gcore.rollout.client import SamplingParams
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import FinishReason, Group, Outcome, Prompt, PromptRef, Sample, Version, VersionSpan

HEAD = Version(0, 0)
WORDS = ["1", "2", "3", "4", "5", "long", "a", "b", "c"]


def write_data(tmp_path: Path) -> None:
    """Sums of one token, of which one is longer; letters of one token."""
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "<unk>"])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 32}))
    prompts = {"sums": ["1", "2", "long long long 3", "4"], "letters": ["a", "b", "c"]}
    for name, texts in prompts.items():
        lines = [json.dumps({"prompt": text, "answer": text, "solution": "x"}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def make_spec(tmp_path: Path, **rollout: Any) -> JobSpec:
    sums = {"name": "sums", "path": str(tmp_path / "sums.jsonl"), "max_prompt_tokens": 2}
    letters = {
        "name": "letters",
        "path": str(tmp_path / "letters.jsonl"),
        "reward": {"name": "exact", "answer": "solution"},
        "sampling": {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 3, "stop": ["."]},
    }
    held_out = [
        sums | {"max_prompt_tokens": None},
        letters | {"sampling": {"stop": ["."]}, "max_new_tokens": 3},
    ]
    return stored_spec(  # of a time when training could cut off tokens
        {
            "name": "t",
            "model": {"path": str(tmp_path / "model")},
            "data": {"sources": [sums, letters], "shards": 1},
            "flow": {"steps": 2, "groups_per_step": 8, "samples_per_prompt": 2, "max_reissues": 3},
            "rollout": {
                "max_new_tokens": 6,
                "min_new_tokens": 1,
                "stop_token_ids": [4],
                "correction": "tis",
                **rollout,
            },
            "reward": {"name": "exact"},
            "eval": {"sources": held_out, "every": 1, "show": 3, "limit": 3},
        }
    )


class Engines:
    """Answers with the prompt's own text."""

    def __init__(self, spec: JobSpec) -> None:
        self.asked: list[tuple[Sequence[tuple[int, ...]], SamplingParams]] = []
        self.reasons: list[FinishReason] = ["stop"]
        self.errors: list[EngineError] = []
        self.texts: list[str] = ["x"]

    def serves(self, version: Version) -> bool:
        return True

    async def generate(
        self, version: Version, prompts: Any, params: SamplingParams, seeds: Sequence[int], rid: str, *_: object
    ) -> tuple[Sample, ...]:
        self.asked.append((prompts, params))
        if self.errors:
            raise self.errors.pop(0)
        return tuple(
            Sample(
                (7,),
                (0.0,),
                self.texts[i % len(self.texts)],
                self.reasons[i % len(self.reasons)],
                (VersionSpan(version, 0, 1),),
            )
            for i in range(len(prompts))
        )


class Alone:
    """A job with one controller, which is this one."""

    def __init__(self, tmp_path: Path, *, config: Mapping[str, Any] | None = None, **rollout: Any) -> None:
        """`config`: content of the model's config.json."""
        write_data(tmp_path)
        if config is not None:
            (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        self.spec = make_spec(tmp_path, **rollout)
        self.prompts = open_prompts(self.spec, tmp_path, tmp_path / "model")
        self.clock = FakeClock()
        self.changes = ChangeSignal()
        self.buffer = GroupBuffer()
        self.engines = Engines(self.spec)
        self.evaluations: list[Evaluation] = []
        head = chain.base_entry(1, "w", ChainWriter("me", "n")).head
        first = Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""),))
        self.mirror = JobMirror(
            JobKeys("u"),
            status=Versioned(JobStatus(phase=JobPhase.RUNNING), 1),
            head=Versioned(head, 1),
            assign=Versioned(Assignment(members=("me",), owners=(0,)), 1),
            checkpoints=Versioned(first, 1),
            plan=Versioned(Plan(generation=1, world="w", ranks=(), engines=()), 1),
            members={"me": Versioned(Member(incarnation="me", node="n", address="h:1"), 1)},
        )
        data = make_job_data(self.spec, "u", self.prompts, DirectScorer())
        self.store = store = MemoryStore(MemoryCluster(self.clock))
        self.faults = PluginErrorLog(store, self.mirror.keys, "n")
        self.peer = JobPeer(
            data,
            self.look,
            self.changes,
            self.engines,  # type: ignore[arg-type]
            self.buffer,
            self,
            self.clock,
            StepTimer(),
            CurriculumOrders.find(self.spec, data.stream, self.changes.notify),
            find_filters(self.spec.flow.filters),
            PeerCollectives(store, lambda: self.mirror, "me", 0, self.changes, self.clock),
            self.faults,
            WarningLog(store, self.mirror.keys, "n", self.clock),
        )

    def look(self) -> JobView:
        rules = StreamRules(self.prompts.stream.shape, 16, self.spec.flow.groups_per_step)
        return JobView(self.spec, rules, self.mirror, "me", "n", {}, {})

    async def write_part(self, part: EvalPart) -> bool:
        self._now(eval_parts={**self.mirror.eval_parts, f"{part.version}/{part.number}": Versioned(part, 2)})
        return True

    async def write_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        self._now(evaluations={str(evaluation.version): Versioned(evaluation, 3)}, eval_parts={})

    def _now(self, **changed: Any) -> None:
        self.mirror = replace(self.mirror, **changed)
        self.changes.notify()

    def prompt(self, source: str, seqs: int = 7) -> Prompt:
        """The first prompt of a source that is not filtered."""
        refs = [PromptRef(0, 0, seq) for seq in range(seqs)]
        ref = next(r for r in refs if self.is_shown(r, source))
        return self.prompts.stream.prompt(ref)

    def is_shown(self, ref: PromptRef, source: str) -> bool:
        opened, entry = self.prompts.stream.found(ref)
        return opened.name == source and not (source == "sums" and entry == 2)

    async def group(self, prompt: Prompt) -> Group | Outcome:
        return await self.peer.score(prompt, await self.peer.rollout(prompt))


async def test_a_prompt_is_answered_as_its_source_says(tmp_path: Path) -> None:
    job = Alone(tmp_path)
    await job.peer.rollout(job.prompt("sums"))
    await job.peer.rollout(job.prompt("letters"))
    sums, letters = (params for _, params in job.engines.asked)
    assert sums == SamplingParams(temperature=1.0, max_new_tokens=6, min_new_tokens=1, stop_token_ids=(4,))
    assert letters == SamplingParams(
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        max_new_tokens=3,
        min_new_tokens=1,
        stop=(".",),
        stop_token_ids=(4,),
    )


async def test_an_answer_is_scored_as_its_source_says_and_the_group_carries_source_and_temperature(
    tmp_path: Path,
) -> None:
    job = Alone(tmp_path)
    sums, letters = await job.group(job.prompt("sums")), await job.group(job.prompt("letters"))
    assert isinstance(sums, Group)
    assert isinstance(letters, Group)
    assert (sums.source, sums.temperature, sums.samples[0].reward) == ("sums", 1.0, 0.0)
    assert (letters.source, letters.temperature, letters.samples[0].reward) == ("letters", 0.5, 1.0)


async def test_a_source_whose_rewards_have_been_equal_for_ten_steps_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Alone(tmp_path)
    for source in ("sums", "letters"):
        await job.group(job.prompt(source))
    assert {source: one.reward for source, one in job.peer._equal_rewards._equal.items()} == {
        "sums": 0.0,
        "letters": 1.0,
    }
    watch = EqualRewardsWatch(8, WarningLog(job.store, job.mirror.keys, "n", job.clock))

    def note(count: int, first_step: int, per_step: int = 2, reward: float = 0.0) -> None:
        for number in range(count):
            ref = PromptRef(0, 0, number)
            # As ReMax does: the greedy answer apart from the others.
            watch.note("sums", ref, [reward], first_step + number // per_step)
            watch.note("sums", ref, [reward] * 2, first_step + number // per_step)

    note(20, 0)
    assert caplog.messages == [], "nine steps"
    note(21, 0)
    note(30, 10)
    said = (
        "source 'sums': the last 121 responses to 21 prompts all had reward 0. The policy cannot learn from equal rewards. "
        "Compare responses with the expected answers: gcore samples"
    )
    assert caplog.messages == [said]
    watch.note("sums", PromptRef(0, 0, 0), [0.0, 1.0], 30)
    note(79, 30, per_step=1000)
    assert len(caplog.messages) == 1, "it began anew, and no step was committed"
    note(80, 30, per_step=1000)
    assert len(caplog.messages) == 2, "as many groups as ten steps have"
    note(15, 40, per_step=1, reward=1.0)
    assert len(caplog.messages) == 2, "too few groups to say it of a rare source"
    note(16, 40, per_step=1, reward=1.0)
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("policy", ["keep", "mask", "penalise", "drop_group"])
async def test_truncated_responses_are_treated_as_the_spec_says(tmp_path: Path, policy: str) -> None:
    job = Alone(tmp_path, truncated=policy, truncated_penalty=0.25)
    job.engines.reasons = ["length", "stop"]
    found = await job.group(job.prompt("letters"))
    if policy == "drop_group":
        assert found == Outcome("filtered", "a response was truncated at 1 tokens (rollout.max_new_tokens)")
        return
    assert isinstance(found, Group)
    assert [s.masked for s in found.samples] == [policy == "mask", False]
    assert [s.reward for s in found.samples] == [0.75 if policy == "penalise" else 1.0, 1.0]
    job.buffer.add_group(found)
    offered = job.buffer.offers[found.ref]
    assert (offered.truncated, offered.masked) == (1, (0,) if policy == "mask" else ())


async def test_a_group_of_which_nothing_is_left_for_the_loss_is_filtered(tmp_path: Path) -> None:
    job = Alone(tmp_path, truncated="mask")
    job.engines.reasons = ["length"]
    assert await job.group(job.prompt("sums")) == Outcome(
        "filtered", "every response was truncated (rollout.max_new_tokens) and masked in the loss"
    )


async def test_prompts_that_are_filtered_or_cannot_be_shown_end_without_being_issued(tmp_path: Path) -> None:
    job = Alone(tmp_path)
    step = JobStep(job.peer.context, HEAD)
    issued: list[Prompt] = []
    async for prompt in job.peer.prompts(step):
        issued.append(prompt)
        if len(issued) == 6:
            break
    outcomes = list(job.buffer.outcomes.values())
    assert {(o.kind, o.reason, o.source) for o in outcomes} == {
        ("filtered", "the prompt is longer than max_prompt_tokens (2)", "sums")
    }
    assert "long" not in " ".join(prompt.text for prompt in issued)
    assert {prompt.source for prompt in issued} == {"sums", "letters"}


async def test_a_prompt_whose_groups_were_too_old_too_often_fails_instead_of_being_issued(tmp_path: Path) -> None:
    job = Alone(tmp_path)
    late, again = job.prompt("sums").ref, job.prompt("letters").ref
    job.buffer.went_stale |= {late, again}
    job.buffer.reissues |= {late: 4, again: 3}  # three may be in vain
    issued: list[PromptRef] = []
    async for prompt in job.peer.prompts(JobStep(job.peer.context, HEAD)):
        issued.append(prompt.ref)
        if len(issued) == 5:
            break
    assert late not in issued
    assert again in issued
    ended = job.buffer.outcomes[late]
    assert (ended.kind, ended.source) == ("failed", "sums")
    assert (
        ended.reason == "stale: sampled 4 times; the last group exceeded the staleness limit before a step could use it"
    )


async def produced(
    job: Alone, prompt: Prompt, work: Coroutine[Any, Any, Group | Outcome] | None = None
) -> asyncio.Task[None]:
    """The production of one prompt, begun."""
    step = JobStep(job.peer.context, HEAD)
    batch = JobBatch(job.peer.context, step)
    step.hand_out(prompt)
    batch.start(work or job.group(prompt))
    (task,) = batch._tasks
    await job.clock.advance(0)
    return task


async def test_a_prompt_whose_engine_cannot_be_reached_waits_longer_each_time(tmp_path: Path) -> None:
    job = Alone(tmp_path)
    prompt = job.prompt("sums")
    for tries, delay in ((1, 0.2), (2, 0.4), (3, 0.8)):
        job.engines.errors = [EngineUnreachable("gone")]
        task = await produced(job, prompt)
        await job.clock.advance(delay - 0.01)
        assert prompt.ref in job.buffer.in_flight
        await job.clock.advance(0.02)
        assert prompt.ref not in job.buffer.in_flight
        assert job.buffer.reissues[prompt.ref] == tries
        await task
    assert job.buffer.outcomes == {}
    job.engines.errors = [EngineUnreachable("gone", fix="It is issued again")]
    await produced(job, prompt)
    ended = job.buffer.outcomes[prompt.ref]
    assert (ended.kind, ended.source) == ("failed", "sums")
    assert ended.reason == "sampled 4 times; the last error: gone"


async def test_a_prompt_fails_if_an_engine_samples_a_media_token(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 32, "vision_config": {}, "image_token_id": 7}  # the engine answers with 7
    job = Alone(tmp_path, config=config)
    prompt = job.prompt("sums")
    await produced(job, prompt)
    ended = job.buffer.outcomes[prompt.ref]
    assert ended.kind == "failed"
    assert ended.reason.startswith("a response (sample 0) has token 7, which stands for media and cannot be trained")


async def test_an_engine_that_refused_is_asked_again_at_once(tmp_path: Path) -> None:
    job = Alone(tmp_path)
    prompt = job.prompt("sums")
    job.engines.errors = [EngineError("busy with something else")]
    await produced(job, prompt)
    assert prompt.ref not in job.buffer.in_flight
    assert job.buffer.reissues[prompt.ref] == 1


async def test_a_prompt_whose_production_raises_a_cancellation_that_nobody_asked_for_counts_as_a_try(
    tmp_path: Path,
) -> None:
    job = Alone(tmp_path)
    prompt = job.prompt("sums")

    async def cancelled() -> Group:
        raise asyncio.CancelledError

    for tries in (1, 2, 3):
        await produced(job, prompt, cancelled())
        assert prompt.ref not in job.buffer.in_flight
        assert job.buffer.reissues[prompt.ref] == tries
    assert job.buffer.outcomes == {}
    await produced(job, prompt, cancelled())
    ended = job.buffer.outcomes[prompt.ref]
    assert (ended.kind, ended.source) == ("failed", "sums")
    assert ended.reason == "sampled 4 times; the last error: an inner task was cancelled"


async def test_early_judging_continues_until_the_production_ends(
    tmp_path: Path,
) -> None:
    job = Alone(tmp_path)
    prompt, clock = job.prompt("letters"), job.clock
    tutor = JudgeSpec.model_validate({"name": "tutor", "model": {"path": "j"}, "template": "{{ response }}"})
    fake = FakeJudge(lambda question, seed: "hm" if question == "odd" else "0.5", clock, delay_s=lambda question: 5.0)
    rewards = Scorer(DirectScorer(), {"tutor": Judge.of(tutor, fake, RecordingObserver(), clock)})
    pipeline = job.peer.data.sources["letters"]
    judged = replace(pipeline, rewards=rewards, source=replace(pipeline.source, reward=RewardSpec(judge="tutor")))
    job.peer.data = replace(job.peer.data, sources={"letters": judged})
    generate = job.engines.generate

    async def told_of(*asked: Any) -> tuple[Sample, ...]:
        made = await generate(*asked)
        for place, sample in enumerate(made if (ended := asked[7]) is not None else ()):
            ended(place, sample)
        await clock.sleep(0.5)
        return made

    job.engines.generate = told_of  # type: ignore[assignment, method-assign]

    async def beside_a_greedy_one() -> Group | Outcome:
        samples, _ = await asyncio.gather(job.peer.rollout(prompt), job.peer.rollout(prompt, 1, greedy=True))
        await clock.sleep(1.0)
        return await job.peer.score(prompt, samples)

    task = await produced(job, prompt, beside_a_greedy_one())
    await clock.advance(1.5)
    assert fake.open == 1
    await clock.advance(5)
    await task
    assert len(fake.asked) == 1
    job.engines.texts = ["another"]
    given_up = await produced(job, prompt, beside_a_greedy_one())
    await clock.advance(1.5)
    assert fake.open == 1
    given_up.cancel()
    await clock.advance(0)
    assert fake.open == 0
    job.engines.texts = ["odd"]
    for times in (3, 4):
        await produced(job, prompt, beside_a_greedy_one())
        await clock.advance(6)
        assert len(fake.asked) == times, "what cannot be judged is asked once in each production"


def test_every_reward_of_a_job_is_found_under_a_name_also_where_evaluation_calls_a_source_the_same(
    tmp_path: Path,
) -> None:
    tree = make_spec(tmp_path).model_dump(mode="json")
    tree["eval"]["sources"][1]["reward"] = {"name": "length", "options": {"limit": 3}}
    spec = stored_spec(tree)
    found = rewards_of(spec)
    assert {name: reward.name for name, reward in found.items()} == {
        "sums": "exact",
        "letters": "exact",
        "letters of eval": "length",
    }
    assert {s.reward.answer for s in training_sources(spec)} == {"answer", "solution"}


async def test_a_prompt_with_a_response_that_cannot_be_scored_fails_with_the_reason_and_is_not_issued_again(
    tmp_path: Path,
) -> None:
    class LastIsOdd:
        """Can score all but the last."""

        async def score(self, spec: Any, fields: Any, responses: Any) -> Any:
            first = DirectScorer().score(spec, fields, responses[:-1])
            return (*await first, RewardError("reward 'exact' took longer than 10 s (reward.timeout_s)"))

    job = Alone(tmp_path)
    prompt = job.prompt("letters")
    pipelines = job.peer.data.sources
    odd = {name: replace(pipeline, rewards=Scorer(LastIsOdd(), {})) for name, pipeline in pipelines.items()}
    job.peer.data = replace(job.peer.data, sources=odd)
    await (await produced(job, prompt))
    ended = job.buffer.outcomes[prompt.ref]
    assert (ended.kind, ended.source) == ("failed", "letters")
    assert ended.reason == "reward 'exact' took longer than 10 s (reward.timeout_s)"
    assert job.buffer.reissues == {}
    assert job.buffer.offers == {}


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 1e39])
async def test_a_group_that_a_flow_scored_itself_with_what_is_no_number_fails_its_prompt(
    tmp_path: Path, reward: float
) -> None:
    job = Alone(tmp_path)
    prompt = job.prompt("sums")

    async def own_score() -> Group:
        group = await job.group(prompt)
        assert isinstance(group, Group)
        return replace(group, samples=(replace(group.samples[0], reward=reward), *group.samples[1:]))

    step = JobStep(job.peer.context, HEAD)
    batch = JobBatch(job.peer.context, step)
    step.hand_out(prompt)
    batch.start(own_score())
    await job.clock.advance(0)
    ended = job.buffer.outcomes[prompt.ref]
    assert ended.kind == "failed"
    assert "not finite in float32" in ended.reason
    assert job.buffer.offers == {}


async def test_an_evaluation_is_greedy_and_has_an_accuracy_for_each_source(tmp_path: Path) -> None:
    job = Alone(tmp_path)
    job.engines.texts = ["1", "x"]
    await asyncio.gather(job.peer.evaluate(), job.clock.advance(0))
    (made,) = job.evaluations
    assert [len(prompts) for prompts, _ in job.engines.asked] == [3, 3], "eval.limit is each source's"
    assert [params for _, params in job.engines.asked] == [
        SamplingParams(temperature=0.0, max_new_tokens=6, min_new_tokens=1, stop_token_ids=(4,)),
        SamplingParams(temperature=0.0, max_new_tokens=3, min_new_tokens=1, stop=(".",), stop_token_ids=(4,)),
    ]
    # Sums want their own text ("1", "2", "long ..."): the first is right; letters want "x": the second is.
    assert {name: (score.accuracy, score.count) for name, score in made.by_source.items()} == {
        "sums": (pytest.approx(1 / 3), 3),
        "letters": (pytest.approx(1 / 3), 3),
    }
    assert (made.accuracy, made.count) == (pytest.approx(1 / 3), 6)
    assert [sample.source for sample in made.samples] == ["sums", "letters", "sums"]


def test_only_an_evaluation_scores_responses_without_their_group(tmp_path: Path) -> None:
    data = Alone(tmp_path).peer.data
    assert [one.evaluates for one in data.sources.values()] == [False, False]
    assert [one.evaluates for one in data.evaluated.values()] == [True, True]


class Odd:
    """Can score nothing."""

    async def score(self, spec: Any, fields: Any, responses: Any) -> Any:
        return tuple(RewardError("reward 'odd' raised ValueError") for _ in responses)


async def test_an_evaluation_answer_that_its_reward_cannot_score_is_not_correct_and_says_why(tmp_path: Path) -> None:
    job = Alone(tmp_path)
    pipeline = replace(job.peer.data.evaluated["sums"], rewards=Scorer(Odd(), {}))
    sample = Sample((7,), (0.0,), "x", "stop", (VersionSpan(HEAD, 0, 1),))
    (mark,) = await score_answers(pipeline, -1.0, job.prompt("sums"), [sample], HEAD)
    assert (mark.shown.reward, mark.shown.correct) == (0.0, False), "not even where nothing is demanded"
    assert mark.shown.unscored == "reward 'odd' raised ValueError"


@pytest.mark.parametrize(
    ("reward", "threshold", "is_correct"),
    [(1.0, 1.0, True), (0.7 + 0.2 + 0.1, 1.0, True), (0.99, 1.0, False), (-1e-12, 0.0, True), (-0.1, 0.0, False)],
)
def test_a_reward_that_is_a_sum_of_parts_reaches_its_threshold(
    reward: float, threshold: float, is_correct: bool
) -> None:
    assert meets_threshold(reward, threshold) == is_correct


async def test_responses_that_cannot_be_scored_are_counted_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Alone(tmp_path)
    job.engines.texts = ["1", "x"]
    job.peer.data.evaluated["letters"] = replace(job.peer.data.evaluated["letters"], rewards=Scorer(Odd(), {}))  # type: ignore[index]
    await asyncio.gather(job.peer.evaluate(), job.clock.advance(0))
    (made,) = job.evaluations
    assert (made.unscored, made.accuracy, made.count) == (3, pytest.approx(1 / 6), 6)
    letters = made.by_source["letters"]
    assert (letters.accuracy, letters.unscored, letters.metrics) == (0.0, 3, {"pass@1": 0.0}), "and no mean reward"
    assert letters.why_unscored == "reward 'odd' raised ValueError"
    assert "3 of 3 responses could not be scored; the first, to prompt 0: reward 'odd' raised ValueError" in caplog.text


def test_the_answers_shown_are_of_every_source_in_turn_and_short() -> None:
    def answer(source: str, text: str) -> EvalSample:
        return EvalSample(prompt=text, response=text, answer="", reward=0.0, source=source)

    found = interleave_samples([[answer("a", "1"), answer("a", "2"), answer("a", "3")], [answer("b", "4")]], 3)
    assert [(one.source, one.response) for one in found] == [("a", "1"), ("b", "4"), ("a", "2")]
    assert interleave_samples([], 5) == ()
    assert len(clip_for_record("y" * (2 * SHOWN_CHARACTERS))) == SHOWN_CHARACTERS
    assert len(json.dumps(clip_for_record("😀" * SHOWN_CHARACTERS))) * 150 < 3 * 512 * 1024, "fifty fit into one write"
