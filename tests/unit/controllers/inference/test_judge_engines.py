"""The engines of judges: routing, conditions for a valid answer, and reports to users."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from controllers.api.submission.checks import CheckedJudge, check_fallbacks, check_judges
from controllers.changes import ChangeSignal
from controllers.inference.judge_engines import JUDGE_RETRY_S, JudgePool, QuestionEncoder
from controllers.inference.judges import (
    LEAST_UNREADABLE,
    READABLE,
    REPORT_FACTOR,
    JudgeMetricsObserver,
    answers_of_a_step,
    judge_encoder,
    open_judges,
)
from controllers.inference.pool import HEALTH_CHECK_S
from controllers.inference.rules import HealthLimits, HealthState
from gcore.config import JobSpec, parse_spec
from gcore.config.reward import Fallback
from gcore.errors import DataError, SpecError
from gcore.observability.metrics import Metrics
from gcore.plugins import PluginFault
from gcore.reward.judges.template import Question
from gcore.reward.judges.types import JudgeAway, JudgeError
from gcore.rollout.client import EngineClient
from gcore.testing import FakeClock
from gcore.types import Prompt, PromptRef
from gcore.worker.records import WorkerRecord

WORDS = ("1", "2", "3", "good", "bad", "?", "<unk>")
PROMPT = Prompt(PromptRef(0, 0, 0), "1 2", (0, 1), {})


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    judge = {
        "name": "tutor",
        "model": {"path": str(tmp_path)},
        "template": "{{ prompt }} {{ response }} ?",
        "max_new_tokens": 2,
        "verdict": {"parser": "words", "words": {"good": 1, "bad": 0}},
    }
    tree = {"name": "t", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
    return parse_spec(tree | {"rollout": {"max_new_tokens": 4}, "judges": [judge], "reward": {"judge": "tutor"}})


class Engine:
    """A judge's engine that says "good" of whatever ends in 1."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.paths: list[str] = []
        self.is_away = False
        self.failure: httpx.TransportError = httpx.ConnectError("nobody")
        self.serves = "0.0"
        self.made: str | None = None
        """The version that its answers name, if it is another one."""
        self.reason: dict[str, Any] = {"type": "stop"}

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_away:
            raise self.failure
        self.paths.append(request.url.path)
        if request.url.path == "/update_weight_version":
            self.serves = json.loads(request.content)["new_version"]
        if request.url.path != "/generate":
            return httpx.Response(200, json={"weight_version": self.serves, "success": True})
        body = json.loads(request.content)
        self.asked.append(body)
        token = 3 if body["input_ids"][0][-2] == 0 else 4
        meta = {"finish_reason": self.reason, "weight_version": self.made or self.serves, "completion_tokens": 1}
        one = {
            "text": WORDS[token],
            "output_ids": [token],
            "meta_info": meta | {"output_token_logprobs": [[0.0, token, None]]},
        }
        return httpx.Response(200, json=[one] * len(body["input_ids"]))


class Court:
    """A controller's side of a job's judges, with engines of its own."""

    def __init__(self, spec: JobSpec, *engines: str, me: str = "a.1") -> None:
        self.spec = spec
        self.clock = FakeClock()
        self.engines = {name: Engine() for name in engines}
        self.metrics = Metrics()
        self.told: list[tuple[str, str]] = []
        self.book = JudgePool(spec, spec.judges[0], "u", me, ChangeSignal(), self.clock, self.metrics, self.connect)
        self.counts = JudgeMetricsObserver(self.metrics, lambda topic, said: self.told.append((topic, said)))

    def connect(self, url: str, *, timeout_s: float, instance: str) -> EngineClient:
        name = url.removeprefix("http://").partition(":")[0]
        return EngineClient(url, timeout_s=timeout_s, transport=httpx.MockTransport(self.engines[name].answer))

    @property
    def serving(self) -> int:
        """Engines that answer now."""
        return sum(view.version is not None for view in self.book.views.values())

    async def meet(self) -> None:
        """The engines are there, and what they serve is found out."""
        await self.book.aim({name: worker(name) for name in self.engines})
        await self.look()

    async def look(self) -> None:
        self.book.look_after(1)
        for _ in range(20):
            await asyncio.sleep(0)

    async def value(self, response: str) -> float:
        judge = open_judges(self.spec, {"tutor": self.book}, self.counts, self.clock)["tutor"]
        return (await self.clock.run(judge.value(PROMPT, response))).value

    def seen(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"judge": "tutor"} | labels)


