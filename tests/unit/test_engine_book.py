"""Routing to engines: what an answer must be to count."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from controllers.changes import Changes
from controllers.engines import EngineBook
from gcore.errors import EngineError
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.types import Sample, Version, VersionSpan

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


class OldEngine:
    """Says that it serves one version, and answers with another."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.aborted: list[str] = []
        self.resumed = 0

    async def served(self) -> Version:
        return Version(0, 2)

    async def resume(self) -> None:
        self.resumed += 1

    async def generate_each(self, prompts: Any, params: Any, *, seeds: Any, rid: str) -> tuple[Sample, ...]:
        return tuple(Sample((1,), (0.0,), "a", "stop", (VersionSpan(Version(0, 1), 0, 1),)) for _ in seeds)

    async def close(self) -> None:
        return None


async def test_an_answer_made_with_other_weights_is_refused_and_its_engine_distrusted(tmp_path: Any) -> None:
    engines = EngineBook(Changes(), timeout_s=1.0, connect=OldEngine)  # type: ignore[arg-type]
    await engines.aim({"e": SimpleNamespace(address="h:1")})  # type: ignore[dict-item]
    await engines.publish("e", Version(0, 2), tmp_path)
    assert engines.serves(Version(0, 2))
    with pytest.raises(EngineError, match=r"weights 0\.1, not 0\.2"):
        await engines.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r")
    assert not engines.serves(Version(0, 2))


async def test_an_engine_that_has_the_version_already_is_let_go_on_for_its_publisher_may_have_died(
    tmp_path: Any,
) -> None:
    made: list[OldEngine] = []

    def connect(*_: Any, **__: Any) -> Any:
        made.append(OldEngine())
        return made[-1]

    engines = EngineBook(Changes(), timeout_s=1.0, connect=connect)
    await engines.aim({"e": SimpleNamespace(address="h:1")})  # type: ignore[dict-item]
    await engines.publish("e", Version(0, 2), tmp_path)
    assert [engine.resumed for engine in made] == [1]


class AskedEngine:
    """A real client, of an engine that takes whatever it is brought and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.serves = "0.1"
        self.refuses = False
        self.begun = asyncio.Event()
        self.generating = asyncio.Event()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if request.url.path == "/generate":
            self.begun.set()
            await self.generating.wait()
            return httpx.Response(400, json={"error": "of no interest"})
        if request.url.path == "/update_weights_from_disk":
            if self.refuses:
                return httpx.Response(400, json={"error": "no"})
            self.serves = json.loads(request.content)["weight_version"]
        return httpx.Response(200, json={"weight_version": self.serves, "success": True})

    def client(self, url: str, *, timeout_s: float) -> EngineClient:
        return EngineClient(url, timeout_s=timeout_s, transport=httpx.MockTransport(self._answer))

    def told(self) -> list[str]:
        """What it was asked since this was last called."""
        told, self.asked = self.asked, []
        return told


WHOLE_PUBLICATION = [
    "/model_info",
    "/pause_generation",
    "/update_weights_from_disk",
    "/continue_generation",
    "/model_info",
]


async def test_an_engine_of_which_all_is_known_is_brought_its_weights_in_one_request(tmp_path: Path) -> None:
    """One that is met, or that refused, is asked what it serves, and let go on: a peer may have left it paused."""
    engine = AskedEngine()
    engines = EngineBook(Changes(), timeout_s=1.0, connect=engine.client)
    await engines.aim({"e": SimpleNamespace(address="h:1")})  # type: ignore[dict-item]
    await engines.publish("e", Version(0, 2), tmp_path)
    assert engine.told() == WHOLE_PUBLICATION
    assert engines.serves(Version(0, 2))

    await engines.publish("e", Version(0, 3), tmp_path)
    assert engine.told() == ["/update_weights_from_disk"]
    assert engines.serves(Version(0, 3))

    engine.refuses = True
    with pytest.raises(EngineError):
        await engines.publish("e", Version(0, 4), tmp_path)
    assert not engines.serves(Version(0, 3))
    engine.refuses = False
    engine.told()
    await engines.publish("e", Version(0, 4), tmp_path)
    assert engine.told() == WHOLE_PUBLICATION

    engines.distrust("e")
    await engines.publish("e", Version(0, 5), tmp_path)
    assert engine.told() == WHOLE_PUBLICATION
    await engines.close()


async def test_an_engine_that_makes_responses_is_paused_while_it_takes_its_weights(tmp_path: Path) -> None:
    engine = AskedEngine()
    engines = EngineBook(Changes(), timeout_s=1.0, connect=engine.client)
    await engines.aim({"e": SimpleNamespace(address="h:1")})  # type: ignore[dict-item]
    await engines.publish("e", Version(0, 2), tmp_path)
    engine.told()
    asked = asyncio.create_task(engines.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r"))
    await engine.begun.wait()
    await engines.publish("e", Version(0, 3), tmp_path)
    assert engine.told() == ["/generate", *WHOLE_PUBLICATION]
    engine.generating.set()
    with pytest.raises(EngineError):
        await asked
    await engines.close()


class NamedEngine(OldEngine):
    """Notes what its requests are called and which it is to give up, and answers none of them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.called: asyncio.Queue[str] = asyncio.Queue()
        self.given_up: asyncio.Queue[str] = asyncio.Queue()

    async def generate_each(self, prompts: Any, params: Any, *, seeds: Any, rid: str) -> tuple[Sample, ...]:
        self.called.put_nowait(rid)
        await asyncio.Event().wait()
        return ()

    async def abort(self, rid: str, count: int) -> None:
        self.given_up.put_nowait(rid)


