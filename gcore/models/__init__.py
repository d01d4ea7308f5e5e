"""Models on disk: hubs, checks without torch, checkpoints, staged weights, broadcasts to engines.

Staged weights are those of a trained version, kept for engines to load. Read `layout` first. Only `adapters`, `dtypes`,
`publisher` and `row_adapters` import torch, and `export` when it merges adapters.
"""