def worker(name: str, **more: Any) -> WorkerRecord:
    told = {"node": "n", "role": "reward", "judge": "tutor", "job_uid": "u", "slot": "cpu:0", "state": "serving"}
    where = {"pid": 1, "pid_started": 1, "address": f"{name}:1"}
    return WorkerRecord.model_validate({"instance": name} | told | where | more)


async def test_an_engine_that_serves_is_asked_in_its_judges_own_tokens(spec: JobSpec) -> None:
    court = Court(spec, "a")
    await court.meet()
    assert court.serving == 1
    assert (await court.value("1"), await court.value("2")) == (1.0, 0.0)
    first = court.engines["a"].asked[0]
    assert first["input_ids"] == [[0, 1, 0, 5]]
    assert first["sampling_params"][0]["temperature"] == 0
    assert court.seen("gcore_judge_tokens_total", part="question") == 8
    assert court.seen("gcore_judge_tokens_total", part="answer") == 2
    assert court.seen("gcore_judge_questions_total", result="answered") == 2
    assert court.seen("gcore_judge_open_questions") == 0
    assert court.metrics.registry.get_sample_value("gcore_samples_total") == 0, "what a judge writes is no sample"
    await court.book.close()


async def test_no_two_controllers_call_their_questions_the_same(spec: JobSpec) -> None:
    asked = []
    for me in ("a.1", "b.1"):
        court = Court(spec, "a", me=me)
        await court.meet()
        await court.value("1")
        asked += [rid for body in court.engines["a"].asked for rid in body["rid"]]
        await court.book.close()
    assert len(set(asked)) == 2


async def test_workers_that_serve_something_else_are_not_asked(spec: JobSpec) -> None:
    court = Court(spec, "a")
    others = [{"role": "rollout", "judge": ""}, {"judge": "other"}, {"job_uid": "v"}, {"state": "starting"}]
    for more in others:
        await court.book.aim({"a": worker("a", **more)})
        assert court.book.views == {}, more
    await court.book.close()


@pytest.fixture
def adapter_spec(spec: JobSpec) -> JobSpec:
    tree = spec.model_dump(exclude_unset=True, mode="json")
    tree["model"] = {"path": tree["judges"][0].pop("model")["path"]}
    tree["judges"][0]["adapter"] = "grades"
    return parse_spec(tree | {"train": {"lora": {"publish": "adapter"}}})


async def test_engines_of_the_policy_serve_an_adapter_under_all_weights(adapter_spec: JobSpec) -> None:
    court = Court(adapter_spec, "a")
    engine, policy = court.engines["a"], {"role": "rollout", "judge": ""}
    for more in ({}, policy | {"job_uid": "v"}, policy | {"state": "starting"}):
        await court.book.aim({"a": worker("a", **more)})
        assert court.book.views == {}, more
    await court.book.aim({"a": worker("a", **policy)})
    engine.serves = "0.7"
    await court.look()
    assert court.serving == 1
    engine.made = "0.0"
    assert (await court.value("1"), await court.value("2")) == (1.0, 0.0)
    assert engine.asked[0]["lora_path"] == ["tutor"]
    assert not [path for path in engine.paths if "weight" in path], "the policy's pool alone changes weights"
    await court.book.close()