async def test_the_abort_of_a_request_that_was_given_up_cannot_end_the_one_that_repeats_it(tmp_path: Any) -> None:
    engine = NamedEngine()
    engines = EngineBook(Changes(), timeout_s=1.0, connect=lambda *_, **__: engine)  # type: ignore[arg-type, return-value]
    await engines.aim({"e": SimpleNamespace(address="h:1")})  # type: ignore[dict-item]
    await engines.publish("e", Version(0, 2), tmp_path)
    first = asyncio.create_task(engines.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r"))
    name = await engine.called.get()
    first.cancel()
    again = asyncio.create_task(engines.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r"))
    assert await engine.given_up.get() == name
    assert await engine.called.get() != name
    again.cancel()


class SlowEngine(OldEngine):
    """Takes its weights, and answers, when it is let."""

    def __init__(self, address: str, **_: Any) -> None:
        super().__init__()
        self.address = address
        self.weights: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers = asyncio.Event()
        self.asked = 0
        self._version = Version(0, 1)

    async def served(self) -> Version:
        return self._version

    async def update_weights(self, folder: str, version: Version, *, idle: bool = False) -> None:
        await self.weights
        self._version = version

    async def generate_each(self, prompts: Any, params: Any, *, seeds: Any, rid: str) -> tuple[Sample, ...]:
        self.asked += 1
        await self.answers.wait()
        return tuple(Sample((1,), (0.0,), "a", "stop", (VersionSpan(self._version, 0, 1),)) for _ in seeds)

    async def abort(self, rid: str, count: int) -> None:
        return None


class Two:
    """A quick engine that serves version 0.2 and a slow one on its way there, and four requests for that version."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self.made: dict[str, SlowEngine] = {}
        self.book = EngineBook(Changes(), timeout_s=1.0, connect=self._connect)  # type: ignore[arg-type]
        self.requests: list[asyncio.Task[tuple[Sample, ...]]] = []
        self.publication: asyncio.Task[None]

    def _connect(self, address: str, **_: Any) -> SlowEngine:
        self.made[address] = SlowEngine(address)
        return self.made[address]

    async def begin(self) -> tuple[SlowEngine, SlowEngine]:
        await self.book.aim({name: SimpleNamespace(address=name) for name in ("quick", "slow")})  # type: ignore[arg-type]
        quick, slow = self.made["http://quick"], self.made["http://slow"]
        quick.weights.set_result(None)
        self.publication = asyncio.create_task(self.book.publish("slow", Version(0, 2), self.folder))
        await asyncio.sleep(0)
        await self.book.publish("quick", Version(0, 2), self.folder)
        self.requests = [
            asyncio.create_task(self.book.generate(Version(0, 2), [(1,)] * 8, PARAMS, (0,) * 8, str(n)))
            for n in range(4)
        ]
        await settle()
        return quick, slow


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_step_is_dealt_to_all_engines_though_one_is_ready_first(tmp_path: Any) -> None:
    two = Two(tmp_path)
    quick, slow = await two.begin()
    assert (quick.asked, slow.asked) == (2, 0)
    slow.weights.set_result(None)
    await settle()
    assert (quick.asked, slow.asked) == (2, 2)
    quick.answers.set()
    slow.answers.set()
    assert [len(samples) for samples in await asyncio.gather(*two.requests)] == [8] * 4
    await two.publication


async def test_what_waits_for_an_engine_that_does_not_come_up_goes_to_one_that_is_free(tmp_path: Any) -> None:
    two = Two(tmp_path)
    quick, slow = await two.begin()
    quick.answers.set()
    await asyncio.gather(*two.requests)
    assert (quick.asked, slow.asked) == (4, 0)
    two.publication.cancel()


async def test_what_waits_for_an_engine_whose_weights_fail_goes_elsewhere_at_once(tmp_path: Any) -> None:
    two = Two(tmp_path)
    quick, slow = await two.begin()
    slow.weights.set_exception(EngineError("no such weights"))
    await settle()
    assert (quick.asked, slow.asked) == (4, 0)
    with pytest.raises(EngineError, match="no such weights"):
        await two.publication
    quick.answers.set()
    await asyncio.gather(*two.requests)


async def test_a_request_that_is_given_up_while_it_waits_leaves_its_place(tmp_path: Any) -> None:
    two = Two(tmp_path)
    quick, slow = await two.begin()
    for request in two.requests:
        request.cancel()
    await asyncio.gather(*two.requests, return_exceptions=True)
    slow.weights.set_result(None)
    await two.publication
    again = [asyncio.create_task(two.book.generate(Version(0, 2), [(1,)], PARAMS, (0,), str(n))) for n in range(2)]
    await settle()
    assert (quick.asked, slow.asked) == (3, 1)
    quick.answers.set()
    slow.answers.set()
    await asyncio.gather(*again)
