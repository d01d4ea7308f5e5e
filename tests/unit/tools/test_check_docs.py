"""The checker of the documents finds each kind of fault."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planted import Fault, not_found, plant, repository

from tools import check_docs
from tools.documents import documents
from tools.problem import ROOT

README = """# A page

```console
$ gcore rnu x.yaml
```
Type `gcore run x.yaml --nwe` or
`gcore up --controllers many`, and `gcore run x.yaml`. A [link](there.md) and [another](gone.md#part).
`unit/test_there.py::test_this` is there, `tests/unit/test_there.py::test_that` is not, nor `sim/gone.py::test_it`.
`systemctl status there`, `journalctl -u gone`.

```yaml
flow: {steps: 3}
```

```yaml
train: {no_such_key: 1}
```

<!-- node: a daemon's -->
```yaml
lease_ttl_s: never
```
"""


def test_each_fault_of_a_page_is_found_with_its_line(tmp_path: Path) -> None:
    for path, text in (
        ("README.md", README),
        ("there.md", ""),
        ("tests/unit/test_there.py", "async def test_this(): ..."),
        ("deploy/systemd/there.service", ""),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (file,) = documents(tmp_path)
    rules = (
        *(check_docs.commands_exist, check_docs.links_lead_somewhere, check_docs.tests_exist),
        *(check_docs.units_exist, check_docs.specs_are_valid),
    )
    found = [str(problem) for rule in rules for problem in rule(file, tmp_path)]
    expected = [
        "README.md:4: gcore rnu x.yaml: no verb 'rnu'",
        "README.md:6: gcore run x.yaml --nwe: No such option",
        "README.md:7: gcore up --controllers many: Input should be a valid integer",
        "README.md:7: the link leads to gone.md",
        "README.md:8: there is no test test_that in tests/unit/test_there.py",
        "README.md:8: there is no test test_it in tests/sim/gone.py",
        "README.md:9: deploy/systemd has no unit gone",
        "README.md:16: this is no part of a spec",
        "README.md:21: this is no part of a daemon's configuration",
    ]
    assert [line for line, start in zip(found, expected, strict=True) if not line.startswith(start)] == []


PAGE = """# A page

## The words `of` it

[Here](#the-words-of-it), [there](there.md#a-part), [again](there.md#a-part-1), [elsewhere](https://example.org/x#y).
[No part](#the-words) and [no other](there.md#a-part-2), [by reference][one], [absolute](/etc/passwd), [spaces](<go ne.md>).
<img src="gone.svg">

[one]: gone.md

```python
from gcore.types import Sample, Simple
from gcore.system import clock
import gcore.system.clocks
```
"""


def test_rows_without_a_header_and_rows_of_another_width_are_found(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    whole = "| a | b |\n|---|:-:|\n| 1 \\| 2 | 3 |\n"
    page.write_text(f"{whole}\n```\n| no table |\n```\n\n{whole}\n| apart | 4 |\n\n{whole}| one |\n")
    assert [str(problem) for problem in check_docs.tables_are_whole(page, tmp_path)] == [
        "README.md:13: a row of a table without a header: is a blank line above it?",
        "README.md:18: a row of a table has 1 cells, and its header 2",
    ]


def test_links_to_headings_references_pictures_and_imports_are_followed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "there.md").write_text("# A part\n```\n# no heading\n```\n# A part\n")
    (tmp_path / "gcore" / "system").mkdir(parents=True)
    (tmp_path / "gcore" / "types.py").write_text("class Sample: ...\n")
    (tmp_path / "gcore" / "system" / "__init__.py").touch()
    (tmp_path / "gcore" / "system" / "clock.py").touch()
    rules = (check_docs.links_lead_somewhere, check_docs.imports_exist)
    found = [str(problem) for rule in rules for problem in rule(tmp_path / "README.md", tmp_path)]
    assert found == [
        "README.md:6: the link leads to #the-words, and README.md has no such heading: correct it",
        "README.md:6: the link leads to #a-part-2, and there.md has no such heading: correct it",
        "README.md:6: the link leads to /etc/passwd, which is not there: correct it",
        "README.md:6: the link leads to go, which is not there: correct it",
        "README.md:7: the link leads to gone.svg, which is not there: correct it",
        "README.md:9: the link leads to gone.md, which is not there: correct it",
        "README.md:12: `from gcore.types import Simple`: there is no such name: write today's",
        "README.md:12: `import gcore.system.clocks`: there is no such name: write today's",
    ]


FAULTS: list[Fault] = [
    ("docs/index.md", "](use/data.md)", "](model.md)", "docs/index.md:1: no link leads to use/data.md"),
    ("docs/develop/architecture.md", "`", "`", "the map does not name gcore/planted"),
    ("docs/develop/architecture.md", "| Workers: an", "| A worker: an", "the map says of gcore/worker 'A worker: an"),
    (
        "docs/develop/architecture.md",
        "| `gcore/store` |",
        "| `gcore/stores` |",
        "the map names gcore/stores, and there is no",
    ),
    ("docs/develop/architecture.md", "`gcore/emulated`", "`gcore/emulate`", "the page does not name gcore/emulated"),
    (
        "docs/develop/adr/moved-modules.tsv",
        "\tcontrollers.rules.actions\n",
        "\tcontrollers.rules.deeds\n",
        "there is no controllers.rules.deeds: write today's",
    ),
    ("docs/images/step.svg", "1 produce", "1 generate", "docs/images/step.svg:1: it is not what its program draws"),
    ("docs/develop/step-protocol.md", "| 3 |", "| 4 |", "the rules are numbered ['1', '2', '4', '4'"),
    (
        "docs/develop/step-protocol.md",
        "| a controller dies between seal and READY |",
        "| x | y | z |\n| between |",
        "no test that shows it: | x | y",
    ),
    (
        "docs/develop/step-protocol.md",
        "reads version 2, the first",
        "knows version 2, the first",
        "docs/develop/step-protocol.md:1: the page does not say 'this gcore",
    ),
    ("docs/operate/failures.md", "| `reward` |", "| `rewards` |", "the wait reward becomes an event after"),
    (
        "docs/operate/failures.md",
        "`rollout.silent_s` (",
        "`rollout.silent_s` (about ",
        "does not say `rollout.silent_s` (30 s)",
    ),
    ("docs/use/algorithms.md", "`gspo`", "`gpso`", "train.loss may be `gspo`, which is not on the page"),
    ("docs/operate/configuration.md", "| `advertise` |", "| `advertised` |", "no table has the key `advertise`"),
    ("mkdocs.yml", "      - use/data.md\n", "", "the navigation does not name use/data.md: add it"),
    ("mkdocs.yml", "- use/model.md", "- use/models.md", "the navigation names use/models.md, which is not there"),
    (
        "mkdocs.yml",
        "- use/judges.md",
        "- use/judges.md\n      - use/judges.md",
        "names use/judges.md 2 times: name it once",
    ),
]


def test_each_fault_of_the_pages_that_must_be_complete_is_found(tmp_path: Path) -> None:
    root = repository(tmp_path, "docs", "gcore", "controllers", "mkdocs.yml")
    plant(root, FAULTS)
    (root / "gcore" / "planted").mkdir()
    (root / "gcore" / "planted" / "__init__.py").touch()
    algorithms = root / "docs" / "use" / "algorithms.md"
    algorithms.write_text(algorithms.read_text().replace("`gspo`", "`gpso`"))
    rules = (
        *(check_docs.index_is_complete, check_docs.map_is_complete, check_docs.drawings_are_current),
        *(check_docs.protocol_page_is_complete, check_docs.failures_page_is_right, check_docs.names_are_listed),
        *(check_docs.moves_lead_somewhere, check_docs.site_is_complete),
    )
    found = [problem for rule in rules for problem in rule(root)]
    assert not_found(found, FAULTS) == []


NAMES = """`gcore.errors`, `gcore.errors.GcoreError.exit_code`, `gcore.Client`, `placement.policy`, `gcore.flows`: there.
`gcore.errors.NoSuchError`, `controllers.deeds`, `placement.slots.Slot.colour`.
`gcore/errors.py`, `unit/tools/test_check_docs.py`, `decide.py` are there;
`gcore/deeds.py` and `deeds.py` are not. `gcore.api.v1.Jobs` is a service, `gcore.api.v1.Deeds` is none.
"""


def test_names_of_modules_and_files_that_do_not_exist_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(NAMES)
    found = [f"{problem.line}: {problem.message}" for problem in check_docs.names_exist(page, ROOT)]
    assert found == [
        "2: there is no gcore.errors.NoSuchError: write today's name",
        "2: there is no controllers.deeds: write today's name",
        "2: there is no placement.slots.Slot.colour: write today's name",
        "4: there is no file gcore/deeds.py: write today's path",
        "4: there is no file deeds.py: write today's path",
        "4: there is no gcore.api.v1.Deeds: write today's name",
    ]


@pytest.mark.parametrize(
    ("epilog", "message"),
    [
        (None, "has no example"),
        ("gcore up", "cannot be typed: gcore up: it is an example of up"),
        ("gcore list --no-such-option", "cannot be typed"),
    ],
)
def test_a_verb_without_an_example_that_can_be_typed_is_found(epilog: str | None, message: str) -> None:
    def listing() -> None: ...

    cli: Any = SimpleNamespace(commands={"list": SimpleNamespace(epilog=epilog, callback=listing)})
    (problem,) = check_docs.help_has_examples(cli, ROOT)
    assert message in problem.message


def test_every_folder_of_documents_is_read() -> None:
    folders = {file.parent.relative_to(ROOT).parts[:2] for file in documents(ROOT)}
    assert {(), ("docs",), ("docs", "use"), ("docs", "operate"), ("examples", "arithmetic")} <= folders
