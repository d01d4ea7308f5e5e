"""The documents: every command in them exists with its options, every spec validates, every link leads somewhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from documents import DOCUMENTS, ROOT, Block, blocks, commands, inline_commands, mismatch
from typer.exceptions import TyperException

from controllers.cli.main import app
from gcore.config import NodeConfig, parse_spec

CLI: Any = typer.main.get_command(app)
BASE = {"name": "base", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
BASE["rollout"] = {"max_new_tokens": 8}


class Unparsable(Exception):
    """The command line has no such verb, option or value."""


PLACEHOLDER = re.compile(r"^[A-Z][A-Z_.]*$|^FOLDER/.*")


def gcore_commands(file: Path) -> list[list[str]]:
    """Every `gcore` in the document's consoles and running text, as words behind it."""
    typed = [line for block in blocks(file, "console") for c in commands(block) for line in _simple(c.text)]
    typed += inline_commands(file)
    words = [shlex.split(text, comments=True) for text in typed]
    return [w[1:] for w in words if w and Path(w[0]).name == "gcore"]


def _simple(text: str) -> list[str]:
    """The commands of a line without its here-document; `cd x && gcore ...` has two."""
    first = text.replace("\\\n", " ").split("\n")[0]
    return [part.strip().split(" > ")[0] for part in first.split("&&")]


def parse(words: list[str]) -> None:
    """Raises Unparsable for a verb or option that does not exist, or a value of the wrong kind."""
    if words[0].startswith("-"):
        CLI.make_context("gcore", list(words), resilient_parsing=True)
        return
    words = ["1" if word == "N" else word for word in words]  # a number
    command = CLI.commands.get(words[0])
    if command is None:
        raise Unparsable(f"no verb {words[0]!r}")
    if (inner := getattr(command, "commands", None)) and len(words) > 1 and not words[1].startswith("-"):
        if "|" in words[1]:  # running text names several
            return
        words, command = words[1:], inner.get(words[1])
        if command is None:
            raise Unparsable(f"no verb {words[0]!r}")
    try:
        command.make_context(words[0], words[1:])
    except TyperException as error:
        if type(error).__name__ != "MissingParameter":  # running text names a verb without its arguments
            raise Unparsable(getattr(error, "message", str(error))) from error


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))
def test_every_command_in_the_documents_exists_with_its_options(file: Path) -> None:
    for words in gcore_commands(file):
        if words[0] in ("VERB", "--help", "--version", "--install-completion") or PLACEHOLDER.match(words[0]):
            continue
        if "--help" in words:
            words.remove("--help")
        try:
            parse(words)
        except Unparsable as error:
            pytest.fail(f"{file.name}: gcore {' '.join(words)}: {error}")


def test_the_check_of_commands_finds_what_is_wrong() -> None:
    for wrong in (["rnu", "x.yaml"], ["run", "x.yaml", "--nwe"], ["up", "--controllers", "many"]):
        with pytest.raises(Unparsable):
            parse(wrong)


YAML = [block for file in DOCUMENTS for block in blocks(file, "yaml") if block.mark != "node"]
NODE_YAML = [block for file in DOCUMENTS for block in blocks(file, "yaml") if block.mark == "node"]


@pytest.mark.parametrize("block", YAML, ids=lambda b: b.where)
def test_every_piece_of_a_spec_in_the_documents_is_valid(block: Block) -> None:
    tree: dict[str, Any] = yaml.safe_load(block.text)
    # A job goes by steps or by epochs.
    base = BASE | {"flow": {}} if "epochs" in tree.get("flow", {}) else BASE
    parts = {k: {**base.get(k, {}), **v} if isinstance(v, dict) else v for k, v in tree.items()}
    parse_spec(base | parts)


@pytest.mark.parametrize("block", NODE_YAML, ids=lambda b: b.where)
def test_every_piece_of_a_daemons_configuration_in_the_documents_is_valid(block: Block, tmp_path: Path) -> None:
    least = {"node": "n", "home": "h", "run_root": "r", "slots": ["cpu:0"], "etcd": {"endpoints": ["h:1"]}}
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump(least | yaml.safe_load(block.text)))
    NodeConfig.load(file)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))
