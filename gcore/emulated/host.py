"""`python -m gcore.emulated.host`: the emulated engines of a job on a node; started by a controller."""

from gcore.engines.emulated.host import main

if __name__ == "__main__":
    main()
