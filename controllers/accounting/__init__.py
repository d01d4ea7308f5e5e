"""Slot accounting: assigns every second of every slot to exactly one state.

Read `states` first (what the states are and how conflicting reports are settled), then `attribution` (what a worker's time counts as, and
why it was idle), then `step_account` (how the account of a step is closed). These three are pure; `collector` reads engines and writes accounts.

No decision depends on the accounts and no step waits for them. Time that cannot be booked is reported as `unbooked`, never guessed.
"""
