"""Turns a job spec into the record of a job.

`submit` creates the record, `checks` validates a spec against this cluster, and `allowlist` decides which models, plug-ins and paths a
spec may name.
"""
