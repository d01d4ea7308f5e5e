"""Alias until 0.3: daemons start `python -m gcore.tracking`; the code is in `gcore.observability.tracking`."""
