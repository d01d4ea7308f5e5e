"""The torch engine's process under load: late and lost clients, long queues, weight updates, slow readers.

No test measures time: each waits until the engine's gauges show the required state.
"""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import weight_trainer
from engine_contract import begin, generate, mixed_error, post, prompt, reason, span_error, spans
from safetensors.torch import load_file
from warm_programs import ENGINES

from gcore.models.publisher import describe_tensors
from gcore.rollout.transport import EngineTransport
from gcore.testing.models import make_tiny_model

CONTEXT = 40_000
SLOTS = 64
ENDLESS = {"max_new_tokens": 30_000, "ignore_eos": True}
IGNORED = {"ignore_eos": True}
MIB = 2**20


@dataclass(frozen=True)
class Engine:
    """A process that serves, and the folders of its weights."""

    url: str
    pid: int
    weights: tuple[Path, Path]

    @property
    def memory(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("models")
    folders = (
        make_tiny_model(root / "first", seed=0, context=CONTEXT, ends=False),
        make_tiny_model(root / "second", seed=1, context=CONTEXT, ends=False),
    )
    process = ENGINES.popen(
        *("gcore.rollout.engine", "--model", str(folders[0]), f"--batch-slots={SLOTS}"),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert process.stdout is not None
    address = process.stdout.readline().removeprefix("serving on ").strip()
    assert address
    yield Engine(f"http://{address}", process.pid, folders)
    process.terminate()
    process.communicate()


@pytest.fixture
async def http(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=engine.url, timeout=240, trust_env=False, limits=limits) as http:
        yield http
        await http.post("/abort_request", json={"abort_all": True})
        await http.post("/continue_generation", json={})


async def gauge(http: httpx.AsyncClient, name: str) -> int:
    text = (await http.get("/metrics")).text
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"sglang:{name} "))


async def until(http: httpx.AsyncClient, **expected: int) -> None:
    while True:
        if [await gauge(http, name) for name in expected] == list(expected.values()):
            return
        await asyncio.sleep(0.005)


async def filled(http: httpx.AsyncClient, rows: int = SLOTS) -> "asyncio.Task[Any]":
    """A request of endless samples, all of which run."""
    task = asyncio.create_task(
        generate(http, input_ids=[[5, 6]] * rows, rid="filling", sampling_params=ENDLESS, return_logprob=True)
    )
    await until(http, num_running_reqs=rows)
    return task


