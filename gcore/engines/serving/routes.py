"""The routes that change weights: from a folder, from a trainer's broadcasts, by name only.

Every one of them answers `{"success": bool, "message": str}`, with status 400 when nothing (or, of a broadcast that did not
fit, nothing of it) was changed. A change waits for what runs, unless the engine is paused (`gate`). A cache that running
rows hold is not flushed: whoever changes weights under a pause in place says `flush_cache: false`, and whoever wants the
keys and values made anew pauses with `retract`.

The weight group's blocking calls run in threads, one after the other; the model's thread only writes what has arrived.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.engines.serving.http import (
    ApiKeyGuard,
    ApiKeys,
    answer_errors,
    lenient_checker,
    query_seconds,
    read_body,
    route_not_found,
)
from gcore.engines.serving.io_struct import (
    AbortBody,
    BeginBody,
    EmptyBody,
    GroupBody,
    InitGroupBody,
    MemoryBody,
    PauseBody,
    UpdateDistributedBody,
    UpdateFromDiskBody,
    UpdateVersionBody,
    WeightsByNameBody,
    json_number,
)
from gcore.engines.torch.async_engine import EngineFrontend, ServedModel
from gcore.engines.torch.model import StagedWeights, check_awake, same_kind, stage_weights
from gcore.errors import EngineError, GcoreError
from gcore.models.broadcast import TransferManifest, WeightGroup
from gcore.rollout.engine_time import prometheus_text

T = TypeVar("T")


JOIN_S = 120.0
"""The longest wait for the others of a weight group, and for each of their broadcasts."""


class WeightRoutes:
    """The handlers."""

    def __init__(self, core: ServedModel, desk: EngineFrontend, model_path: str) -> None:
        self._core = core
        self._desk = desk
        self.model_path = model_path
        """The folder whose weights are served, as far as they came from one."""
        self._groups: dict[str, WeightGroup] = {}
        self._open = False
        """Whether a begin waits for its end."""
        self._joining = asyncio.Lock()

    def table(self) -> dict[str, Callable[[Request], Any]]:
        """Path by path; all are POST but for one."""
        return {
            "/update_weights_from_disk": self.from_disk,
            "/update_weights_from_distributed": self.from_distributed,
            "/init_weights_update_group": self.init_group,
            "/destroy_weights_update_group": self.destroy_group,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/update_weight_version": self.rename,
        }

    async def from_disk(self, request: Request) -> Response:
        """Other weights, from a folder."""
        body = await read_body(request, lenient_checker(UpdateFromDiskBody))
        core = self._core
        try:
            await self._make_way(body.weight_version, flush=body.flush_cache, abort=body.abort_all_requests)
            async with self._desk.gate.changing():
                core.check_version(body.weight_version)
                staged = await asyncio.to_thread(stage_weights, core.model, Path(body.model_path))
                await self._install(staged, body.weight_version, flush=body.flush_cache)
        except GcoreError as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self.model_path = body.model_path
        message = "Succeeded to update model weights." + _renamed(body.weight_version)
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

    async def from_distributed(self, request: Request) -> Response:
        """Some or all weights, as the trainer of a weight group sends them."""
        body = await read_body(request, lenient_checker(UpdateDistributedBody))
        try:
            group = self._groups.get(body.group_name)
            if not self._open:
                raise EngineError("no weight update has begun", fix="Call /begin_weight_update first")
            if group is None:
                raise EngineError(f"there is no group {body.group_name!r}", fix="Call /init_weights_update_group first")
            manifest = TransferManifest(
                tuple(body.names), tuple(body.dtypes), tuple(tuple(shape) for shape in body.shapes)
            )
            await self._make_way(body.weight_version, flush=body.flush_cache, abort=body.abort_all_requests)
            async with self._desk.gate.changing():
                # Received before it is looked at: whoever sends is in the broadcast already, and would wait for ever.
                tensors = await _aside(lambda: group.receive(manifest))
                staged = _part(self._core, tensors)
                await self._install(staged, body.weight_version, flush=body.flush_cache)
        except GcoreError as error:
            return _told(False, str(error))
        return _told(True, "Succeeded to update parameter online." + _renamed(body.weight_version))

    async def _make_way(self, version: str | None, *, flush: bool, abort: bool) -> None:
        """Before weights are read. Raises EngineError for what will not be possible."""
        core = self._core
        if abort:
            await self._desk.perform(lambda: core.abort_all("aborted by a change of weights"))
        core.check_version(version)
        if flush and core.paused and core.running:
            raise EngineError(
                f"{core.running} requests stand where they were, and the cache that is to be flushed is theirs",
                fix="Pause with mode retract, or send flush_cache: false",
            )

    async def _install(self, staged: StagedWeights, version: str | None, *, flush: bool) -> None:
        await self._desk.perform(lambda: self._core.change_weights(staged, version, flush=flush, abort=False))

    async def init_group(self, request: Request) -> Response:
        """Join a weight group."""
        body = await read_body(request, lenient_checker(InitGroupBody))

        def join() -> WeightGroup:
            return WeightGroup.join(
                body.master_address,
                body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                name=body.group_name,
                backend=body.backend,
                timeout_s=JOIN_S,
            )

        async with self._joining:
            if body.group_name in self._groups:
                return _told(False, f"There is a group {body.group_name!r} already; destroy it first.")
            try:
                self._groups[body.group_name] = await _aside(join)
            except GcoreError as error:
                return _told(False, str(error))
        return _told(True, "Succeeded to initialize custom process group.")

    async def destroy_group(self, request: Request) -> Response:
        """Leave a weight group."""
        body = await read_body(request, lenient_checker(GroupBody))
        async with self._joining, self._desk.gate.changing():
            group = self._groups.pop(body.group_name, None)
            if group is None:
                return _told(False, "The group to be destroyed does not exist.")
            await _aside(group.close)
        return _told(True, "Succeeded to destroy custom process group.")

    async def begin(self, request: Request) -> Response:
        """Broadcasts may come."""
        await read_body(request, lenient_checker(BeginBody))
        if self._open:
            return _told(False, "A weight update has begun already; call /end_weight_update first.")
        async with self._desk.gate.changing():
            self._open = True
        return _told(True, "Success")

    async def end(self, request: Request) -> Response:
        """No more broadcasts come."""
        await read_body(request, lenient_checker(EmptyBody))
        if not self._open:
            return _told(False, "No weight update has begun; call /begin_weight_update first.")
        async with self._desk.gate.changing():
            self._open = False
        return _told(True, "Success")

    async def rename(self, request: Request) -> Response:
        """Call the served weights otherwise."""
        body = await read_body(request, lenient_checker(UpdateVersionBody))
        core = self._core

        def rename() -> None:
            core.check_version(body.new_version)
            if body.abort_all_requests:
                core.abort_all("aborted by a change of the weights' version")
            core.rename(body.new_version)

        try:
            await self._desk.perform(rename)
        except EngineError as error:
            return JSONResponse({"success": False, "message": str(error), "new_version": core.version}, 400)
        message = f"Weight version updated to {body.new_version}"
        return JSONResponse({"success": True, "message": message, "new_version": body.new_version})

    async def by_name(self, request: Request) -> Response:
        """A tensor's first rows, as float32, to look at."""
        body = await read_body(request, lenient_checker(WeightsByNameBody))

        def look() -> Any:
            check_awake(self._core.model)
            tensor = self._core.model.module.state_dict().get(body.name)
            if tensor is None:
                raise EngineError(f"the model has no tensor {body.name!r}")
            rows: Any = tensor[: max(0, body.truncate_size)] if tensor.dim() else tensor
            return json_number(rows.to("cpu", torch.float32).tolist())

        return JSONResponse(await self._desk.perform(look))