async def test_questions_that_time_out_behind_rollouts_cost_an_adapter_no_engine(adapter_spec: JobSpec) -> None:
    court = Court(adapter_spec, "a")
    engine = court.engines["a"]
    await court.book.aim({"a": worker("a", role="rollout", judge="")})
    await court.look()
    limits, now = HealthLimits(request_s=adapter_spec.judges[0].timeout_s), court.clock.monotonic()
    connection = court.book._connections["a"]
    for begun in (now, now + 2 * limits.request_s):
        connection.health = connection.health.fails(limits, begun, begun + limits.request_s)
    assert connection.health.verdict(limits, now) is HealthState.HUNG
    await court.clock.advance(HEALTH_CHECK_S)
    await court.look()
    await court.look()
    assert court.serving == 1
    assert await court.value("1") == 1.0
    assert court.metrics.registry.get_sample_value("gcore_samples_total") == 0, "a verdict is no sample"
    assert engine.asked
    await court.book.close()


async def test_a_question_to_an_adapter_waits_until_an_engine_is_awake(adapter_spec: JobSpec) -> None:
    court = Court(adapter_spec, "a")
    court.engines["a"].serves = "asleep"
    await court.book.aim({"a": worker("a", role="rollout", judge="")})
    await court.look()
    assert court.serving == 0
    court.engines["a"].serves, court.engines["a"].made = "0.1", "0.0"
    await court.clock.advance(JUDGE_RETRY_S)
    await court.look()
    assert await court.value("1") == 1.0
    await court.book.close()


async def test_a_question_goes_to_another_engine_when_its_own_is_lost(spec: JobSpec) -> None:
    court = Court(spec, "a", "b")
    await court.meet()
    court.engines["a"].is_away = True
    assert [await court.value("1"), await court.value("2"), await court.value("3")] == [1.0, 0.0, 0.0]
    assert len(court.engines["b"].asked) == 3
    assert court.serving == 1, "it is distrusted"
    court.engines["a"].is_away = False
    await court.clock.advance(JUDGE_RETRY_S)
    await court.look()
    assert court.serving == 2
    await court.book.close()


@pytest.mark.parametrize(
    ("failure", "result"),
    [
        pytest.param(httpx.ReadTimeout("the time is up"), "timeout", id="silent"),
        pytest.param(httpx.ConnectTimeout("no connection in time"), "away", id="no connection"),
        pytest.param(httpx.ConnectError("refused"), "away", id="refused"),
    ],
)
async def test_a_question_to_an_engine_that_sends_nothing_in_time_is_told_as_such(
    spec: JobSpec, failure: httpx.TransportError, result: str
) -> None:
    court = Court(spec, "a", "b")
    await court.meet()
    court.engines["a"].is_away, court.engines["a"].failure = True, failure
    assert [await court.value("1"), await court.value("2"), await court.value("3")] == [1.0, 0.0, 0.0]
    told = {one: court.seen("gcore_judge_questions_total", result=one) for one in ("away", "timeout", "answered")}
    assert told == {"away": 0, "timeout": 0, "answered": 3, result: 1}
    await court.book.close()


async def test_a_judges_engine_that_sleeps_is_not_asked_and_one_that_woke_is_asked_at_once(spec: JobSpec) -> None:
    mine, other = Court(spec, "a", "b"), Court(spec, me="b.1")
    other.engines = mine.engines
    for court in (mine, other):
        await court.meet()
        court.book.shut({"a"})
    await mine.book.sleep("a")
    assert mine.engines["a"].serves == "asleep"
    await other.look()
    assert await other.value("r1") == await mine.value("r1")
    assert not mine.engines["a"].asked
    mine.engines["a"].paths.clear()
    for court in (mine, other):
        court.book.shut(())
    other.book.distrust("a")
    await other.look()  # it meets an engine that sleeps, and leaves it alone
    assert set(mine.engines["a"].paths) <= {"/model_info"}
    assert other.serving == 1
    await mine.book.wake("a")
    assert (mine.serving, mine.engines["a"].serves) == (2, "0.0")
    assert (mine.book.slept_s, mine.book.woke_s) != (None, None)
    other.clock.jump(1.0)
    await other.look()
    assert other.serving == 2


