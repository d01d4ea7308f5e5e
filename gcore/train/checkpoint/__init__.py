"""Checkpoints, staged weights and receipts on disk; copies of train states in the memory of nodes."""
