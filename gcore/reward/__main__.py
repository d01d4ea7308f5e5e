"""`python -m gcore.reward`: runs rewards of a job; started by a controller."""

from gcore.reward.worker import main

if __name__ == "__main__":
    main()
