"""Alias until 0.3: older daemons start `python -m gcore.rollout.sglang`, which is now `gcore.engines.sglang`."""
