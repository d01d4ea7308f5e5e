"""`python -m gcore.environments`: runs tools of a job; started by a controller."""

from gcore.rollout.environments.__main__ import main

if __name__ == "__main__":
    main()
