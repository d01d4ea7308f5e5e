"""Models on disk: hubs, checks without torch, checkpoints and weights in a run's folder, weights over a process group.

Read `layout` first. Only `broadcast` imports torch.
"""
