#!/usr/bin/env python3
"""Health probe for containers: health.py NODE.yaml. Exit code 0 if the daemon of this configuration serves, else 1.

Prints the health status or the reason of a failure. If the configuration has certificates, the probe uses TLS with them, like
other nodes. It needs only the daemon's dependencies.
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
    """Return the daemon's address for calls from this machine. Raise ValueError without a fixed port."""
    host, port = str(config.get("listen_host", "127.0.0.1")), config.get("listen_port", 0)
    if not port:
        raise ValueError("listen_port is not fixed. Set it in the configuration")
    return f"{EVERY_ADDRESS.get(host, f'[{host}]' if ':' in host else host)}:{port}"


INSIDE = [("grpc.enable_http_proxy", 0)]
"""Channel options. The daemon is on this machine, so HTTP proxies are ignored."""


def channel(config: Mapping[str, Any], folder: Path) -> grpc.Channel:
    """Return a channel to the daemon; with TLS, verified against the name in its certificate."""
    tls = config.get("tls")
    if not tls:
        return grpc.insecure_channel(address(config), INSIDE)  # noqa: TID251
    ca, cert, key = ((folder / tls[name]).read_bytes() for name in ("ca", "cert", "key"))
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    named_so = ("grpc.ssl_target_name_override", named(config))
    return grpc.secure_channel(address(config), credentials, [named_so, *INSIDE])  # noqa: TID251


def named(config: Mapping[str, Any]) -> str:
    """Return the host that the daemon advertises and its certificate names."""
    advertised = str(config.get("advertise") or config["node"])
    if advertised.count(":") > 1 and not advertised.startswith("["):
        return advertised  # an IPv6 address without a port
    return urlsplit(f"//{advertised}").hostname or advertised


def main(arguments: list[str]) -> int:
    """Run the probe and return the exit code."""
    try:
        file = Path(arguments[0])
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        with channel(config, file.parent) as line:
            stub = health_pb2_grpc.HealthStub(line)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    except grpc.RpcError as error:
        print(f"no answer: {error.code().name}")  # noqa: T201 - output of the command
        return 1
    except Exception as error:  # noqa: BLE001 - any error means that the daemon does not serve
        print(f"cannot ask: {error}")  # noqa: T201
        return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(status)  # noqa: T201
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
