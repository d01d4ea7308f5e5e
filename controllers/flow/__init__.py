"""The controller's side of the RL flow: prompts issued, answered, scored, filtered and kept until they are trained.

Implements `gcore.flows.api`. Read `peer` first, then `step`. Sealing, training and commits are not here: they follow from the records
(`controllers.rules.step`).
"""
