"""Passes requests for pictures on to SGLang's diffusion server, and serialises weight updates with them.

SGLang's server has no routes to abort or pause, and reports no version of its weights. So this engine keeps the queue: it
gives the server few pictures at a time, waits until they are done before it changes weights or releases memory, and knows
which weights denoised each picture. An abort answers at once; a picture that the server already denoises is dropped when it
is done. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgpack

from gcore.engines.request import ABORTED, Finish, PauseMode, check_version
from gcore.engines.serving.denoising import (
    AnswerWriter,
    DenoisingBody,
    DenoisingOutput,
    DenoisingRequest,
    DenoisingResult,
    admit_pictures,
)
from gcore.engines.serving.engine import ServedEngine
from gcore.engines.sglang_diffusion.rollouts import RolloutRefused, check_request, read_rollout, rollout_body
from gcore.errors import EngineError, EngineUnreachable, one_line
from gcore.models.diffusion.pipeline import SampledPipeline
from gcore.models.tensors import TensorShape, check_weight_file
from gcore.rollout.engine_time import EngineTimeMeter, EngineTimeSums, current_activity
from gcore.system.clock import Clock
from gcore.system.concurrency import gather_or_cancel
from gcore.system.network import http_client

ENGINE_NAME = "SGLang's diffusion server behind gcore"
"""Name of the engine in `/server_info`."""

AT_ONCE = 2
"""Pictures that the server has at once: it denoises one, and the other waits there while the arrays of the one before are
stored. More would only delay weight updates."""

UNKNOWN = "unknown"
"""Version of weights after an update that SGLang refused: it may have changed a part of them."""

SHORT_S = 30.0
"""Timeout in seconds of calls that compute nothing. Others have none: the supervisor's watchdog ends a server that hangs."""

MOST_WORDS = 500

ProgressReport = Callable[[str, int], None]
"""Function that reports progress to the supervisor: the phase, and a counter that grows with progress."""


class DiffusionServer:
    """SGLang's routes of one server at `url`. Methods raise EngineUnreachable, and EngineError if it refuses."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = http_client(SHORT_S)

    async def healthy(self) -> bool | None:
        """Whether the server can denoise; None if it does not answer, while it starts or is busy."""
        try:
            response = await self._http.get(f"{self._url}/health")
        except httpx.HTTPError:
            return None
        return response.status_code == httpx.codes.OK

    async def rollout(self, body: Mapping[str, Any]) -> bytes:
        """Denoise a picture; the answer is in msgpack."""
        return (await self._post("/rollout/generate", body)).content

    async def update(self, folder: Path, module: str) -> None:
        """Load the weights of `module` from the folder of that name in `folder`."""
        await self._changed("/update_weights_from_disk", {"model_path": str(folder), "target_modules": [module]})

    async def release(self) -> None:
        """Move the weights to host memory."""
        await self._changed("/release_memory_occupation", {})

    async def restore(self) -> None:
        """Move the weights back."""
        await self._changed("/resume_memory_occupation", {})

    async def checksums(self, modules: Sequence[str] | None) -> Any:
        """SHA-256 of the weights of each module."""
        return (await self._post("/get_weights_checksum", {"module_names": modules})).json()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _changed(self, path: str, body: Mapping[str, Any]) -> None:
        response = await self._post(path, body)
        try:
            succeeded = response.json()["success"] is True
        except (ValueError, KeyError, TypeError):
            succeeded = False
        if not succeeded:
            raise EngineError(f"SGLang answered {path} with {response.text[:MOST_WORDS]}")

    async def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        try:
            response = await self._http.post(f"{self._url}{path}", json=body, timeout=None)
        except httpx.HTTPError as error:
            raise EngineUnreachable(
                f"SGLang did not answer {path} ({one_line(error) or type(error).__name__})"
            ) from error
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise EngineUnreachable(f"SGLang cannot serve {path}: {response.text[:MOST_WORDS]}")
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"SGLang refused {path} (status {response.status_code}): {response.text[:MOST_WORDS]}")
        return response


@dataclass(slots=True, eq=False)
class _Picture:
    """A request that waits or is denoised, and its output: the request with the levels that were used, and how it ended."""

    request: DenoisingRequest
    output: asyncio.Future[tuple[DenoisingRequest, DenoisingOutput]] = field(default_factory=asyncio.Future)

    def end(self, output: DenoisingOutput, levels: tuple[float, ...] | None = None) -> None:
        """Set the output, unless the picture was aborted or no client waits for it."""
        if not self.output.done():
            self.output.set_result((self.request if levels is None else replace(self.request, levels=levels), output))

    def fail(self, error: Exception) -> None:
        """Let the client's request fail."""
        if not self.output.done():
            self.output.set_exception(error)


