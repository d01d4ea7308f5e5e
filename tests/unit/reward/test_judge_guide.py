"""The page on judges: its specs are valid, its example answers parse as stated, and its metrics exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import ROOT, Block, blocks
from plug_in_package import installer

from gcore.config.reward import JudgeSpec, VerdictSpec
from gcore.errors import SpecError
from gcore.observability.metrics import Metrics
from gcore.reward.api import Response
from gcore.reward.judges.judge import both_orders, choose_pairs
from gcore.reward.judges.parsers import find_parser
from gcore.reward.judges.template import LONGEST_TEXT, MOST_TURNS, Question
from gcore.reward.judges.types import Unreadable
from gcore.types import Prompt, PromptRef

GUIDE = ROOT / "docs" / "use" / "judges.md"
TEXT = GUIDE.read_text(encoding="utf-8")
SPECS = blocks(GUIDE, "yaml")


def judges(block: Block) -> list[JudgeSpec]:
    tree: dict[str, Any] = yaml.safe_load(block.text)
    return [JudgeSpec.model_validate(judge) for judge in tree["judges"]]


@pytest.fixture
def stars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's own parser, installed."""
    (code,) = (block.text for block in blocks(GUIDE, "python"))
    (toml,) = (block.text for block in blocks(GUIDE, "toml"))
    group, name, value = re.findall(r'"(gcore\.\w+)"\]\n(\w+) = "my_package\.([\w:]+)"', toml)[0]
    installer(tmp_path, monkeypatch, group)("stars", f"{name} = {value}", code)


@pytest.mark.parametrize("block", SPECS, ids=lambda block: block.where)
@pytest.mark.usefixtures("stars")
def test_every_judge_of_the_guide_can_be_asked_and_its_parser_is_there(block: Block) -> None:
    prompt = Prompt(PromptRef(0, 0, 0), "the prompt", (1,), {"question": "the question", "answer": "the answer"})
    generates = "flow_grpo" in block.text
    for judge in judges(block):
        question = Question.compile(judge, "judges.0", generates=generates)
        if generates:
            assert len(question.about(prompt, Response("", picture_file=("a.png", "ab" * 32, 8, 8))).pictures) == 1
        elif judge.mode == "pairwise":
            assert "Answer A: one" in question.between(prompt, "one", "two").text
        else:
            assert "one" in question.about(prompt, "one").text
        assert find_parser(judge.verdict.parser)


@pytest.mark.usefixtures("stars")
def test_the_guides_own_parser_reads_stars() -> None:
    (spec,) = (judge.verdict for block in SPECS for judge in judges(block) if judge.verdict.parser == "stars")
    assert find_parser("stars")("★★★", spec) == 0.5
    with pytest.raises(Unreadable, match="no stars"):
        find_parser("stars")("three", spec)


def test_the_answers_of_the_table_are_read() -> None:
    told = {"number": {"most": 10}, "words": {"words": {"Y": 7, "N": 0}, "most": 7}, "json": {"most": 10}}
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \|.*\| `(.*)` \|$", TEXT, re.M)
    assert [name for name, _ in rows] == list(told)
    for name, answer in rows:
        assert find_parser(name)(answer, VerdictSpec.model_validate({"parser": name} | told[name])) == 7


def test_templates_that_the_guide_excludes_are_refused() -> None:
    for template in (
        "{{ response|center(9) }}",
        "{% macro m() %}{% endmacro %}{{ response }}",
        "{{ now() }}{{ response }}",
    ):
        with pytest.raises(SpecError):
            Question.compile(
                JudgeSpec.model_validate({"name": "j", "model": {"path": "m"}, "template": template}), "judges.0"
            )


def test_the_numbers_of_the_guide_are_those_of_the_code() -> None:
    judge = JudgeSpec.model_validate({"name": "j", "model": {"path": "m"}, "template": "{{ response }}"})
    assert f"at most {LONGEST_TEXT:,} characters" in TEXT
    assert f"at most {MOST_TURNS:,} turns" in TEXT.replace("\n", " ")
    assert f"`remembered` ({judge.remembered:,})" in TEXT
    assert f"`tries` ({judge.tries})" in TEXT
    assert f"`timeout_s` ({judge.timeout_s:g} s)" in TEXT
    assert (len(both_orders(choose_pairs(8))), len(both_orders(choose_pairs(8, 4)))) == (56, 32)


def test_the_metrics_of_the_guide_are_there() -> None:
    there = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in Metrics().registry.collect()
    }
    told = set(re.findall(r"`(gcore_judge_\w+)`", TEXT))
    assert told
    assert told <= there