async def test_a_request_that_arrives_while_others_decode_has_its_answer_while_they_run(
    http: httpx.AsyncClient,
) -> None:
    filling = await filled(http, SLOTS - 1)
    late = await begin(http, input_ids=prompt(1, 500), sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    assert reason(await late.last()) == {"type": "length", "length": 5}
    assert not filling.done()
    assert await gauge(http, "num_running_reqs") == SLOTS - 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_away_frees_its_rows_for_those_who_wait(
    engine: Engine, http: httpx.AsyncClient, stream: bool
) -> None:
    async with httpx.AsyncClient(base_url=engine.url, timeout=240, trust_env=False) as leaving:
        if stream:
            going = [await begin(leaving, input_ids=[[5, 6]] * SLOTS, sampling_params=ENDLESS)]
            tasks = [one.task for one in going if one.task is not None]
            await until(http, num_running_reqs=SLOTS)
        else:
            tasks = [await filled(leaving)]
        waiting = asyncio.create_task(generate(http, input_ids=[7], sampling_params={"max_new_tokens": 3}))
        await until(http, num_queue_reqs=1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (await waiting)["meta_info"]["completion_tokens"] == 3
    await until(http, num_running_reqs=0, num_queue_reqs=0)


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may have more than 1,024 files open, which an ordinary user's may not at first."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
async def test_a_thousand_waiting_requests_all_come_back_and_memory_stays_bounded(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    async def one(client: httpx.AsyncClient, number: int) -> None:
        answer = await generate(
            client,
            input_ids=prompt(number, 20),
            sampling_params={"max_new_tokens": 10, "ignore_eos": True},
            return_logprob=True,
        )
        assert len(answer["output_ids"]) == 10

    # gcore's own transport: httpx's pool would take minutes over a thousand connections.
    async with httpx.AsyncClient(base_url=engine.url, timeout=240, transport=EngineTransport()) as many:
        await asyncio.gather(*(one(many, n) for n in range(100)))
        before = engine.memory
        await post(http, "/pause_generation", mode="in_place")
        tasks = [asyncio.create_task(one(many, n)) for n in range(1000)]
        waiting = asyncio.create_task(until(http, num_queue_reqs=1000))
        await asyncio.wait((waiting, *tasks), return_when=asyncio.FIRST_COMPLETED)
        assert [task for task in tasks if task.done()] == [], "none was refused"
        await waiting
        await post(http, "/continue_generation")
        await asyncio.gather(*tasks)
    assert engine.memory - before < 150 * MIB
    assert await gauge(http, "num_queue_reqs") == 0


async def test_waiting_requests_are_served_in_the_order_in_which_they_came(http: httpx.AsyncClient) -> None:
    filling = await filled(http, SLOTS - 1)
    ended: list[int] = []

    async def one(number: int) -> None:
        # Long enough that no two answers are read at once: one row is free, so they run one after the other.
        await generate(http, input_ids=[5], rid=f"one-{number}", sampling_params={"max_new_tokens": 60, **IGNORED})
        ended.append(number)

    await post(http, "/pause_generation", mode="in_place")
    tasks = []
    for number in range(12):
        tasks.append(asyncio.create_task(one(number)))
        await until(http, num_queue_reqs=number + 1)
    await post(http, "/continue_generation")
    await asyncio.gather(*tasks)
    assert ended == list(range(12))
    assert not filling.done()


async def test_the_prompts_of_one_request_begin_in_their_order(http: httpx.AsyncClient) -> None:
    filling = await filled(http, SLOTS - 4)
    many = await begin(
        http, input_ids=[prompt(n, 3) for n in range(200)], sampling_params={"max_new_tokens": 4, **IGNORED}
    )
    first_seen = list(dict.fromkeys(part["index"] for part in await many.ended()))
    assert first_seen == list(range(200))
    assert not filling.done()


async def test_weights_from_a_folder_under_load_lose_no_token_and_each_span_has_its_own_numbers(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    async def change() -> None:
        await post(
            http,
            "/update_weights_from_disk",
            model_path=str(engine.weights[1]),
            weight_version="0.1",
            flush_cache=False,
        )

    await changed_under_load(engine, http, change)
    for name in ("back", "0.0"):
        await post(http, "/update_weights_from_disk", model_path=str(engine.weights[0]), weight_version=name)


async def test_weights_from_a_trainer_under_load_lose_no_token_and_each_span_has_its_own_numbers(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    weights = dict(sorted(load_file(engine.weights[1] / "model.safetensors").items()))
    manifest = describe_tensors(weights)
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused_port = free.getsockname()[1]
    program = [sys.executable, weight_trainer.__file__, str(engine.weights[1]), str(unused_port), "2", "load"]
    trainer = start(program)
    try:
        await post(
            http,
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=unused_port,
            rank_offset=1,
            world_size=2,
            group_name="load",
            backend="gloo",
        )

        async def change() -> None:
            await post(http, "/begin_weight_update")
            body = {
                "names": list(manifest.names),
                "dtypes": list(manifest.dtypes),
                "shapes": [list(shape) for shape in manifest.shapes],
                "group_name": "load",
                "weight_version": "0.1",
                "flush_cache": False,
            }
            asked = asyncio.create_task(post(http, "/update_weights_from_distributed", **body))
            assert trainer.stdin is not None
            trainer.stdin.write("send *\n")
            trainer.stdin.flush()
            await asked
            await post(http, "/end_weight_update")

        await changed_under_load(engine, http, change)
        await post(http, "/destroy_weights_update_group", group_name="load")
    finally:
        trainer.kill()
        trainer.communicate()
    for name in ("back", "0.0"):
        await post(http, "/update_weights_from_disk", model_path=str(engine.weights[0]), weight_version=name)


def start(program: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def changed_under_load(engine: Engine, http: httpx.AsyncClient, change: Any) -> None:
    """64 samples decode, are paused where they stand, get other weights, and go on."""
    prompts = [prompt(n, 3 + n % 7) for n in range(SLOTS)]
    length = 400
    sampling = {"max_new_tokens": length, **IGNORED}
    made = await gauge(http, "generation_tokens_total")
    running = asyncio.create_task(generate(http, input_ids=prompts, sampling_params=sampling, return_logprob=True))
    await until(http, num_running_reqs=SLOTS)
    await passed(http, made + 20 * SLOTS)
    await post(http, "/pause_generation", mode="in_place")
    assert await gauge(http, "num_running_reqs") == SLOTS
    await change()
    await post(http, "/continue_generation")
    answers = await running
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer["output_ids"]) == length
        (old, start, middle), (new, again, end) = spans(answer)
        assert (old, start, new, end) == ("0.0", 0, "0.1", length)
        assert 0 < middle == again < length
        assert span_error(engine.weights[0], ids, answer, 0, middle) < 1e-4
        assert mixed_error(engine.weights, ids, answer, middle) < 1e-4


async def test_a_client_that_does_not_read_its_stream_costs_no_memory_that_grows(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    host, port = engine.url.removeprefix("http://").split(":")
    asked = {"input_ids": [[5, 6]] * 16, "sampling_params": {"max_new_tokens": 900, **IGNORED}, "stream": True}
    body = json.dumps({**asked, "return_logprob": True}).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    try:
        made = await gauge(http, "generation_tokens_total")
        writer.write(head % len(body) + body)
        await passed(http, made + 16 * 200)
        before = engine.memory
        await passed(http, made + 16 * 900)
        # Were all that is told to it kept, it would be 16 x 700 lists of 550 tokens and log-probabilities: 200 MiB.
        assert engine.memory - before < 60 * MIB
    finally:
        writer.close()
    await until(http, num_running_reqs=0)


async def passed(http: httpx.AsyncClient, tokens: int) -> None:
    """Until the engine has made so many tokens in its life."""
    while True:
        if await gauge(http, "generation_tokens_total") >= tokens:
            return
        await asyncio.sleep(0.01)
