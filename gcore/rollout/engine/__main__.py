"""`python -m gcore.rollout.engine`: the older name of `python -m gcore.engines.torch`."""

from gcore.engines.torch.main import run

if __name__ == "__main__":
    run()
