"""Alias until 0.3: `python -m gcore.prompts.tables` is started to read tables; the code is in `gcore.data.tables`."""
