"""gcore: post-training of language models by reinforcement learning, on a cluster without a head node."""

import os

# gRPC's core writes to stderr past all logging, at INFO whenever a peer goes away. Read when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
