"""`python -m gcore.tracking`: a process that sends metrics to one experiment tracker; a controller starts it."""

from gcore.observability.tracking import main

if __name__ == "__main__":
    main()
