"""Output of the command line: the live view of a run, tables, reports of placement, data and diagnoses.

Read `state` first: it computes the state of the live view from events.
"""
