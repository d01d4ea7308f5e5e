"""The step protocol: selection of groups, transactions, statistics, and the audit.

Read `records.chain` first, then `selection` (what is due, what a seal takes) and `transactions` (every guarded transaction). All of it is pure
but `archive`, the executor in `transactions`, and the files in `records.slot_accounting`.
"""
