"""`python -m gcore.agents`: runs agent code of a job; started by a controller."""

from gcore.rollout.agents.__main__ import main

if __name__ == "__main__":
    main()
