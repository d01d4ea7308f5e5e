"""`python -m gcore.engines.diffusers`: the diffusers engine, under its supervisor or started by hand."""

from gcore.engines.launch import DiffusersLaunch, run_engine

if __name__ == "__main__":
    run_engine("gcore.engines.diffusers", "gcore.engines.diffusers.server", DiffusersLaunch)
