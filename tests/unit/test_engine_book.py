"""Routing to engines: what an answer must be to count."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from controllers.changes import Changes
from controllers.engines import EngineBook
from gcore.errors import EngineError
from gcore.rollout.client import SamplingParams
from gcore.types import Sample, Version, VersionSpan

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


class OldEngine:
    """Says that it serves one version, and answers with another."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.aborted: list[str] = []
        self.resumed = 0

    async def info(self) -> Any:
        return SimpleNamespace(version=Version(0, 2))

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
    assert engines.ready(Version(0, 2)) == ["e"]
    with pytest.raises(EngineError, match=r"weights 0\.1, not 0\.2"):
        await engines.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r")
    assert engines.ready(Version(0, 2)) == []


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