@dataclass(frozen=True, slots=True)
class NetworkWeights:
    """Checked weights of the network in `folder`, which are not served yet."""

    folder: Path


class SglangDiffusionEngine(ServedEngine[NetworkWeights]):
    """Serves pictures of `server`, an SGLang server on a device "cpu" or "cuda" that has loaded `pipeline`.

    `alive`: returns whether the server's process runs. `side`: height and width of pictures if a request has none. `scratch`:
    folder for links to weights. `report`: for progress.
    """

    kind = ENGINE_NAME
    alternative = "Use the diffusers engine"

    def __init__(
        self,
        server: DiffusionServer,
        pipeline: SampledPipeline,
        writer: AnswerWriter,
        *,
        clock: Clock,
        alive: Callable[[], bool],
        description: dict[str, Any],
        device: str,
        version: str,
        side: tuple[int, int],
        scratch: Path,
        report: ProgressReport,
    ) -> None:
        """Raises ModelError if the weights of the network cannot be read."""
        facts = {"engine": ENGINE_NAME, "scheduler": pipeline.schedule.fingerprint, "guidance": pipeline.guidance}
        super().__init__(clock, self, {**description, **facts, "max_running_requests": AT_ONCE})
        self.version = version
        self.paused = False
        self.asleep: frozenset[str] = frozenset()
        self.pictures = 0
        """Number of pictures that the server has finished."""
        self._alive = alive
        self._server = server
        self._pipeline = pipeline
        self._writer = writer
        self._device = device
        self._side = side
        self._scratch = scratch
        self._report = report
        self._shapes = _tensor_shapes(pipeline.files.network)
        self._numbers = itertools.count()
        self._updates = itertools.count(1)
        self._links: list[Path] = []
        """Folder of the last update."""
        self._steps = 0
        self._waiting: deque[_Picture] = deque()
        self._calls: dict[asyncio.Task[None], _Picture] = {}
        """The pictures that the server has, by the task that waits for it."""
        self._generating = False
        """Whether the supervisor knows that the server has pictures."""
        self._changing = False
        self._damaged = False
        """Whether SGLang refused an update, so that its weights are unknown."""
        self._meter = EngineTimeMeter(1, clock.monotonic())

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._alive()

    @property
    def running(self) -> int:
        """Number of pictures that the server has."""
        return len(self._calls)

    @property
    def waiting(self) -> int:
        """Number of pictures in the queue."""
        return len(self._waiting)

    @property
    def generated_tokens(self) -> int:
        """Number of denoising steps since the start."""
        return self._steps

    def time_sums(self) -> EngineTimeSums:
        """How the time until now was spent."""
        return self._meter.read(self.clock.monotonic())

    def admit(self, body: DenoisingBody) -> list[DenoisingRequest]:
        """Check a body, and return its requests. Starts nothing. Raises EngineError, DataError."""
        self._check_weights()
        requests = admit_pictures(
            body, self._pipeline, self._side, number=lambda: next(self._numbers), names=self._names_of
        )
        for request in requests:
            check_request(request)
        return requests

    def _check_weights(self) -> None:
        if self._damaged:
            raise EngineError("the weights are unknown after an update that failed", fix="Repeat the weight sync")

    def _names_of(self, rids: Sequence[str] | None, count: int) -> Sequence[str]:
        names = rids or tuple(uuid.uuid4().hex for _ in range(count))
        self.check_names(set(names))
        return names

    async def answers(self, requests: list[DenoisingRequest], *, with_condition: bool) -> list[dict[str, Any]]:
        """Denoise all requests, and return the answers in order. If the caller is cancelled, they are aborted.

        Raises EngineError if the server refuses a request or the store an array, EngineUnreachable if the server has ended.
        """
        names = {request.rid for request in requests}
        # Check again: two requests admitted in the same turn of the loop had not registered their names yet.
        self.check_names(names)
        self._names |= names
        since = self.clock.monotonic()
        self.requests += len(requests)
        self.prompt_tokens += sum(len(request.prompt) for request in requests)

        async def answered(picture: _Picture) -> dict[str, Any]:
            request, output = await picture.output
            latency = self.clock.monotonic() - since
            return await self._writer.answer(request, output, latency, with_condition=with_condition)

        try:
            async with self.gate.passing():
                pictures = [_Picture(request) for request in requests]
                self._waiting.extend(pictures)
                self._dispatch()
                try:
                    return await gather_or_cancel(answered(picture) for picture in pictures)
                finally:
                    self._forget(pictures)
        finally:
            self._names -= names

    def _forget(self, pictures: Sequence[_Picture]) -> None:
        """Drop the pictures for which no client waits any more."""
        for picture in pictures:
            picture.output.cancel()
        self._waiting = deque(picture for picture in self._waiting if not picture.output.done())
        self._note()

    def _dispatch(self) -> None:
        """Give waiting pictures to the server, as long as it may have more."""
        still = self.paused or self.asleep or self._changing
        while self._waiting and not still and len(self._calls) < AT_ONCE:
            picture = self._waiting.popleft()
            self._calls[asyncio.create_task(self._call(picture))] = picture
        self._note()

    async def _call(self, picture: _Picture) -> None:
        """Let the server denoise a picture, and set its output."""
        request, version = picture.request, self.version
        try:
            self._check_weights()
            raw = await self._server.rollout(rollout_body(request, self._pipeline, self._device))
            self.pictures += 1
            self._steps += len(request.levels) - 1
            levels, result = await asyncio.to_thread(self._read, raw, request, version)
            picture.end(DenoisingOutput(request.number, version, Finish("stop"), result), levels)
        except RolloutRefused as error:
            broken = str(error)
            picture.end(DenoisingOutput(request.number, version, Finish("abort", message=broken), broken=broken))
        except Exception as error:  # noqa: BLE001  # raised again where it is awaited
            picture.fail(error)
        finally:
            task = asyncio.current_task()
            assert task is not None
            del self._calls[task]
            self._dispatch()

    def _read(self, raw: bytes, request: DenoisingRequest, version: str) -> tuple[tuple[float, ...], DenoisingResult]:
        try:
            answer = msgpack.unpackb(raw)
        except (ValueError, msgpack.UnpackException) as error:
            raise RolloutRefused(f"the answer is not msgpack ({error!r})") from error
        return read_rollout(answer, request, self._pipeline, version)

    async def _drained(self) -> None:
        """Wait until the server has no pictures."""
        while self._calls:
            await asyncio.wait(list(self._calls))

    def _note(self) -> None:
        doing = current_activity(paused=self.paused, asleep=bool(self.asleep))
        self._meter.note(doing, self.running + self.waiting, self.clock.monotonic())
        if self._calls and not self._generating:
            self.report_progress()

    def report_progress(self) -> None:
        """Report progress to the supervisor. The engine does so when work begins; call it once a second too."""
        self._generating = bool(self._calls)
        self._report("generate" if self._generating else "waiting", self.pictures)

    async def abort(self, unwanted: Callable[[Any], bool], message: str = ABORTED) -> None:
        """End the requests for which `unwanted` is true. They have no picture."""
        for picture in (*self._waiting, *self._calls.values()):
            if unwanted(picture.request):
                picture.end(DenoisingOutput(picture.request.number, self.version, Finish("abort", message=message)))
        self._waiting = deque(picture for picture in self._waiting if not picture.output.done())
        self._note()

    async def pause(self, mode: PauseMode) -> None:
        """Give the server no more pictures. Returns when it has finished those that it has; "abort" ends all requests first."""
        self.paused = True
        if mode == "abort":
            await self.abort(lambda _: True, "aborted by a pause")
        self._note()
        await self._drained()

    async def resume(self) -> None:
        """Give the server pictures again."""
        self.paused = False
        self._dispatch()

    async def flush(self) -> bool:
        """Return whether no picture is denoised. SGLang drops what it computed from weights when they change."""
        return not self._calls

    async def release(self, tags: frozenset[str]) -> None:
        """Release the memory of the weights, once the pictures that the server has are finished; new requests wait.

        On a CPU SGLang cannot release it: requests only wait. Raises EngineError; then nothing has changed.
        """
        before = self.asleep
        self.asleep = before | tags
        try:
            await self._drained()
            if self._device != "cpu" and "weights" in tags - before:
                await self._server.release()
        except BaseException:
            self.asleep = before
            self._dispatch()
            raise
        self._note()

    async def wake(self, tags: frozenset[str]) -> None:
        """Restore the released memory named by `tags`."""
        if self._device != "cpu" and "weights" in tags & self.asleep:
            await self._server.restore()
        self.asleep -= tags
        self._dispatch()

    async def rename(self, version: str, *, abort: bool) -> None:
        """Change the version name of the served weights. `abort`: end all requests first. Raises EngineError for an older
        version."""
        check_version(version, self.version)
        if abort:
            await self.abort(lambda _: True, "aborted by a change of the weight version")
        self.version = version

    async def stage_weights(self, folder: Path) -> NetworkWeights:
        """Check that a folder has exactly the tensors of the network: SGLang ignores those that it does not know, and keeps old
        values of those that are missing. Raises EngineError."""
        await asyncio.to_thread(check_tensors, folder, self._shapes)
        return NetworkWeights(folder)

    async def install_weights(self, staged: NetworkWeights, version: str | None, *, flush: bool) -> None:
        """Serve staged weights from the next picture on. Raises EngineError; if SGLang refused them, its weights are unknown."""
        if "weights" in self.asleep:
            raise EngineError("the weights are released", fix="Call /resume_memory_occupation first")
        self._changing = True
        try:
            await self._drained()
            module = self._pipeline.files.network.name
            # SGLang reads the weights of a module from a folder of its name.
            folder = self._scratch / f"update-{next(self._updates)}"
            folder.mkdir()
            (folder / module).symlink_to(staged.folder.resolve(), target_is_directory=True)
            name = self.version if version is None else version
            self.version, self._damaged = UNKNOWN, True
            await self._server.update(folder, module)
            self.version, self._damaged = name, False
            # SGLang reads the folder of the last update again to undo one that fails, but not those before.
            self._links.append(folder)
            for old in self._links[:-1]:
                (old / module).unlink()
                old.rmdir()
            del self._links[:-1]
        finally:
            self._changing = False
            self._dispatch()

    async def checksums(self, modules: Sequence[str] | None) -> Any:
        """SHA-256 of the weights that the server has, of each module. Raises EngineError."""
        return await self._server.checksums(modules)


def _tensor_shapes(folder: Path) -> Mapping[str, TensorShape]:
    """Dtype and shape of each tensor in the weight files of a folder. Raises ModelError."""
    found: dict[str, TensorShape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= check_weight_file(file)
    return found


def check_tensors(folder: Path, own: Mapping[str, TensorShape]) -> None:
    """Raise EngineError unless the weight files in `folder` have the tensors `own`, in any floating-point type, and no others."""
    found = _tensor_shapes(folder)
    missing, foreign = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    if missing:
        what = f"the weights lack {missing[0]}"
    elif foreign:
        what = f"the weights have {foreign[0]}, which the network does not have"
    else:
        wrong = [name for name, one in found.items() if one.shape != own[name].shape or one.dtype not in FLOATS]
        if not wrong:
            return
        name = min(wrong)
        what = f"{name} is {found[name].dtype} {list(found[name].shape)}, expected {list(own[name].shape)}"
    raise EngineError(f"{what}; nothing was changed", where=str(folder), fix="Provide all weights of the network")


FLOATS = ("F64", "F32", "BF16", "F16")
