"""The order in which a store asks the nodes that have a blob."""

from __future__ import annotations

import hashlib
from collections import Counter

from gcore.media.transfers import order_of_nodes

NODES = ("node-0", "node-1", "node-2")


def test_every_node_is_asked_first_for_about_as_many_blobs_and_an_order_depends_on_nothing_else() -> None:
    orders = {
        sha256: order_of_nodes(sha256, NODES)
        for sha256 in (hashlib.sha256(str(number).encode()).hexdigest() for number in range(900))
    }
    assert all(sorted(order) == list(NODES) for order in orders.values())
    assert all(240 < count < 360 for count in Counter(order[0] for order in orders.values()).values())
    assert all(order_of_nodes(sha256, set(NODES)) == order for sha256, order in orders.items())
