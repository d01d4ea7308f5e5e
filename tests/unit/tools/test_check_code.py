"""The checker of the sources finds each kind of fault, and accepts harmless code."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tools import check_code
from tools.problem import ROOT

FORBIDDEN, ALLOWED = check_code.pure_contract(tomllib.loads((ROOT / "pyproject.toml").read_text()))
ALGORITHM = check_code.ALGORITHMS + "planted.py"


@pytest.mark.parametrize(
    "statement",
    [
        "import asyncio",
        "from random import choice",
        "from gcore.store import etcd",
        "def f():\n    import time",
        "import json\nfrom gcore.system.clock import Clock",
        "def f():\n    from datetime import datetime",
        "import os",
        "import socket",
    ],
)
def test_a_module_that_calls_itself_pure_and_is_not_is_found(statement: str) -> None:
    pure, other = (ast.parse(f'"""{text}"""\n{statement}\n') for text in ("Rules. Pure.", "Rules. Not so purely."))
    (problem,) = check_code.impure_imports("x.py", pure, FORBIDDEN, ALLOWED)
    assert problem.line == 2 + statement.count("\n")
    assert list(check_code.impure_imports("x.py", other, FORBIDDEN, ALLOWED)) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from gcore.store.types import Put",
        "from gcore.store import keys",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gcore.system.clock import Clock",
    ],
)
def test_a_pure_module_may_import_what_is_said_to_the_store_and_types(statement: str) -> None:
    tree = ast.parse(f'"""Pure: rules."""\n{statement}\n')
    assert list(check_code.impure_imports("x.py", tree, FORBIDDEN, ALLOWED)) == []


def test_the_import_contract_holds_many_modules_pure() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (found,) = [one for one in contracts if one["name"] == check_code.CONTRACT]
    assert len(found["source_modules"]) > 30
    assert {name.split(".")[0] for name in found["source_modules"]} == {"gcore", "controllers", "placement"}


RUNS_WHAT_IT_READS = [
    "import pickle",
    "from pickle import loads",
    "import torch.multiprocessing",
    "from multiprocessing import Pool",
    "torch.load(f)",
    "torch.load(f, weights_only=False)",
    "torch.save(x, f)",
    "np.load(f, allow_pickle=True)",
    "numpy.load(f, allow_pickle=1)",
    "yaml.load(text, Loader=yaml.Loader)",
    "yaml.load(text)",
    "yaml.load_all(text)",
    "yaml.unsafe_load(text)",
    "dist.all_gather_object(a, b)",
    "engine.save_checkpoint(folder)",
    "eval(text)",
    "exec(text)",
    "subprocess.run(text, shell=True)",
]
HARMLESS = [
    "torch.load(f, weights_only=True)",
    "np.load(f)",
    "np.load(f, allow_pickle=False)",
    "yaml.load(text, Loader=PlainLoader)",
    "yaml.safe_load(text)",
    "model.eval()",
]


def test_execution_of_read_code_is_found() -> None:
    found = {source: list(check_code.runs_what_it_reads("x.py", ast.parse(source))) for source in RUNS_WHAT_IT_READS}
    assert [source for source, problems in found.items() if not problems] == []
    assert [source for source in HARMLESS if list(check_code.runs_what_it_reads("x.py", ast.parse(source)))] == []
    assert list(check_code.runs_what_it_reads(check_code.JAIL, ast.parse("exec(text)"))) == []
    assert (ROOT / check_code.JAIL).exists()


def test_a_process_that_finds_modules_in_the_current_folder_is_found() -> None:
    text = 'x = 1\nstart([sys.executable, "-m", "gcore"])\nstart([sys.executable, "-P", "-m", "gcore"])\n'
    (problem,) = check_code.shadowed("gcore/x.py", text)
    assert problem.line == 2


@pytest.mark.parametrize(
    ("docstring", "messages"),
    [
        ("", ["has no docstring", "names no source"]),
        ("The loss of arXiv 1707.06347.", ["says no shape"]),
        ("The loss, [batch, tokens].", ["names no source"]),
        ("The loss, [batch, tokens] (Schulman, 2017).", []),
    ],
)
def test_an_algorithm_without_shapes_or_source_is_found(docstring: str, messages: list[str]) -> None:
    source = f'def planted_loss(logp: Tensor) -> Tensor:\n    """{docstring}"""\n'
    found = list(check_code.undocumented(ALGORITHM, ast.parse(source)))
    assert len(found) == len(messages)
    assert all(message in problem.message for message, problem in zip(messages, found, strict=True))


def test_a_fault_in_a_tree_is_found_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text().replace('"pickle".msg', '"x".msg'))
    (tmp_path / "controllers").mkdir()
    (tmp_path / "controllers" / "planted.py").write_text('"""Rules. Pure."""\nimport grpc\nimport pickle\n')
    found = [str(problem) for problem in check_code.check(tmp_path)]
    assert found[0].startswith("controllers/planted.py:2: the docstring says pure, and it imports grpc")
    assert found[1].startswith("controllers/planted.py:3: imports pickle")
    assert any("SOURCELESS has nll_loss" in line for line in found)
    assert "pyproject.toml:1: ruff does not ban pickle: ban it" in found


NAMES = '''"""Reads `Config` by `load_config(path)`, `load_config()` and `gone_name`; `Config.size`, `Config.colour`.

`asyncio` and `None` are Python's; `a sentence` is no name; "`kind.of`" is a key.
"""
class Config:
    """Of `path` or `nowhere`."""
    size: int
def load_config(path): return {"kind.of": "no such thing as nowhere or colour"}
'''


def test_a_docstring_that_names_what_no_code_has_is_found() -> None:
    old = (check_code.OLD_NAMES, "", ast.parse("OLD = ['gone_name']"))
    found = check_code.unknown_names([("gcore/x.py", NAMES, ast.parse(NAMES)), old])
    assert [f"{problem.line} {problem.message.split('`')[1]}" for problem in found] == [
        "1 Config.colour",
        "1 gone_name",
        "6 nowhere",
    ]


MOVED = '''"""`gcore.place.found`, `gcore.place.gone`, `gcore.gone`, `gcore.gone.found`, `placement.found` and `gcore.groups`."""
found = "gone"
GROUP = "gcore.groups"
'''


def test_a_dotted_name_whose_words_exist_elsewhere_only_is_found() -> None:
    every = [("gcore/place.py", MOVED, ast.parse(MOVED))]
    every += [(f"{package}/__init__.py", "", ast.parse("")) for package in ("gcore", "placement")]
    messages = [problem.message for problem in check_code.unknown_names(every)]
    assert [message.split("`")[1] for message in messages] == ["gcore.gone", "gcore.gone.found", "gcore.place.gone"]
