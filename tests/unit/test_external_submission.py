"""What is refused of a judge that others serve before there is a job."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.service.capability import check_served
from controllers.service.judge_checks import check_judges
from gcore import schema
from gcore.config import JobSpec, parse_spec
from gcore.errors import SpecError, UsageError
from gcore.ledger.job import NodeRecord

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
    assert check_judges(spec())["far"].renderer is None


def test_nodes_that_know_no_judges_are_not_asked_to_ask_one_and_emulated_slots_need_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_served(spec(), [EMULATED])
    monkeypatch.setattr(schema, "_spoken", 1)
    with pytest.raises(SpecError, match="judge 'far' needs nodes of this version, and some are older"):
        check_served(spec(), [EMULATED])


@pytest.mark.parametrize(
    ("external", "message"),
    [
        ({"most_cost": 5.0}, "most_cost needs price_in or price_out"),
        ({"url": "api.example.com"}, "url"),
        ({"key_env": "sk-1234"}, "key_env"),
        ({"requests_per_s": 0}, "requests_per_s"),
        ({"in_flight": 0}, "in_flight"),
    ],
    ids=["no prices", "no scheme", "the key itself", "never", "nothing at once"],
)
def test_what_cannot_be_meant_is_refused_with_the_field(external: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(**external)
