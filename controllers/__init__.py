"""The peer controllers: one daemon per node, all equal, coordinating through etcd."""
