"""Who may call which route, as a table."""

import pytest

from gcore.engines.serving.http import ADMIN, ApiKeys

NORMAL, ADMINISTRATIVE, OPEN = "/generate", "/abort_request", "/health_generate"


@pytest.mark.parametrize(
    ("keys", "normal", "administrative"),
    [
        pytest.param(ApiKeys(), {None, "k", "a"}, {None, "k", "a"}, id="no keys"),
        pytest.param(ApiKeys("k"), {"k"}, {"k"}, id="a key for all"),
        pytest.param(ApiKeys(None, "a"), {None, "k", "a"}, {"a"}, id="a key for changes"),
        pytest.param(ApiKeys("k", "a"), {"k"}, {"a"}, id="both"),
    ],
)
def test_a_route_opens_to_its_own_key(keys: ApiKeys, normal: set[str | None], administrative: set[str | None]) -> None:
    for path, allowed in ((NORMAL, normal), (ADMINISTRATIVE, administrative), (OPEN, {None, "k", "a"})):
        for given in (None, "k", "a"):
            assert keys.allow(path, None if given is None else f"Bearer {given}") == (given in allowed)


@pytest.mark.parametrize("header", ["", "Bearer", "k", "Basic k", "Bearer  k", "Bearer kk", "Bearer \u00e4"])
def test_what_is_not_the_key_opens_nothing(header: str) -> None:
    assert not ApiKeys("k").allow(NORMAL, header)


def test_the_word_bearer_is_read_in_any_case() -> None:
    assert ApiKeys("k").allow(NORMAL, "bearer k")


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ApiKeys("secret", "secret"))


def test_every_route_that_changes_the_engine_is_administrative() -> None:
    changing = ("/update_weight_version", "/flush_cache", "/pause_generation", "/release_memory_occupation")
    assert set(changing) <= ADMIN
