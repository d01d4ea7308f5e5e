"""The audit: proves from etcd and the run folder that every prompt has exactly one outcome.

`audit.audit_records` runs all checks. `chain` checks the log from head; `receipts` compares what the ranks trained with
what the log says.
"""
