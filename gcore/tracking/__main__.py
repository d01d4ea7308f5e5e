"""`python -m gcore.tracking`: one experiment tracker; started by a controller."""

from gcore.observability.tracking import main

if __name__ == "__main__":
    main()
