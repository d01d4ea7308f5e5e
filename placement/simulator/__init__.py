"""Simulated runs under placement policies, for tables of regret and for `gcore simulate`.

`scenario` is what happens, `kernel` and `job` play it, `run` compares policies, `replay` turns a recorded run into a scenario. Nothing that
plans or forecasts may import this package.
"""
