"""The rendezvous of a world's ranks."""

from __future__ import annotations

import pytest

from gcore.train.backends.distributed import Rendezvous, find_interface, find_store, open_store


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_loopback_address_is_that_of_the_loopback_interface(host: str) -> None:
    assert find_interface(host) == "lo"


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "no-such-host.invalid"])
def test_an_address_of_no_interface_here_names_none(host: str) -> None:
    assert find_interface(host) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_store_of_rank_0_is_found_at_the_address_that_it_names(host: str) -> None:
    opened = open_store(Rendezvous(0, 2, host))
    found = find_store(opened.address, Rendezvous(1, 2, host))
    opened.store.set("said", "here")
    assert found.get("said") == b"here"
