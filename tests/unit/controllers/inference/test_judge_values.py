"""A judge that is a classifier: its questions, conditions for a valid answer, and refused questions."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_classifiers import make_tiny_classifier

from controllers.api.submission.checks import check_judges
from controllers.changes import ChangeSignal
from controllers.inference.judge_engines import JudgePool
from controllers.inference.judges import JudgeMetricsObserver, open_judges
from controllers.workers.launch_documents import engine_document
from gcore.config import JobSpec, NodeConfig, parse_spec
from gcore.data.renderer import PromptRenderer
from gcore.engines import launch as sglang_launch
from gcore.engines import launch as torch_launch
from gcore.errors import EngineError, SpecError, UsageError
from gcore.ledger.records.job import EnginePlace
from gcore.models.hubs import ModelError
from gcore.observability.metrics import Metrics
from gcore.reward.judges.types import JudgeError
from gcore.rollout.client import EngineClient
from gcore.store.reference import StoreRef
from gcore.testing import FakeClock
from gcore.testing.models import make_tiny_model
from gcore.types import Prompt, PromptRef
from gcore.worker.records import WorkerRecord

PROMPT = Prompt(PromptRef(0, 0, 0), "12", (4, 5), {})
CONTEXT = 8
NODE = NodeConfig(
    node="n", home="/h", etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",), run_root="/r", sglang_python="/p"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_classifier(tmp_path_factory.mktemp("classifier"), context=CONTEXT)


def spec_of(folder: Path, **more: Any) -> JobSpec:
    judge = {"name": "taste", "kind": "classifier", "model": {"path": str(folder)}, "template": "{{ response }}"}
    judge |= {"serving": {"batch_slots": 4}} | more
    tree = {"name": "t", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
    return parse_spec(tree | {"rollout": {"max_new_tokens": 4}, "judges": [judge], "reward": {"judge": "taste"}})


class Engine:
    """A classifier's engine: a question is worth its first token. One that begins with `poison` is refused."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []
        self.aborted: list[str] = []
        self.is_away = False
        self.hangs = False
        self.poison = -1
        self.reason: dict[str, Any] | None = None
        self.score: Any = ...
        """Of every question; ...: each has its own."""
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_away:
            raise httpx.ConnectError("no server")
        if self.hangs:
            await asyncio.Event().wait()
        body = json.loads(request.content or b"{}")
        if request.url.path == "/abort_request":
            self.aborted.append(body["rid"])
        if request.url.path != "/classify":
            return httpx.Response(200, json={"weight_version": "0.0", "success": True})
        questions = body["input_ids"]
        self.asked.append(questions)
        await self.goes_on.wait()
        if any(question[0] == self.poison for question in questions):
            return httpx.Response(400, json={"error": {"message": "a question is poison"}})
        meta = {"weight_version": "0.0", "finish_reason": self.reason}
        scores = [question[0] / 2 if self.score is ... else self.score for question in questions]
        return httpx.Response(200, json=[{"embedding": [score], "meta_info": meta} for score in scores])