def test_every_link_in_the_documents_leads_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_units_of_systemd_in_the_documents_are_those_there_are() -> None:
    units = {file.stem for file in (ROOT / "deploy" / "systemd").glob("*.service")}
    told = re.compile(r"(?:systemctl (?:status|start|stop|restart|reload|enable --now)|journalctl -u) ([\w.-]+)")
    named = {(file.name, unit) for file in DOCUMENTS for unit in told.findall(file.read_text(encoding="utf-8"))}
    assert named
    assert {(file, unit) for file, unit in named if unit.removesuffix(".service") not in units} == set()


def test_every_guide_is_on_the_map() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "index.md" and f"]({p.name})" not in index]
    assert missing == []


def test_the_reward_of_the_guide_passes_the_test_of_the_guide(tmp_path: Path) -> None:
    code, test = (block.text for block in blocks(ROOT / "docs" / "your-reward.md", "python"))
    (toml,) = (block.text for block in blocks(ROOT / "docs" / "your-reward.md", "toml"))
    name, value = re.findall(r'^(\w+) = "([\w.:]+)"$', toml, re.M)[0]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "reward.py").write_text(code)
    (tmp_path / "test_reward.py").write_text(test)
    info = tmp_path / "my_package-0.1.dist-info"  # as pip would leave it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[gcore.rewards]\n{name} = {value}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 passed" in ended.stdout


def test_what_is_printed_is_compared_line_by_line_and_dots_stand_for_anything() -> None:
    assert mismatch(("one", "...", "th...e"), "one\ntwo\nthree\nfour") is None
    assert mismatch((), "anything") is None
    assert mismatch(("two",), "one\ntwo") == "two"
    assert mismatch(("...", "five"), "one\ntwo") == "five"
    assert mismatch(("one", "three"), "one\ntwo\nthree") == "three"


@pytest.mark.parametrize(("words", "completed"), [("gcore ex", "export"), ("gcore run --pl", "--plain")])
def test_the_shell_completes_verbs_and_options(words: str, completed: str) -> None:
    asked = {"_GCORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    program = "import sys; from controllers.cli.main import app; sys.argv = ['gcore']; app(prog_name='gcore')"
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True)
    assert ended.stdout.split() == [completed]


def test_completion_can_be_installed(tmp_path: Path) -> None:
    asked = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    program = "from controllers.cli.main import app; app(['--install-completion', 'bash'], prog_name='gcore')"
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "_GCORE_COMPLETE" in (tmp_path / ".bash_completions" / "gcore.sh").read_text()


@pytest.mark.parametrize("verb", sorted(CLI.commands))
def test_the_help_of_every_verb_has_an_example_that_can_be_typed(verb: str) -> None:
    epilog = CLI.commands[verb].epilog or ""
    typed = [shlex.split(line[line.index("gcore ") :])[1:] for line in epilog.splitlines() if "gcore " in line]
    assert typed, f"gcore {verb} --help has no example"
    for words in typed:
        assert words[0] == verb
        parse(words[: words.index(">")] if ">" in words else words)


def test_the_map_of_the_code_names_every_module_that_coordinates() -> None:
    """Of the controllers and the ledger; the package docstring of `gcore.train` names its own."""
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:[\w/]+/)?([\w*]+\.py)`", architecture)
    modules = [*(ROOT / "controllers").glob("*.py"), *(ROOT / "gcore" / "ledger").glob("*.py")]
    missing = [m.name for m in modules if m.name != "__init__.py" and not any(fnmatch(m.name, one) for one in named)]
    assert missing == [], "say in docs/architecture.md what they are for"


def test_the_trainers_own_map_names_every_module() -> None:
    folder = ROOT / "gcore" / "train"
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    words = set(re.findall(r"\w+", told))
    assert [m.stem for m in sorted(folder.glob("[!_]*.py")) if m.stem not in words] == []
