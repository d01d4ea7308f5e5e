"""Engine for pipelines of diffusers: generates pictures by denoising, with the log-probability of each random step.

`core` denoises all running samples together, one step a cycle, each at its own level. `server` has the routes.
"""
