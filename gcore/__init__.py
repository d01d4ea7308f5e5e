"""gcore: post-training of language models by reinforcement learning, on a cluster without a head node."""

import os
from typing import TYPE_CHECKING, Any

from gcore import aliases

if TYPE_CHECKING:
    from gcore.client.client import AsyncClient, Client
    from gcore.client.local import LocalCluster, run
    from gcore.reward.api import batch_reward

# gRPC's core writes to stderr without Python logging, at INFO whenever a peer disconnects. Read at the first import of grpc.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

aliases.install()

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "LocalCluster", "__version__", "batch_reward", "run"]


def __getattr__(name: str) -> Any:
    """Import the public names of gcore (clients, `LocalCluster`, `run`, `batch_reward`) at first use: workers and most commands do not need them."""
    if name in ("LocalCluster", "run"):
        from gcore.client import local

        return getattr(local, name)
    if name == "batch_reward":
        from gcore.reward.api import batch_reward

        return batch_reward
    if name == "AsyncClient":
        from gcore.client.client import AsyncClient

        return AsyncClient
    if name == "Client":
        from gcore.client.client import Client

        return Client
    raise AttributeError(f"module 'gcore' has no attribute {name!r}")
