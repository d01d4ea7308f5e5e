"""Write down what documentation, examples and new projects imported from the product at an earlier commit.

`python -m tools.old_imports COMMIT` writes two files into `tests/golden`. `imports_of_COMMIT.txt` has one statement a line, from the
fenced blocks of the pages, the Python files of `examples/`, the files that `gcore init` wrote, and the product's modules that the
pages name in running text as something to import. `plug_in_of_COMMIT.txt` has plug-ins that were written then: the package of
`examples/custom_flow`, and the placement policy of `docs/placement.md`; each file stands behind a line `==> PATH`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tools.problem import ROOT

GOLDEN = ROOT / "tests" / "golden"
PACKAGES = ("gcore", "placement")
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "examples")
INTERNAL = re.compile(r"gcore\.(emulated|engine|fault_points|ledger|rollout|service|train\.serving|weights)\b")
"""Named in running text as parts of the product; packages of users have no use for them."""
PLUG_IN = "examples/custom_flow"
POLICY = "docs/placement.md"

_FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"`((?:gcore|placement)(?:\.[a-z_]+)+)`")
_STATEMENT = re.compile(
    r"from +((?:gcore|placement)[\w.]*) +import +(\([^)]*\)|[^\n#;\"']+)|^ *import +((?:gcore|placement)[\w.]*)",
    re.MULTILINE,
)
_NEW_PROJECT = """
from gcore.prepare.project import OwnModel, StarterModel, files
from gcore.prepare.starter_tasks import TASKS
for task in TASKS.values():
    for model in (StarterModel(0.5), OwnModel("hf://owner/name", chat=True)):
        print(*(text for path, text in files("mine", task, model, seed=0).items() if path.endswith(".py")), sep="\\n")
"""


def main(argv: list[str] | None = None) -> int:
    """Write both files of a commit."""
    parser = argparse.ArgumentParser(prog="python -m tools.old_imports", description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    commit = parser.parse_args(argv).commit
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(tree, filter="data")
        GOLDEN.mkdir(exist_ok=True)
        imports = "".join(f"{statement}\n" for statement in sorted(set(find_imports(tree))))
        (GOLDEN / f"imports_of_{commit}.txt").write_text(imports, encoding="utf-8")
        plug_in = "".join(f"==> {path}\n{text}" for path, text in find_plug_in(tree))
        (GOLDEN / f"plug_in_of_{commit}.txt").write_text(plug_in, encoding="utf-8")
    return 0


def find_imports(tree: Path) -> Iterator[str]:
    """Yield the imports that the pages, examples and new projects of a source tree have, a statement a name."""
    for page in _files(tree, ".md"):
        text = page.read_text(encoding="utf-8")
        for block in _FENCED.finditer(text):
            yield from imports_in_text(textwrap.dedent(block[3]))
        for name in _MODULE.findall(text):
            if _is_module(tree, name) and not INTERNAL.match(name):
                yield f"import {name}"
    for module in _files(tree, ".py"):
        yield from imports_in_code(module.read_text(encoding="utf-8"))
    command = [sys.executable, "-c", _NEW_PROJECT]
    made = subprocess.run(command, cwd=tree, env={"PYTHONPATH": str(tree)}, check=True, capture_output=True)
    yield from imports_in_text(made.stdout.decode())


def imports_in_text(text: str) -> Iterator[str]:
    """Yield the imports in text that need not be Python as a whole, such as a shell's `python -c`."""
    for found in _STATEMENT.finditer(text):
        if found[3] is not None:
            yield f"import {found[3]}"
            continue
        for name in found[2].strip("() \n").split(","):
            if words := name.split():
                yield f"from {found[1]} import {words[0]}"


def imports_in_code(code: str) -> Iterator[str]:
    """Yield the imports in a Python module, those inside functions included."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            yield from (f"from {node.module} import {alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in PACKAGES)


def find_plug_in(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of the plug-ins of a source tree: path and text."""
    folder = tree / PLUG_IN
    for file in sorted([folder / "pyproject.toml", *folder.rglob("*.py")]):
        yield str(file.relative_to(folder)), file.read_text(encoding="utf-8")
    page = (tree / POLICY).read_text(encoding="utf-8")
    yield "policy.py", next(block[3] for block in _FENCED.finditer(page) if "import Decision" in block[3])


def _files(tree: Path, suffix: str) -> Iterator[Path]:
    for name in PAGES:
        found = tree / name
        yield from sorted(found.rglob(f"*{suffix}")) if found.is_dir() else [found] if found.suffix == suffix else []


def _is_module(tree: Path, name: str) -> bool:
    path = tree.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


if __name__ == "__main__":
    sys.exit(main())
