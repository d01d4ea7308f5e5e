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
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gcore.errors import EngineError, GcoreError
from gcore.rollout.engine.administration import (
    BeginBody,
    EmptyBody,
    GroupBody,
    InitGroupBody,
    UpdateDistributedBody,
    UpdateFromDiskBody,
    UpdateVersionBody,
    WeightsByNameBody,
)
from gcore.rollout.engine.answers import finite
from gcore.rollout.engine.bodies import checker, read
from gcore.rollout.engine.served import Front, Served
from gcore.rollout.engine.weights import Staged, check_awake, same_kind, stage
from gcore.weights.broadcast import Manifest, WeightGroup

T = TypeVar("T")
JOIN_S = 120.0
"""The longest wait for the others of a weight group, and for each of their broadcasts."""


class WeightRoutes:
    """The handlers."""

    def __init__(self, core: Served, desk: Front, model_path: str) -> None:
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
        body = await read(request, checker(UpdateFromDiskBody))
        core = self._core
        try:
            await self._make_way(body.weight_version, flush=body.flush_cache, abort=body.abort_all_requests)
            async with self._desk.gate.changing():
                core.check_version(body.weight_version)
                staged = await asyncio.to_thread(stage, core.model, Path(body.model_path))
                await self._install(staged, body.weight_version, flush=body.flush_cache)
        except GcoreError as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self.model_path = body.model_path
        message = "Succeeded to update model weights." + _renamed(body.weight_version)
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

    async def from_distributed(self, request: Request) -> Response:
        """Some or all weights, as the trainer of a weight group sends them."""
        body = await read(request, checker(UpdateDistributedBody))
        try:
            group = self._groups.get(body.group_name)
            if not self._open:
                raise EngineError("no weight update has begun", fix="Call /begin_weight_update first")
            if group is None:
                raise EngineError(f"there is no group {body.group_name!r}", fix="Call /init_weights_update_group first")
            manifest = Manifest(tuple(body.names), tuple(body.dtypes), tuple(tuple(shape) for shape in body.shapes))
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

    async def _install(self, staged: Staged, version: str | None, *, flush: bool) -> None:
        await self._desk.perform(lambda: self._core.change_weights(staged, version, flush=flush, abort=False))

    async def init_group(self, request: Request) -> Response:
        """Join a weight group."""
        body = await read(request, checker(InitGroupBody))

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
        body = await read(request, checker(GroupBody))
        async with self._joining, self._desk.gate.changing():
            group = self._groups.pop(body.group_name, None)
            if group is None:
                return _told(False, "The group to be destroyed does not exist.")
            await _aside(group.close)
        return _told(True, "Succeeded to destroy custom process group.")

    async def begin(self, request: Request) -> Response:
        """Broadcasts may come."""
        await read(request, checker(BeginBody))
        if self._open:
            return _told(False, "A weight update has begun already; call /end_weight_update first.")
        async with self._desk.gate.changing():
            self._open = True
        return _told(True, "Success")

    async def end(self, request: Request) -> Response:
        """No more broadcasts come."""
        await read(request, checker(EmptyBody))
        if not self._open:
            return _told(False, "No weight update has begun; call /begin_weight_update first.")
        async with self._desk.gate.changing():
            self._open = False
        return _told(True, "Success")

    async def rename(self, request: Request) -> Response:
        """Call the served weights otherwise."""
        body = await read(request, checker(UpdateVersionBody))
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
        body = await read(request, checker(WeightsByNameBody))

        def look() -> Any:
            check_awake(self._core.model)
            tensor = self._core.model.module.state_dict().get(body.name)
            if tensor is None:
                raise EngineError(f"the model has no tensor {body.name!r}")
            rows: Any = tensor[: max(0, body.truncate_size)] if tensor.dim() else tensor
            return finite(rows.to("cpu", torch.float32).tolist())

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


def _part(core: Served, tensors: dict[str, torch.Tensor]) -> Staged:
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
    return Staged(tensors)


def _renamed(version: str | None) -> str:
    return "" if version is None else f" Weight version updated to {version}."


def _told(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)
