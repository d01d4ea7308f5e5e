"""What a controller reports about a running job: events, metrics, samples, warnings, and data for experiment trackers.

Read `run_recorder` first. `events` and `step_stats` are pure. No decision depends on telemetry.
"""
