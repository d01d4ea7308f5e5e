"""The generated reference pages have every field of a spec, every command and the public modules; an outdated page is found."""

from __future__ import annotations

from pathlib import Path

from tools import reference_pages
from tools.problem import ROOT

SCHEMA = {
    "properties": {
        "steps": {
            "anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}],
            "default": None,
            "description": "Steps | all",
        },
        "loss": {"$ref": "#/$defs/Loss"},
        "names": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["loss"],
    "$defs": {"Loss": {"enum": ["grpo", "gspo"]}},
}


def test_a_field_shows_its_type_bounds_choices_and_default() -> None:
    table = reference_pages._field_table(SCHEMA, SCHEMA["$defs"])  # type: ignore[arg-type]
    assert table.splitlines()[2:] == [
        r"| `steps` | integer >= 1 | `null` | Steps \| all |",
        "| `loss` | `grpo`, `gspo` | required |  |",
        "| `names` | list of string |  |  |",
    ]


def test_every_section_and_command_is_on_its_page_once() -> None:
    spec, commands = reference_pages.spec_page(), reference_pages.commands_page()
    for section in (
        "model",
        "data",
        "flow",
        "rollout",
        "train",
        "train.critic",
        "placement",
        "checkpoint",
        "judges.external",
    ):
        assert spec.count(f"\n## {section}\n") == 1, section
    for command in ("run", "submit", "placement pin", "certs init", "audit"):
        assert commands.count(f"\n## gcore {command}\n") == 1, command


def test_the_committed_pages_are_those_of_the_code() -> None:
    assert list(reference_pages.check(ROOT)) == []


def test_a_page_that_was_changed_by_hand_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "reference"
    folder.mkdir(parents=True)
    for page, text in reference_pages.reference_pages(ROOT).items():
        (folder / page.name).write_text(text.replace("`seed`", "`seeds`"))
    (tmp_path / "gcore").symlink_to(ROOT / "gcore")
    (problem,) = reference_pages.check(tmp_path)
    assert problem.path == "docs/reference/spec.md"
