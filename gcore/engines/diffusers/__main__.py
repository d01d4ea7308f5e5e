"""`python -m gcore.engines.diffusers`: the diffusers engine, under its supervisor or started by hand."""

from gcore.engines.diffusers.server import run

if __name__ == "__main__":
    run()
