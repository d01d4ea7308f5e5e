"""Weight updates that a real trainer process broadcasts over gloo, against each available engine."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from engine_contract import (
    ENDLESS,
    FIRST,
    FRONT_END,
    Serving,
    begin,
    error_of,
    generate,
    mixed_error,
    post,
    prompt,
    span_error,
    spans,
)
from trainer_process import Trainer, joined, updated

from gcore.system.network import free_ports

SECOND = "0.1"


@pytest.fixture
def trainers(serving: Serving) -> Iterator[Callable[..., Trainer]]:
    started: list[Trainer] = []

    def start(group: str, folder: Path | None = None) -> Trainer:
        started.append(Trainer(folder or serving.weights[1], free_ports(1)[0], group))
        return started[-1]

    yield start
    for trainer in started:
        trainer.process.kill()
        trainer.process.communicate()


async def test_weights_come_from_a_trainers_broadcast(
    changing: httpx.AsyncClient, serving: Serving, trainers: Callable[..., Trainer]
) -> None:
    trainer, ids = trainers("whole"), prompt(3, 8)
    async with joined(changing, trainer):
        await post(changing, "/begin_weight_update")
        response = await updated(changing, trainer, weight_version=SECOND)
        assert (response.status_code, response.json()["success"]) == (200, True)
        await post(changing, "/end_weight_update")
        answer = await generate(changing, input_ids=ids, sampling_params={"max_new_tokens": 30}, return_logprob=True)
    assert spans(answer) == [(SECOND, 0, 30)]
    assert error_of(serving.weights[1], ids, answer) < serving.tolerance
    assert (await changing.get("/model_info")).json()["weight_version"] == SECOND


async def test_weights_may_come_in_several_parts_and_the_version_with_the_last(
    changing: httpx.AsyncClient, serving: Serving, trainers: Callable[..., Trainer]
) -> None:
    trainer, ids = trainers("parts"), prompt(3, 8)
    names = list(trainer.weights)
    async with joined(changing, trainer):
        await post(changing, "/pause_generation", mode="in_place")
        await post(changing, "/begin_weight_update")
        for part in (names[::2], names[1::2]):
            version = SECOND if part[0] == names[1] else None
            response = await updated(changing, trainer, part, weight_version=version)
            assert response.status_code == 200
        await post(changing, "/end_weight_update")
        await post(changing, "/continue_generation")
        answer = await generate(changing, input_ids=ids, sampling_params={"max_new_tokens": 30}, return_logprob=True)
    assert spans(answer) == [(SECOND, 0, 30)]
    assert error_of(serving.weights[1], ids, answer) < serving.tolerance


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True)])
async def test_a_broadcast_under_load_is_told_in_spans(
    changing: httpx.AsyncClient, serving: Serving, trainers: Callable[..., Trainer], mode: str, flush: bool
) -> None:
    trainer = trainers(f"load-{mode}")
    prompts = [prompt(8, 3 + n) for n in range(4)]
    async with joined(changing, trainer):
        running = [
            await begin(changing, input_ids=ids, sampling_params=ENDLESS, return_logprob=True) for ids in prompts
        ]
        await running[-1].until(50)
        await post(changing, "/pause_generation", mode=mode)
        await post(changing, "/begin_weight_update")
        response = await updated(changing, trainer, weight_version=SECOND, flush_cache=flush)
        assert response.status_code == 200, response.text
        await post(changing, "/end_weight_update")
        paused_at = max(len(streaming.parts[-1]["output_ids"]) for streaming in running)
        await post(changing, "/continue_generation")
        for streaming in running:
            await streaming.until(paused_at + 100)
        await post(changing, "/abort_request", abort_all=True)
        for ids, streaming in zip(prompts, running, strict=True):
            answer = await streaming.last()
            (old, start, middle), (new, again, end) = spans(answer)
            assert (old, start, new, end) == (FIRST, 0, SECOND, len(answer["output_ids"]))
            assert 0 < middle == again < end
            assert span_error(serving.weights[0], ids, answer, 0, middle) < 1e-4
            if mode == "retract":
                assert span_error(serving.weights[1], ids, answer, middle, end) < 1e-4
            else:
                assert mixed_error(serving.weights, ids, answer, middle) < 1e-4


async def test_a_broadcast_outside_an_update_or_of_no_group_is_refused(
    changing: httpx.AsyncClient, trainers: Callable[..., Trainer]
) -> None:
    trainer = trainers("early")
    async with joined(changing, trainer):
        response = await changing.post("/update_weights_from_distributed", json=trainer.body())
        assert response.status_code == 400
        assert response.json()["success"] is False
        await post(changing, "/begin_weight_update")
        assert (await changing.post("/begin_weight_update", json={})).status_code == 400
        response = await changing.post("/update_weights_from_distributed", json={**trainer.body(), "group_name": "x"})
        assert response.status_code == 400
        assert response.json()["success"] is False
        await post(changing, "/end_weight_update")
    assert (await changing.post("/destroy_weights_update_group", json={"group_name": "early"})).status_code == 400
    assert (await changing.get("/model_info")).json()["weight_version"] == FIRST


# SGLang passes over a name that it does not know, and dies of a shape that does not fit.
@FRONT_END
async def test_a_broadcast_that_does_not_fit_is_received_and_refused_and_the_old_weights_stay(
    changing: httpx.AsyncClient, serving: Serving, trainers: Callable[..., Trainer]
) -> None:
    trainer = trainers("unfit")
    name = "model.embed_tokens.weight"
    async with joined(changing, trainer):
        await post(changing, "/begin_weight_update")
        fits = trainer.body([name], weight_version="9.9")
        for wrong in ({"names": ["model.nothing"]}, {"shapes": [fits["shapes"][0][::-1]]}):
            body = fits | wrong
            asked = asyncio.create_task(changing.post("/update_weights_from_distributed", json=body))
            trainer.send([name])
            # Whoever sends does not hang.
            assert await trainer.says() == "sent"
            response = await asked
            assert response.status_code == 400
            assert "the whole broadcast was rejected" in response.json()["message"]
        bodies = ({"dtypes": ["float31"]}, *({"shapes": shapes} for shapes in ([], [[-1, 5]], [[2**50]], [[2**70]])))
        for wrong in bodies:
            response = await changing.post("/update_weights_from_distributed", json=trainer.body([name]) | wrong)
            assert response.status_code == 400
        await post(changing, "/end_weight_update")
        assert (await changing.post("/init_weights_update_group", json=trainer.joining())).status_code == 400
    answer = await generate(changing, input_ids=[5], sampling_params={"max_new_tokens": 20}, return_logprob=True)
    assert spans(answer) == [(FIRST, 0, 20)]
    assert error_of(serving.weights[0], [5], answer) < 1e-5


# SGLang waits for the others for half an hour, and answers nothing meanwhile.
@FRONT_END
async def test_a_group_that_cannot_be_is_refused_and_a_trainer_that_dies_is_told_of(
    changing: httpx.AsyncClient, serving: Serving, trainers: Callable[..., Trainer]
) -> None:
    fields = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
    many = {"rank_offset": 2**70, "world_size": 2**71}
    wrongs = [{"backend": "carrier pigeon"}, {"rank_offset": 2}, {"group_name": ""}, many]
    if not torch.cuda.is_available():
        wrongs.append({"backend": "nccl"})
    for wrong in (*wrongs, {"master_port": 0}, {"master_port": 2**16}):
        response = await changing.post("/init_weights_update_group", json={**fields, "backend": "gloo", **wrong})
        assert response.status_code == 400
        assert response.json()["success"] is False
    trainer = trainers("dies")
    async with joined(changing, trainer):
        await post(changing, "/begin_weight_update")
        asked = asyncio.create_task(changing.post("/update_weights_from_distributed", json=trainer.body()))
        trainer.process.kill()
        response = await asked
        assert response.status_code == 400
        assert "broadcast failed" in response.json()["message"]
        await post(changing, "/end_weight_update")
    answer = await generate(changing, input_ids=[5], sampling_params={"max_new_tokens": 20}, return_logprob=True)
    assert error_of(serving.weights[0], [5], answer) < 1e-5
