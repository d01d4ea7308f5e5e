"""Placement policies: which share of the slots each pool gets.

`base` is the interface, `simple` has the static and one-step policies, `dynamic` the policy that looks steps ahead, `corrections` what it
learned about its own errors. The entry-point group is `gcore.placement`.
"""
