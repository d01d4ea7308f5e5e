"""Emulated slots: control plane, network and storage are real, compute is simulated. For tests and benchmarks.

`law` defines how long simulated work takes, `device` simulates the engines of a slot in time (both pure), `routes` and
`host` serve them over HTTP, `rank` is a train rank without computation. Measurements from an emulated device say
nothing about a model, an accelerator or a network.
"""
