"""Samples of a run kept for people: what was trained on, with its rewards and advantages."""
