"""`python -m gcore.rollout.engine`: the torch engine under its supervisor."""

from gcore.engines.torch.main import run

if __name__ == "__main__":
    run()
