"""The delay of an offer: few writes, and no later seal because of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from controllers.rules.step import COALESCE_S, GROUPS_S, OUTCOME_S, offer_delay_s
from gcore.ledger.selection import AwaitGroups, SealStep
from gcore.types import PromptRef


def view(lacking: int, peers: int, part: int | None = None) -> Any:
    chosen = AwaitGroups(PromptRef(0, 0, 0), lacking) if lacking else SealStep((), ())
    members = SimpleNamespace(members=dict.fromkeys(range(peers)))
    return SimpleNamespace(chosen=chosen, mirror=members, rules=SimpleNamespace(part=part))


@given(told=st.lists(st.integers(0, 70), min_size=1, max_size=20), lacking=st.integers(1, 1100))
def test_offer_that_completes_the_quota_is_written_at_once(told: list[int], lacking: int) -> None:
    assume(sum(told) >= lacking)
    waits = [offer_delay_s(view(lacking, len(told)), untold, 0) for untold in told if untold]
    assert min(waits) == COALESCE_S


@given(peers=st.integers(1, 32), quota=st.integers(1, 1500))
def test_a_peer_writes_few_offers_however_many_groups_there_are(peers: int, quota: int) -> None:
    """Groups finish one by one, at the peers in turn; a peer's share is offered at once."""
    lacking, writes = quota, 0
    untold = [0] * peers
    for number in range(quota):
        peer = number % peers
        untold[peer] += 1
        if offer_delay_s(view(lacking, peers), untold[peer], 0) == COALESCE_S:
            lacking, untold[peer], writes = lacking - untold[peer], 0, writes + 1
    # What lacks shrinks by 1 - 1/n with each telling, down to one group a peer: about the logarithm of a peer's groups.
    assert writes / peers <= 2 + 2 * math.log2(max(2.0, quota / peers))


def test_less_than_a_share_waits_longer_without_outcomes_than_with_them() -> None:
    assert offer_delay_s(view(100, 4), 3, 0) == GROUPS_S
    assert offer_delay_s(view(100, 4), 3, 1) == OUTCOME_S
    assert offer_delay_s(view(100, 4), 25, 0) == COALESCE_S


def test_offer_beyond_the_quota_waits_only_the_coalescing_delay() -> None:
    assert offer_delay_s(view(0, 4), 1, 0) == COALESCE_S
