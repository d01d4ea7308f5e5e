"""The controller's side of a flow: samples prompts, requests responses, scores, filters, and holds groups until they are trained.

A flow is the user's program of a training step; these modules implement the interface that it calls
(`gcore.flows.api`). Read `peer` first, then `step`. Sealing, training and commits are not here: rules decide on them
from the job's records (`controllers.rules.step`).
"""
