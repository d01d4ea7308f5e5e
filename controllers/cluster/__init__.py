"""The cluster's nodes, slots and shares as one daemon sees them, and the registration of its own node.

`mirror` follows the records, `registration` writes this node's, `shares` divides slots between jobs, `slot_health` finds failing slots.
`rules` is pure.
"""
