"""Routes for weights broadcast by a trainer, and for reading a tensor of the served model.

A trainer joins the engine to a weight group (a process group for broadcasts), begins an update, broadcasts tensors, and
ends the update. Each route responds with `{"success": bool, "message": str}`, with status 400 if nothing was done; a
broadcast that does not fit changes nothing. Blocking calls of the group run in a separate thread, one after the other;
the model's thread only writes received tensors.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gcore.engines.serving.http import ApiKeys, answer_errors, read_fields
from gcore.engines.serving.io_struct import (
    BeginBody,
    EmptyBody,
    GroupBody,
    InitGroupBody,
    UpdateDistributedBody,
    WeightsByNameBody,
    json_number,
)
from gcore.engines.serving.routes import control_routes, guard_routes, version_notice
from gcore.engines.torch.async_engine import AsyncEngine
from gcore.engines.torch.model import StagedWeights, check_awake
from gcore.errors import EngineError, GcoreError
from gcore.models.adapters import same_kind
from gcore.models.publisher import WeightGroup
from gcore.rollout.api import TransferManifest

T = TypeVar("T")

JOIN_S = 120.0
"""Maximum wait in seconds for the other members of a weight group, and for each of their broadcasts."""


class WeightRoutes:
    """Handlers of these routes, with the weight groups that the engine has joined."""

    def __init__(self, engine: AsyncEngine[Any, Any]) -> None:
        self._engine = engine
        self._groups: dict[str, WeightGroup] = {}
        self._begun = False
        self._joining = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return the routes for the application."""
        table = {
            "/update_weights_from_distributed": self.from_distributed,
            "/init_weights_update_group": self.init_group,
            "/destroy_weights_update_group": self.destroy_group,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
        }
        routes = [Route(path, answer_errors(handler), methods=["POST"]) for path, handler in table.items()]
        return [*routes, Route("/get_weights_by_name", answer_errors(self.by_name), methods=["GET", "POST"])]

    async def from_distributed(self, request: Request) -> Response:
        """Receive some or all weights by a broadcast in a weight group, and serve them."""
        body = await read_fields(request, UpdateDistributedBody)
        engine = self._engine
        try:
            group = self._groups.get(body.group_name)
            if not self._begun:
                raise EngineError("no weight update is active", fix="Call /begin_weight_update first")
            if group is None:
                raise EngineError(f"there is no group {body.group_name!r}", fix="Call /init_weights_update_group first")
            manifest = TransferManifest(
                tuple(body.names), tuple(body.dtypes), tuple(tuple(shape) for shape in body.shapes)
            )
            await engine.make_way(body.weight_version, flush=body.flush_cache, abort=body.abort_all_requests)
            async with engine.gate.changing():
                # Receive before the check: the sender is already in the broadcast and would wait forever.
                tensors = await _in_thread(lambda: group.receive(manifest))
                staged = _part_of_model(engine.core.model.module.state_dict(), tensors)
                await engine.install_weights(staged, body.weight_version, flush=body.flush_cache)
        except GcoreError as error:
            return _outcome(False, str(error))
        return _outcome(True, "Succeeded to update parameter online." + version_notice(body.weight_version))

    async def init_group(self, request: Request) -> Response:
        """Join a weight group, as the rank that the request names."""
        body = await read_fields(request, InitGroupBody)

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
                return _outcome(False, f"There is a group {body.group_name!r} already; destroy it first.")
            try:
                self._groups[body.group_name] = await _in_thread(join)
            except GcoreError as error:
                return _outcome(False, str(error))
        return _outcome(True, "Succeeded to initialize custom process group.")

    async def destroy_group(self, request: Request) -> Response:
        """Leave a weight group."""
        body = await read_fields(request, GroupBody)
        async with self._joining, self._engine.gate.changing():
            group = self._groups.pop(body.group_name, None)
            if group is None:
                return _outcome(False, "The group to be destroyed does not exist.")
            await _in_thread(group.close)
        return _outcome(True, "Succeeded to destroy custom process group.")

    async def begin(self, request: Request) -> Response:
        """Begin a weight update: broadcasts are accepted until it ends."""
        await read_fields(request, BeginBody)
        if self._begun:
            return _outcome(False, "A weight update is already active; call /end_weight_update first.")
        async with self._engine.gate.changing():
            self._begun = True
        return _outcome(True, "Success")

    async def end(self, request: Request) -> Response:
        """End the weight update: broadcasts are refused."""
        await read_fields(request, EmptyBody)
        if not self._begun:
            return _outcome(False, "No weight update is active; call /begin_weight_update first.")
        async with self._engine.gate.changing():
            self._begun = False
        return _outcome(True, "Success")

    async def by_name(self, request: Request) -> Response:
        """Respond with the first `truncate_size` rows of a weight tensor as float32."""
        body = await read_fields(request, WeightsByNameBody)
        model = self._engine.core.model

        def look() -> Any:
            check_awake(model)
            tensor = model.module.state_dict().get(body.name)
            if tensor is None:
                raise EngineError(f"the model has no tensor {body.name!r}")
            if tensor.is_meta:
                raise EngineError("this engine does not show its weights")
            rows: Any = tensor[: max(0, body.truncate_size)] if tensor.dim() else tensor
            return json_number(rows.to("cpu", torch.float32).tolist())

        return JSONResponse(await self._engine.perform(look))


def engine_app(
    engine: AsyncEngine[Any, Any], routes: Sequence[Route], unserved: Sequence[str], keys: ApiKeys
) -> ASGIApp:
    """The application of an engine, protected by the API keys: its own `routes`, and those that control it and its weights.
    `unserved`: SGLang's paths that it refuses.
    """
    return guard_routes([*routes, *control_routes(lambda _: engine, unserved), *WeightRoutes(engine).routes()], keys)


async def _in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a daemon thread, which does not delay the end of the process: it may wait two minutes."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  # raised again where it is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await asyncio.wrap_future(future)


def _part_of_model(own: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> StagedWeights:
    """Check received tensors, which may be only some of the model's. Raises EngineError if one does not fit.

    `own`: the model's tensors, by name.
    """
    for name, tensor in tensors.items():
        if name not in own:
            raise EngineError(f"the model has no tensor {name!r}; the whole broadcast was rejected")
        if tensor.shape != own[name].shape:
            raise EngineError(
                f"{name} has shape {list(tensor.shape)}, expected {list(own[name].shape)}; "
                "the whole broadcast was rejected"
            )
        if not same_kind(tensor, own[name]):
            raise EngineError(f"{name} has an integer type ({tensor.dtype}); the whole broadcast was rejected")
    return StagedWeights(tensors)


def _outcome(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)