async def _aside(call: Callable[[], T]) -> T:
    """In a thread that does not keep the process from ending: such a call may wait for two minutes."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  # goes to whoever asked
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await asyncio.wrap_future(future)


def _part(core: ServedModel, tensors: dict[str, torch.Tensor]) -> StagedWeights:
    """These tensors, which may be a part of the model's. Raises EngineError when one does not fit."""
    own: dict[str, torch.Tensor] = core.model.module.state_dict()
    for name, tensor in tensors.items():
        if name not in own:
            raise EngineError(f"the model has no tensor {name!r}; nothing of this broadcast was taken")
        if tensor.shape != own[name].shape:
            raise EngineError(
                f"{name} came as {list(tensor.shape)} and is {list(own[name].shape)}; "
                "nothing of this broadcast was taken"
            )
        if not same_kind(tensor, own[name]):
            raise EngineError(f"{name} came as whole numbers ({tensor.dtype}); nothing of this broadcast was taken")
    return StagedWeights(tensors)


def _renamed(version: str | None) -> str:
    return "" if version is None else f" Weight version updated to {version}."


def _told(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)


# -------------------- control_routes
# The routes that control an engine and tell how it is, whatever it serves: SGLang's paths and fields over HTTP.
#
# Pauses, aborts, memory, health, what is served and what goes on; changes of weights are in `weight_routes`. Nothing here waits
# for the model on the event loop.

LOOK_S = 0.02
"""How often a flush that may wait looks whether the engine is idle."""


