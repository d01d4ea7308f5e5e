"""Producing and evaluating: what becomes of the rest when one part fails."""

from __future__ import annotations

import asyncio

import pytest

from controllers.produce import all_or_none
from gcore.errors import EngineError


async def test_the_results_come_in_order() -> None:
    async def one(value: int) -> int:
        for _ in range(3 - value):
            await asyncio.sleep(0)
        return value

    assert await all_or_none(one(value) for value in range(3)) == [0, 1, 2]


async def test_when_one_answer_fails_the_others_have_ended_before_it_is_raised() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        await all_or_none([waits(), fails(), waits()])
    assert ended == ["waits", "waits"]
