"""Events, metrics, samples, warnings and experiment trackers of a running job.

Read `run_recorder` first. `events` and `step_stats` are pure. No decision depends on telemetry.
"""
