"""Slot accounting: assigns every second of every slot to exactly one state.

Read `states` first (the states, and how conflicting reports are resolved), then `attribution` (how a worker's time
counts, and why it was idle), then `step_account` (how the account of a step is closed). These three are pure;
`collector` reads engines and writes accounts.

No decision depends on the accounts, and no step waits for them. Time that no report covers is reported as `unbooked`,
never guessed.
"""
