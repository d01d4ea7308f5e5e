"""HTTP server that agents call, and the process pool that runs agents.

The server listens on loopback only. It has OpenAI's routes under one address per response:

    POST /r/TOKEN/v1/chat/completions      GET /r/TOKEN/v1/models

A token identifies one response and cannot be guessed. When the response ends, pending requests are cancelled, and later
ones get 404. If a client disconnects, its request is cancelled; a client that only closes its sending
side still gets its answer. Errors have the header `x-should-retry: false`, because OpenAI's client would retry some of
them. `gcore.rollout.agents.session` computes the answers; this module reads and writes HTTP/1.1 with h11.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

import h11

from gcore.config.rollout import AgentSpec
from gcore.plugins import PluginFault, shown_name
from gcore.rollout.agents.api import AgentFault, AgentRequestRefused
from gcore.rollout.agents.chat_protocol import EVENTS, JSON, encode_answer, encode_models, encode_refusal, encode_stream
from gcore.rollout.agents.session import AgentSession
from gcore.system.clock import Clock, SystemClock
from gcore.system.concurrency import cancel_all
from gcore.system.process import CannotStart
from gcore.worker.sandbox.child import encode_line
from gcore.worker.sandbox.pool import PoolStatus, SandboxProgram, WorkerPool
from gcore.worker.sandbox.process import ProcessEnded, ProtocolBroken, SandboxProcess

log = logging.getLogger(__name__)
READ_BYTES = 1 << 16

MOST_BODY = 8 << 20
"""Maximum size of a request body in bytes."""

MOST_LINES = 4096
"""Maximum number of open connections; further ones are closed at once."""

GONE_S = 0.1
"""Seconds until a closed connection reports an error after data was sent to it."""

_PATH = re.compile(r"/r/([0-9a-f]{32})/v1/(chat/completions|models)")

_RETRY = b"x-stainless-retry-count"
"""Header with the retry count of OpenAI's clients."""

Reply = tuple[int, str, bytes]
"""Status, content type, body."""


