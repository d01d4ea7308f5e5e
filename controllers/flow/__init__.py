"""The controller's side of a flow: issues prompts, requests responses, scores, filters, and keeps groups until they are
trained.

Implements `gcore.flows.api`. Read `peer` first, then `step`. Sealing, training and commits are not here: they follow from the records
(`controllers.rules.step`).
"""
