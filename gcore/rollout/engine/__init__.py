"""Alias until 0.3: daemons of before start `python -m gcore.rollout.engine`, which is `gcore.engines.torch` now."""
