"""The commands of `gcore`, one module a subject; typer calls their functions."""
