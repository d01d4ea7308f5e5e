"""Connections inside the cluster ignore the environment's proxies, and IPv6 addresses work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from gcore.api.tls import Connector
from gcore.errors import CannotListen
from gcore.store.connection import EtcdEndpoint, _made
from gcore.system import network
from gcore.system.network import (
    bypass_proxies,
    free_ports,
    http_client,
    join_host_port,
    listen,
    listen_http,
    open_channel,
    split_host_port,
)

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(params=["http_proxy", "https_proxy", "all_proxy", "grpc_proxy"])
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy address without a server, for all hosts."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, NOWHERE)


@pytest.fixture(params=["127.0.0.1", "[::1]"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    server = grpc.aio.server()
    port = server.add_insecure_port(f"{request.param}:0")
    await server.start()
    yield f"{request.param}:{port}"
    await server.stop(None)


@pytest.mark.usefixtures("proxy")
async def test_channels_inside_the_cluster_are_ready_with_a_proxy_in_the_environment(server: str) -> None:
    (to_store,) = _made([EtcdEndpoint.parse(server)], None)
    for channel in (open_channel(server), Connector().channel(server), to_store.channel):
        async with asyncio.timeout(20):
            await channel.channel_ready()
        await channel.close()


@pytest.mark.usefixtures("proxy")
async def test_http_inside_the_cluster_does_not_ask_a_proxy() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as serving, http_client(20.0) as http:
        port = serving.sockets[0].getsockname()[1]
        assert (await http.get(f"http://127.0.0.1:{port}/")).text == "ok"
        serving.close()


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy"])
def test_programs_of_others_are_told_what_no_proxy_is_for(name: str) -> None:
    assert bypass_proxies({}, "10.0.0.1") == {}
    named = bypass_proxies({name: NOWHERE, "no_proxy": "internal.example"}, "10.0.0.1", "localhost")
    assert named == {"NO_PROXY": "10.0.0.1,localhost", "no_proxy": "internal.example,10.0.0.1,localhost"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_listeners_of_either_ip_version_are_reachable(host: str) -> None:
    with listen(host) as listener:
        address = join_host_port(host, listener.getsockname()[1])
        with socket.create_connection(split_host_port(address), timeout=20):
            pass


def test_bodies_of_responses_do_not_wait_for_acknowledgements_of_their_heads() -> None:
    with listen_http("127.0.0.1", 0, 8) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::1", "gpu-7.cluster"])
def test_an_address_is_split_as_it_was_joined(host: str) -> None:
    assert split_host_port(join_host_port(host, 7)) == (host, 7)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_free_ports_are_below_those_of_outgoing_connections_and_never_the_same(host: str) -> None:
    with socket.socket() as outgoing, listen("127.0.0.1") as server:
        outgoing.connect(server.getsockname())
        first = outgoing.getsockname()[1]
    ports = [*free_ports(40, host), *free_ports(40, host)]
    assert len(set(ports)) == 80
    assert all(network.LOWEST_PORT <= port < min(first, 32_768) for port in ports)
    for port in ports:
        listen(host, port).close()


def test_a_port_in_use_and_the_port_before_it_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_ports(1, adjacent=2)[0] + 1, free_ports(1, adjacent=2)[0]
    drawn = iter([taken, taken - 1, free])
    monkeypatch.setattr(network, "_given", set())
    monkeypatch.setattr(network.secrets, "randbelow", lambda _: next(drawn) - network.LOWEST_PORT)
    with listen("127.0.0.1", taken):
        assert free_ports(1, adjacent=2) == (free,)


def test_no_free_port_is_an_error_and_no_endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr(network.secrets, "randbelow", lambda _: port - network.LOWEST_PORT)
    with pytest.raises(CannotListen, match="no 1 free ports were found"):
        free_ports(1)
