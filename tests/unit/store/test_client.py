"""The client distinguishes a restored store from a member that lags behind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.store.client import RestoreCheck


def header(cluster: int, revision: int) -> Any:
    return SimpleNamespace(cluster_id=cluster, revision=revision)


@given(st.lists(st.integers(1, 50), min_size=1))
def test_answers_of_one_store_in_whatever_order_never_contradict_the_newest(revisions: Sequence[int]) -> None:
    heard = RestoreCheck()
    for revision in revisions:
        heard = heard.and_now(header(7, revision))
    assert heard == RestoreCheck(7, max(revisions))
    assert not heard.contradicts(header(7, max(revisions)))


@pytest.mark.parametrize(
    ("cluster", "revision", "contradicts"),
    [(7, 9, True), (7, 10, False), (7, 11, False), (8, 10, True), (8, 99, True)],
)
def test_an_older_revision_or_another_cluster_contradicts(cluster: int, revision: int, contradicts: bool) -> None:
    assert RestoreCheck(7, 10).contradicts(header(cluster, revision)) == contradicts
    assert not RestoreCheck().contradicts(header(cluster, revision)), "whoever has heard nothing knows nothing"


def test_revision_of_another_cluster_is_not_mixed_in() -> None:
    assert RestoreCheck(7, 10).and_now(header(8, 99)) == RestoreCheck(7, 10)
