"""One job on one controller.

`runner` watches a job's records and runs its `session`, which builds the parts. `reconciler` is the loop: read the view, decide, execute what
is due. `executor` turns one action into one guarded transaction or one call. Read `reconciler` first. Decisions are in `controllers.rules`.
"""
