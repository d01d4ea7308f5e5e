"""The section on external judges: its spec is valid, and its numbers and names are those of the code."""

from __future__ import annotations

import re
from typing import Any

import yaml
from documents import ROOT, blocks

from controllers.inference.judges import WRITE_S
from gcore.config.reward import ExternalJudge, JudgeSpec
from gcore.observability.metrics import Metrics
from gcore.reward.judges.external import (
    BUSY_S,
    LARGEST_ANSWER_BYTES,
    MOST_DENIED,
    SEED_BITS,
    classify_status,
    completion_request,
)
from gcore.reward.judges.rate_limit import BURST_S, KEY_AGAIN_S, LONGEST_HOLD_S
from gcore.reward.judges.template import Question
from gcore.types import Prompt, PromptRef

GUIDE = ROOT / "docs" / "use" / "judges.md"
SECTION = GUIDE.read_text(encoding="utf-8").partition("\n## External judges\n")[2]
TEXT = " ".join(SECTION.split())


def judge() -> JudgeSpec:
    (block,) = (block for block in blocks(GUIDE, "yaml") if "external:" in block.text and "judges:" in block.text)
    tree: dict[str, Any] = yaml.safe_load(block.text)
    return JudgeSpec.model_validate(tree["judges"][0])


def test_the_judge_of_the_guide_can_be_asked_and_its_request_has_what_the_guide_says() -> None:
    spec = judge()
    assert spec.external is not None
    prompt = Prompt(PromptRef(0, 0, 0), "the prompt", (1,), {"question": "the question", "answer": "the answer"})
    question = Question.compile(spec, "judges.0").about(prompt, "the response").text
    body = completion_request(spec.model_copy(update={"stop": ("x",)}), spec.external, question, 1)
    told = TEXT.split("One request per answer, with ", 1)[1].split(". With `votes`", 1)[0]
    assert set(re.findall(r"`(\w+)", told)) - {"system"} == set(body)
    assert f"a `seed` of {SEED_BITS} bits" in told


def test_the_table_has_every_key_with_its_default() -> None:
    table = SECTION.split("# The key", 1)[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|", table, re.M)
    told = {name: default.strip() for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    fields = {name: field.default for name, field in ExternalJudge.model_fields.items()}
    assert told.keys() == fields.keys()
    for name, default in told.items():
        if default not in ("", "none"):
            assert float(default) == fields[name]
        else:
            assert (fields[name] is None) is (default == "none")


def test_its_numbers_are_those_of_the_code() -> None:
    assert f"`Retry-After` ({BUSY_S:g} s without it, at most {LONGEST_HOLD_S:g} s)" in TEXT
    assert f"more than {LARGEST_ANSWER_BYTES >> 20} MiB" in TEXT
    assert (KEY_AGAIN_S, MOST_DENIED, BURST_S) == (60, 3, 0.1)
    assert f"at most {WRITE_S:g} s later" in TEXT
    spec = judge().external
    assert spec is not None
    flight, unwritten = 2 * spec.in_flight, spec.requests_per_s * WRITE_S
    assert f"at most {flight} and {unwritten:g} requests" in TEXT


def test_guide_states_the_class_of_each_status() -> None:
    assert {classify_status(status) for status in (400, 404, 422, 302)} == {"refused"}
    assert {classify_status(status) for status in (408, 429, 500, 503, 403)} == {"away"}
    assert {classify_status(status) for status in (401, 402)} == {"key"}


def test_its_metrics_are_there() -> None:
    there = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in Metrics().registry.collect()
    }
    told = set(re.findall(r"`(gcore_judge_\w+)`", TEXT))
    assert told >= {"gcore_judge_cost_total", "gcore_judge_held_seconds_total"}
    assert told <= there
