"""The prose checker finds sentences whose form is hard to read, in pages, docstrings and messages of errors, and nothing in code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import check_prose


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Whoever asks for a job gets it.", "relative clause"),
        ("It is quiet. What a node holds is written down.", "relative clause"),
        ("A job that nobody works on waits.", "sense of its own"),
        ("The store was put back.", "sense of its own"),
        ("The daemon reads; the rank waits; the engine stops.", "two semicolons"),
        ("The " + "very " * 46 + "long sentence.", "more than 45 words"),
        ("The the daemon reads.", "lexical illusion"),
    ],
)
def test_a_sentence_of_a_bad_form_is_found(text: str, rule: str) -> None:
    assert any(rule in message for message, _ in check_prose.findings(text)), text


@pytest.mark.parametrize(
    "text",
    [
        "The daemon reads the request.",
        "What does a node hold?",
        "Three states: open; sealed; ready.",
        "X1 X2 is provided more than once, by X3",
        "etcd, gRPC and etcd members",
        "a head of 1 x X2 numbers",
    ],
)
def test_a_plain_sentence_is_not_found(text: str) -> None:
    assert list(check_prose.findings(text)) == []


PAGE = """# What whoever reads

A paragraph over
two lines with `nobody`.

| cell one | cell two |
|---|---|

- an item

```console
$ nobody
```

<!-- RESULT -->
nobody
<!-- /RESULT -->

| one; two; three |
|---|
"""


def test_a_page_is_read_by_paragraphs_items_and_cells_without_headings_and_code() -> None:
    found = [(line, text) for line, text in check_prose.texts_of_page(PAGE) if text.strip("- ")]
    assert found == [
        (3, "A paragraph over two lines with X1."),
        (6, "cell one"),
        (6, "cell two"),
        (9, "an item"),
        (19, "one, two, three"),
    ]


MODULE = '''"""First.

    an example of nobody

Last."""

LIMIT = 3
"""Of a thing."""


def raises(value):
    raise ValueError(f"{value} is no number", fix="Write one")
'''


def test_a_module_is_read_by_docstrings_and_messages() -> None:
    found = [text for _, text in check_prose.texts_of_module(ast.parse(MODULE))]
    assert found == ["First.", "Last.", "Of a thing.", "X0 is no number", "Write one"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_what_a_node_holds_is_kept", "without a subject"),
        ("test_nobody_waits", "without a subject"),
        ("test_a_node_is_told_of_its_slots", "sense of its own"),
        ("test_node_keeps_its_files", ""),
        ("what_a_helper_returns", ""),
    ],
)
def test_riddles_and_private_words_in_names_of_tests_are_found(name: str, words: str) -> None:
    found = [message for _, message in check_prose.findings_in_names(ast.parse(f"def {name}(): pass"))]
    assert len(found) == bool(words)
    assert all(words in message for message in found)


def test_an_area_with_more_findings_than_it_may_have_is_a_problem_and_so_is_one_with_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("A job that nobody works on waits.\n")
    monkeypatch.setattr(check_prose, "ALLOWED", {})
    assert [problem.path for problem in check_prose.check(tmp_path)] == ["README.md", "README.md"]
    monkeypatch.setattr(check_prose, "ALLOWED", {"README.md": 1})
    assert list(check_prose.check(tmp_path)) == []
    monkeypatch.setattr(check_prose, "ALLOWED", {"README.md": 2})
    (problem,) = check_prose.check(tmp_path)
    assert "lower its number (2)" in problem.message