class AgentHttpServer:
    """HTTP server for the agents of one job on one controller. The first `begin` opens the port; close it after use."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._port = 0
        self._served: dict[str, AgentSession] = {}
        self._lines: dict[asyncio.Task[None], str] = {}
        """Open connections, with the token of each one's last request."""

    async def begin(self, served: AgentSession) -> str:
        """Serve a response from now on, and open the port if necessary; returns the response's token."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
                self._port = self._server.sockets[0].getsockname()[1]
        token = secrets.token_hex(16)
        self._served[token] = served
        return token

    def base_url(self, token: str) -> str:
        """Address of the response with this token, as `base_url` for OpenAI's clients."""
        return f"http://127.0.0.1:{self._port}/r/{token}/v1"

    async def end(self, token: str) -> None:
        """Stop serving a response: later requests get 404, and its pending requests are cancelled."""
        self._served.pop(token, None)
        await cancel_all([line for line, asked in self._lines.items() if asked == token])

    async def close(self) -> None:
        """Stop serving all responses, and close the port."""
        self._served.clear()
        if self._server is not None:
            self._server.close()
        await cancel_all(list(self._lines))

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # An explicit task: asyncio logs the cancellation of its own connection tasks as errors.
        if len(self._lines) >= MOST_LINES:
            writer.close()
            return
        line = asyncio.ensure_future(self._line(reader, writer))
        self._lines[line] = ""
        line.add_done_callback(lambda line: self._lines.pop(line, None))

    async def _line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, h11.RemoteProtocolError, h11.LocalProtocolError):
                await self._serve(reader, writer, h11.Connection(h11.SERVER))
        finally:
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: h11.Connection
    ) -> None:
        """Serve requests of one connection until the client disconnects."""
        head, body = None, bytearray()
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                if protocol.they_are_waiting_for_100_continue:
                    writer.write(protocol.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                protocol.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                head, body = event, bytearray()
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MOST_BODY:
                    too_large = AgentRequestRefused(
                        413, "too_large", f"the request has more than {MOST_BODY >> 20} MiB"
                    )
                    await _send(writer, protocol, _refusal(too_large), close=True)
                    return
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                reply = await self._unless_gone(head, bytes(body), reader, writer, protocol)
                if reply is None:
                    return
                await _send(writer, protocol, reply)
                if protocol.our_state is h11.MUST_CLOSE:
                    return
                protocol.start_next_cycle()
            else:
                return

    async def _unless_gone(
        self,
        head: h11.Request,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        protocol: h11.Connection,
    ) -> Reply | None:
        """Answer a request; None if the client disconnects before."""
        line, found = asyncio.current_task(), _path(head)
        if found is not None and line in self._lines:
            self._lines[line] = found.group(1)
        answer = asyncio.ensure_future(self._reply(head, body))
        more = asyncio.ensure_future(reader.read(READ_BYTES))
        try:
            await asyncio.wait((answer, more), return_when=asyncio.FIRST_COMPLETED)
            if more.done() and (data := more.result()):
                protocol.receive_data(data)  # the client sent its next request before the answer to this one
            elif not answer.done() and await _is_gone(answer, head, writer, protocol):
                return None
            return await answer
        finally:
            await cancel_all((answer, more))

    async def _reply(self, head: h11.Request, body: bytes) -> Reply:
        try:
            return await self._answered(head, body)
        except AgentRequestRefused as refused:
            return _refusal(refused)
        except Exception:  # return an error to the client and keep the connection open
            log.exception("a request of an agent failed")
            return _refusal(AgentRequestRefused(500, "defect", "internal error of gcore; see the controller's log"))

    async def _answered(self, head: h11.Request, body: bytes) -> Reply:
        found = _path(head)
        if found is None:
            raise AgentRequestRefused(
                404, "no_such_route", "unknown route; a rollout's base_url has only chat/completions and models"
            )
        token, route = found.groups()
        served = self._served.get(token)
        if served is None:
            raise AgentRequestRefused(404, "no_such_rollout", "this rollout has ended or does not exist")
        wanted = "GET" if route == "models" else "POST"
        if head.method.decode("ascii", errors="replace") != wanted:
            raise AgentRequestRefused(405, "wrong_method", f"use {wanted}")
        if route == "models":
            return 200, JSON, encode_models()
        again = any(name == _RETRY and value.strip() not in (b"", b"0") for name, value in head.headers)
        question, completion = await served.complete(body, again=again)
        if question.stream:
            return 200, EVENTS, encode_stream(completion, usage=question.usage)
        return 200, JSON, encode_answer(completion)


async def _is_gone(
    answer: asyncio.Future[Reply], head: h11.Request, writer: asyncio.StreamWriter, protocol: h11.Connection
) -> bool:
    """Whether a client that closed its sending side has also closed its receiving side, which shows only when data is
    sent.

    Sends `100 Continue`, which clients ignore; HTTP/1.0 does not allow it. A closed connection reports an error after
    the first one, and the second cannot be sent. False if `answer` is complete before that.
    """
    if head.http_version < b"1.1":
        return True
    for _ in range(2):
        writer.write(protocol.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        await asyncio.wait((answer,), timeout=GONE_S)
        if answer.done() or writer.transport.is_closing():
            break
    return writer.transport.is_closing()


def _path(head: h11.Request) -> re.Match[str] | None:
    return _PATH.fullmatch(head.target.decode("ascii", errors="replace").partition("?")[0])


def _refusal(refused: AgentRequestRefused) -> Reply:
    return refused.status, JSON, encode_refusal(refused)


async def _send(writer: asyncio.StreamWriter, protocol: h11.Connection, reply: Reply, *, close: bool = False) -> None:
    status, kind, body = reply
    headers = [("content-type", kind), ("content-length", str(len(body)))]
    if status >= 400:
        headers.append(("x-should-retry", "false"))
    if close:
        headers.append(("connection", "close"))
    parts = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
    writer.write(b"".join(protocol.send(part) or b"" for part in parts))
    await writer.drain()


NEVER_S = 1e8
"""Timeout of a call to a process, in seconds: in effect none, because `watch` ends the call."""


class AgentPool:
    """Process pool that runs agents on one controller. Belongs to one event loop; close it after use.

    An agent is foreign code that processes model output, so it does not run in the controller. A few processes
    (`agent.workers`) run one agent each at a time; the agent's time starts when it gets a process. If an agent exceeds
    its time, or its response is aborted, its process is killed with all of its child processes and replaced; so is a
    process that dies. A process whose agent raised runs the next one. A process with leftover threads or child
    processes is replaced, because they could send requests for the next response.

    The processes are the same as for rewards, with another program (`gcore.worker.sandbox.pool`).
    """

    def __init__(self, spec: AgentSpec, clock: Clock, group: str = "") -> None:
        """`group`: folder of the control group (cgroup) of the processes; empty: that of this process."""
        setup = encode_line({"agent": spec.name, "memory_mb": spec.memory_mb})
        program = SandboxProgram(
            "gcore.agents", setup, f"agent {shown_name(spec.name)!r}", "agent", spec.start_timeout_s, group
        )
        self._crew = WorkerPool(program, spec.workers, clock)

    async def warm(self) -> None:
        """Start one process. Raises PluginFault for an agent that cannot be loaded, CannotStart if no process can be
        started.
        """
        await self._crew.warm()

    async def run(
        self, call: Mapping[str, Any], began: Callable[[], None], watch: Callable[[], Coroutine[Any, Any, NoReturn]]
    ) -> float | None:
        """Run the agent for one response; returns its reward. `call`: the fields of `AgentRollout`.

        `began` is called when the agent gets a process. `watch` runs meanwhile and raises when the agent must end.

        Raises AgentFault, what `watch` raises, and PluginFault if this node lacks the agent.
        """
        async with self._crew.lent() as loan:
            loan.process.ask(call)
            began()
            try:
                said = await self._said(loan.process, watch())
                score = _parse_score(said)
            except ProtocolBroken:
                raise _unagreed() from None
            except ProcessEnded:
                raise AgentFault(
                    f"ended its process, which was {await self._crew.how_ended(loan.process)}",
                    where="agent",
                    fix="See the controller's log; raise agent.memory_mb if memory ran out",
                ) from None
            loan.fit = not said.get("threads")
            if isinstance(score, AgentFault):
                raise score
            return score

    @property
    def waits(self) -> PoolStatus:
        """Number of responses that wait for a process, and of those served so far."""
        return self._crew.waits

    async def close(self) -> None:
        """End every process."""
        await self._crew.close()

    async def _said(self, process: SandboxProcess, watch: Coroutine[Any, Any, NoReturn]) -> Any:
        """Wait for the result of the call to `process`. Raises what `watch` raises before."""
        answer, watching = asyncio.ensure_future(process.result(NEVER_S)), asyncio.ensure_future(watch)
        try:
            await asyncio.wait((answer, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                watching.result()
            return answer.result()
        finally:
            await cancel_all((answer, watching))


def _parse_score(said: Any) -> float | AgentFault | None:
    """Parse a process's result: the agent's reward or None, or the agent's error. Raises AgentFault for other messages."""
    match said:
        case {"reward": None}:
            return None
        case {"reward": float() | int() as reward}:
            return float(reward)
        case {"what": str(what), "trace": str(trace)}:
            return AgentFault(what, where="agent", fix="Correct the agent", trace=trace)
    raise _unagreed()


def _unagreed() -> AgentFault:
    return AgentFault(
        "wrote an invalid message to the controller", where="agent", fix="Do not use the process's socket in the agent"
    )


def try_agent(spec: AgentSpec) -> None:
    """Load an agent in a process, before the job exists. The agent is not called, because there is no policy yet.

    Blocks; do not use it in an event loop. Raises PluginFault.
    """
    asyncio.run(_tried(spec))


async def _tried(spec: AgentSpec) -> None:
    pool = AgentPool(spec.model_copy(update={"workers": 1}), SystemClock())
    try:
        await pool.warm()
    except CannotStart as error:
        raise PluginFault(error.what, where=error.where or "agent", fix=error.fix) from error
    finally:
        await pool.close()
