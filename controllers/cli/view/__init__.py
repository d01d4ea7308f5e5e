"""Output of the command line: the live view of a run, tables, and reports on placement, data and checks.

Read `state` first: it computes the state of the live view from events.
"""
