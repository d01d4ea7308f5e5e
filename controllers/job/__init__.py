"""One job on one controller.

`runner` wires the parts of a job and watches its records; `reconciler` is the loop: look, decide, carry out what is due; `executor` turns one
action into one guarded transaction or one call. Read `reconciler` first. Decisions are in `controllers.rules`.
"""
