"""`python -m gcore.train`: a train rank under its supervisor."""

from gcore.clock import SystemClock
from gcore.train.serving import main

main(SystemClock())
