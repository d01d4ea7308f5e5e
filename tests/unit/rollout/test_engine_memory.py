"""An engine without memory reports, as SGLang: memory is released and acquired once, for any caller and any earlier state."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.errors import EngineMemoryUnknown, EngineUnreachable
from gcore.rollout.client import EngineClient
from gcore.types import Version

SERVED = Version(0, 2)
CALLS = ("sleep", "take_memory", "wake", "update")


class Server:
    """SGLang's routes, as far as memory goes. A second release or a second resume is the end of it, as seen with 0.5.23.

    `breaks`: the request before which its client is lost, counted from 0 over those that change something; None: never.
    """

    def __init__(self, breaks: int | None = None) -> None:
        self.called, self.released, self.ended = str(SERVED), False, False
        self._left = breaks

    def client(self) -> EngineClient:
        return EngineClient("http://engine", timeout_s=5, transport=httpx.MockTransport(self._answer))

    def restore(self) -> None:
        self._left = None

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/model_info":
            return httpx.Response(200, json={"weight_version": self.called})
        if path == "/server_info":
            return httpx.Response(200, json={"internal_states": [{"memory_usage": {}}]})
        if self._left is not None:
            if self._left == 0:
                raise httpx.ConnectError("the client is gone")
            self._left -= 1
        if path == "/update_weight_version":
            self.called = json.loads(request.content)["new_version"]
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            wanted = path.startswith("/release")
            self.ended = self.ended or self.released == wanted
            self.released = wanted
        if path == "/update_weights_from_disk":
            self.ended = self.ended or self.released
            self.called = json.loads(request.content)["weight_version"]
            return httpx.Response(200, json={"success": True})
        return httpx.Response(200, json={})


async def ask(client: EngineClient, call: str) -> None:
    match call:
        case "sleep":
            await client.sleep()
        case "take_memory":
            await client.take_memory()
        case "wake":
            await client.wake(SERVED)
        case "update":
            await client.take_memory()
            await client.update_weights("/w", SERVED)


@given(st.lists(st.sampled_from(CALLS), max_size=8))
async def test_calls_of_any_order_release_and_take_memory_in_turns(calls: list[str]) -> None:
    server = Server()
    for call in calls:
        await ask(server.client(), call)  # each by another controller, which remembers nothing
        assert not server.ended
        assert server.released == (call == "sleep")
        assert await server.client().released() == server.released
        assert await server.client().sleeps() == (
            call == "sleep" or (call == "take_memory" and server.called == "woken")
        )


@given(st.lists(st.sampled_from(CALLS), min_size=1, max_size=4), st.integers(0, 12), st.sampled_from(CALLS))
async def test_a_client_that_is_lost_between_two_calls_leaves_an_engine_that_the_next_does_not_end(
    calls: list[str], breaks: int, then: str
) -> None:
    server = Server(breaks)
    with contextlib.suppress(EngineUnreachable):
        for call in calls:
            await ask(server.client(), call)
    server.restore()
    if server.called in ("falling-asleep", "waking"):
        with pytest.raises(EngineMemoryUnknown, match="memory state is unknown"):
            await ask(server.client(), then)
    else:
        await ask(server.client(), then)
    assert not server.ended
