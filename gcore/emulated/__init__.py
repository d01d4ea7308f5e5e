"""Alias until 0.3: daemons start `python -m gcore.emulated.host` and `.rank`; the code is in `gcore.engines.emulated`."""
