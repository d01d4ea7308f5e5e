"""`python -m gcore.emulated.rank`: an emulated train rank under its supervisor."""

from gcore.engines.emulated.rank import load_emulated_rank
from gcore.system.clock import SystemClock
from gcore.train.rank.main import main

if __name__ == "__main__":
    main(SystemClock(), load_emulated_rank)
