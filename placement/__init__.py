"""Placement of models on slots. Pure: no clock, no network, no store. Only the simulator reads files.

Read `slots` first, then `assign` (turns a split into places on slots), `request` and `placer` (what a job requests, and
its plans) and `policies` (choose the split). `forecast` predicts the time of a step, `lending` decides elastic
reassignment within a step, `mapping` proposes a first layout from models and devices.
"""

from gcore import aliases

aliases.install()  # old names of this package
