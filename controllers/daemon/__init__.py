"""The controller process: `gcore-controller`.

`__main__` is the program, `daemon` wires it, `incarnation` is one incarnation under one lease, `security` keeps certificates and tokens.
Read `daemon` first.
"""
