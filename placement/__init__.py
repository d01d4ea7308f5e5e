"""Placement of models on slots. Pure, but for the files of the simulator: no clock, no network, no store.

Read `slots` first, then `assign` (a split of the slots becomes places), `request` and `placer` (what a job asks for, and its plans) and
`policies` (which split). `forecast` predicts the time of a step, `lending` decides loans within a step, `mapping` proposes a first layout
from models and devices.
"""

from gcore import aliases

aliases.install()  # old names of this package
