"""The store: etcd's keys, transactions, leases and watches.

Read `types` first (the interface, also of the in-memory store in `gcore.testing`), then `keys` (where every record is).
`client` is the etcd client.
"""
