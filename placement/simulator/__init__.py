"""Simulated runs under placement policies, for tables of regret and for `gcore simulate`.

`scenario` defines the input, `kernel` and `job` simulate it, `run` compares policies, `replay` turns a recorded run
into a scenario. Code that plans or forecasts must not import this package.
"""
