"""A server that answers chat completions with a function and fails on demand, for tests of clients of external judges.

It is a real HTTP server on a port of its own, in the event loop of the test. It counts requests and
checks the API key. It holds no model, and supports only the fields of OpenAI's API that a judge's requests have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11

from gcore.system.clock import Clock, SystemClock
from gcore.system.concurrency import cancel_all

READ_BYTES = 1 << 16

Say = Callable[[Mapping[str, Any]], str]
"""What is answered to the body of a request."""


@dataclass(frozen=True, slots=True)
class FakeFailure:
    """What happens to one request. `status` None: its connection is closed without a word. `slow_s`: it is answered late.

    `body`: sent as it is, instead of a completion. `usage`: whether a completion says how many tokens it has.
    """

    status: int | None = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    slow_s: float = 0.0
    usage: bool = True


WELL = FakeFailure()


class FakeOpenAI:
    """Use it as `async with FakeOpenAI(say) as fake`; `fake.url` is what a spec names. A token is a word."""

    def __init__(self, say: Say, *, key: str | None = None, clock: Clock | None = None) -> None:
        """`key`: any other is refused with 401."""
        self._say = say
        self.key = key
        self._clock = clock or SystemClock()
        self.script: list[FakeFailure] = []
        """What happens to the next requests, one after the other; to those after them nothing."""
        self.asked: list[dict[str, Any]] = []
        """The bodies of all requests with the right key."""
        self.refused = 0
        """Requests without it."""
        self.open, self.most_open = 0, 0
        """Requests under way, now and at most."""
        self.url = ""
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeOpenAI:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await cancel_all(self._lines)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of the fake's own: of one that asyncio makes itself, its cancellation is logged as an error.
        line = asyncio.ensure_future(self._line(reader, writer))
        self._lines.add(line)
        line.add_done_callback(self._lines.discard)

    async def _line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, h11.RemoteProtocolError):
                await self._serve(reader, writer, h11.Connection(h11.SERVER))
        finally:
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: h11.Connection
    ) -> None:
        """One request after the other, until the client goes away."""
        head, body = None, bytearray()
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                protocol.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                head, body = event, bytearray()
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    status, headers, answer = await self._answered(head, bytes(body))
                finally:
                    self.open -= 1
                if status is None:
                    return
                told = {"content-type": "application/json", "content-length": str(len(answer)), **headers}
                sent = [h11.Response(status_code=status, headers=list(told.items())), h11.Data(data=answer)]
                writer.write(b"".join(protocol.send(part) or b"" for part in (*sent, h11.EndOfMessage())))
                await writer.drain()
                protocol.start_next_cycle()
            else:
                return

    async def _answered(self, head: h11.Request, body: bytes) -> tuple[int | None, Mapping[str, str], bytes]:
        if head.target != b"/v1/chat/completions" or head.method != b"POST":
            return 404, {}, _error(f"there is nothing at {head.target.decode()}")
        said = next((value.decode() for name, value in head.headers if name == b"authorization"), "")
        if self.key is not None and said != f"Bearer {self.key}":
            self.refused += 1
            return 401, {}, _error(f"Incorrect API key provided: {said.removeprefix('Bearer ')}")
        asked: dict[str, Any] = json.loads(body)
        self.asked.append(asked)
        fate = self.script.pop(0) if self.script else WELL
        await self._clock.sleep(fate.slow_s)
        if fate.body is not None or fate.status != 200:
            return fate.status, fate.headers, fate.body or _error("the script says so")
        return 200, fate.headers, self._completion(asked, usage=fate.usage)

    def _completion(self, asked: Mapping[str, Any], *, usage: bool) -> bytes:
        words = self._say(asked).split(" ")
        cut = len(words) > asked["max_tokens"]
        words = words[: asked["max_tokens"]]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": " ".join(words)},
            "finish_reason": "length" if cut else "stop",
        }
        tree = {"id": "fake", "object": "chat.completion", "model": asked["model"], "choices": [choice]}
        if usage:
            questions: Sequence[Mapping[str, str]] = asked["messages"]
            tokens = sum(len(part.split()) for message in questions for part in _texts(message["content"]))
            tree["usage"] = {"prompt_tokens": tokens, "completion_tokens": len(words)}
        return json.dumps(tree).encode()


def _texts(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of a message, without its pictures."""
    return [content] if isinstance(content, str) else [one["text"] for one in content if one["type"] == "text"]


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()
