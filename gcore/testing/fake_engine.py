"""An engine that computes nothing: the routes and answers of the real ones, tokens drawn from the seed.

For tests of controllers and workers, where a model would only cost time. It keeps the promises that callers rely on:
weight versions and their spans, one answer a sample in order, abort with the tokens so far. Never reaches a user.

    python -m gcore.testing.fake_engine        under a supervisor, as any engine
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gcore.types import Version
from gcore.worker.child import Control

VOCABULARY = 10


class FakeEngine:
    """One engine. `seconds_per_token`: how long a token takes."""

    def __init__(self, version: str, seconds_per_token: float = 0.0) -> None:
        self.version = version
        self.seconds_per_token = seconds_per_token
        self._aborted: set[str] = set()

    def app(self) -> Starlette:
        """The routes."""
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/health", self._ok),
                Route("/model_info", self._model_info),
                Route("/generate", self._generate, methods=post),
                Route("/abort_request", self._abort, methods=post),
                Route("/update_weights_from_disk", self._update, methods=post),
                Route("/pause_generation", self._status_ok, methods=post),
                Route("/continue_generation", self._status_ok, methods=post),
            ]
        )

    async def _ok(self, request: Request) -> Response:
        return Response()

    async def _status_ok(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "message": ""})

    async def _model_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def _update(self, request: Request) -> Response:
        version = str((await request.json()).get("weight_version"))
        if Version.parse(version) < Version.parse(self.version):
            return JSONResponse({"success": False, "message": f"{self.version} is newer"}, status_code=400)
        self.version = version
        return JSONResponse({"success": True, "message": ""})

    async def _abort(self, request: Request) -> Response:
        self._aborted.add(str((await request.json())["rid"]))
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        one = not isinstance(body["input_ids"][0], list)
        prompts = [body["input_ids"]] if one else body["input_ids"]
        params = body["sampling_params"] if isinstance(body["sampling_params"], list) else [body["sampling_params"]]
        rids = body.get("rid") if isinstance(body.get("rid"), list) else [body.get("rid", "")]
        answers = await asyncio.gather(
            *(self._sample(prompt, param, str(rid)) for prompt, param, rid in zip(prompts, params, rids, strict=True))
        )
        return JSONResponse(answers[0] if one else list(answers))

    async def _sample(self, prompt: list[int], params: dict[str, Any], rid: str) -> dict[str, Any]:
        drawn = np.random.Generator(np.random.Philox(int(params.get("sampling_seed", 0))))
        length = int(drawn.integers(1, int(params["max_new_tokens"]) + 1))
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        reason = "stop"
        for position in range(length):
            if self.seconds_per_token:
                await asyncio.sleep(self.seconds_per_token)  # noqa: TID251 - the emulated work itself
            if rid in self._aborted:
                reason = "abort"
                break
            ids.append(int(drawn.integers(0, VOCABULARY)))
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": position, "end": position + 1})
            spans[-1]["end"] = position + 1
        logprob = -float(np.log(VOCABULARY))
        return {
            "text": "".join(map(str, ids)),
            "output_ids": ids,
            "meta_info": {
                "id": rid,
                "finish_reason": {"type": reason},
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "weight_version": self.version,
                "weight_versions": spans,
                "output_token_logprobs": [[logprob, token, None] for token in ids],
            },
        }


async def _serve(control: Control) -> None:
    engine = FakeEngine(str(control.launch.get("weight_version", "0.0")))
    server = uvicorn.Server(uvicorn.Config(engine.app(), host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)  # noqa: TID251 - a fake needs no injected clock
    port = server.servers[0].sockets[0].getsockname()[1]
    control.send("serving", address=f"127.0.0.1:{port}")
    await asyncio.to_thread(control.wait_for, "stop")
    server.should_exit = True
    await task


if __name__ == "__main__":
    line = Control.inherit()
    assert line is not None
    asyncio.run(_serve(line))
