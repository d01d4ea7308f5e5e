"""`python -m gcore.train`: a train rank, started by its supervisor."""

from gcore.system.clock import SystemClock
from gcore.train.rank.main import main

if __name__ == "__main__":
    main(SystemClock())
