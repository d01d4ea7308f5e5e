"""What people and programs learn of a running job: events, metrics, samples, warnings, experiment trackers.

Read `run_recorder` first. `events` and `step_stats` are pure. No decision depends on telemetry.
"""
