"""The `gcore` command.

Read `main` first: it registers the commands. `commands` has one module a subject, `view` renders responses as text and live screens,
`options` and `output` are shared. A command imports its dependencies when it runs, so that `gcore --help` starts fast.
"""
