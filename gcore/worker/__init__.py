"""Workers: an engine or a train rank under its supervisor.

`lifecycle` is the pure state machine, `supervisor` runs it, `control` is the line to the child, `main` the program.
`sandbox` runs foreign code.
"""
