"""How an engine is reached that is registered: its address and its name become a client, with TLS and its key where the cluster has
them."""

from __future__ import annotations

from typing import Protocol

from gcore.rollout.client import EngineClient
from gcore.rollout.transport import PlainTransport
from gcore.tls.connecting import PLAIN, Connector


class EngineReach(Protocol):
    """Makes a client of the engine that registered as `instance`, and answers at `url` (http://host:port)."""

    def __call__(self, url: str, *, timeout_s: float, instance: str) -> EngineClient: ...


def reach_by(connector: Connector) -> EngineReach:
    """Over the connections of `connector`."""

    def reach(url: str, *, timeout_s: float, instance: str) -> EngineClient:
        key = connector.engine_key(instance)
        if not connector.secure:
            return EngineClient(url, timeout_s=timeout_s, key=key)
        transport = PlainTransport(lambda: connector.http)
        secure = url.replace("http://", "https://", 1)
        return EngineClient(secure, timeout_s=timeout_s, transport=transport, key=key)

    return reach


plain_reach: EngineReach = reach_by(PLAIN)
"""On loopback, without keys."""
