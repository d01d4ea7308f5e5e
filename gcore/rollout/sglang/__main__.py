"""`python -m gcore.rollout.sglang`: the old name of `python -m gcore.engines.sglang`."""

from gcore.engines.sglang.adapter import run

if __name__ == "__main__":
    run()
