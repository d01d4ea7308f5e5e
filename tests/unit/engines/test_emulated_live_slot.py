"""An emulated slot in an event loop, and a request to an engine that has ended meanwhile."""

from __future__ import annotations

import asyncio

from gcore.engines.emulated.device import EmulatedDevice
from gcore.engines.emulated.engine import LiveSlot
from gcore.engines.emulated.law import ReplicaTiming, TimingModel
from gcore.engines.emulated.responses import EmulatedResponse
from gcore.engines.request import Finish, GenerationRequest, RequestOutput, RequestSampling
from gcore.testing.clock import FakeClock


def test_nothing_is_done_to_an_engine_that_is_gone_and_the_others_on_its_slot_go_on() -> None:
    def whole(task: GenerationRequest, version: str) -> EmulatedResponse:
        return EmulatedResponse((1,), (-1.0,), Finish("length"))

    async def scene() -> list[RequestOutput]:
        clock, ended, done = FakeClock(), list[RequestOutput](), []
        slot = LiveSlot(clock, 1.0)
        gone, stays = (
            EmulatedDevice(ReplicaTiming(TimingModel(decode_s=1.0), name), whole, rows=8, version="0.0")
            for name in "ab"
        )
        for device in (gone, stays):
            slot.add(device, ended.extend)
        slot.remove(gone)
        slot.do(gone, lambda now: done.append(now))
        assert done == []
        slot.do(
            stays,
            lambda now: stays.submit(
                [GenerationRequest(0, "r", (1, 2), RequestSampling(max_new_tokens=1, seed=0))], now
            ),
        )
        await clock.advance(60.0)
        slot.do(stays, stays.advance)
        return ended

    assert [one.number for one in asyncio.run(scene())] == [0]
