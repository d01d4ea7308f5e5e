"""Workers: an engine or a train rank under its supervisor.

The supervisor is a small process that starts the engine or rank as its child, registers it in the store (etcd) and ends
it. `lifecycle` is the pure state machine, `supervisor` runs it, `control` is the line to the child, `main` the program.
`sandbox` runs foreign code.
"""
