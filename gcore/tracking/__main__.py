"""`python -m gcore.tracking`: one tracker's process, started by a controller."""

from gcore.tracking.process import main

if __name__ == "__main__":
    main()
