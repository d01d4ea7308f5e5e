"""The worker and the client in front of the real SGLang, on the CPU (make test-sglang).

The engine contract (tests/contract) covers SGLang's routes; these tests cover gcore's use of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_processes import SglangProcess, require_python
from sglang_worker import LONG_S, Worker, check_ended, start_worker
from tiny_classifiers import make_tiny_classifier
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from gcore.engines.environments import SGLANG
from gcore.engines.launch import SglangLaunch
from gcore.engines.sglang.command import server_command
from gcore.errors import EngineError, EngineUnreachable
from gcore.rollout.client import EngineClient, EngineInfo, SamplingParams
from gcore.testing.models import make_tiny_model
from gcore.types import Sample, Version

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7]
MANY = SamplingParams(temperature=1.0, max_new_tokens=10_000)
"""More than is waited for."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return (
        make_tiny_model(root / "first", seed=0, context=20_000, ends=False),
        make_tiny_model(root / "second", seed=1, context=20_000, ends=False),
    )


@pytest.fixture
def start(tmp_path: Path, folders: tuple[Path, Path]) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def begin(**more: Any) -> Worker:
        document = {"kind": "sglang", "python": str(require_python(SGLANG)), "model": str(folders[0])}
        document |= {"weight_version": "0.0", "batch_slots": 4, **more}
        started.append(start_worker(document, tmp_path / f"log{len(started)}"))
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


def scheduler_of(worker: Worker) -> int:
    """The process that holds the model."""
    for process in worker.below():
        if b"sglang::scheduler" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            return process.pid
    raise AssertionError("no scheduler")


async def test_a_worker_serves_tells_its_progress_and_its_servers_death(start: Callable[..., Worker]) -> None:
    worker = start()
    client = EngineClient(f"http://{worker.hear('serving')['address']}", timeout_s=LONG_S)
    assert (await client.info()).version == Version(0, 0)
    busy = asyncio.create_task(client.generate(PROMPT, MANY, seeds=range(6), rid="busy"))
    first = await asyncio.to_thread(worker.hear, "progress", phase="generating")
    second = await asyncio.to_thread(worker.hear, "progress", phase="generating")
    assert second["progress"] > first["progress"]
    processes = worker.below()
    os.kill(scheduler_of(worker), signal.SIGKILL)
    reason = (await asyncio.to_thread(worker.hear, "failed"))["reason"]
    assert reason.startswith("SGLang's server ended")
    assert worker.process.wait(LONG_S) == 1
    with pytest.raises(EngineUnreachable):
        await busy
    await client.close()
    await asyncio.to_thread(check_ended, processes)


async def test_a_worker_serves_a_classifier_and_tells_that_it_waits(
    start: Callable[..., Worker], tmp_path: Path
) -> None:
    folder = make_tiny_classifier(tmp_path / "classifier", kind="qwen3")
    worker = start(model=str(folder), task="classify")
    client = EngineClient(f"http://{worker.hear('serving')['address']}", timeout_s=LONG_S)
    assert (await client.info()).version == Version(0, 0)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        score = float(plain(torch.tensor([PROMPT])).logits[0, 0])
    assert await client.classify([PROMPT, PROMPT], rid="asked") == pytest.approx((score, score), abs=1e-4)
    await asyncio.to_thread(worker.hear, "progress", phase="waiting")
    processes = worker.below()
    worker.say("stop")
    assert worker.process.wait(LONG_S) == 0
    await client.close()
    await asyncio.to_thread(check_ended, processes)


@pytest.mark.parametrize("while_it", ["loads", "serves"])
def test_a_killed_worker_leaves_no_process_of_sglang_behind(start: Callable[..., Worker], while_it: str) -> None:
    worker = start()
    if while_it == "serves":
        worker.hear("serving")
    else:
        # The warden, the server and one more: it has begun to start its own.
        while len(worker.below()) < 3:
            worker.hear("progress", phase="loading")
    processes = worker.below()
    os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait(LONG_S)
    check_ended(processes)


def test_arguments_that_sglang_does_not_take_are_told_in_its_own_words(start: Callable[..., Worker]) -> None:
    reason = start(engine_args=["--enable-deterministic-inference"]).hear("failed")["reason"]
    assert "attention backends are supported for deterministic inference" in reason


PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
options = vars(parser.parse_args(sys.argv[1:]))
print(json.dumps({name: options[name] for name in ("tp_size", "device", "enable_memory_saver", "mem_fraction_static")}))
"""


def test_sglang_knows_every_option_that_a_gpu_server_is_given_and_takes_the_jobs_word_last() -> None:
    launch = SglangLaunch(
        python=str(require_python(SGLANG)),
        model="/m",
        device="cuda",
        gpus=2,
        cache_tokens=5,
        context_length=7,
        trust_remote_code=True,
        engine_args=("--mem-fraction-static", "0.25"),
    )
    command = [launch.python, "-W", "ignore", "-c", PARSE, *server_command(launch, 1)[3:]]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert result.returncode == 0, result.stderr
    parsed = {"tp_size": 2, "device": "cuda", "enable_memory_saver": True, "mem_fraction_static": 0.25}
    assert json.loads(result.stdout) == parsed


@pytest.fixture(scope="module")
def url(folders: tuple[Path, Path]) -> Iterator[str]:
    with SglangProcess(folders[0], batch_slots=4, cache_tokens=20_000) as server:
        yield server.base_url


@pytest.fixture
async def client(url: str, folders: tuple[Path, Path]) -> AsyncIterator[EngineClient]:
    client = EngineClient(url, timeout_s=LONG_S)
    await client.update_weights(str(folders[0]), Version(0, 0))
    yield client
    await client.abort_all()
    await client.close()


async def until(client: EngineClient, condition: Callable[[EngineInfo], bool]) -> None:
    while True:
        if condition(await client.info()):
            return
        await asyncio.sleep(0.01)


def error_of(folder: Path, sample: Sample, temperature: float, start: int = 0, end: int | None = None) -> float:
    """Largest distance of its log-probabilities from a full forward pass of the plain model, tokens [start, end)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT + list(sample.token_ids)])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1] / temperature
    plain = torch.log_softmax(logits, -1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
    return float((plain - torch.tensor(sample.logprobs))[start:end].abs().max())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}], ids=str)
async def test_log_probabilities_are_tempered_and_not_truncated(
    client: EngineClient, folders: tuple[Path, Path], temperature: float, cut: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=50, **cut)
    for sample in await client.generate(PROMPT, params, seeds=(1, 2), rid="tempered"):
        assert error_of(folders[0], sample, temperature) < 1e-4


async def test_every_sampling_parameter_is_passed_on(client: EngineClient) -> None:
    (free,) = await client.generate(PROMPT, SamplingParams(0.0, 30), seeds=(1,), rid="free")
    stop = free.token_ids[8]
    first = free.token_ids.index(stop)
    params = SamplingParams(0.0, 30, stop_token_ids=(stop,))
    (stopped,) = await client.generate(PROMPT, params, seeds=(1,), rid="stopped")
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    params = SamplingParams(0.0, 30, stop_token_ids=(stop,), min_new_tokens=first + 5)
    (late,) = await client.generate(PROMPT, params, seeds=(1,), rid="late")
    assert len(late.token_ids) >= first + 5
    narrow = SamplingParams(1.0, 40, min_p=0.999)
    (likeliest,) = await client.generate(PROMPT, narrow, seeds=(1,), rid="narrow")
    assert likeliest.token_ids[:30] == free.token_ids


async def test_weights_change_at_once_under_load_and_the_spans_tell_which_made_what(
    client: EngineClient, folders: tuple[Path, Path]
) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=600)
    running = asyncio.create_task(client.generate(PROMPT, params, seeds=range(8), rid="change"))
    await until(client, lambda info: bool(info.running))
    await client.update_weights(str(folders[1]), Version(0, 1))
    assert not running.done()
    assert (await client.info()).version == Version(0, 1)
    samples = await running
    assert {sample.spans[-1].version for sample in samples} == {Version(0, 1)}
    assert any(len(sample.spans) == 2 for sample in samples)
    for sample in samples:
        for span in sample.spans:
            assert error_of(folders[span.version.step], sample, 1.0, span.start, span.end) < 1e-4


async def test_a_refused_change_leaves_the_version_and_lets_it_go_on(client: EngineClient) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=100)
    running = asyncio.create_task(client.generate(PROMPT, params, seeds=(1,), rid="refused"))
    with pytest.raises(EngineError, match="/update_weights_from_disk"):
        await client.update_weights("/nowhere", Version(0, 9))
    (sample,) = await running
    assert sample.finish_reason == "length"
    assert (await client.info()).version == Version(0, 0)


async def test_each_sample_of_a_request_is_aborted_with_the_tokens_it_has(client: EngineClient) -> None:
    running = asyncio.create_task(client.generate(PROMPT, MANY, seeds=range(6), rid="gone"))
    await until(client, lambda info: bool(info.waiting))
    await client.abort("gone", 6)
    samples = await running
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert any(sample.token_ids for sample in samples)
    assert all(sample.oldest == Version(0, 0) for sample in samples)


async def test_its_scheduler_answers_while_it_is_paused(client: EngineClient) -> None:
    running = asyncio.create_task(client.generate(PROMPT, MANY, seeds=(1,), rid="paused"))
    await client.pause("in_place")
    assert (await client.scheduler_state())["internal_states"]
    await client.resume()
    await client.abort("paused", 1)
    assert (await running)[0].finish_reason == "abort"


def test_a_full_queue_sends_a_request_to_another_engine(folders: tuple[Path, Path]) -> None:
    async def ask(url: str) -> list[BaseException | tuple[Sample, ...]]:
        client = EngineClient(url, timeout_s=LONG_S)
        params = SamplingParams(temperature=1.0, max_new_tokens=200)
        requests = (client.generate(PROMPT, params, seeds=range(4), rid=f"full-{n}") for n in range(6))
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        await client.close()
        return outcomes

    arguments = ("--max-queued-requests", "3")
    with SglangProcess(folders[0], batch_slots=4, cache_tokens=20_000, engine_args=arguments) as server:
        outcomes = asyncio.run(ask(server.base_url))
    assert any(isinstance(outcome, EngineUnreachable) for outcome in outcomes)
    assert all(isinstance(outcome, tuple | EngineUnreachable) for outcome in outcomes)
