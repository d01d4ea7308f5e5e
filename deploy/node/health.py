#!/usr/bin/env python3
"""Asks the daemon of a node's configuration whether it serves: health.py NODE.yaml. Exit code 0 if it does, 1 if not.

For the probes of containers; what it prints is for whoever reads why one failed. Where the configuration has certificates, it speaks TLS
with them, as other nodes do. Needs nothing but what the daemon itself needs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
PATIENCE_S = 5.0


def address(config: Mapping[str, Any]) -> str:
    """Where the daemon listens, as this machine reaches it."""
    host, port = str(config.get("listen_host", "127.0.0.1")), config.get("listen_port", 0)
    if not port:
        raise ValueError("listen_port is not fixed, so nobody can ask there: set it")
    return f"{EVERY_ADDRESS.get(host, f'[{host}]' if ':' in host else host)}:{port}"


INSIDE = [("grpc.enable_http_proxy", 0)]
"""The daemon is on this machine: no proxy for the web is between."""


def channel(config: Mapping[str, Any], folder: Path) -> grpc.Channel:
    """To the daemon; with TLS, to the name that its own certificate says."""
    tls = config.get("tls")
    if not tls:
        return grpc.insecure_channel(address(config), INSIDE)  # noqa: TID251
    ca, cert, key = ((folder / tls[name]).read_bytes() for name in ("ca", "cert", "key"))
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    named_so = ("grpc.ssl_target_name_override", named(config))
    return grpc.secure_channel(address(config), credentials, [named_so, *INSIDE])  # noqa: TID251


def named(config: Mapping[str, Any]) -> str:
    """The host that the daemon advertises, which its certificate is of."""
    advertised = str(config.get("advertise") or config["node"])
    if advertised.count(":") > 1 and not advertised.startswith("["):
        return advertised  # an address of IPv6, without a port
    return urlsplit(f"//{advertised}").hostname or advertised


def main(arguments: list[str]) -> int:
    """The exit code."""
    try:
        file = Path(arguments[0])
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        with channel(config, file.parent) as line:
            stub = health_pb2_grpc.HealthStub(line)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    except grpc.RpcError as error:
        print(f"no answer: {error.code().name}")  # noqa: T201 - the command line's own voice
        return 1
    except Exception as error:  # noqa: BLE001 - the edge of the process: any reason is one not to serve
        print(f"cannot ask: {error}")  # noqa: T201
        return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(status)  # noqa: T201
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
