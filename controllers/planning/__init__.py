"""Placement while a job runs: calls the policy, proposes moves, lends slots within a step.

Read `planner` first. `history` gives steps to policies and writes `moves.jsonl`; `lender` lends slots within a step.
The policies are in `placement.policies`.
"""
