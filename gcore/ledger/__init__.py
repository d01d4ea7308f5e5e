"""The step protocol: selection of groups, transactions, statistics, and the audit.

Read `records.chain` first (the stored records), then `selection` (which prompts to sample next, and which groups form
the next step) and `transactions` (every write, with the compares that guard it). All functions are pure, except those
of `archive`, the executor in `transactions`, and the file access in `records.slot_accounting`.
"""
