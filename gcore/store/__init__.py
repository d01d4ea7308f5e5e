"""The store: etcd's keys, transactions, leases and watches, and where everything of gcore stands in it."""
