"""Engines for the engine contract: the torch engine always, SGLang and vLLM with the markers of their names.

Of the Hugging Face engine `make test` runs the cases in `HF_IN_MAKE_TEST`, because it is slow; the rest has the marker
`hf`.
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
HF_IN_MAKE_TEST = {
    "test_a_pause_stops_tokens_and_continuing_goes_on_as_if_nothing_was",
    "test_an_abort_by_name_ends_only_what_it_names_with_its_tokens_so_far",
    "test_memory_is_released_and_resumed",
    "test_the_clients_update_under_load_is_told_in_spans",
}
"""All in one file, so that one process of the engine serves them."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        engine = item.callspec.params.get("serving") if hasattr(item, "callspec") else None
        if engine == "hf" and item.originalname not in HF_IN_MAKE_TEST:
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
    for name in ("put back", FIRST):
        body = {"model_path": str(serving.weights[0]), "weight_version": name}
        assert (await http.post("/update_weights_from_disk", json=body)).status_code == 200
