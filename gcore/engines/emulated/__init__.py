"""Emulated slots: control plane, network and storage are real, compute is simulated. For tests and benchmarks.

`law` defines durations, `device` simulates the engines of a slot in time (both pure), `routes` and `host` serve them,
`rank` is a train rank without computation. Figures from an emulated device say nothing about a model, an accelerator or
a network.
"""
