"""From the network to a service: the server, who may call what, limits on calls, and errors on the wire.

Read `gate` first: it authenticates a call from its headers, before the body is read.
"""
