"""Alias until 0.3: daemons of before start `python -m gcore.rollout.sglang`, which is `gcore.engines.sglang` now."""
