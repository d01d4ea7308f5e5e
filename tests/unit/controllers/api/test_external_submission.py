"""Errors about external judges at the submission of a job."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.api.submission.checks import check_judges
from controllers.api.submission.nodes import check_served_judges
from gcore.config import JobSpec, parse_spec
from gcore.errors import DataError, SpecError, UsageError
from gcore.ledger.records.job import NodeRecord

KEY = "THE_KEY_OF_THE_TEST"
EMULATED = NodeRecord(name="e", incarnation="e.1", address="h:1", slots=("emulated:0",), pid=1)


def spec(**external: Any) -> JobSpec:
    outside = {"url": "https://api.example.com/v1", "model": "m"} | external
    return parse_spec(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 1},
            "rollout": {"max_new_tokens": 4},
            "judges": [{"name": "far", "template": "{{ response }}", "external": outside}],
            "reward": {"judge": "far"},
        }
    )


def test_without_its_key_a_job_is_refused_with_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(UsageError, match=f"the environment variable {KEY} is not set here") as raised:
        check_judges(spec(key_env=KEY))
    assert raised.value.where == "judges.0.external.key_env"
    monkeypatch.setenv(KEY, "sk-x")
    assert check_judges(spec(key_env=KEY))["far"].model is None
    assert check_judges(spec())["far"].encoder is None


def test_a_key_that_stands_where_its_variables_name_belongs_is_not_shown() -> None:
    with pytest.raises(SpecError, match=r"environment variable .*, not the key itself") as caught:
        spec(key_env="sk-secret")
    assert "secret" not in str(caught.value)


def test_emulated_slots_need_no_engine_for_a_judge_outside_of_the_cluster() -> None:
    check_served_judges(spec(), [EMULATED])


@pytest.mark.parametrize(
    ("external", "message"),
    [
        ({"most_cost": 5.0}, "most_cost needs price_in or price_out"),
        ({"url": "api.example.com"}, "judges.0.external.url: it should begin with https:// or http://"),
        ({"url": "ftp://x"}, "judges.0.external.url: it should begin with https:// or http://"),
        ({"url": "http:///v1"}, "it has no valid host"),
        ({"url": "http://h:0/v1"}, "it has no valid port"),
        ({"url": "http://h:99999/v1"}, "it is not a valid address"),
        ({"url": "http://[::1/v1"}, "it is not a valid address"),
        ({"url": "http://h\x7f/v1"}, "unprintable characters"),
        ({"url": "http://h/v1?a=b"}, "it should contain no ? and no #"),
        ({"url": "http://h/v1#a"}, "it should contain no ? and no #"),
        ({"key_env": "sk-1234"}, "judges.0.external.key_env: it should be the name of an environment variable"),
        ({"requests_per_s": 0}, "requests_per_s"),
        ({"requests_per_s": 1e-9}, "requests_per_s: Input should be greater than or equal to 0.001"),
        ({"in_flight": 0}, "in_flight"),
    ],
    ids=[
        *(
            "no prices",
            "no scheme",
            "another scheme",
            "no host",
            "no port",
            "a port that none is",
            "half a bracket",
            "unprintable",
        ),
        *("a query", "a fragment", "the key itself", "never", "as good as never", "nothing at once"),
    ],
)
def test_invalid_external_judges_are_refused_with_the_field(external: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        spec(**external)
    assert message in str(raised.value)


@pytest.mark.parametrize("url", ["http://[::1]:8000/v1", "https://api.example.com/", "http://bücher.example:1/v1"])
def test_an_address_that_can_be_asked_is_taken(url: str) -> None:
    assert check_judges(spec(url=url))["far"].model is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SSL_CERT_FILE", "/nonexistent.pem"),
        ("SSL_CERT_FILE", __file__),
        ("ALL_PROXY", "ftp://user:word@x"),
        ("NO_PROXY", "[::1"),
    ],
    ids=["no file", "no certificate", "no proxy", "no host"],
)
def test_proxies_and_certificates_that_cannot_be_used_are_refused_and_no_password_is_said(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="no client for judge 'far' can be created") as raised:
        check_judges(spec())
    assert name in str(raised.value)
    assert "word" not in str(raised.value)


def test_a_host_that_has_no_name_is_refused_before_there_is_a_job() -> None:
    with pytest.raises(DataError, match="no client for judge 'far' can be created"):
        check_judges(spec(url="http://xn--/v1"))
