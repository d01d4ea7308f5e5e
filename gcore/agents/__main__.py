"""`python -m gcore.agents`: a process that runs a job's agent code; a controller starts it."""

from gcore.rollout.agents.__main__ import main

if __name__ == "__main__":
    main()
