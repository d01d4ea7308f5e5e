"""Emulated slots: control plane, network and storage are real, compute is simulated. For tests and benchmarks.

`law` says how long things take, `device` plays the engines of a slot in time (both pure), `routes` and `host` serve them, `rank` is a train rank
that computes nothing. No figure from an emulated device says anything about a model, an accelerator or a network.
"""
