"""Alias until 0.3: older daemons start `python -m gcore.rollout.engine`, which is now `gcore.engines.torch`."""
