"""`python -m gcore.environments`: runs tools of a job; started by a controller."""

from gcore.rollout.environments.worker import main

if __name__ == "__main__":
    main()
