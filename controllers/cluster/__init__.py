"""Nodes, slots and shares as one daemon sees them and registers its own.

`mirror` follows the records, `registration` writes this node's, `shares` divides slots between jobs, `slot_health` finds slots that fail.
`rules` is pure.
"""
