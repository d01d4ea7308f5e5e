"""Models that generate pictures: denoising steps and their log-probabilities, schedules, networks and pipelines.

Engines and train ranks use the same functions, so that a step which the engine sampled has the same log-probability when
a rank replays it. See `gcore.train.algorithms.denoising` for advantages and losses.
"""