async def test_an_engine_that_gives_up_on_a_question_is_asked_again(spec: JobSpec, tmp_path: Path) -> None:
    court = Court(spec, "a")
    await court.meet()
    court.engines["a"].reason = {"type": "abort"}
    asker = court.book.asker(judge_encoder(0, spec.judges[0], tmp_path), None)
    with pytest.raises(JudgeAway, match="aborted the request"):
        await asker("1 2", [0])
    await court.book.close()


async def test_a_question_that_does_not_fit_the_judges_context_is_refused_before_it_is_asked(
    spec: JobSpec, tmp_path: Path
) -> None:
    court = Court(spec, "a")
    await court.meet()
    with pytest.raises(JudgeError, match="more than the 8 of the judge's context"):
        await court.value("1 1 1 1")
    with pytest.raises(JudgeError, match=r"more than \d+ tokens, and with max_new_tokens .2. more than the 8 of"):
        await court.book.asker(judge_encoder(0, spec.judges[0], tmp_path), 8)("1 " * 500_000, [0])
    assert court.engines["a"].asked == []
    await court.book.close()


def test_a_judge_whose_folder_is_no_model_says_which_judge_it_is(
    spec: JobSpec, adapter_spec: JobSpec, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="does not exist") as caught:
        judge_encoder(0, spec.judges[0], tmp_path / "gone")
    assert caught.value.where == f"judges.0 ('tutor'), {tmp_path / 'gone'}"
    assert caught.value.fix == "Name an existing folder in judges.0.model.path"
    with pytest.raises(DataError, match="does not exist") as caught:
        judge_encoder(0, adapter_spec.judges[0], tmp_path / "gone")
    assert caught.value.fix == "Name an existing folder in model.path", "an adapter has the policy's model"
    with pytest.raises(DataError, match="no chat template") as caught:
        judge_encoder(1, spec.judges[0].model_copy(update={"chat": True}), tmp_path)
    assert caught.value.fix == (
        "Set judges.1.chat: false, put a chat_template.jinja into the folder, or take another model"
    )


def test_unaskable_question_names_the_judges_fields(spec: JobSpec) -> None:
    judge = spec.judges[0]

    def checked(encode: Any) -> CheckedJudge:
        renderer: Any = SimpleNamespace(render=lambda question: question, encode=encode, max_length=8)
        return CheckedJudge(0, judge, Question.compile(judge, "judges.0"), None, QuestionEncoder(renderer, None))

    def mute(text: str) -> Any:
        raise DataError("the model's tokenizer cannot say 'Y'", fix="Remove what is not in its vocabulary")

    with pytest.raises(SpecError) as caught:
        checked(mute).check_question(PROMPT, "data")
    assert caught.value.where == "judges.0 ('tutor'), source 'data'"
    assert caught.value.what == "the judge cannot score the longest prompt: the model's tokenizer cannot say 'Y'"
    assert "judges.0.template" in str(caught.value.fix)
    with pytest.raises(SpecError, match=r"Lower judges\.0\.max_new_tokens or data\.max_prompt_tokens"):
        checked(lambda text: [0] * 7).check_question(PROMPT, "data")


def test_the_names_that_a_judge_gives_are_refused_by_the_keys_that_give_them(spec: JobSpec) -> None:
    judge = spec.judges[0]
    lost = judge.model_copy(update={"on_error": Fallback(fallback="exakt")})
    with pytest.raises(PluginFault, match="no reward is called 'exakt', did you mean 'exact'") as caught:
        check_fallbacks(spec.model_copy(update={"judges": (lost,)}))
    assert caught.value.where == "judges.0.on_error.fallback"
    check_fallbacks(spec.model_copy(update={"judges": (judge, lost.model_copy(update={"on_error": "retry"}))}))
    odd = judge.model_copy(update={"verdict": judge.verdict.model_copy(update={"parser": "wrods"})})
    with pytest.raises(PluginFault, match="no verdict parser is called 'wrods'") as caught:
        check_judges(spec.model_copy(update={"judges": (odd,)}))
    assert caught.value.where == "judges.0.verdict.parser"


