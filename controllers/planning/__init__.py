"""Placement while a job runs: calls the policy, proposes moves, lends slots within a step.

Read `planner` first. `history` collects the measured steps that policies get and writes `moves.jsonl`; `lender` lends
slots between pools within a step. The policies themselves are in `placement.policies`.
"""
