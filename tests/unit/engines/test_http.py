"""The permitted callers of each route, as a table.

The gate between requests and weight updates.
"""

from __future__ import annotations

import asyncio

import pytest

from gcore.engines.serving.engine import UpdateLock
from gcore.engines.serving.http import ADMIN, ApiKeys, error_response
from gcore.errors import EngineError, GcoreError
from gcore.media.protocol import BlobTooLarge, StoreFull, StoreUnreachable

NORMAL, ADMINISTRATIVE, OPEN = "/generate", "/abort_request", "/health_generate"


@pytest.mark.parametrize(
    ("keys", "normal", "administrative"),
    [
        pytest.param(ApiKeys(), {None, "k", "a"}, {None, "k", "a"}, id="no keys"),
        pytest.param(ApiKeys("k"), {"k"}, {"k"}, id="a key for all"),
        pytest.param(ApiKeys(None, "a"), {None, "k", "a"}, {"a"}, id="a key for changes"),
        pytest.param(ApiKeys("k", "a"), {"k"}, {"a"}, id="both"),
    ],
)
def test_a_route_opens_to_its_own_key(keys: ApiKeys, normal: set[str | None], administrative: set[str | None]) -> None:
    for path, allowed in ((NORMAL, normal), (ADMINISTRATIVE, administrative), (OPEN, {None, "k", "a"})):
        for given in (None, "k", "a"):
            assert keys.allow(path, None if given is None else f"Bearer {given}") == (given in allowed)


@pytest.mark.parametrize("header", ["", "Bearer", "k", "Basic k", "Bearer  k", "Bearer kk", "Bearer \u00e4"])
def test_wrong_key_is_refused(header: str) -> None:
    assert not ApiKeys("k").allow(NORMAL, header)


def test_the_word_bearer_is_read_in_any_case() -> None:
    assert ApiKeys("k").allow(NORMAL, "bearer k")


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ApiKeys("secret", "secret"))


def test_every_route_that_changes_the_engine_is_administrative() -> None:
    changing = ("/update_weight_version", "/flush_cache", "/pause_generation", "/release_memory_occupation")
    assert set(changing) <= ADMIN


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineError("no"), 400),
        (StoreFull("no room"), 503),
        (StoreUnreachable("no answer"), 503),
        (BlobTooLarge("never"), 400),
    ],
)
def test_an_answer_whose_arrays_the_store_refuses_now_is_no_refusal_of_the_request(
    error: GcoreError, status: int
) -> None:
    assert error_response(error).status_code == status


class Engine:
    """The state of an engine for its gate, and a record of events in order."""

    def __init__(self) -> None:
        self.still = False
        self.gate = UpdateLock(lambda: self.still)
        self.log: list[str] = []

    async def request(self, name: str, end: asyncio.Event) -> None:
        async with self.gate.passing():
            self.log.append(f"{name} begins")
            await end.wait()
        self.log.append(f"{name} ends")

    async def change(self, name: str) -> None:
        async with self.gate.changing():
            self.log.append(name)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_change_waits_for_requests_under_way_and_later_requests_wait_for_it() -> None:
    engine, end = Engine(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.request("first", end))
        group.create_task(engine.request("second", end))
        await settle()
        group.create_task(engine.change("change"))
        group.create_task(engine.change("another"))
        await settle()
        group.create_task(engine.request("later", end))
        await settle()
        assert engine.log == ["first begins", "second begins"]
        end.set()
    assert engine.log[2:4] == ["first ends", "second ends"]
    assert engine.log.index("change") < engine.log.index("later begins")
    assert engine.log.count("another") == 1


async def test_an_engine_that_stands_still_is_changed_at_once_and_lets_requests_in() -> None:
    engine, end = Engine(), asyncio.Event()
    engine.still = True
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.request("request", end))
        await settle()
        await engine.change("change")
        assert engine.log == ["request begins", "change"]
        end.set()


async def test_a_change_that_waits_goes_on_once_the_engine_is_paused() -> None:
    engine, end = Engine(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.request("request", end))
        await settle()
        changing = group.create_task(engine.change("change"))
        await settle()
        assert not changing.done()
        engine.still = True
        engine.gate.recheck()
        await changing
        end.set()


async def test_a_request_or_a_change_that_is_given_up_holds_nothing_up() -> None:
    engine, end = Engine(), asyncio.Event()
    running = asyncio.create_task(engine.request("given up", end))
    await settle()
    waiting = asyncio.create_task(engine.change("given up too"))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engine.change("change")
    end.set()
    await engine.request("request", end)
    assert engine.log == ["given up begins", "change", "request begins", "request ends"]