class Court:
    """A controller's side of a job's judges, with engines of its own."""

    def __init__(self, spec: JobSpec, *engines: str) -> None:
        self.clock = FakeClock()
        self.engines = {name: Engine() for name in engines}
        self.metrics = Metrics()
        self.book = JudgePool(spec, spec.judges[0], "u", "a.1", ChangeSignal(), self.clock, self.metrics, self.connect)
        self.counts = JudgeMetricsObserver(self.metrics, lambda *_: None)
        self.judge = open_judges(spec, {"taste": self.book}, self.counts, self.clock)["taste"]

    def connect(self, url: str, *, timeout_s: float, instance: str) -> EngineClient:
        name = url.removeprefix("http://").partition(":")[0]
        return EngineClient(url, timeout_s=timeout_s, transport=httpx.MockTransport(self.engines[name].answer))

    @property
    def serving(self) -> int:
        """Engines that answer now."""
        return sum(view.version is not None for view in self.book.views.values())

    async def meet(self) -> None:
        told = {"node": "n", "role": "reward", "judge": "taste", "job_uid": "u", "slot": "cpu:0", "state": "serving"}
        where = {"pid": 1, "pid_started": 1}
        await self.book.aim(
            {
                name: WorkerRecord.model_validate({"instance": name, "address": f"{name}:1"} | told | where)
                for name in self.engines
            }
        )
        self.book.look_after(1)
        await turns()

    async def values(self, *responses: str) -> list[float | str]:
        """The value of each response, or the reason that it has none."""
        found = await self.clock.run(self.judge.values(PROMPT, responses))
        return [one.what if isinstance(one, JudgeError) else one.value for one in found]

    def seen(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_group_is_one_request_and_each_question_has_its_own_score(folder: Path) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    assert await court.values("0", "1", "22") == [1.5, 2.0, 2.5]
    assert court.engines["a"].asked == [[[3], [4], [5, 5]]]
    assert court.seen("gcore_judge_questions_total", judge="taste", result="answered") == 3
    assert court.seen("gcore_judge_tokens_total", judge="taste", part="question") == 4
    assert court.seen("gcore_judge_tokens_total", judge="taste", part="answer") == 0
    assert court.seen("gcore_judge_open_questions", judge="taste") == 0
    assert court.seen("gcore_engine_requests_total", pool="reward", result="ok") == 1
    await court.book.close()


async def test_no_request_is_larger_than_an_engine_takes_at_once_and_engines_share_them(folder: Path) -> None:
    court = Court(spec_of(folder), "a", "b")
    await court.meet()
    assert await court.values(*(str(number) for number in range(10))) == [1.5 + number / 2 for number in range(10)]
    sizes = sorted(len(request) for engine in court.engines.values() for request in engine.asked)
    assert sizes == [2, 4, 4]
    assert all(engine.asked for engine in court.engines.values())
    await court.book.close()


async def test_a_lost_engines_questions_go_to_another_and_none_is_lost(folder: Path) -> None:
    court = Court(spec_of(folder), "a", "b")
    await court.meet()
    court.engines["a"].is_away = True
    assert await court.values("0", "1", "2") == [1.5, 2.0, 2.5]
    assert court.serving == 1, "it is distrusted"
    await court.book.close()


async def test_an_engine_that_answers_nothing_is_left_and_its_questions_go_to_another(folder: Path) -> None:
    court = Court(spec_of(folder), "a", "b")
    await court.meet()
    court.engines["a"].hangs = True
    asked = asyncio.create_task(court.judge.values(PROMPT, ["0", "1"]))
    for _ in range(60):
        await court.clock.advance(1.0)
        court.book.look_after(1)
        await turns()
        if asked.done():
            break
    assert [one.value for one in asked.result() if not isinstance(one, JudgeError)] == [1.5, 2.0]
    assert court.book.views["a"].silent
    assert court.seen("gcore_judge_questions_total", judge="taste", result="away") == 2
    await court.book.close()


async def test_of_a_request_that_is_refused_only_that_question_fails_that_is_why(folder: Path) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    court.engines["a"].poison = 4
    first, second, third = await court.values("0", "1", "2")
    assert (first, third) == (1.5, 2.5)
    assert "a question is poison" in str(second)
    await court.book.close()


async def test_aborted_question_is_retried(folder: Path) -> None:
    court = Court(spec_of(folder, tries=2), "a")
    await court.meet()
    engine = court.engines["a"]
    engine.reason = {"type": "abort", "message": "aborted by a pause"}
    (said,) = await court.values("0")
    assert "the engine aborted a request" in str(said)
    assert len(engine.asked) == 2
    assert court.serving == 1, "it answers, so it is trusted"
    await court.book.close()


@pytest.mark.parametrize("score", [None, "high", 1e300, [1.0]], ids=str)
async def test_non_finite_score_is_invalid(score: Any, folder: Path) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    court.engines["a"].score = score
    (said,) = await court.values("0")
    assert "the engine's response is invalid" in str(said)
    await court.book.close()


async def test_cancelled_question_leaves_others_of_the_request_running(folder: Path) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    engine = court.engines["a"]
    engine.goes_on.clear()
    one, other = (asyncio.create_task(court.judge.value(PROMPT, response)) for response in ("0", "1"))
    await turns()
    one.cancel()
    await turns()
    assert engine.aborted == []
    engine.goes_on.set()
    assert (await other).value == 2.0
    await court.book.close()


async def test_when_nobody_waits_any_more_the_engine_is_told_to_give_up(folder: Path) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    engine = court.engines["a"]
    engine.goes_on.clear()
    asked = [asyncio.create_task(court.judge.value(PROMPT, response)) for response in ("0", "1")]
    await turns()
    for task in asked:
        task.cancel()
    await turns()
    assert len(engine.aborted) == 2
    await court.book.close()


async def test_a_defect_is_told_to_whoever_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(EngineClient, "classify", broken)
    court = Court(spec_of(folder), "a")
    await court.meet()
    with pytest.raises(RuntimeError, match="a defect"):
        await court.judge.value(PROMPT, "0")
    await court.book.close()


async def test_a_question_that_does_not_fit_is_refused_before_it_is_asked(folder: Path) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    said, worth = await court.values("1" * CONTEXT, "1" * (CONTEXT - 1))
    assert f"the question has {CONTEXT} tokens, which do not fit into the judge's context of {CONTEXT}" in str(said)
    assert worth == 2.0
    await court.book.close()


async def test_a_long_question_is_tokenized_beside_the_event_loop_and_not_to_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    encode, where = PromptRenderer.encode, list[tuple[int, bool]]()

    def seen(self: PromptRenderer, text: str) -> tuple[int, ...]:
        where.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(self, text)

    monkeypatch.setattr(PromptRenderer, "encode", seen)
    said = await asyncio.gather(
        *(court.judge.value(PROMPT, response) for response in ("1" * 500_000, "1")), return_exceptions=True
    )
    assert "tokens, which do not fit into the judge's context" in str(said[0])
    assert (said[1].value, court.engines["a"].asked) == (2.0, [[[4]]])  # type: ignore[union-attr]
    assert len(where) == 2
    assert max(where)[0] < 5000
    assert not any(main for _, main in where)
    await court.book.close()


async def test_too_long_question_does_not_keep_an_abandoned_request_running(folder: Path) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    engine = court.engines["a"]
    engine.goes_on.clear()
    refused, gone = (asyncio.create_task(court.judge.value(PROMPT, text)) for text in ("1" * CONTEXT, "1"))
    await turns()
    assert "do not fit" in str(refused.exception())
    gone.cancel()
    await turns()
    assert len(engine.aborted) == 1
    await court.book.close()


async def test_a_question_without_tokens_is_never_asked(folder: Path) -> None:
    court = Court(spec_of(folder), "a")
    await court.meet()
    assert await court.values("", "1") == ["the question has no tokens", 2.0]
    assert court.engines["a"].asked == [[[4]]]
    await court.book.close()


async def test_without_an_engine_a_question_waits(folder: Path) -> None:
    court = Court(spec_of(folder))
    asked = asyncio.create_task(court.judge.value(PROMPT, "0"))
    await turns()
    assert not asked.done()
    assert court.seen("gcore_judge_open_questions", judge="taste") == 1
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert court.seen("gcore_judge_open_questions", judge="taste") == 0
    await court.book.close()


def test_a_model_without_a_head_of_one_number_is_refused_at_submission(folder: Path, tmp_path: Path) -> None:
    assert check_judges(spec_of(folder))["taste"].encoder is not None
    with pytest.raises(ModelError, match=r"^judges\.0 \('taste'\), .*head \(config\.json has Qwen3ForCausalLM\)"):
        check_judges(spec_of(make_tiny_model(tmp_path)))


@pytest.mark.parametrize(("engine", "argument"), [("sglang", "--port=1"), ("vllm", "--nnodes=2")])
def test_engine_args_of_a_judge_that_gcore_sets_are_refused_by_their_field(engine: str, argument: str) -> None:
    spec = spec_of(Path("m"), kind="generative", serving={"engine": engine, "engine_args": [argument]})
    name = argument.partition("=")[0]
    with pytest.raises(UsageError) as error:
        check_judges(spec)
    assert str(error.value) == (
        f"judges.0.serving.engine_args: {name} is set by gcore. Remove {name} from judges.0.serving.engine_args"
    )


def test_a_judge_without_room_for_a_response_is_refused_at_submission(folder: Path) -> None:
    checked = check_judges(spec_of(folder, template="12345678{{ response }}"))["taste"]
    with pytest.raises(
        SpecError, match="has 8 tokens, which leaves no room for a response in the judge's context of 8"
    ):
        checked.check_question(PROMPT, "source")


def test_a_context_that_the_judges_model_has_not_is_refused_at_submission(folder: Path) -> None:
    model = {"path": str(folder), "max_length": 1_000_000}
    with pytest.raises(SpecError, match="max_length is 1000000, which exceeds the judge's context of 8") as raised:
        check_judges(spec_of(folder, model=model))["taste"].check_question(PROMPT, "source")
    assert raised.value.where == "judges.0.model.max_length"
    sglang = check_judges(spec_of(folder, model=model, serving={"engine": "sglang"}))["taste"]
    sglang.check_question(PROMPT, "source")  # which looks at its configuration itself


@pytest.mark.parametrize("engine", ["torch", "sglang"])
def test_its_engines_are_told_that_they_classify(engine: str, folder: Path) -> None:
    spec = spec_of(folder, serving={"engine": engine})
    kind = torch_launch.EngineLaunch if engine == "torch" else sglang_launch.SglangLaunch
    judges = engine_document(spec, EnginePlace(node="n", slot="cpu:0", judge="taste"), NODE)
    assert torch_launch.parse_launch(kind, judges.document).task == "classify"
    policys = engine_document(spec, EnginePlace(node="n", slot="cpu:0"), NODE)
    assert torch_launch.parse_launch(torch_launch.EngineLaunch, policys.document).task == "generate"


async def test_an_answer_with_too_few_scores_is_no_answer() -> None:
    async def one(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=[{"embedding": [1.0], "meta_info": {}}])

    client = EngineClient("http://a:1", timeout_s=1, transport=httpx.MockTransport(one))
    assert await client.classify([[3]], rid="r") == (1.0,)
    with pytest.raises(EngineError, match="does not have 2 scores"):
        await client.classify([[3], [4]], rid="r")
