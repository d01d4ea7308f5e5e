"""The first placement of a job, before it has run: computed from model shapes and device figures.

`workload` counts parameters and work, `cluster` describes devices, `memory` computes the memory of a layout, `search`
ranks the layouts that fit.
"""