def test_unreadable_answers_are_told_at_the_first_and_then_more_and_more_rarely() -> None:
    told: list[str] = []
    counts = JudgeMetricsObserver(Metrics(), lambda topic, said: told.append(f"{topic}: {said}"))
    for number in range(REPORT_FACTOR**2):
        counts.unreadable("tutor", f"well {number}", "it has no stars")
    assert told == [
        f"judge-tutor: judge 'tutor' gave an answer that cannot be parsed, such as 'well 0': it has no stars. {READABLE}",
        f"judge-tutor: judge 'tutor' gave {REPORT_FACTOR} answers that cannot be parsed, such as 'well 9': it has no stars. {READABLE}",
        f"judge-tutor: judge 'tutor' gave {REPORT_FACTOR**2} answers that cannot be parsed, such as 'well 99': it has no stars. {READABLE}",
    ]


def test_a_judge_is_unreadable_until_one_answer_of_its_can_be_read() -> None:
    counts = JudgeMetricsObserver(Metrics(), lambda *_: None)
    counts.verdict("other", 1.0)
    both = {"tutor": 32, "other": 8}
    for number in range(32):
        assert counts.unreadable_judge_reason(both) == ""
        counts.unreadable("tutor", f"well {number}", "it has no stars")
        counts.unreadable("other", "oh", "it has no stars")
    why = "such as 'well 31': it has no stars"
    assert counts.unreadable_judge_reason({"other": 8}) == ""
    said = f"judge 'tutor' gave 32 answers and none of them can be parsed, {why}. {READABLE}"
    assert counts.unreadable_judge_reason(both) == said
    counts.verdict("tutor", 0.5)
    assert counts.unreadable_judge_reason(both) == ""


def test_the_judges_without_which_nothing_can_be_trained_are_those_of_training_that_nothing_replaces() -> None:
    def judge(name: str, **more: object) -> dict[str, object]:
        return {"name": name, "model": {"path": "m"}, "template": "{{ response }}", **more}

    tree: dict[str, Any] = {
        "name": "t",
        "model": {"path": "m"},
        "data": {"path": "d.jsonl"},
        "rollout": {"max_new_tokens": 4},
        "judges": [
            judge("alone", votes=3, temperature=1.0),
            judge("replaced", on_error={"fallback": "numeric"}),
            judge("held-out"),
        ],
        "reward": {"parts": [{"judge": "alone"}, {"judge": "replaced"}]},
        "flow": {"steps": 2, "groups_per_step": 16, "samples_per_prompt": 2},
        "eval": {"sources": [{"name": "e", "path": "e.jsonl", "reward": {"judge": "held-out"}}]},
    }
    assert answers_of_a_step(parse_spec(tree)) == {"alone": 96}
    small = tree | {"flow": {"steps": 2, "groups_per_step": 1, "samples_per_prompt": 2}}
    assert answers_of_a_step(parse_spec(small)) == {"alone": LEAST_UNREADABLE}


def test_questions_waiting_for_judges_are_counted_and_named() -> None:
    counts = JudgeMetricsObserver(Metrics(), lambda *_: None)
    counts.begun("b")
    counts.begun("a")
    counts.begun("a")
    assert counts.scoring.what == "3 questions wait for judge 'a' and 'b'"
    counts.ended("a")
    counts.asked("a", 1.0, 5, 1)
    counts.ended("a")
    counts.failed("a", "away")
    assert (counts.scoring.what, counts.scoring.scored) == ("1 question waits for judge 'b'", 1), (
        "a failure is no progress"
    )
