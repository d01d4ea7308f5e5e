"""Check the documents: commands, specs, links, test names and tables agree with the code and the files.

The checker reads every document of `documents()`. Each `gcore` command exists with its options. Each YAML block is a valid part
of a spec or of a daemon's configuration. Each link leads to a file. Each named test, systemd unit, module, function and
Python file exists. Each table is complete. The checker knows the pages that must be complete: the index, the site's navigation, the map
of the code, the step protocol, failures, algorithms and the daemon's configuration. The help of each verb has
an example that can be typed. `check_commands` checks that tests run the commands.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import shlex
import sys
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import typer
import yaml
from pydantic import BaseModel, ValidationError
from typer.exceptions import TyperException

from controllers.cli.main import app
from controllers.rules.waits import PATIENCE_S
from gcore.config import NodeConfig, parse_spec
from gcore.config.load import apply_flow_settings
from gcore.config.node import GarbageSection, JobLimits, KeepPolicy
from gcore.config.placement import PlacementSpec
from gcore.config.rollout import RolloutSpec
from gcore.config.train import TrainSpec
from gcore.errors import GcoreError
from gcore.plugins import PluginFault, resolve_plugin_files
from gcore.schema import NEWEST_VERSION
from tools.documents import Block, blocks, commands, documents, inline_commands
from tools.draw_architecture import drawings
from tools.old_imports import imports_in_text
from tools.problem import Problem, line_of, main, nodes, parsed, relative

CLI: Any = typer.main.get_command(app)
MAPPED = ("gcore", "placement", "controllers")
"""Trees of which docs/develop/architecture.md names every package."""
ALIAS = '"""Alias until'
MOST_GUIDES = 37
"""Beside reference, runbooks and decisions."""
RULES = 17
"""Rules of the step protocol."""
SHOWN_BY_TESTS = ("The rules", "What a failure means", "Limits")
"""Tables of docs/develop/step-protocol.md of which each row names a test."""

