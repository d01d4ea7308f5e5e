"""The HTTP server of a worker process: its socket, its settings, and the report that it serves."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

import uvicorn

from gcore.errors import UsageError, explain_os_errors
from gcore.system.network import join_host_port, listen

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gcore.system.control_line import ControlLine

KEEP_ALIVE_S = 60
"""Seconds for which an idle connection stays open."""


def listen_http(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at `host`; `port` 0: a free port. Connections wait in it until the server starts. Raises UsageError."""
    where = join_host_port(host, port)
    with explain_os_errors("cannot listen at this address", UsageError, where=where, fix="Choose another host or port"):
        listener = listen(host, port, backlog)
    # Inherited by each connection. asyncio sets it only on sockets that name their protocol, which these do not.
    # Without it the body of a response waits for the acknowledgement of its head, which a client delays by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def http_settings(app: ASGIApp, *, backlog: int, grace_s: int, tls: ssl.SSLContext | None) -> uvicorn.Config:
    """Return the settings of a server for `app`.

    `grace_s`: time that running requests get when the server stops. `tls`: None: unencrypted.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        backlog=backlog,
        timeout_graceful_shutdown=grace_s,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    config.ssl = tls
    return config


def report_serving(control: ControlLine | None, host: str, listener: socket.socket) -> None:
    """Report the address of `listener` to the supervisor; without one, print it."""
    address = join_host_port(host, listener.getsockname()[1])
    if control is None:
        print(f"serving on {address}", flush=True)  # noqa: T201
        return
    control.send("serving", address=address)
    control.report_progress("waiting", 0)
