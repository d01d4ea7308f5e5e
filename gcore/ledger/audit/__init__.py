"""The audit: proves from etcd and the run folder that every prompt has exactly one outcome.

`audit` is the whole, `chain` checks the log from head, `receipts` compares what ranks trained with what the log says.
"""
