"""Connections, HTTP servers and addresses inside a cluster, and errors of listening.

Nodes, ranks, engines and etcd use the cluster's own addresses. Environment settings for other networks (`HTTP_PROXY`, `HTTPS_PROXY`,
`ALL_PROXY`, `SSL_CERT_FILE`) must not apply to them, because calls through a proxy would not reach a rank. So this module creates all channels
and HTTP clients for the cluster, and ruff forbids others (`banned-api`). External judges and hubs are outside, and use the environment.

If listening on an address fails, the problem may be temporary, as during a machine's boot (`CannotListen`: retry), or the configuration names an
unusable address, such as a port that needs privileges (`UsageError`).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.errors import CannotListen, GcoreError, UsageError, explain_os_errors

if TYPE_CHECKING:
    import ssl

    import grpc
    import httpx
    import uvicorn
    from starlette.types import ASGIApp

ChannelOptions = Sequence[tuple[str, Any]]


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, options: ChannelOptions = ()
) -> grpc.aio.Channel:
    """Open a channel to `host:port` inside the cluster; without `credentials` unencrypted."""
    import grpc  # engines open none

    inside = (*options, ("grpc.enable_http_proxy", 0))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=inside)
    return grpc.aio.secure_channel(address, credentials, options=inside)


KEEP_ALIVE_S = 60
"""Seconds for which an HTTP server keeps an idle connection open."""

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def bypass_proxies(environ: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return environment variables (NO_PROXY) with which child processes bypass the proxies in `environ` for `hosts`; empty without a proxy."""
    if not any(environ.get(name) or environ.get(name.lower()) for name in PROXIES):
        return {}
    return {name: ",".join(filter(None, (environ.get(name), *hosts))) for name in ("NO_PROXY", "no_proxy")}


def http_client(timeout_s: float, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Return an HTTP client for addresses inside the cluster. `transport`: by default httpx's own."""
    import httpx  # not every process needs it

    return httpx.AsyncClient(timeout=timeout_s, transport=transport, trust_env=False)


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, or `[v6]:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port` into host (without brackets) and port. Raises ValueError if the port is not a number."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(host: str, port: int = 0, backlog: int = 128) -> socket.socket:
    """Return a socket that listens at the first IPv4 or IPv6 address of `host`; `port` 0: a free port. Raises OSError."""
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server((host, port), family=family, backlog=backlog)


LOWEST_PORT = 10_240
"""The lowest port that `free_ports` returns."""

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_OUTGOING, _MOST_TRIES, _LEAST_CHOICE = 32_768, 1000, 1000
_given: set[int] = set()


def free_ports(count: int, host: str = "127.0.0.1", *, adjacent: int = 1) -> tuple[int, ...]:
    """Return `count` ports at which other processes can listen. Raises CannotListen if there are not enough.

    The system's own choice (port 0) is a port that an outgoing connection may take before the process listens. These are
    below the ports of outgoing connections, and no two calls in this process return the same. `adjacent`: of each port,
    the ports after it are free too, so that there are so many in a row.
    """
    outgoing = _FIRST_OUTGOING
    with contextlib.suppress(OSError, ValueError):
        outgoing = int(_OUTGOING.read_text().split()[0])
    end = outgoing if outgoing - LOWEST_PORT >= _LEAST_CHOICE else 65_536
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(_MOST_TRIES):
            if len(found) == count:
                return tuple(found)
            first = LOWEST_PORT + secrets.randbelow(end - LOWEST_PORT - adjacent)
            ports = range(first, first + adjacent)
            if _given.isdisjoint(ports):
                with contextlib.suppress(OSError):
                    for port in ports:
                        held.enter_context(listen(host, port))
                    found.append(first)
                    _given.update(ports)
    raise CannotListen(f"no {count} free ports were found", where=host, fix="End other processes of this machine")


def listen_http(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket (`listen`) for an HTTP server. Connections wait in it until the server starts. Raises UsageError."""
    where = join_host_port(host, port)
    with explain_os_errors("cannot listen at this address", UsageError, where=where, fix="Choose another host or port"):
        listener = listen(host, port, backlog)
    # Inherited by each connection. asyncio sets it only on sockets that name their protocol, which these do not.
    # Without it the body of a response waits for the acknowledgement of its head, which a client delays by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def http_settings(app: ASGIApp, *, backlog: int, grace_s: int, tls: ssl.SSLContext | None) -> uvicorn.Config:
    """Return the settings of an HTTP server for `app`.

    `grace_s`: time that running requests get when the server stops. `tls`: None: unencrypted.
    """
    import uvicorn  # few processes serve HTTP

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


PASSING = frozenset({errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.ENETDOWN, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE})
"""System errors of listening that are temporary."""

PASSING_NAMES = frozenset({socket.EAI_AGAIN})
"""Resolver errors that are temporary: the name server does not answer yet."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listen_error(what: str, error: OSError | None) -> GcoreError:
    """Return the error for a failed listen: CannotListen if it may be temporary, otherwise UsageError.

    `what`: what failed, with the address. `error`: the system's error; None: another try (`describe_listen_error`) succeeded.
    """
    said = "another process used it a moment ago" if error is None else error.strerror or str(error)
    if error is None or error.errno in (PASSING_NAMES if isinstance(error, socket.gaierror) else PASSING):
        return CannotListen(
            f"{what} ({said})",
            fix="Retry; if it fails again, choose another address or port in the configuration",
        )
    return UsageError(f"{what} ({said})", fix="Choose another address or port in the configuration")


def describe_listen_error(host: str, port: int) -> OSError | None:
    """Try to listen at `host` and `port` and return the system's error; None if it succeeds. For servers that do not report the error themselves."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with closing(socket.socket(family, kind, protocol)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
    except OSError as error:
        return error
    return None
