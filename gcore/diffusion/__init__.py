"""Image generation by flow matching and diffusion: denoising steps, their log-probabilities, and windows of trained steps.

Engines and train ranks use the same functions, so that a step which the engine sampled has the same log-probability when
a rank replays it. See `gcore.train.algorithms.denoising` for advantages and losses.
"""
