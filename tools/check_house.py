"""Check the shape of the product's module tree: sizes, folders, class names, import circles.

`python -m tools.check_house` prints every violation and exits 1; `--report` prints the numbers instead. The layers
between packages are checked by import-linter (pyproject.toml). Exceptions are in `house.toml`, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from tools.problem import PRODUCT, ROOT, nodes, parsed

EXCEPTIONS = Path(__file__).with_name("house.toml")
ALIAS = "Alias until"
"""How the docstring of a module begins that only keeps an old import path alive."""


@dataclass(frozen=True)
class Limits:
    packages: tuple[str, ...] = PRODUCT
    generated: tuple[str, ...] = ("gcore/api/v1",)
    lines: int = 800
    small: int = 80
    """A module below this with one importer belongs into that importer."""
    entries: int = 15
    entries_of: dict[str, int] = field(default_factory=lambda: {"controllers": 17, "gcore": 25})
    modules_of: dict[str, int] = field(default_factory=lambda: {"controllers": 112, "placement": 27, "gcore": 272})


@dataclass(frozen=True)
class Violation:
    rule: str
    subject: str
    """What an exception names: a path, a class name, or the members of a circle joined by ' + '."""
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.rule}: {self.subject}]"


@dataclass(frozen=True)
class Module:
    name: str
    path: str
    """Relative to the root, with slashes."""
    tree: ast.Module
    lines: int
    is_init: bool
    generated: bool
    in_alias: bool = False
    """Whether it is in a package that is an alias, such as a program that keeps its old name for `python -m`."""

    @cached_property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def stem(self) -> str:
        return self.path.rsplit("/", 1)[-1].removesuffix(".py")

    @cached_property
    def alias(self) -> bool:
        return self.in_alias or self.docstring.startswith(ALIAS)

    @cached_property
    def face(self) -> bool:
        """Whether the body is imports, `__all__` and a docstring only (with at least one import)."""
        imports = [node for node in nodes(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        return bool(imports) and all(_of_a_face(node) for node in self.tree.body)

    @property
    def counted(self) -> bool:
        """Whether the module counts as one of the package's modules."""
        return not (self.is_init or self.stem == "__main__" or self.generated or self.alias or self.face)

    @cached_property
    def statements(self) -> int:
        """All statements, nested ones too, without docstrings."""
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        every = nodes(self.tree)
        documented = sum(isinstance(node, holders) and ast.get_docstring(node) is not None for node in every)
        return sum(isinstance(node, ast.stmt) for node in every) - documented

    @cached_property
    def bindings(self) -> dict[str, tuple[str, str]]:
        """Names imported from another module: name -> (module, name there)."""
        return {
            alias.asname or alias.name: (origin, alias.name)
            for node in nodes(self.tree)
            if isinstance(node, ast.ImportFrom)
            for origin in [self._origin(node)]
            for alias in node.names
        }

    def imports(self) -> Iterator[tuple[str, str | None]]:
        """(module, name) of each import statement, wherever it stands; the name is None for `import module`."""
        for node in nodes(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                yield from ((origin, alias.name) for alias in node.names)
            elif isinstance(node, ast.Call) and _called(node) in self._importers:
                given = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")]
                yield from (
                    (arg.value, None) for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                )
            elif isinstance(node, ast.Attribute) and (name := self._attribute(node)) is not None:
                yield name

    @cached_property
    def _importers(self) -> set[str]:
        """Functions that import by name, as they are called here."""
        return {"import_module", "__import__"} | {
            own for own, (origin, name) in self.bindings.items() if (origin, name) == ("importlib", "import_module")
        }

    @cached_property
    def _packages(self) -> set[str]:
        """The first words of what `import package.module` binds."""
        return {
            alias.name.partition(".")[0]
            for node in nodes(self.tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.asname is None
        }

    def _attribute(self, node: ast.Attribute) -> tuple[str, str] | None:
        """(module, name) of `package.module.name`, where the package was imported by its own name."""
        words = [node.attr]
        inner: ast.expr = node.value
        while isinstance(inner, ast.Attribute):
            words.append(inner.attr)
            inner = inner.value
        if not (isinstance(inner, ast.Name) and inner.id in self._packages and inner.id in PRODUCT):
            return None
        return ".".join([inner.id, *reversed(words[1:])]), words[0]

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = len(parts) - node.level + (1 if self.is_init else 0)
        return ".".join([*parts[:kept], *([node.module] if node.module else [])])

    def classes(self) -> Iterator[tuple[str, ast.ClassDef]]:
        """(qualified name, definition) of each public class, nested ones too."""

        def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
            for child in ast.iter_child_nodes(node):
                inner = prefix
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    inner = f"{prefix}{child.name}."
                    if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                        yield prefix + child.name, child
                yield from walk(child, inner)

        return walk(self.tree, "")


def _called(call: ast.Call) -> str:
    """The last name of what is called; empty if it has none."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _of_a_face(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.AnnAssign(target=ast.Name(id="__all__")):
            return True
        case ast.If(test=test, body=body, orelse=[]):
            return ast.unparse(test).endswith("TYPE_CHECKING") and all(map(_of_a_face, body))
    return False


class House:
    """The product's modules and what they import of one another."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self.limits = limits
        self.modules: dict[str, Module] = {}
        for package in limits.packages:
            for path in sorted((root / package).rglob("*.py")):
                module = self._read(root, path)
                self.modules[module.name] = module
        for name, module in self.modules.items():
            around = self.modules.get(name.rpartition(".")[0])
            if around is not None and around.alias:
                self.modules[name] = replace(module, in_alias=True)
        self.edges = {n: set() if m.alias else self._edges(m) for n, m in self.modules.items()}

    def _read(self, root: Path, path: Path) -> Module:
        relative = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        parts = relative.removesuffix(".py").split("/")
        is_init = parts[-1] == "__init__"
        return Module(
            name=".".join(parts[:-1] if is_init else parts),
            path=relative,
            tree=parsed(text),
            lines=len(text.splitlines()),
            is_init=is_init,
            generated=any(relative.startswith(f"{folder}/") for folder in self.limits.generated),
        )

    def _edges(self, module: Module) -> set[str]:
        """The product modules that a module other than an alias imports: what each name is defined in, and each face it is taken from.

        A package that is only on the way (`from package import submodule`) is no edge.
        """
        found: set[str] = set()
        for origin, name in module.imports():
            found |= set(self._resolve(origin, name))
        return found - {module.name}

    def _resolve(self, origin: str, name: str | None) -> Iterator[str]:
        seen = set()
        while (origin, name) not in seen:
            seen.add((origin, name))
            here = self.modules.get(origin)
            if here is None:
                if name is None and "." in origin:  # `import package.module.attribute` does not exist; be safe
                    origin = origin.rsplit(".", 1)[0]
                    continue
                return
            bound = here.bindings.get(name) if name and (here.is_init or here.face or here.alias) else None
            if bound is None and name and f"{origin}.{name}" in self.modules:
                yield f"{origin}.{name}"
                return
            yield origin
            if bound is None:
                return
            origin, name = bound

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """The users of each module. Faces and aliases pass names on and do not count."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, targets in self.edges.items():
            module = self.modules[name]
            if not module.face:
                for target in targets:
                    found[target].add(name)
        return found

    def one_importer(self) -> list[Module]:
        return [m for m in self.modules.values() if m.counted and len(self.importers[m.name]) == 1]

    def duplicate_classes(self) -> dict[str, list[str]]:
        """Public class names with more than one definition: name -> places (path:line)."""
        places: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
        for module in self.modules.values():
            if not (module.generated or module.alias):
                for qualified, node in module.classes():
                    places[node.name].setdefault((module.name, qualified), f"{module.path}:{node.lineno}")
        return {name: sorted(found.values()) for name, found in sorted(places.items()) if len(found) > 1}

    def module_circles(self) -> list[list[str]]:
        return circles(self.edges)

    def package_circles(self) -> list[list[str]]:
        """Circles between packages that lie in the same folder, also through a module beside them."""
        inner: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name, targets in self.edges.items():
            for target in targets:
                if (pair := _siblings(name, target)) is not None:
                    inner[pair[0]][pair[1]].add(pair[2])
        found = []
        for edges in inner.values():
            for circle in circles(edges):
                if sum(self._is_package(one) for one in circle) > 1:
                    found.append(circle)
        return sorted(found)

    def _is_package(self, name: str) -> bool:
        module = self.modules.get(name)
        return module is None or module.is_init

    def folders(self) -> dict[str, set[str]]:
        """The entries of each product folder: modules and subfolders with modules, without aliases."""
        found: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            if module.alias:
                continue
            parts = module.path.split("/")
            if not (module.is_init or module.stem == "__main__" or module.generated):
                found["/".join(parts[:-1])].add(parts[-1])
            for depth in range(1, len(parts) - 1):
                found["/".join(parts[:depth])].add(parts[depth] + "/")
        return found

    def counted(self, package: str) -> list[Module]:
        return [m for m in self.modules.values() if m.counted and m.path.startswith(f"{package}/")]

    def violations(self) -> Iterator[Violation]:
        yield from self._sizes()
        yield from self._folders()
        for name, places in self.duplicate_classes().items():
            message = f"public class {name} is defined {len(places)} times ({', '.join(places)}): rename all but one"
            yield Violation("duplicate-class", name, places[0], message)
        for name, targets in self.edges.items():
            for target in sorted(targets):
                if self.modules[target].alias:
                    message = f"imports {target}, which is an alias: import the module that it names"
                    yield Violation("alias-import", name, f"{self.modules[name].path}:1", message)
        for rule, found in (("module-circle", self.module_circles()), ("package-circle", self.package_circles())):
            for circle in found:
                yield self._circle(rule, circle)

    def _sizes(self) -> Iterator[Violation]:
        limits = self.limits
        for module in self.modules.values():
            if module.lines > limits.lines and not module.generated:
                message = f"{module.lines} lines, at most {limits.lines}: split the module by subject"
                yield Violation("long-module", module.path, f"{module.path}:1", message)
        for module in self.one_importer():
            if module.lines < limits.small:
                (user,) = self.importers[module.name]
                message = f"{module.lines} lines and one importer, {user}: merge the module into it"
                yield Violation("small-module", module.path, f"{module.path}:1", message)

    def _folders(self) -> Iterator[Violation]:
        limits = self.limits
        for folder, entries in sorted(self.folders().items()):
            most = limits.entries_of.get(folder, limits.entries)
            if len(entries) > most:
                message = f"{len(entries)} entries, at most {most}: group modules by subject"
                yield Violation("large-folder", folder, folder, message)
        for package, most in limits.modules_of.items():
            if (count := len(self.counted(package))) > most:
                yield Violation("many-modules", package, package, f"{count} modules, at most {most}: merge modules")

    def _circle(self, rule: str, circle: list[str]) -> Violation:
        inside = {
            f"{name} -> {target}"
            for name, targets in self.edges.items()
            for target in targets
            if rule == "module-circle" and name in circle and target in circle
        }
        detail = f" ({'; '.join(sorted(inside))})" if 0 < len(inside) <= 12 else ""
        first = self.modules.get(circle[0])
        where = f"{first.path}:1" if first else circle[0]
        message = f"{len(circle)} import one another: {', '.join(circle)}{detail}: move what they share below them"
        return Violation(rule, " + ".join(circle), where, message)


def _siblings(name: str, target: str) -> tuple[str, str, str] | None:
    """(common package, child on the way to name, child on the way to target); None if one contains the other."""
    a, b = name.split("."), target.split(".")
    depth = 0
    while depth < min(len(a), len(b)) and a[depth] == b[depth]:
        depth += 1
    if depth in (len(a), len(b)):
        return None
    return ".".join(a[:depth]), ".".join(a[: depth + 1]), ".".join(b[: depth + 1])


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found = []
    for start in sorted(edges):
        if start in index:
            continue
        work: list[tuple[str, Iterator[str]]] = []

        def enter(node: str, work: list[tuple[str, Iterator[str]]] = work) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            on_stack.add(node)
            work.append((node, iter(sorted(edges.get(node, ())))))

        enter(start)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    enter(target)
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component: list[str] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    if len(component) > 1:
                        found.append(sorted(component))
    return sorted(found)


def excepted(violations: Iterable[Violation], file: Path) -> list[str]:
    """The violations that no exception names, and the exceptions that name none or give no reason."""
    table = tomllib.loads(file.read_text(encoding="utf-8")).get("exception", []) if file.exists() else []
    allowed = Counter((entry["rule"], entry["subject"]) for entry in table)
    errors = [
        f"{file.name}: {entry['rule']} {entry['subject']}: give a reason" for entry in table if not entry.get("reason")
    ]
    found = {(v.rule, v.subject): v for v in violations}
    errors += [str(violation) for key, violation in found.items() if key not in allowed]
    errors += [
        f"{file.name}: {r} {s}: the exception is not needed: delete it" for r, s in allowed if (r, s) not in found
    ]
    errors += [f"{file.name}: {r} {s}: the exception is there {n} times" for (r, s), n in allowed.items() if n > 1]
    return errors


def report(house: House) -> Iterator[str]:
    limits = house.limits
    yield "package      modules  median lines    lines  statements  one importer  of these small  all files  all lines"
    for package in (*limits.packages, "all"):
        own = [m for m in house.modules.values() if not m.generated and (package in ("all", m.path.split("/")[0]))]
        modules = [m for m in own if m.counted]
        single = [m for m in house.one_importer() if m in modules]
        small = [m for m in single if m.lines < limits.small]
        yield (
            f"{package:<11}  {len(modules):>7}  {median(m.lines for m in modules) if modules else 0:>12g}  "
            f"{sum(m.lines for m in modules):>7}  {sum(m.statements for m in own):>10}  {len(single):>12}  "
            f"{len(small):>14}  {len(own):>9}  {sum(m.lines for m in own):>9}"
        )
    yield "(lines: of the counted modules; statements, all files, all lines: with __init__, __main__, faces and aliases)"
    yield ""
    yield from _list(
        "modules over the line limit",
        [f"{m.path} {m.lines}" for m in house.modules.values() if m.lines > limits.lines and not m.generated],
    )
    yield from _list("aliases", [m.path for m in house.modules.values() if m.alias])
    yield from _list(
        "faces that are no __init__", [m.path for m in house.modules.values() if m.face and not (m.is_init or m.alias)]
    )
    folders = sorted(house.folders().items(), key=lambda item: (-len(item[1]), item[0]))
    yield from _list("folders (entries)", [f"{folder} {len(entries)}" for folder, entries in folders])
    duplicates = house.duplicate_classes()
    yield from _list(
        "public class names defined more than once", [f"{n}: {', '.join(p)}" for n, p in duplicates.items()]
    )
    yield from _list("circles of modules", [" + ".join(one) for one in house.module_circles()])
    yield from _list("circles of packages", [" + ".join(one) for one in house.package_circles()])
    yield from _list(
        "modules with one importer",
        [f"{m.path} {m.lines} <- {next(iter(house.importers[m.name]))}" for m in house.one_importer()],
    )


def _list(title: str, lines: list[str]) -> Iterator[str]:
    yield f"{title}: {len(lines)}"
    yield from (f"  {line}" for line in lines)
    yield ""


def check(root: Path = ROOT, limits: Limits | None = None, exceptions: Path = EXCEPTIONS) -> list[str]:
    return excepted(House(root, limits or Limits()).violations(), exceptions)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="print the numbers of today and check nothing")
    parser.add_argument("--root", type=Path, default=ROOT)
    given = parser.parse_args(arguments)
    if given.report:
        print("\n".join(report(House(given.root, Limits()))))
        return 0
    errors = check(given.root)
    print("\n".join(errors), end="\n" if errors else "")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
