"""Placement while a job runs: when the policy is asked, what becomes of its answer, and loans within a step.

Read `planner` first. `history` gives steps to policies and keeps `moves.jsonl`; `lender` lends slots within a step. The policies are in
`placement.policies`.
"""
