"""The step protocol: selection of groups, transactions, statistics, and the audit.

Read `records.chain` first, then `selection` (which refs to sample, what a seal takes) and `transactions` (every guarded
transaction). Everything is pure except `archive`, the executor in `transactions`, and the files in
`records.slot_accounting`.
"""
