"""Alias until 0.3: daemons start a program of this name with `python -m`."""
