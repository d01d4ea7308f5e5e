"""`python -m gcore.rollout.engine`: the old name of `python -m gcore.engines.torch`."""

from gcore.engines.torch.__main__ import run

if __name__ == "__main__":
    run()
