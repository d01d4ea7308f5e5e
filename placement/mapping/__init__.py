"""The first placement: before a job has run, which pools get which slots, from models' shapes and devices' figures. Pure.

`shapes` counts a model's parameters from its configuration, `cluster` and `devices` say what there is, `workload` what a step
does, `memory` and `speed` what that takes, and `search` tries every way and tells why the others do not fit.
"""
