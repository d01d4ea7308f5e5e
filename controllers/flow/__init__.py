"""The controller's side of a flow: samples prompts, requests responses, scores, filters, and holds groups until they are trained.

Implements `gcore.flows.api`. Read `peer` first, then `step`. Sealing, training and commits are elsewhere: they follow from the records
(`controllers.rules.step`).
"""
