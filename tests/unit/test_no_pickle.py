"""Nothing that gcore reads from a wire or a file can run code: no pickle in any form, no YAML but plain, no text that is evaluated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT

PACKAGES = ("gcore", "controllers", "placement")
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing",
    "copyreg",
}
"""What (de)serializes by running code, or, as multiprocessing, sends pickles."""
CALLS = {
    "all_gather_object": "sends pickles",
    "broadcast_object_list": "sends pickles",
    "gather_object": "sends pickles",
    "scatter_object_list": "sends pickles",
    "send_object_list": "sends pickles",
    "recv_object_list": "reads pickles",
    "read_pickle": "reads pickles",
    "to_pickle": "writes pickles",
    "unsafe_load": "builds whatever it is told",
    "full_load": "builds whatever it is told",
    "save_checkpoint": "writes pickles (DeepSpeed's own)",
    "load_checkpoint": "reads pickles (DeepSpeed's own)",
}
JAIL = "gcore/reward/jail.py"
"""Runs the programs of the reward `code`, shut in: it is what it is for."""


def problems_in(source: str, where: str) -> Iterator[str]:
    """What could run code that was read, each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [module] if module else [alias.name for alias in node.names]
            for name in names:
                if name.split(".")[0] in MODULES or name.startswith("torch.multiprocessing"):
                    yield f"{where}:{node.lineno} imports {name}"
        elif isinstance(node, ast.Call):
            yield from (f"{where}:{node.lineno} {problem}" for problem in _of_call(node, where))


def _of_call(node: ast.Call, where: str) -> Iterator[str]:
    owner, name = _called(node.func)
    given = {word.arg: word.value for word in node.keywords}
    truth = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
    if name in CALLS:
        yield f"calls {name}, which {CALLS[name]}"
    if (owner, name) == ("torch", "load") and truth.get("weights_only") is not True:
        yield "calls torch.load without weights_only=True"
    if (owner, name) == ("torch", "save"):
        yield "calls torch.save: safetensors is what is written"
    if name == "load" and owner in ("np", "numpy") and truth.get("allow_pickle", False) is not False:
        yield "calls numpy.load with allow_pickle"
    if (owner, name) == ("yaml", "load") and not (
        isinstance(given.get("Loader"), ast.Name) and getattr(given["Loader"], "id", "") == "PlainLoader"
    ):
        yield "calls yaml.load with another loader than PlainLoader"
    if (owner, name) == ("yaml", "load_all"):
        yield "calls yaml.load_all"
    if owner == "" and name in ("eval", "exec") and where != JAIL:
        yield f"calls {name}"
    if truth.get("shell") is True:
        yield "starts a shell"


def _called(function: ast.expr) -> tuple[str, str]:
    if isinstance(function, ast.Attribute):
        return (function.value.id if isinstance(function.value, ast.Name) else "?"), function.attr
    return "", function.id if isinstance(function, ast.Name) else ""


def sources() -> list[Path]:
    """Every module of the three packages."""
    found = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(found) > 300
    return found


def test_no_source_of_gcore_reads_or_writes_what_could_run_code() -> None:
    found = [
        problem
        for file in sources()
        for problem in problems_in(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
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
        "yaml.unsafe_load(text)",
        "dist.all_gather_object(a, b)",
        "engine.save_checkpoint(folder)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_each_of_them_would_be_found(source: str) -> None:
    assert list(problems_in(source, "x.py"))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f, weights_only=True)",
        "np.load(f)",
        "np.load(f, allow_pickle=False)",
        "yaml.load(text, Loader=PlainLoader)",
        "yaml.safe_load(text)",
        "model.eval()",
    ],
)
def test_what_is_harmless_is_left_alone(source: str) -> None:
    assert not list(problems_in(source, "x.py"))


def test_the_linter_bans_pickle_too() -> None:
    import tomllib

    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "pickle" in rules["flake8-tidy-imports"]["banned-api"]
    assert "TID" in rules["select"]
