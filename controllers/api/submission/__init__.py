"""From a spec to the record of a job.

`submit` creates the record, `checks` finds what is wrong with a spec on this cluster, `allowlist` says which models, plug-ins and paths a spec
may name.
"""
