"""The engine process, once torch is there: load, prove, listen, serve, stop.

The port is taken before the model is loaded, so that a port in use is known at once; it is answered on only when the
model serves. A supervisor hears "serving", progress, and "failed" with a sentence; "stop" ends the process in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.types import ASGIApp

from gcore.clock import Clock, SystemClock
from gcore.errors import UsageError
from gcore.rollout.classifier.core import ClassifierCore
from gcore.rollout.classifier.desk import ClassifierDesk
from gcore.rollout.classifier.routes import ClassifierRoutes
from gcore.rollout.classifier.start import start_classifier
from gcore.rollout.engine.auth import Keys
from gcore.rollout.engine.core import Core
from gcore.rollout.engine.desk import Desk
from gcore.rollout.engine.launch import EngineLaunch
from gcore.rollout.engine.runner import Report, Runner
from gcore.rollout.engine.server import Routes
from gcore.rollout.engine.start import start
from gcore.rollout.engine.text import Text
from gcore.tls.material import Watched
from gcore.tls.serving_http import serving_context
from gcore.worker.child import Control

SWITCH_S = 0.0005
"""The interpreter's switch interval: the model's thread must not wait 5 ms for the event loop, or the loop for it."""
BACKLOG = 4096
GRACE_S = 2
"""Seconds that open connections have after "stop"."""
DEATH_EXIT = 1


def serve(launch: EngineLaunch, control: Control | None, clock: Clock | None = None) -> None:
    """Serve until told to stop. Raises UsageError and DataError before that, each in one sentence."""
    clock = clock or SystemClock()
    _raise_descriptor_limit()
    listener = _listen(launch.host, launch.port)
    torch.set_num_threads(launch.threads)
    torch.set_num_interop_threads(1)  # nothing here runs operators side by side
    torch.set_grad_enabled(False)
    text = Text.load(Path(launch.model))
    core = start_classifier(launch, text) if launch.task == "classify" else start(launch, text)
    sys.setswitchinterval(SWITCH_S)
    asyncio.run(_run(core, text, launch, listener, control, clock))


def _facade(
    core: Core | ClassifierCore, text: Text | None, launch: EngineLaunch, clock: Clock
) -> tuple[Desk | ClassifierDesk, ASGIApp]:
    """What stands before the model's thread: a desk, and the routes to it."""
    keys = Keys(launch.api_key, launch.admin_api_key)
    describe = _description(core, launch)
    if isinstance(core, ClassifierCore):
        reception = ClassifierDesk(core, text, clock=clock)
        return reception, ClassifierRoutes(core, reception, describe, keys).app()
    desk = Desk(core, text, clock=clock, seeds=np.random.default_rng())
    more = {"max_total_num_tokens": core.limits.cache_tokens, "lane": core.lane.name}
    return desk, Routes(core, desk, describe | more, keys).app()


def _description(core: Core | ClassifierCore, launch: EngineLaunch) -> dict[str, Any]:
    model = core.model
    return {
        "model_path": launch.model,
        "tokenizer_path": launch.model,
        "load_format": "auto",
        "model_type": getattr(model.module.config, "model_type", None),
        "architectures": getattr(model.module.config, "architectures", None),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "engine": "gcore torch engine",
        "context_length": model.context,
        "vocab_size": model.vocabulary,
        "max_running_requests": launch.batch_slots,
        "dtype": launch.dtype,
        "device": str(model.shape.device),
    }


async def _run(
    core: Core | ClassifierCore,
    text: Text | None,
    launch: EngineLaunch,
    listener: socket.socket,
    control: Control | None,
    clock: Clock,
) -> None:
    desk, app = _facade(core, text, launch, clock)
    runner: Runner[Any] = Runner(
        core, clock=clock, deliver=desk.deliver, report=_reporter(control), on_death=_death(control)
    )
    desk.open(runner)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=60,
    )
    config.load()
    if launch.tls is not None:
        config.ssl = serving_context(Watched(launch.tls.material))
    server = uvicorn.Server(config)
    runner.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    # The socket listens since before the model was loaded: whoever connects from here on is answered.
    address = f"{launch.host}:{listener.getsockname()[1]}"
    if control is None:
        print(f"serving on {address}", flush=True)  # noqa: T201
    else:
        control.send("serving", address=address)
        control.send("progress", phase="waiting", progress=0)
        threading.Thread(target=_obey, args=(control, server), name="stop", daemon=True).start()
    await serving


def _raise_descriptor_limit() -> None:
    """Each request under way is an open connection, and the limit that shells set, 1024, is for programs that select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a kernel may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG)
        # Inherited by each connection. asyncio sets it only on sockets that name their protocol, which these do not; and
        # without it an answer's body waits for the receipt of its head, which a client delays by 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UsageError(
            f"cannot listen there ({error.strerror or error})",
            where=f"{host}:{port}",
            fix="Choose another host or port",
        ) from error


def _obey(control: Control, server: uvicorn.Server) -> None:
    control.wait_for("stop")
    server.should_exit = True


def _reporter(control: Control | None) -> Report:
    def report(phase: str, progress: int) -> None:
        if control is not None:
            control.send("progress", phase=phase, progress=progress)

    return report


def _death(control: Control | None) -> Callable[[Exception], None]:
    """The model's thread has ended: nothing that this process could still answer is worth waiting for."""

    def die(error: Exception) -> None:
        import traceback

        traceback.print_exception(error)
        if control is not None:
            control.send("failed", reason=f"the model's thread ended: {' '.join(str(error).split())[:300] or error!r}")
        sys.stderr.flush()
        os._exit(DEATH_EXIT)

    return die
