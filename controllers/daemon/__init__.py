"""The controller process: `gcore-controller`.

`__main__` is the program, `daemon` builds its parts, `incarnation` is one incarnation under one lease, `security` manages certificates and
tokens, `keeper` restarts the processes of a local cluster. Read `daemon` first.
"""
