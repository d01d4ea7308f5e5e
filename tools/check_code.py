"""Check the product's sources for what no linter knows: purity, code that is read and run, shadowed modules, docstrings.

A module whose docstring says "Pure" imports nothing that waits, asks or draws: the list is that of the import contract
`decisions are pure` in pyproject.toml, whose `ignore_imports` are allowed here too. Nothing that gcore reads from a wire
or a file can run code. A process that gcore starts leaves the current folder out of its path. Each public function of
the algorithms says its shapes and its source. A name between backticks in a docstring is a name of the product.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from tools.problem import Problem, line_of, main, nodes, sources

CONTRACT = "decisions are pure"
ALGORITHMS = "gcore/train/algorithms/"
JAIL = "gcore/worker/sandbox/jail.py"
"""Runs the programs of the reward `code`, shut in: that is its purpose."""
TESTING = "gcore/testing/"

MODULES = {
    *(
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
    )
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
    "unsafe_load": "builds any object",
    "full_load": "builds any object",
    "save_checkpoint": "writes pickles (DeepSpeed's own)",
    "load_checkpoint": "reads pickles (DeepSpeed's own)",
}
STARTS_PYTHON = re.compile(r"sys\.executable,\s*(\"-[^m][^\"]*\",\s*)*\"-m\"")

SHAPES = re.compile(r"\[(batch|n|b)\b|of one shape|hapes as in")
SOURCE = re.compile(r"arXiv \d{4}\.\d{4,5}|\b(19|20)\d\d\b")
SOURCELESS = {
    "denominator": "a count",
    "loss_sum": "Mode has the sources",
    "at_last_token": "a placement",
    "nll_loss": "a definition",
    "clip_fraction_tokens": "a measure of ppo_loss",
    "gspo_clip_fraction_tokens": "a measure of gspo_loss",
    "cispo_clip_fraction_tokens": "a measure of cispo_loss",
    "value_clip_tokens": "a measure of value_loss",
    "token_ratio": "a definition",
    "sequence_ratio": "gspo_loss's",
    "mis_mask": "public implementations",
}
"""Public functions of the algorithms whose docstrings name no publication, and why."""

NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`(?!`)")
WORD = re.compile(r"[A-Za-z_]\w*")
OLD_NAMES = "gcore/aliases.py"
"""Its texts are names that are no longer the product's."""
FOREIGN = {
    "Auto": "how transformers' classes begin",
    "AutoTokenizer": "transformers",
    "Status": "google.rpc",
    "datasets": "a library",
    "tokenizers": "a library",
    "google": "a package of protobuf messages",
    "rpc": "google.rpc",
    "offload_states": "DeepSpeed",
    "stage3_max_live_parameters": "DeepSpeed",
    "http_sd_configs": "Prometheus",
    "strftime_now": "chat templates",
    "SSL_CERT_FILE": "OpenSSL",
    "NaN": "JSON",
    "v6": "an address",
    "gcore_ID_SECRET": "the shape of a token",
    "incorrect": "a word of a verdict",
    "PID": "a process number in a file's name",
    "fired": "a part of a file's name",
}
"""Names that docstrings put between backticks and the product does not have, and whose they are."""


def check(root: Path) -> Iterator[Problem]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    forbidden, allowed = pure_contract(project)
    functions = set[str]()
    every = list(sources(root))
    yield from unknown_names(every)
    for path, text, tree in every:
        yield from impure_imports(path, tree, forbidden, allowed)
        yield from runs_what_it_reads(path, tree)
        yield from shadowed(path, text)
        if path.startswith(ALGORITHMS):
            yield from undocumented(path, tree)
            functions |= {function.name for function in public_functions(tree)}
    for name in sorted(SOURCELESS.keys() - functions):
        yield Problem("tools/check_code.py", 1, f"SOURCELESS has {name}, which {ALGORITHMS} has not: delete it")
    lint = project["tool"]["ruff"]["lint"]
    if "pickle" not in lint["flake8-tidy-imports"]["banned-api"] or "TID" not in lint["select"]:
        yield Problem("pyproject.toml", 1, "ruff does not ban pickle: ban it")


