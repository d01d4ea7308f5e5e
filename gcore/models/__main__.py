"""`python -m gcore.models`: downloads a model; started by a controller."""

from gcore.models.resolve import main

if __name__ == "__main__":
    main()
