"""One job on one controller.

Read `reconciler` first: the loop that reads the view, decides, and executes what is due. `executor` turns each action
into one guarded transaction or one call. `runner` watches a job's records and runs its `session`, which builds all
parts. Decisions are in `controllers.rules`.
"""
