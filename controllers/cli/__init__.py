"""The `gcore` command.

`main` lists the commands; `commands` has them by subject; `view` turns answers into text and live screens; `options` and `output` are shared by
all. Read `main` first. A command imports what it needs when it runs, so that `gcore --help` starts fast.
"""
