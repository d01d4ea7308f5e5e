"""The torch engine's process: loads a model, selects its runner, and serves HTTP until it is stopped.

The port is bound before the model is loaded, so that a port in use is detected at once; requests wait until the model
is loaded. The process sends "serving", progress, and "failed" with an explanation to its supervisor; on "stop" it
finishes running requests for `GRACE_S` and ends.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.types import ASGIApp

from gcore.api.tls import ReloadingFiles, serving_context
from gcore.engines.detokenizer import Detokenizer
from gcore.engines.launch import EngineLaunch, FrontEndLaunch
from gcore.engines.serving.http import ApiKeys
from gcore.engines.torch.async_engine import AsyncEngine, ModelThread
from gcore.engines.torch.classifier import ClassifierCore, ClassifierRequestHandler, classifier_app, start_classifier
from gcore.engines.torch.engine import EngineCore, EngineLimits, GeneratorBase
from gcore.engines.torch.frontend import RequestHandler, generator_app
from gcore.engines.torch.model import (
    TOO_BIG,
    default_cache_tokens,
    device_of,
    explain_memory_error,
    free_bytes,
    load_model,
)
from gcore.engines.torch.model_runner import FastRunner
from gcore.engines.torch.runner_selection import select_runner
from gcore.errors import UsageError
from gcore.system.clock import Clock, SystemClock
from gcore.system.control_line import ControlLine, report_serving
from gcore.system.network import http_settings, join_host_port, listen_http

SHORTEST = 2
"""Number of tokens of the smallest request: one of the prompt, one of the response."""


def start_engine(launch: EngineLaunch, text: Detokenizer | None) -> EngineCore:
    """Create the engine core for a launch document: load the model, select its runner, and set the size of its KV
    cache.

    Opens no port and starts no thread. Raises UsageError, DataError or EngineError if the model cannot be served.
    """
    device = device_of(launch)
    with explain_memory_error("while it loaded the model", TOO_BIG):
        model = load_model(
            Path(launch.model),
            dtype=launch.dtype,
            device=device,
            context=launch.context_length,
            text=text,
            trust_remote_code=launch.trust_remote_code,
            adapters={name: Path(folder) for name, folder in launch.adapters.items()},
            adapter_digests=launch.adapter_digests,
            blobs=Path(launch.blobs) if launch.blobs else None,
        )
        lane = select_runner(model, deterministic=launch.deterministic, chunk=launch.prefill_chunk_tokens)
    budget = launch.cache_tokens or default_cache_tokens(model.shape, free_bytes(model.shape.device))
    if isinstance(lane, FastRunner):
        lane = FastRunner(model, slots=launch.batch_slots, budget=budget)
    limits = EngineLimits(launch.batch_slots, budget, launch.prefill_chunk_tokens)
    core = EngineCore(model, text, lane, limits, version=launch.weight_version)
    if core.longest < SHORTEST:
        raise UsageError(
            f"a cache of {budget} tokens is too small even for a request of {SHORTEST} tokens",
            where="--cache-tokens",
            fix="Raise rollout.cache_tokens, or remove it to use the free memory",
        )
    return core


Core = GeneratorBase | ClassifierCore


def start_core(launch: EngineLaunch, text: Detokenizer | None) -> Core:
    """Create the core of the torch engine for the task of a launch document. Raises like `start_engine`."""
    if launch.task != "classify":
        return start_engine(launch, text)
    if launch.adapters:
        raise UsageError("a classifier serves no adapters", where="--adapters", fix="Remove it")
    return start_classifier(launch, text)


SWITCH_S = 0.0005
"""Python's thread switch interval in seconds. With the default of 5 ms the model's thread and the event loop would wait
too long for each other.
"""

BACKLOG = 4096

GRACE_S = 2
"""Seconds before open connections are closed after "stop"."""

DEATH_EXIT = 1


def serve_engine(
    launch: FrontEndLaunch,
    control: ControlLine | None,
    start: Callable[[Any, Detokenizer | None], Any] = start_core,
    facade: Callable[[Any, Detokenizer | None, Any, Clock], tuple[AsyncEngine[Any, Any], ASGIApp]] | None = None,
) -> None:
    """Load the model of a launch document and serve it until the supervisor sends "stop" or a signal arrives.

    `control`: connection to the supervisor; None: started by hand. `start`: creates the engine core for `launch`.
    `facade`: creates its request handler and application; None: those of a generator or classifier. Raises UsageError,
    DataError or EngineError if the engine cannot start.
    """
    _raise_descriptor_limit()
    listener = listen_http(launch.host, launch.port, BACKLOG)
    torch.set_num_threads(launch.threads)
    torch.set_num_interop_threads(1)  # no operators run concurrently here
    torch.set_grad_enabled(False)
    text = Detokenizer.load(Path(launch.model))
    core = start(launch, text)
    sys.setswitchinterval(SWITCH_S)
    clock = SystemClock()
    made = partial(facade or _facade, core, text, launch, clock)
    asyncio.run(_run(core, made, launch, listener, control, clock))


def _facade(
    core: Core, text: Detokenizer | None, launch: FrontEndLaunch, clock: Clock
) -> tuple[RequestHandler | ClassifierRequestHandler, ASGIApp]:
    """Create the request handler for a core, and the ASGI application with its routes."""
    keys = ApiKeys(launch.api_key, launch.admin_api_key)
    description = _description(core, launch) | core.facts
    if isinstance(core, ClassifierCore):
        classifier = ClassifierRequestHandler(core, text, clock=clock, description=description)
        return classifier, classifier_app(classifier, keys)
    generator = RequestHandler(core, text, clock=clock, seeds=np.random.default_rng(), description=description)
    return generator, generator_app(generator, Path(launch.model), keys)


def _description(core: Core, launch: FrontEndLaunch) -> dict[str, Any]:
    model = core.model
    return {
        "model_path": launch.model,
        "tokenizer_path": launch.model,
        "load_format": "auto",
        "model_type": getattr(model.module.config, "model_type", None),
        "architectures": getattr(model.module.config, "architectures", None),
        "has_image_understanding": core.takes_pictures,
        "has_audio_understanding": False,
        "context_length": model.context,
        "vocab_size": model.vocabulary,
        "max_running_requests": launch.batch_slots,
        "dtype": launch.dtype,
        "device": str(model.shape.device),
    }


async def _run(
    core: Any,
    facade: Callable[[], tuple[AsyncEngine[Any, Any], ASGIApp]],
    launch: FrontEndLaunch,
    listener: socket.socket,
    control: ControlLine | None,
    clock: Clock,
) -> None:
    desk, app = facade()
    report = None if control is None else control.report_progress
    runner: ModelThread[Any] = ModelThread(
        core, clock=clock, deliver=desk.deliver, report=report, on_death=_death(control)
    )
    desk.open(runner)
    tls = None if launch.tls is None else serving_context(ReloadingFiles(launch.tls.material))
    server = uvicorn.Server(http_settings(app, backlog=BACKLOG, grace_s=GRACE_S, tls=tls))
    runner.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    # The socket has been listening since before the model was loaded: connections from here on are answered.
    report_serving(control, join_host_port(launch.host, listener.getsockname()[1]))
    if control is not None:
        threading.Thread(target=_obey, args=(control, server), name="stop", daemon=True).start()
    await serving


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit: each running request is an open connection, and shells usually
    set a limit of 1024.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a kernel may allow less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _obey(control: ControlLine, server: uvicorn.Server) -> None:
    control.wait_for("stop")
    server.should_exit = True


def _death(control: ControlLine | None) -> Callable[[Exception], None]:
    """Return the function to call when the model's thread has failed. It reports the error and ends the process, which
    could not serve any request.
    """

    def die(error: Exception) -> None:
        import traceback

        traceback.print_exception(error)
        if control is not None:
            control.send("failed", reason=f"the model's thread ended: {' '.join(str(error).split())[:300] or error!r}")
        sys.stderr.flush()
        os._exit(DEATH_EXIT)

    return die
