"""The controller: one daemon per node, all equal, and the command line.

A controller watches the records of each job, decides what to do next (`rules`), and carries it out with guarded transactions (`job`).
Read `rules.view` and `rules.decide` first, then `job.reconciler`. `daemon` wires the process, `job.runner` wires one job.
"""
