"""gcore: post-training of language models by reinforcement learning, on a cluster without a head node."""

__version__ = "0.1.0"
