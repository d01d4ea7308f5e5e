"""Engines for the engine contract: the torch engine always, SGLang and vLLM with the markers of their names.

Of the Hugging Face engine, which is slow, `make test` leaves out the cases in `HF_ELSEWHERE`: they have the marker `hf`.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from engine_contract import CHAT_TEMPLATE, CONTEXT, FIRST, OF_SGLANG, OF_VLLM, SLOTS, Serving
from engine_processes import HF, TORCH, SglangProcess, engine_process, vllm_command

from gcore.rollout.client import EngineClient
from gcore.testing.models import make_tiny_model

ENGINES = ["torch", "hf", OF_SGLANG, OF_VLLM]
TIMEOUT_S = 120
HF_ELSEWHERE = {
    "test_an_answer_too_big_for_the_event_loop_is_whole",
    "test_a_thousand_waiting_requests_are_all_answered",
    "test_many_samples_are_distributed_as_the_model_says",
    "test_a_request_that_arrives_while_others_decode_has_its_first_token_before_they_end",
}
"""A third of the time of the Hugging Face engine's cases."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        engine = item.callspec.params.get("serving") if hasattr(item, "callspec") else None
        if engine == "hf" and item.originalname in HF_ELSEWHERE:
            item.add_marker("hf")


@pytest.fixture(scope="session")
def engine_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


def make_models(root: Path, **shape: int) -> tuple[Path, Path]:
    first = make_tiny_model(root / "first", seed=0, context=CONTEXT, ends=False, **shape)
    (first / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return first, make_tiny_model(root / "second", seed=1, context=CONTEXT, ends=False, **shape)


@pytest.fixture(scope="session", params=ENGINES)
def serving(
    request: pytest.FixtureRequest, engine_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    if request.param == "vllm":
        # On CPUs vLLM's attention has no heads of less than 32.
        folders = make_models(tmp_path_factory.mktemp("wide"), hidden=64, heads=2, kv_heads=1)
        with engine_process(folders[0], vllm_command(), batch_slots=SLOTS) as url:
            yield Serving("vllm", url, folders)
    elif request.param in ("torch", "hf"):
        command = TORCH if request.param == "torch" else HF
        with engine_process(engine_folders[0], command, batch_slots=SLOTS) as url:
            yield Serving(request.param, url, engine_folders)
    else:
        with SglangProcess(engine_folders[0], batch_slots=SLOTS) as process:
            yield Serving("sglang", process.base_url, engine_folders)


@pytest.fixture
async def client(serving: Serving) -> AsyncIterator[EngineClient]:
    client = EngineClient(serving.url, timeout_s=TIMEOUT_S)
    yield client
    await client.abort_all()
    await client.resume()
    await client.close()


@pytest.fixture
async def http(serving: Serving) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=serving.url, timeout=TIMEOUT_S, trust_env=False) as http:
        yield http
        await http.post("/abort_request", json={"abort_all": True})
        await http.post("/continue_generation", json={})


@pytest.fixture
async def changing(serving: Serving, http: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    """For tests that change weights or their name: afterwards the first weights are served again."""
    yield http
    await http.post("/abort_request", json={"abort_all": True})
    await http.post("/continue_generation", json={})
    await http.post("/end_weight_update", json={})
    # By way of a name that is no version: versions only ever rise.
    for name in ("restored", FIRST):
        body = {"model_path": str(serving.weights[0]), "weight_version": name}
        assert (await http.post("/update_weights_from_disk", json=body)).status_code == 200
