"""One job on one controller.

`runner` watches a job's records and runs its `session`, which wires the parts. `reconciler` is the loop: look, decide, carry out what is due.
`executor` turns one action into one guarded transaction or one call. Read `reconciler` first. Decisions are in `controllers.rules`.
"""
