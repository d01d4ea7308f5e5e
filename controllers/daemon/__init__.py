"""The controller process: `gcore-controller`.

Read `daemon` first: it builds the parts of the process. `incarnation` is what the process does under one lease.
`security` manages certificates and tokens. `keeper` restarts the processes of a local cluster. `__main__` is the
program.
"""
