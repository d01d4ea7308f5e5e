"""The placement scheduler: a pure core that turns a snapshot of the slots into a plan with reasons."""