BASE: dict[str, Any] = {"name": "base", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
BASE["rollout"] = {"max_new_tokens": 8}
LEAST_NODE = {"node": "n", "home": "h", "run_root": "r", "slots": ["cpu:0"], "etcd": {"endpoints": ["h:1"]}}
PLACEHOLDER = re.compile(r"^[A-Z][A-Z_.]*$|^FOLDER/.*")
LINK = re.compile(
    r"\]\(<?([^)\s>]+)[^)]*\)|^\[[^\]\n]+\]: *(\S+)|<(?:img|a) [^>]*?(?:src|href)=\"([^\"]+)\"", re.MULTILINE
)
"""In the text, as a reference below it, or as HTML."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(?:tests/)?((?:unit|integration|contract|sim|chaos|gpu|trackers|upgrade)/[\w/]+\.py)::(\w+)`")
DOTTED = re.compile(r"(?<![\w./-])((?:gcore|controllers|placement)(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
"""A module, or a name in one; also an entry-point group, a field of the spec or a gRPC service."""
NO_MODULES = {
    "controllers.yml": "a file of deploy/prometheus",
    "gcore.advantages": "an entry-point group of which gcore itself has no entry",
    "gcore.losses": "an entry-point group of which gcore itself has no entry",
    "gcore.lineage": "a tag in MLflow",
    "gcore.rollback": "a tag in MLflow",
    "gcore.rl.svc": "a Kubernetes service",
    "src/sorting/reward.py": "a file that `gcore init` makes",
    "own.py": "a file that the reader of docs/start/own-run.md writes",
}
"""What looks like a name or a file of the product and is another thing."""
MODULE_PATH = re.compile(r"(?<![\w./*{}<>-])([\w-]+(?:/[\w.-]+)*\.py)\b")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
UNIT = re.compile(r"(?:systemctl (?:status|start|stop|restart|reload|enable --now)|journalctl -u) ([\w.-]+)")


def check(root: Path) -> Iterator[Problem]:
    for file in documents(root):
        if file.name != "commands.md":  # made from the commands themselves
            yield from commands_exist(file, root)
        yield from specs_are_valid(file, root)
        yield from links_lead_somewhere(file, root)
        yield from tests_exist(file, root)
        yield from units_exist(file, root)
        yield from names_exist(file, root)
        yield from imports_exist(file, root)
        yield from tables_are_whole(file, root)
    for file in (root / "CHANGELOG.md", *sorted((root / "docs" / "develop" / "adr").glob("*.md"))):
        yield from links_lead_somewhere(file, root)
    yield from index_is_complete(root)
    yield from site_is_complete(root)
    yield from map_is_complete(root)
    yield from moves_lead_somewhere(root)
    yield from drawings_are_current(root)
    yield from protocol_page_is_complete(root)
    yield from failures_page_is_right(root)
    yield from names_are_listed(root)
    yield from help_has_examples(CLI, root)


class Unparsable(Exception):
    """The command line has no such verb, option or value."""


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


def commands_exist(file: Path, root: Path) -> Iterator[Problem]:
    typed = [(c.line, text) for block in blocks(file, "console") for c in commands(block) for text in _simple(c.text)]
    for line, text in typed + inline_commands(file):
        words = shlex.split(text, comments=True)
        if not words or Path(words[0]).name != "gcore":
            continue
        words = words[1:]
        if words[0] in ("VERB", "--help", "--version", "--install-completion") or PLACEHOLDER.match(words[0]):
            continue
        try:
            parse([word for word in words if word != "--help"])
        except Unparsable as error:
            message = f"gcore {' '.join(words)}: {error}: write a command that exists"
            yield Problem(relative(file, root), line, message)


def _simple(text: str) -> list[str]:
    """The commands of a line without its here-document; `cd x && gcore ...` has two."""
    first = text.replace("\\\n", " ").split("\n")[0]
    return [part.strip().split(" > ")[0] for part in first.split("&&")]


def specs_are_valid(file: Path, root: Path) -> Iterator[Problem]:
    for block in blocks(file, "yaml"):
        try:
            (_node_is_valid if block.mark == "node" else _spec_is_valid)(block)
        except (GcoreError, ValidationError, yaml.YAMLError) as error:
            where = "daemon's configuration" if block.mark == "node" else "spec"
            message = f"this is no part of a {where}: {' '.join(str(error).split())}: correct the block"
            yield Problem(relative(file, root), block.line, message)


def _spec_is_valid(block: Block) -> None:
    tree: dict[str, Any] = yaml.safe_load(block.text)
    # A job goes by steps or by epochs.
    base = BASE | {"flow": {}} if "epochs" in tree.get("flow", {}) else BASE
    if tree.get("rollout", {}).get("engine") == "diffusers":  # pictures have no tokens
        base, tree = base | {"rollout": {}}, apply_flow_settings(tree)
    tree = resolve_plugin_files(tree, None)
    tree = base | {k: {**base.get(k, {}), **v} if isinstance(v, dict) else v for k, v in tree.items()}
    with contextlib.suppress(PluginFault):  # a flow of a package that is not here
        tree = apply_flow_settings(tree)
    if tree["rollout"].get("engine") == "diffusers":
        tree["rollout"] = {key: value for key, value in tree["rollout"].items() if key != "max_new_tokens"}
    parse_spec(tree)


def _node_is_valid(block: Block) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "node.yaml"
        file.write_text(yaml.safe_dump(LEAST_NODE | yaml.safe_load(block.text)))
        NodeConfig.load(file)


def links_lead_somewhere(file: Path, root: Path) -> Iterator[Problem]:
    """Each link within the repository leads to a file, and one with a `#` to a heading of that page."""
    text = file.read_text(encoding="utf-8")
    for match in LINK.finditer(text):
        link = next(group for group in match.groups() if group)
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, heading = link.partition("#")
        target, line = file.parent / path if path else file, text.count("\n", 0, match.start()) + 1
        if path.startswith("/") or not target.exists():
            yield Problem(relative(file, root), line, f"the link leads to {path}, which is not there: correct it")
        elif heading and target.suffix == ".md" and heading not in _anchors(target):
            message = f"the link leads to #{heading}, and {relative(target.resolve(), root.resolve())} has no such heading: correct it"
            yield Problem(relative(file, root), line, message)


@cache
def _anchors(page: Path) -> frozenset[str]:
    """The names that GitHub gives the headings of a page; a second heading of the same text has another, with a number."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    found = Counter[str]()
    names = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return frozenset(names)


def tables_are_whole(file: Path, root: Path) -> Iterator[Problem]:
    """Each table has a header, and each of its rows as many cells: others are shown as text, or lose cells."""
    text = FENCED.sub(lambda block: "\n" * block[0].count("\n"), file.read_text(encoding="utf-8"))
    rows: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("|"):
            rows.append(line)
            continue
        if rows:
            first = number - len(rows)
            cells = [len(re.findall(r"(?<!\\)\|", row.rstrip())) - 1 for row in rows]
            if len(rows) < 2 or not re.fullmatch(r"\|(?: *:?-+:? *\|)+ *", rows[1]):
                yield Problem(
                    relative(file, root), first, "a row of a table without a header: is a blank line above it?"
                )
            for place, count in enumerate(cells):
                if count != cells[0]:
                    what = f"a row of a table has {count} cells, and its header {cells[0]}"
                    yield Problem(relative(file, root), first + place, what)
        rows = []


def tests_exist(file: Path, root: Path) -> Iterator[Problem]:
    text = file.read_text(encoding="utf-8")
    for match in TEST.finditer(text):
        if match[2] not in _functions(root / "tests" / match[1]):
            message = f"there is no test {match[2]} in tests/{match[1]}: name one that exists"
            yield Problem(relative(file, root), text.count("\n", 0, match.start()) + 1, message)


@cache
def _functions(file: Path) -> frozenset[str]:
    if not file.exists():
        return frozenset()
    tree = parsed(file.read_text(encoding="utf-8"))
    return frozenset(n.name for n in nodes(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def units_exist(file: Path, root: Path) -> Iterator[Problem]:
    folder = root / "deploy" / "systemd"
    units = {unit.stem for unit in folder.glob("*.service")} | {unit.name for unit in folder.glob("*.timer")}
    text = file.read_text(encoding="utf-8")
    for match in UNIT.finditer(text):
        if match[1].removesuffix(".service") not in units:
            message = f"deploy/systemd has no unit {match[1]}: name one that exists"
            yield Problem(relative(file, root), text.count("\n", 0, match.start()) + 1, message)


def names_exist(file: Path, root: Path) -> Iterator[Problem]:
    """Each module, each name in a module and each Python file that the running text names in backticks exists."""
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        for code in INLINE.findall(line):
            for match in DOTTED.finditer(code):
                if not (_is_defined(match[1], root) or match[1] in _other_names(root)):
                    yield Problem(relative(file, root), number, f"there is no {match[1]}: write today's name")
            for match in MODULE_PATH.finditer(code):
                if not _is_file(match[1], file, root):
                    yield Problem(relative(file, root), number, f"there is no file {match[1]}: write today's path")


def imports_exist(file: Path, root: Path) -> Iterator[Problem]:
    """Each name that a block of Python imports from the product exists, under today's name."""
    for block in blocks(file, "python"):
        for statement in imports_in_text(textwrap.dedent(block.text)):
            name = statement.removeprefix("from ").removeprefix("import ").replace(" import ", ".")
            if not _is_defined(name, root):
                yield Problem(relative(file, root), block.line, f"`{statement}`: there is no such name: write today's")


def _is_defined(name: str, root: Path) -> bool:
    """Whether a dotted name is a package, a module, or something that a module or its class defines."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        folder = root.joinpath(*parts[:length])
        module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if module.exists():
            return ".".join(parts[length:]) in _members(module)
    return False


@cache
def _members(module: Path) -> frozenset[str]:
    """The names that a module defines, imports or exports, those of its classes as `Class.member`; "" is itself."""
    names = {""}
    for node in parsed(module.read_text(encoding="utf-8")).body:
        names |= _bound(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for part in node.body for member in _bound(part)}
    return frozenset(names)


def _bound(node: ast.stmt) -> set[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name for alias in node.names}
        case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as exported):
            return set(ast.literal_eval(exported))
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name() as target):
            return {target.id}
    return set()


@cache
def _other_names(root: Path) -> frozenset[str]:
    """Entry-point groups, fields of the spec and gRPC services, which look like names of modules."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    fields = {f"placement.{name}" for name in PlacementSpec.model_fields}
    protos = "".join(file.read_text(encoding="utf-8") for file in (root / "protos").rglob("*.proto"))
    services = {f"gcore.api.v1.{name}" for name in re.findall(r"^service (\w+)", protos, re.MULTILINE)}
    return frozenset({*project["entry-points"], *fields, *services, *NO_MODULES})


def _is_file(path: str, page: Path, root: Path) -> bool:
    if path in NO_MODULES or any((folder / path).exists() for folder in (root, root / "tests", page.parent)):
        return True
    return "/" not in path and path in _file_names(root)


@cache
def _file_names(root: Path) -> frozenset[str]:
    folders = [*MAPPED, "tests", "tools", "benchmarks", "deploy", "examples"]
    return frozenset(file.name for folder in folders for file in (root / folder).rglob("*.py"))


def index_is_complete(root: Path) -> Iterator[Problem]:
    index = (root / "docs" / "index.md").read_text(encoding="utf-8")
    pages = sorted(page.relative_to(root / "docs") for page in (root / "docs").glob("*/*.md"))
    for page in pages:
        if f"]({page.as_posix()})" not in index:
            yield Problem("docs/index.md", 1, f"no link leads to {page}: add one")
    guides = [page for page in pages if page.parts[0] != "reference"]
    if len(guides) > MOST_GUIDES:
        yield Problem("docs/index.md", 1, f"there are {len(guides)} guides, more than {MOST_GUIDES}: merge some")


def site_is_complete(root: Path) -> Iterator[Problem]:
    """The site's navigation names each page, and pages that exist; runbooks and decisions are on pages of their own."""
    text = (root / "mkdocs.yml").read_text(encoding="utf-8")
    site = yaml.safe_load(text)
    named = Counter(_leaves(site["nav"]))
    apart = [pattern.strip("/") for pattern in site["not_in_nav"].split()]
    for page in sorted(page.relative_to(root / "docs") for page in (root / "docs").rglob("*.md")):
        if not named[page.as_posix()] and not any(page.match(pattern) for pattern in apart):
            yield Problem("mkdocs.yml", line_of(text, "nav:"), f"the navigation does not name {page}: add it")
    for name, times in named.items():
        if not (root / "docs" / name).exists():
            yield Problem(
                "mkdocs.yml", line_of(text, name), f"the navigation names {name}, which is not there: remove it"
            )
        elif times > 1:
            yield Problem("mkdocs.yml", line_of(text, name), f"the navigation names {name} {times} times: name it once")


def _leaves(tree: Any) -> Iterator[str]:
    """The pages in a navigation."""
    if isinstance(tree, str):
        yield tree
    else:
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(branch)


def map_is_complete(root: Path) -> Iterator[Problem]:
    page = "docs/develop/architecture.md"
    whole = (root / page).read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| `([\w/]+)` \| (.*) \|$", whole, re.MULTILINE))
    for tree in MAPPED:
        for init in sorted((root / tree).rglob("__init__.py")):
            package, text = relative(init.parent, root), init.read_text(encoding="utf-8")
            if text.startswith(ALIAS):
                if f"`{package}`" not in whole:
                    yield Problem(page, 1, f"the page does not name {package}: name it among the old program names")
                continue
            said = " ".join((ast.get_docstring(parsed(text)) or "").partition("\n\n")[0].split())
            line = lines.pop(package, None)
            if line is None:
                yield Problem(page, 1, f"the map does not name {package}: say what it is for")
            elif said and line != said:
                yield Problem(page, 1, f"the map says of {package} {line!r}, its __init__.py {said!r}: say the same")
    for package in lines:
        yield Problem(page, 1, f"the map names {package}, and there is no such package: take its line out")


def moves_lead_somewhere(root: Path) -> Iterator[Problem]:
    """The table of what moved names today's module, folder or name for each old one."""
    page = "docs/develop/adr/moved-modules.tsv"
    for number, line in enumerate((root / page).read_text(encoding="utf-8").splitlines()[1:], 2):
        new = line.rpartition("\t")[2]
        if not (_is_defined(new, root) or root.joinpath(*new.split(".")).is_dir()):
            yield Problem(page, number, f"there is no {new}: write today's name")


def drawings_are_current(root: Path) -> Iterator[Problem]:
    for path, content in drawings().items():
        file = root / path
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            yield Problem(path, 1, "it is not what its program draws: run python -m tools.draw_architecture")


def protocol_page_is_complete(root: Path) -> Iterator[Problem]:
    page = "docs/develop/step-protocol.md"
    text = (root / page).read_text(encoding="utf-8")
    for title in SHOWN_BY_TESTS:
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("|")][2:]
        if not rows:
            yield Problem(page, 1, f"there is no table under '## {title}': write it, or change tools/check_docs.py")
        for row in rows:
            if "::test_" not in row:
                yield Problem(page, line_of(text, row), f"the row names no test that shows it: {row[:60]}")
        numbers = [row.split("|")[1].strip() for row in rows]
        if title == "The rules" and rows and numbers != [str(number) for number in range(1, RULES + 1)]:
            yield Problem(page, line_of(text, rows[0]), f"the rules are numbered {numbers}: number them 1 to {RULES}")
    versions = f"this gcore is of version {NEWEST_VERSION} and reads version {NEWEST_VERSION - 1}"
    if versions not in text:
        yield Problem(page, 1, f"the page does not say '{versions}': correct the versions")


def failures_page_is_right(root: Path) -> Iterator[Problem]:
    page = "docs/operate/failures.md"
    text = (root / page).read_text(encoding="utf-8")
    for cause, seconds in PATIENCE_S.items():
        rows = re.findall(rf"^\| `{cause}` \|.*$", text, re.MULTILINE)
        said = [row.split("|")[3].strip() for row in rows]
        if said != [f"{seconds:g} s"]:
            line = line_of(text, rows[0]) if rows else 1
            yield Problem(page, line, f"the wait {cause} becomes an event after {seconds:g} s, the table says {said}")
    defaults: list[tuple[type[BaseModel], str, str]]
    defaults = [(RolloutSpec, "rollout", name) for name in ("silent_s", "watchdog_s", "timeout_s")]
    defaults += [(TrainSpec, "train", name) for name in ("watchdog_s", "start_limit_s")]
    for section, prefix, name in defaults:
        said_so = f"`{prefix}.{name}` ({section.model_fields[name].default:g} s)"
        if said_so not in text:
            yield Problem(page, line_of(text, f"`{prefix}.{name}`"), f"the page does not say {said_so}: correct it")


def names_are_listed(root: Path) -> Iterator[Problem]:
    """Every value that a spec may choose, and every key of a daemon's configuration, is on its page."""
    algorithms = (root / "docs" / "use" / "algorithms.md").read_text(encoding="utf-8")
    fields = {f"train.{n}": TrainSpec.model_fields[n] for n in ("advantage", "loss", "aggregation", "kl_estimator")}
    fields["train.old_logprobs"] = TrainSpec.model_fields["old_logprobs"]
    fields["rollout.correction"] = RolloutSpec.model_fields["correction"]
    for field, info in fields.items():
        for word in sorted(_words(info.annotation)):
            if f"`{word}`" not in algorithms:
                yield Problem(
                    "docs/use/algorithms.md", 1, f"{field} may be `{word}`, which is not on the page: describe it"
                )
    daemon = (root / "docs" / "operate" / "configuration.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in daemon.splitlines() if line.startswith("| `"))
    own = {"schema_version", "local_cluster"}  # written by `gcore up`, for itself
    keys = [key for key in NodeConfig.model_fields if key not in own and f"`{key}." not in table]
    sections: tuple[type[BaseModel], ...] = (JobLimits, GarbageSection, KeepPolicy)
    for key in [*keys, *(key for section in sections for key in section.model_fields)]:
        if f"`{key}`" not in table:
            yield Problem("docs/operate/configuration.md", 1, f"no table has the key `{key}`: describe it")


def _words(annotation: Any) -> set[str]:
    """The words that a field may be."""
    return {word for part in (annotation, *get_args(annotation)) for word in get_args(part) if isinstance(word, str)}


def help_has_examples(cli: Any, root: Path) -> Iterator[Problem]:
    for verb, command in sorted(cli.commands.items()):
        path, line = _defined(command, root)
        examples = [text for text in (command.epilog or "").splitlines() if "gcore " in text]
        if not examples:
            yield Problem(path, line, f"gcore {verb} --help has no example: add one to its epilog")
        for example in examples:
            words = shlex.split(example[example.index("gcore ") :])[1:]
            try:
                if words[0] != verb:
                    raise Unparsable(f"it is an example of {words[0]}")
                parse(words[: words.index(">")] if ">" in words else words)
            except Unparsable as error:
                yield Problem(path, line, f"an example of gcore {verb} --help cannot be typed: {example}: {error}")


def _defined(command: Any, root: Path) -> tuple[str, int]:
    callback = command.callback or next(iter(command.commands.values())).callback
    function = inspect.unwrap(callback)
    return relative(Path(inspect.getfile(function)), root), inspect.getsourcelines(function)[1]


if __name__ == "__main__":
    sys.exit(main({"docs": check}, __doc__))
