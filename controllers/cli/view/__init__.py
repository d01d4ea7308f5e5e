"""What the command line shows: the live view of a run, tables and accounts of placement, data and diagnoses.

Read `state` first: it folds events into what the live view shows.
"""