def pure_contract(project: dict[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(forbidden modules, modules that may be imported nevertheless) of the import contract on purity."""
    contracts = project["tool"]["importlinter"]["contracts"]  # type: ignore[index]
    (found,) = [one for one in contracts if one["name"] == CONTRACT]
    allowed = [one.partition("->")[2].strip() for one in found.get("ignore_imports", ())]
    return tuple(found["forbidden_modules"]), tuple(allowed)


def impure_imports(
    path: str, tree: ast.Module, forbidden: tuple[str, ...], allowed: tuple[str, ...]
) -> Iterator[Problem]:
    if not re.search(r"(^|[.:] )Pure\b", ast.get_docstring(tree) or "", re.MULTILINE):
        return
    for line, name in imported(tree):
        if _within(name, forbidden) and not _within(name, allowed):
            yield Problem(path, line, f"the docstring says pure, and it imports {name}: pass it in, or drop the word")


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each import of the module, wherever in it, but for types only."""
    typing = {
        inner
        for node in nodes(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in nodes(tree):
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def runs_what_it_reads(path: str, tree: ast.Module) -> Iterator[Problem]:
    """Calls that can execute code from data: pickle in any form, YAML with tags, evaluated text, a shell."""
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for name in [module] if module else [alias.name for alias in node.names]:
                if name.split(".")[0] in MODULES or name.startswith("torch.multiprocessing"):
                    yield Problem(path, node.lineno, f"imports {name}: use safetensors, JSON or protobuf")
        elif isinstance(node, ast.Call):
            yield from (Problem(path, node.lineno, message) for message in _of_call(node, path))


def _of_call(node: ast.Call, path: str) -> Iterator[str]:
    owner, name = _called(node.func)
    given = {word.arg: word.value for word in node.keywords}
    truth = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
    if name in CALLS:
        yield f"calls {name}, which {CALLS[name]}: use safetensors, JSON or protobuf"
    if (owner, name) == ("torch", "load") and truth.get("weights_only") is not True:
        yield "calls torch.load without weights_only=True: add it"
    if (owner, name) == ("torch", "save"):
        yield "calls torch.save: write safetensors"
    if name == "load" and owner in ("np", "numpy") and truth.get("allow_pickle", False) is not False:
        yield "calls numpy.load with allow_pickle: leave it out"
    if (owner, name) == ("yaml", "load") and not (
        isinstance(given.get("Loader"), ast.Name) and getattr(given["Loader"], "id", "") == "PlainLoader"
    ):
        yield "calls yaml.load with another loader than PlainLoader: use PlainLoader"
    if (owner, name) == ("yaml", "load_all"):
        yield "calls yaml.load_all: load one document with PlainLoader"
    if owner == "" and name in ("eval", "exec") and path != JAIL:
        yield f"calls {name}: parse the text instead"
    if truth.get("shell") is True:
        yield "starts a shell: give a list of words"


def _called(function: ast.expr) -> tuple[str, str]:
    if isinstance(function, ast.Attribute):
        return (function.value.id if isinstance(function.value, ast.Name) else "?"), function.attr
    return "", function.id if isinstance(function, ast.Name) else ""


def shadowed(path: str, text: str) -> Iterator[Problem]:
    """Processes that would take a `queue.py` in the user's current folder for Python's."""
    if not path.startswith(TESTING):
        for match in STARTS_PYTHON.finditer(text):
            if '"-P"' not in match.group():
                yield Problem(path, line_of(text, match.group()), "starts Python without -P: add it before -m")


def public_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def undocumented(path: str, tree: ast.Module) -> Iterator[Problem]:
    """Public functions of the algorithms that do not say their shapes or their source."""
    for function in public_functions(tree):
        name, line, said = function.name, function.lineno, ast.get_docstring(function) or ""
        signature = ast.unparse(function.args) + ast.unparse(function.returns or ast.Constant(None))
        if not said:
            yield Problem(path, line, f"{name} has no docstring: say what it computes")
        elif "Tensor" in signature and not SHAPES.search(said):
            yield Problem(path, line, f"{name} says no shape: add it to the docstring, such as [batch, tokens]")
        if name not in SOURCELESS and not SOURCE.search(said):
            yield Problem(path, line, f"{name} names no source: add arXiv number or year to the docstring")


Source = tuple[str, str, ast.Module]


def unknown_names(every: Collection[Source]) -> Iterator[Problem]:
    """Names between backticks in docstrings that stand nowhere in the product's code, nor in Python's standard library."""
    known = {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names, *FOREIGN}
    found = list[tuple[str, int, str]]()
    for path, _, tree in every:
        said = _docstrings(tree)
        known.update(WORD.findall(path.removesuffix(".py")))
        known.update(_names(tree, said, texts=path != OLD_NAMES))
        for constant in said:
            text = str(constant.value)
            for match in NAME.finditer(text):
                found.append((path, constant.lineno + text.count("\n", 0, match.start()), match[1]))
    homes = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree for path, _, tree in every}
    texts = {one.value for _, _, tree in every for one in nodes(tree) if isinstance(one, ast.Constant)}
    for path, line, name in sorted(found):
        if any(word not in known for word in name.split(".")) or (name not in texts and _has_moved(name, homes)):
            yield Problem(path, line, f"the docstring names `{name}`, which no code has: write today's name")


def _has_moved(name: str, homes: Mapping[str, ast.Module]) -> bool:
    """Whether a dotted name begins like one of a module, and there is no such module and no such name in one.

    `placement` is a section of the spec too, so what follows it directly may be anything.
    """
    parts = name.split(".")
    home = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in homes), len(parts))
    if home == len(parts) or parts[:home] == ["placement"]:
        return False
    return parts[home] not in set(_names(homes[".".join(parts[:home])], (), texts=False))


def _docstrings(tree: ast.Module) -> set[ast.Constant]:
    """Those of the module, its classes, functions and attributes."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        statement.value
        for node in nodes(tree)
        if isinstance(node, documented)
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    }


def _names(tree: ast.Module, docstrings: Collection[ast.Constant], *, texts: bool) -> Iterator[str]:
    """Every name that the code has, and with `texts` the words of its texts that have no space: keys, paths, options."""
    for node in nodes(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), other or name)
            case ast.Constant(value=str(text)) if texts and node not in docstrings and not re.search(r"\s", text):
                yield from WORD.findall(text)
            case _:
                pass


if __name__ == "__main__":
    sys.exit(main({"code": check}, __doc__))
