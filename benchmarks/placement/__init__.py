"""Benchmarks of placement: in the simulator, on running clusters, and of what a decision costs."""
