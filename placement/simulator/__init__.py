"""Simulated runs under placement policies: for `gcore simulate`, and to compare policies with the best possible run.

`scenario` defines the input, `kernel` and `job` simulate it, `run` compares policies, `replay` turns a recorded run
into a scenario. Code that plans or forecasts must not import this package.
"""
