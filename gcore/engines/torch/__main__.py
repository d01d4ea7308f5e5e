"""`python -m gcore.engines.torch`: the torch engine under its supervisor."""

from gcore.engines.torch.main import run

if __name__ == "__main__":
    run()