class ControlRoutes:
    """The handlers. `describe` is what `/model_info` and `/server_info` tell about the process."""

    def __init__(self, core: ServedModel, desk: EngineFrontend, describe: dict[str, Any]) -> None:
        self._core = core
        self._desk = desk
        self._describe = describe
        self._weights = WeightRoutes(core, desk, str(describe["model_path"]))
        self._flushing = asyncio.Lock()

    @property
    def model_path(self) -> str:
        """The folder whose weights are served."""
        return self._weights.model_path

    def routes(self, unserved: Sequence[str]) -> list[Route]:
        """The routes; those of SGLang's in `unserved` refuse in words."""
        both = ["GET", "POST"]
        posts = {
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            **self._weights.table(),
            **dict.fromkeys(unserved, self.unserved),
        }
        reads = {
            "/health": self.health,
            "/ready": self.health,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/metrics": self.metrics,
        }
        either = {
            "/flush_cache": self.flush,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.wake,
            "/get_weights_by_name": self._weights.by_name,
        }
        routes = [Route(path, answer_errors(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in reads.items()]
        return routes + [Route(path, answer_errors(handler), methods=both) for path, handler in either.items()]

    async def abort(self, request: Request) -> Response:
        """End requests now; they answer with the tokens they have."""
        body = await read_body(request, lenient_checker(AbortBody))
        if body.abort_all:
            await self._desk.perform(self._core.abort_all)
        else:
            await self._desk.perform(lambda: self._core.abort(lambda task: body.names(task.rid)))
        return Response()

    async def pause(self, request: Request) -> Response:
        """Make no more tokens."""
        body = await read_body(request, lenient_checker(PauseBody))
        await self._desk.perform(lambda: self._core.pause(body.mode))
        self._desk.gate.look_again()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        """Go on."""
        await read_body(request, lenient_checker(EmptyBody))
        await self._desk.perform(self._core.resume)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        """Give the cache's memory back; refused while sequences hold it, after `timeout` seconds of waiting for them."""
        timeout = query_seconds(request, "timeout")
        clock, core = self._desk.clock, self._core

        def flush() -> bool:
            if core.running or (core.waiting and not core.paused):
                return False
            core.flush()
            return True

        async with self._flushing:
            until = clock.monotonic() + timeout
            while not (flushed := await self._desk.perform(flush)) and clock.monotonic() < until:
                await clock.sleep(LOOK_S)
        if flushed:
            return PlainTextResponse("Cache flushed.\n")
        words = "Timed out waiting for idle state.\n" if timeout else "Flush cache failed.\n"
        return PlainTextResponse(f"{words}Requests are running or waiting; retract or abort them first.\n", 400)

    async def release(self, request: Request) -> Response:
        """Sleep: memory goes back, requests wait."""
        body = await read_body(request, lenient_checker(MemoryBody))
        await self._desk.perform(lambda: self._core.release(body.wanted))
        self._desk.gate.look_again()
        return JSONResponse(None)

    async def wake(self, request: Request) -> Response:
        """Wake up."""
        body = await read_body(request, lenient_checker(MemoryBody))
        await self._desk.perform(lambda: self._core.wake(body.wanted))
        return JSONResponse(None)

    async def unserved(self, request: Request) -> Response:
        """What SGLang has and this engine has not."""
        raise EngineError(f"{request.url.path} is not served by this engine", fix="Ask an SGLang server")

    async def health(self, request: Request) -> Response:
        """Whether the model's thread lives."""
        return Response(status_code=200 if self._desk.runner.alive else 503)

    async def model_info(self, request: Request) -> Response:
        """What is served."""
        return JSONResponse({**self._described(), "preferred_sampling_params": None})

    async def server_info(self, request: Request) -> Response:
        """What is served, and what goes on."""
        core = self._core
        state = {
            "num_running_reqs": core.running,
            "num_waiting_reqs": core.waiting,
            "paused": core.paused,
            "released": sorted(core.asleep),
        }
        return JSONResponse({**self._described(), "internal_states": [state]})

    def _described(self) -> dict[str, Any]:
        path = self.model_path
        return {
            **self._describe,
            "model_path": path,
            "served_model_name": path,
            "weight_version": self._core.version,
        }

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, under SGLang's names; and what the engine's time was."""
        core, desk = self._core, self._desk
        table = (
            ("num_running_reqs", "gauge", "Sequences that are worked on.", core.running),
            ("num_queue_reqs", "gauge", "Sequences that wait.", core.waiting),
            ("num_requests_total", "counter", "Sequences asked for.", desk.requests),
            ("prompt_tokens_total", "counter", "Prompt tokens of these.", desk.prompt_tokens),
            ("generation_tokens_total", "counter", "Tokens made.", core.generated_tokens),
        )
        text = "".join(
            f"# HELP sglang:{name} {words}\n# TYPE sglang:{name} {kind}\nsglang:{name} {value}\n"
            for name, kind, words, value in table
        )
        text += prometheus_text(desk.runner.sums())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def guard_routes(routes: Sequence[Route], keys: ApiKeys) -> ASGIApp:
    """The ASGI application of these routes, behind the keys."""
    return ApiKeyGuard(Starlette(routes=list(routes), exception_handlers={HTTPException: route_not_found}), keys)


async def run_unless_disconnected(request: Request, answering: Coroutine[Any, Any, T]) -> T | None:
    """What `answering` gives; None when the client has gone away first."""
    task = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    """Returns once the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
