"""Imports of packages from before the move of the modules still work, with a warning that names the new module.

The list of these imports is in `tests/golden`, made from that commit by `tools.old_imports`.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gcore.aliases import MOVED, RENAMED

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
IMPORTS = (GOLDEN / "imports_of_f9caf92.txt").read_text().splitlines()
PLUG_IN = (GOLDEN / "plug_in_of_f9caf92.txt").read_text()
TRY = """
import json, sys, warnings

loaded, results = frozenset(sys.modules), {}
for statement in json.load(sys.stdin):
    for name in sys.modules.keys() - loaded:
        if name.startswith(("gcore", "placement")) and sys.modules[name].__spec__.origin is None:
            del sys.modules[name]  # an alias warns when it is imported first
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(statement, {})
        except ImportError as error:
            results[statement] = repr(error), []
            continue
    results[statement] = "", [str(one.message) for one in caught if one.category is DeprecationWarning]
print(json.dumps(results))
"""


def _moved_away() -> dict[str, str]:
    """Old module -> new module, of those that are no longer there under the old name."""
    with (ROOT / "docs" / "develop" / "adr" / "moved-modules.tsv").open() as file:
        table = {row["old"]: row["new"] for row in csv.DictReader(file, delimiter="\t")}
    paths = {old: ROOT.joinpath(*old.split(".")) for old in table}
    return {
        old: table[old]
        for old, path in paths.items()
        if not path.with_suffix(".py").exists() and not (path / "__init__.py").exists()
    }


def test_imports_of_the_commit_before_work_and_warn_where_a_module_moved() -> None:
    assert len(IMPORTS) > 50
    done = subprocess.run(
        [sys.executable, "-c", TRY],
        input=json.dumps(IMPORTS),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    results: dict[str, tuple[str, list[str]]] = json.loads(done.stdout)
    moved = _moved_away()
    assert {statement: error for statement, (error, _) in results.items() if error} == {}
    warned = {statement for statement, (_, warnings) in results.items() if warnings}
    assert warned == {statement for statement in IMPORTS if statement.split()[1] in moved}
    for statement in warned:
        for warning in results[statement][1]:
            old, *homes = re.findall(r"\b(?:gcore|placement)(?:\.\w+)+", warning.partition(";")[0])
            assert old.startswith(statement.split()[1])
            assert homes, warning
            assert not moved.keys() & set(homes), warning


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_gives_the_new_one_and_warns_with_it(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match="has moved"):
        module = importlib.import_module(old)
    for name, new in RENAMED[old].items():
        with pytest.warns(DeprecationWarning, match=rf"{re.escape(old)}\.{name} is \S+\.{new} now"):
            found = getattr(module, name)
        assert found in [getattr(importlib.import_module(home), new, None) for home in MOVED[old]]


def test_a_name_that_an_old_module_never_had_is_an_attribute_error_that_names_the_new_modules() -> None:
    sys.modules.pop("placement.split", None)
    with pytest.warns(DeprecationWarning, match="has moved"):
        module = importlib.import_module("placement.split")
    with pytest.raises(AttributeError, match=r"placement\.slots"):
        _ = module.no_such_name


def test_a_plug_in_package_of_the_commit_before_passes_its_own_tests(tmp_path: Path) -> None:
    files = dict(part.split("\n", 1) for part in PLUG_IN.split("==> ")[1:])
    files["src/patient/policy.py"] = files.pop("policy.py")
    for path, text in files.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "tests" / "test_policy.py").write_text(
        "from placement.policies.base import PolicyStart, Situation, SwitchCosts, find_policy\n"
        "from placement.slots import Split, SplitBounds\n\n\n"
        "def test_the_policy_is_found_and_decides() -> None:\n"
        "    first = Split('coexisting', 2, 1, 1)\n"
        "    policy = find_policy('idle_first')(PolicyStart(first, 8, 8))\n"
        "    decision = policy.plan(Situation(SplitBounds(4), None, (), SwitchCosts(1.0, 9.0), None))\n"
        "    assert (decision.split, decision.reason.partition(',')[0]) == (first, 'nothing is measured yet')\n"
    )
    info = tmp_path / "src" / "patient-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: patient\nVersion: 0.1.0\n")
    points = re.findall(r'\[project\.entry-points\."(.*)"\]\n(.*)\n', files["pyproject.toml"])
    points = [*points, ("gcore.placement", 'idle_first = "patient.policy:idle_first"')]
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{line}\n".replace('"', "") for group, line in points))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
    for old in ("gcore.testing.contract", "gcore.testing.fake_peer", "placement.live", "placement.split"):
        assert f"{old} has moved" in done.stdout
