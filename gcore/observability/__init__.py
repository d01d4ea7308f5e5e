"""Metrics for Prometheus, files of a run for people, experiment trackers, traces.

Read `metrics` first: every metric's name, labels and meaning.
"""
