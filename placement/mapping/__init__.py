"""The first placement, before a job has run: from the shapes of models and the figures of devices.

`workload` counts parameters and work, `cluster` describes devices, `memory` what a layout takes, `search` ranks the layouts that fit.
"""
