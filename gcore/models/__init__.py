"""Models on disk: hubs, checks without torch, checkpoints, staged weights, broadcasts to engines.

Read `layout` first. Only `broadcast` imports torch.
"""
