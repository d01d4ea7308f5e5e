"""Slot accounting: assigns every second of every slot to exactly one state.

Read `states` first (the states, and how conflicting reports are resolved), then `attribution` (in which state a
worker's time counts, and why it was idle), then `step_account` (which combines the reports to the account of a step).
These three are pure; `collector` reads the totals of engines and writes the accounts, `usage` adds them up by job and
day.

No step waits for the accounts, and its safety does not depend on them; placement policies use them as measurements.
Time that no report covers is reported as `unbooked`, never guessed.
"""
