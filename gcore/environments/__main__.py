"""`python -m gcore.environments`: a process that runs a job's tools; a controller starts it."""

from gcore.rollout.environments.__main__ import main

if __name__ == "__main__":
    main()
