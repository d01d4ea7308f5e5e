"""Placement policies: decide how many slots each pool gets.

`base` is the interface, `simple` has the static and one-step policies, `dynamic` plans several steps ahead,
`corrections` learns the errors of its forecasts. The entry-point group is `gcore.placement`.
"""
