"""The cluster's nodes, slots and shares as one daemon sees them, and the registration of its own node.

Read `mirror` first: it keeps copies of the cluster's records in the store. `registration` writes the record of this
node, `shares` divides the slots between jobs, and `slot_health` finds unhealthy slots. `rules` contains their decisions
(pure).
"""
