"""Writes a function and all that it needs as the source of a module, so that a cluster can run a notebook's reward.

The module contains the imports, constants, functions and classes that the function refers to, with their present
values. Definitions in notebook cells and in files that are not installed are copied; everything that a process in
another folder can import is imported. Variables of an enclosing function become arguments of a factory function. A
function that refers to a live object (an open file, a model, a lock) is refused.

The text must be that of the loaded function: its bytecode is compared with the compiled text, so a file that was edited
after its import is refused.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dis
import enum
import functools
import importlib.util
import inspect
import linecache
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from gcore.errors import UsageError
from gcore.plugins import MOST_FILE_BYTES, describe_result

CONSTANTS = (bool, int, str, bytes, type(None), type(...))
COLLECTIONS = (list, tuple, set, frozenset, dict)
OF_A_MODULE = frozenset({"__name__", "__builtins__", "__spec__", "__loader__", "__package__", "__doc__"})
"""Globals that every module has; they are not copied."""

Definition = FunctionType | type
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def function_source(function: Callable[..., Any]) -> str:
    """Return the source of a module that defines `function` as `function_name(function)`. Raises UsageError if
    something that it needs cannot be copied, or if the source is too long."""
    check_is_function(function)
    module = _Module()
    name = function_name(function)
    module.define(name, function)
    text = module.text()
    if (size := len(text.encode())) > MOST_FILE_BYTES:
        longest = module.longest()
        what = f"{name!r} and what it names take {size} bytes, {longest!r} the most; the limit is {MOST_FILE_BYTES}"
        raise UsageError(what, fix="Read large data from a file inside the function")
    return text


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function in the written module; "reward" for a lambda and for a name with non-ASCII characters."""
    name = str(getattr(function, "__name__", "reward"))
    return name if name.isidentifier() and name.isascii() else "reward"


def check_is_function(function: Callable[..., Any]) -> None:
    """Check that `function` is a plain Python function, decorated or not. Raises UsageError for a class, a method or
    another object."""
    found = _innermost(function)
    fix = "Define a function with `def` that calls it"
    if isinstance(function, type):
        raise UsageError(f"{function.__qualname__!r} is a class, not a function", fix=fix)
    if isinstance(function, MethodType):
        kind = type(function.__self__).__name__
        raise UsageError(f"{function.__name__!r} is a method of an object of type {kind}, not a function", fix=fix)
    if isinstance(found, FunctionType):
        return
    if inspect.isbuiltin(function):
        raise UsageError(f"{function.__name__!r} is not a function with Python source: it is built in", fix=fix)
    raise UsageError(f"an object of type {type(function).__name__} is not a function", fix=fix)


class _Module:
    """The module under construction. A statement is written after the definitions that it refers to, so that the module
    can be imported."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        """The object that each global name of the module stands for."""
        self._imports: list[str] = []
        self._statements: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}
        """Names of copied functions and classes, by identity."""
        self._pending: list[str] = []
        """Names of definitions that are not written yet, because the definitions that they need are written first."""
        self._deferred: list[tuple[frozenset[str], str, str]] = []
        """Assignments that wait for pending definitions: names of these definitions, the assigned name, the text."""
        self._referred: set[str] = set()
        """Global names in the expression that is being written."""

    def text(self) -> str:
        """The source of the module."""
        imports = "\n".join(sorted(set(self._imports)))
        parts = ["from __future__ import annotations", imports, *(text for _, text in self._statements)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def longest(self) -> str:
        """The name whose statement has the longest text, for the message that the module is too long."""
        return max(self._statements, key=lambda one: len(one[1]))[0]

    def bind(self, name: str, value: Any, user: str) -> None:
        """Bind the global `name` to `value` by an import, a copied definition or an assignment. Raises UsageError if it
        already has another value. `user`: the function that uses the name, for messages."""
        if name in self._values:
            if not _is_same(self._values[name], value):
                what = f"{name!r} has two meanings among the functions that {user!r} uses"
                raise UsageError(what, fix="Rename one of them")
            return
        if isinstance(value, ModuleType):
            self._values[name] = value
            self._add_import(name, value, user)
        elif (place := _import_place(value)) is not None:
            self._values[name] = value
            module, attribute = place
            self._imports.append(f"from {module} import {attribute}" + ("" if attribute == name else f" as {name}"))
        elif _is_definition(value):
            if id(value) in self._names:
                self._values[name] = value
                self._assign(name, self._names[id(value)], {self._names[id(value)]})
            else:
                self.define(name, value)
        else:
            self._values[name] = value
            self._assign(name, *self._expression_and_names(value, f"{user!r} uses {name!r},"))

    def _add_import(self, name: str, module: ModuleType, user: str) -> None:
        """Import a module as `name`. Raises UsageError if the processes that score cannot import it."""
        full = module.__name__
        if not _can_import(full):
            what = f"{user!r} uses the module {full!r}, which scoring processes cannot import"
            raise UsageError(what, fix=f"Import functions from it (`from {full} import ...`), which are copied")
        top, _, below = full.partition(".")
        self._imports.append(f"import {full}" + ("" if name == full or (below and name == top) else f" as {name}"))

    def _assign(self, name: str, expression: str, referred: set[str]) -> None:
        """Write `name = expression`, after the definitions that it refers to."""
        waits = frozenset(referred & set(self._pending))
        if waits:
            self._deferred.append((waits, name, f"{name} = {expression}"))
        else:
            self._write(name, f"{name} = {expression}")

    def _write(self, name: str, text: str) -> None:
        """Append a statement, then the deferred assignments that no longer wait for a definition."""
        self._statements.append((name, text))
        ready = [one for one in self._deferred if not one[0] & set(self._pending)]
        self._deferred = [one for one in self._deferred if one[0] & set(self._pending)]
        for _, later, statement in ready:
            self._statements.append((later, statement))

    def define(self, name: str, value: Any) -> None:
        """Copy the definition of a function or class as `name`, after everything that it needs."""
        found = _Source.find(value)
        self._values[name] = value
        self._names[id(value)] = name
        self._names[id(found.definition)] = name
        self._pending.append(name)
        for used in found.global_names():
            is_itself = used == name and used in found.known and _is_one_of(found.known[used], value)
            if used not in OF_A_MODULE and not is_itself:
                self._need(used, found)
        for used in found.annotations():
            if used in found.known and used not in self._values and _import_place(found.known[used]) is not None:
                self.bind(used, found.known[used], found.name)
        for full in found.submodules():
            self._imports.append(f"import {full} as _{full.replace('.', '_')}")
        found.check_imports(name)
        text = self._definition_text(name, found)
        after = [f"{name}{'.__wrapped__' * found.depth}{line}" for line in self._defaults(found)]
        after += self._attributes(name, value, found)
        self._pending.remove(name)
        self._write(name, "\n".join([text, *after]))

    def _need(self, used: str, found: _Source) -> None:
        """Bind the global name `used` of a definition. Raises UsageError if it is not defined or cannot be copied."""
        if used == "get_ipython":
            what = f"{found.name!r} uses notebook magics (% or !)"
            raise UsageError(what, fix="Write it in Python, or move it into a cell of its own")
        if used in found.known:
            self.bind(used, found.known[used], found.name)
        elif used == "globals":
            raise UsageError(f"{found.name!r} calls globals()", fix="Name the variables that it uses")
        elif not hasattr(builtins, used) and used not in found.assigned_globals():
            raise UsageError(f"{found.name!r} uses {used!r}, which is not defined", fix="Define it before this call")

    def _definition_text(self, name: str, found: _Source) -> str:
        """The text that defines `name`. Variables of an enclosing function become arguments of a factory function."""
        text = found.text(name)
        values = found.closure()
        values = {free: value for free, value in values.items() if not _is_one_of(value, found.value)}
        if not values:
            return text if not text[:1].isspace() else f"if True:\n{text}"
        given = []
        for free, value in values.items():
            expression, referred = self._expression_and_names(
                value, f"{found.name!r} uses {free!r} of its enclosing function,"
            )
            given.append(expression)
            if pending := referred & set(self._pending):
                what = f"{found.name!r} and {min(pending)!r} of its enclosing function use each other"
                raise UsageError(what, fix="Define both outside the function")
        if isinstance(found.node, ast.Lambda):
            return f"{name} = (lambda {', '.join(values)}: {text.partition(' = ')[2]})({', '.join(given)})"
        indent = text[: len(text) - len(text.lstrip())]
        return f"def _make_{name}({', '.join(values)}):\n{text}\n{indent}return {name}\n\n{name} = _make_{name}({', '.join(given)})"

    def _defaults(self, found: _Source) -> Iterator[str]:
        """Statements that set the defaults of a function's parameters to their present values, if its text has
        expressions other than literals."""
        if not isinstance(found.definition, FunctionType) or not found.odd_defaults():
            return
        function = found.definition
        for attribute, values in (("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__)):
            if values:
                yield f".{attribute} = {self._expression(values, f'a default of {found.name!r} is')}"

    def _attributes(self, name: str, value: Any, found: _Source) -> Iterator[str]:
        """Statements that set attributes of a function, such as `score.start`, or constants of a class that were
        changed after its definition."""
        if isinstance(value, type):
            changed = found.changed_constants()
        else:
            own = vars(value) if hasattr(value, "__dict__") else {}
            changed = {key: one for key, one in own.items() if key not in ("__wrapped__", "cache_parameters")}
        for key, one in changed.items():
            yield f"{name}.{key} = {self._expression(one, f'{name!r} has the attribute {key!r},')}"

    def _expression_and_names(self, value: Any, what: str) -> tuple[str, set[str]]:
        """The expression of a value (`_expression`), and the global names in it."""
        outer, self._referred = self._referred, set()
        expression = self._expression(value, what)
        referred, self._referred = self._referred, outer
        return expression, referred

    def _expression(self, value: Any, what: str, inside: tuple[int, ...] = ()) -> str:
        """Return a Python expression whose value equals `value`.

        `what`: beginning of the message if that is impossible. `inside`: ids of the collections around the value, to
        find cycles. Raises UsageError.
        """
        if id(value) in inside:
            raise UsageError(
                f"{what} {describe_result(value)} that contains itself", fix="Create it inside the function"
            )

        def of(one: Any) -> str:
            return self._expression(one, what, (*inside, id(value)))

        kind = type(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        if kind is complex:
            return f"complex({of(value.real)}, {of(value.imag)})"
        if kind in CONSTANTS:
            return repr(value)
        if kind is dict:
            return "{" + ", ".join(f"{of(key)}: {of(one)}" for key, one in value.items()) + "}"
        if kind in COLLECTIONS:
            items = ", ".join(map(of, value))
            if kind is tuple:
                return f"({items}{',' * (len(value) == 1)})"
            return f"[{items}]" if kind is list else f"{kind.__name__}([{items}])"
        if isinstance(value, enum.Enum):
            return f"{self._reference(kind, what)}[{value.name!r}]"
        if _is_definition(value) or isinstance(value, ModuleType) or _import_place(value) is not None:
            return self._reference(value, what)
        call = _construction(value)
        if call is None:
            fix = "Create it inside the function, or in a function `start` of the reward"
            raise UsageError(f"{what} {describe_result(value)} that cannot be copied into a file", fix=fix)
        made, arguments, keywords = call
        given = [of(one) for one in arguments] + [f"{key}={of(one)}" for key, one in keywords.items()]
        return f"{self._reference(made, what)}({', '.join(given)})"

    def _reference(self, value: Any, what: str) -> str:
        """Return the global name of an object for use in an expression, and bind a new name if it has none."""
        name = next((one for one, known in self._values.items() if known is value), "")
        if not name:
            own = getattr(value, "__name__", "value").replace(".", "_")
            own = own if own.isidentifier() else "function"
            name = next(
                one for one in (own, *(f"{own}_{number}" for number in range(2, 1000)))
                if one not in self._values and not hasattr(builtins, one)
            )  # fmt: skip
            self.bind(name, value, what)
        self._referred.add(name)
        return name


@dataclass(frozen=True)
class _Source:
    """The source text of a function or class. `value`: the object with its decorators. `definition`: the same without
    them; `depth`: their number.

    `node`: its syntax tree. `file`, `lines`: the file or cell that defines it.
    """

    value: Any
    definition: Definition
    depth: int
    node: Node
    file: str
    lines: tuple[str, ...]
    known: Mapping[str, Any]
    """The global variables of its module, by name."""

    @classmethod
    def find(cls, value: Any) -> _Source:
        """Find the source of a loaded function or class. Raises UsageError if it is unknown or has changed since."""
        definition, depth = value, 0
        while (inner := _wrapped(definition)) is not None:
            definition, depth = inner, depth + 1
        file, lines, node = _class_place(definition) if isinstance(definition, type) else _function_place(definition)
        module = sys.modules.get(definition.__module__)
        known = dict(vars(module)) if module is not None else {}
        for function in (definition,) if isinstance(definition, FunctionType) else _methods(definition):
            known = function.__globals__
        decorators = getattr(node, "decorator_list", [])
        if len(decorators) < depth:
            what = f"{definition.__name__!r} was wrapped by a call and not by a decorator"
            raise UsageError(what, fix="Write the decorator above the function, with @")
        return cls(value, definition, depth, node, file, lines, known)

    @property
    def name(self) -> str:
        """The name of the function or class."""
        return self.definition.__name__

    def text(self, name: str) -> str:
        """The text of the definition, renamed to `name`; for a lambda an assignment. Defaults that are not literals
        become None."""
        data = [line.encode() for line in self.lines]
        spans = [(one.lineno, one.col_offset, *_end(one), b"None") for one in self.odd_defaults()]
        node = self.node
        if isinstance(node, ast.Lambda):
            spans.append((node.lineno, 0, node.lineno, node.col_offset, f"{name} = (".encode()))
            last, column = _end(node)
            spans.append((last, column, last, len(data[last - 1]), b")"))
            first = node.lineno
        else:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            written = re.match(r"(?:async\s+)?(?:def|class)\s+(\w+)", data[node.lineno - 1][node.col_offset :].decode())
            if written is not None and written[1] != name:
                start = node.col_offset + written.start(1)  # only ASCII before the name
                spans.append((node.lineno, start, node.lineno, start + len(written[1].encode()), name.encode()))
        last, _ = _end(node)
        for begin, column, end, end_column, new in sorted(spans, reverse=True):
            joined = data[begin - 1][:column] + new + data[end - 1][end_column:]
            data[begin - 1 : end] = [joined] + [b""] * (end - begin)
        return b"".join(data[first - 1 : last]).decode().rstrip()

    def global_names(self) -> list[str]:
        """The global names that the definition reads, in order of use, without those in annotations."""
        node: ast.stmt = ast.copy_location(_statement(self._plain_node()), self.node)
        if free := list(self.closure()):
            arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
            node = ast.copy_location(ast.FunctionDef("_make", arguments, [node], []), self.node)
        tree = ast.fix_missing_locations(ast.Module([node], []))
        return list(dict.fromkeys(_names_read(compile(tree, self.file, "exec", dont_inherit=True))))

    def annotations(self) -> list[str]:
        """The names in annotations of a class's attributes. A decorator or a base class, such as `dataclass`, may
        evaluate them."""
        body = self.node.body if isinstance(self.node, ast.ClassDef) else []
        whole = [one.annotation for one in body if isinstance(one, ast.AnnAssign)]
        return [name.id for one in whole for name in ast.walk(one) if isinstance(name, ast.Name)]

    def assigned_globals(self) -> set[str]:
        """The names that the definition declares `global`."""
        return {name for one in ast.walk(self.node) if isinstance(one, ast.Global) for name in one.names}

    def submodules(self) -> Iterator[str]:
        """Submodules that the definition reaches as attributes of a package, such as `concurrent.futures`. Importing
        the package may not load them."""
        for one in ast.walk(self.node):
            names: list[str] = []
            while isinstance(one, ast.Attribute):
                names.insert(0, one.attr)
                one = one.value
            found = self.known.get(one.id) if names and isinstance(one, ast.Name) else None
            while isinstance(found, ModuleType) and names:
                full = f"{found.__name__}.{names[0]}"
                found = getattr(found, names.pop(0), None)
                if isinstance(found, ModuleType) and sys.modules.get(full) is found and _can_import(full):
                    yield full

    def check_imports(self, name: str) -> None:
        """Check the imports inside the definition. Raises UsageError for one that succeeds in this process but would
        fail in a scoring process."""
        guarded = {
            id(one) for t in ast.walk(self.node) if isinstance(t, ast.Try) for s in t.body for one in ast.walk(s)
        }
        for one in ast.walk(self.node):
            if isinstance(one, ast.ImportFrom) and one.level:
                raise UsageError(f"{name!r} has a relative import", fix="Write the full name of the module")
            tops = [] if id(one) in guarded else _imported(one)
            for top in tops:
                if _is_found_here(top) and not _can_import(top):
                    what = f"{name!r} imports {top!r}, which scoring processes cannot import"
                    raise UsageError(what, fix="Import it above the function (`from ... import ...`), or install it")

    def closure(self) -> dict[str, Any]:
        """The values of the enclosing functions' variables that the definition uses, by name. Raises UsageError."""
        functions = [self.definition] if isinstance(self.definition, FunctionType) else list(_methods(self.definition))
        found: dict[str, Any] = {}
        for function in functions:
            for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if free == "__class__":
                    if isinstance(self.definition, FunctionType):
                        raise UsageError(f"{self.name!r} calls super()", fix="Define it outside of the class")
                    continue
                try:
                    found[free] = cell.cell_contents
                except ValueError as error:
                    what = f"{self.name!r} uses {free!r} of its enclosing function, which has no value yet"
                    raise UsageError(what, fix="Assign it before this call") from error
        return found

    def changed_constants(self) -> dict[str, Any]:
        """Present values of the constants in a class body that were changed after the definition, by name."""
        assert isinstance(self.node, ast.ClassDef)
        found = {}
        for one in self.node.body:
            targets = (
                one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
            )
            for target in targets:
                literal = _literal(getattr(one, "value", None))
                now = vars(self.definition).get(getattr(target, "id", ""), ...)
                if literal and type(now) in (*CONSTANTS, float, *COLLECTIONS) and now is not ... and now != literal[0]:
                    found[target.id] = now  # type: ignore[attr-defined]
        return found

    def odd_defaults(self) -> list[ast.expr]:
        """The defaults of parameters that are not literals. The written text has None in their place."""
        if isinstance(self.node, ast.ClassDef):
            return []
        arguments = self.node.args
        return [one for one in (*arguments.defaults, *arguments.kw_defaults) if one is not None and not _literal(one)]

    def _plain_node(self) -> Node:
        """A copy of the syntax tree without annotations, and with None for the defaults that are not literals."""
        text = "".join(self.lines)
        odd = {(one.lineno, one.col_offset) for one in self.odd_defaults()}
        copy = next(
            one for one in ast.walk(_parsed(text, self.file))
            if type(one) is type(self.node) and (one.lineno, one.col_offset) == (self.node.lineno, self.node.col_offset)
        )  # fmt: skip
        plain = _WithoutAnnotations(odd).visit(copy)
        assert isinstance(plain, Node)
        return plain


class _WithoutAnnotations(ast.NodeTransformer):
    """Removes annotations, which a module with `from __future__ import annotations` does not evaluate, and sets
    defaults to None.

    `odd`: (line, column) of these defaults.
    """

    def __init__(self, odd: set[tuple[int, int]]) -> None:
        self._odd = odd

    def visit(self, node: ast.AST) -> Any:
        """Return the replacement of a node."""
        if isinstance(node, ast.expr) and (node.lineno, node.col_offset) in self._odd:
            return ast.copy_location(ast.Constant(None), node)
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            value = ast.Constant(None) if node.value is None else self.visit(node.value)
            plain = ast.Assign([node.target], value) if isinstance(node.target, ast.Name) else ast.Expr(value)
            return ast.fix_missing_locations(ast.copy_location(plain, node))
        return super().generic_visit(node)


def _names_read(code: CodeType, *, top: bool = True) -> list[str]:
    """The global names that compiled code reads, in order of use. `top`: whether it is the code of a module, whose
    variables are global."""
    stored: set[str] = set()
    read: list[str] = []
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD_GLOBAL") or (
            one.opname in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS") and one.argval not in stored
        ):
            read.append(str(one.argval))
        elif one.opname == "STORE_NAME" and not top:
            stored.add(one.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            read += _names_read(constant, top=False)
    return read


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Where a parsed node ends: its last line, from 1, and the byte offset in this line."""
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _statement(node: Node) -> ast.stmt:
    return ast.Expr(node) if isinstance(node, ast.Lambda) else node


def _own_name(node: Node) -> str:
    return "" if isinstance(node, ast.Lambda) else node.name


def _function_place(function: FunctionType) -> tuple[str, tuple[str, ...], Node]:
    """Find the file, its lines and the syntax tree of a function. Raises UsageError if the source changed since it was
    loaded."""
    code = function.__code__
    file = code.co_filename
    lines, tree = _read(file, function.__name__)
    whole = _compiled_file("".join(lines), file)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        if first != code.co_firstlineno or _own_name(node) not in ("", code.co_name):
            continue
        if isinstance(node, ast.Lambda) != (code.co_name == "<lambda>"):
            continue
        if any(isinstance(one, ast.Assert) for one in ast.walk(node)):  # pytest changes the code of assertions
            return file, lines, node
        if any(_is_same_code(one, code) for one in _codes_at(whole, node, code)):
            return file, lines, node
    what = f"the source of {function.__name__!r} has changed since it was loaded"
    raise UsageError(what, where=file, fix="Load it again, and define a lambda on a line of its own")


def _codes_at(whole: CodeType, node: Node, code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects within `whole` that may be compiled from `node`: those with the name and first line of
    `code`.

    For a lambda, the end of its body must match too, because a line may have several lambdas.
    """
    for one in whole.co_consts:
        if not isinstance(one, CodeType):
            continue
        if (one.co_firstlineno, one.co_name) == (code.co_firstlineno, code.co_name):
            body = node.body if isinstance(node, ast.Lambda) else None
            last = _end(body) if body is not None else None
            ends = [(end, column) for _, end, _, column in one.co_positions() if end is not None and column is not None]
            if last is None or last == max(ends, default=last):
                yield one
        yield from _codes_at(one, node, code)


def _is_same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects do the same: equal bytecode, names and constants. Positions in the file do not count."""
    if (one.co_code, one.co_names, one.co_varnames, one.co_freevars) != (
        other.co_code, other.co_names, other.co_varnames, other.co_freevars,
    ) or len(one.co_consts) != len(other.co_consts):  # fmt: skip
        return False
    for mine, its in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, CodeType) and isinstance(its, CodeType):
            if not _is_same_code(mine, its):
                return False
        elif type(mine) is not type(its) or mine != its:
            return False
    return True


def _class_place(found: type) -> tuple[str, tuple[str, ...], Node]:
    """Find the file, its lines and the syntax tree of a class. Raises UsageError."""
    path = [part for part in found.__qualname__.split(".") if part != "<locals>"]
    for method in _methods(found):
        file = method.__code__.co_filename
        lines, tree = _read(file, found.__name__)
        line = method.__code__.co_firstlineno
        for names, node in _classes(tree):
            if names == path and node.lineno <= line <= _end(node)[0]:
                _function_place(method)  # raises if the file has changed
                return file, lines, node
    for text in _texts(found.__module__):
        for names, node in _classes(_parsed(text, found.__name__)):
            if names == path:
                return found.__module__, tuple(text.splitlines(keepends=True)), node
    raise _no_source(found.__name__)


def _texts(module_name: str) -> Iterator[str]:
    """Yield the source texts that may define a class of the module: its file, or the cells that were run in this
    notebook, the newest first."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is not None:
        linecache.checkcache(file)
        yield "".join(linecache.getlines(file))
        return
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    manager = getattr(shell, "history_manager", None)
    for text in reversed(getattr(manager, "input_hist_parsed", [])):
        if _is_python(text):
            yield f"{text}\n"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _classes(tree: ast.AST, above: tuple[str, ...] = ()) -> Iterator[tuple[list[str], ast.ClassDef]]:
    """Yield the classes in a syntax tree with their qualified names (as lists of parts), the last ones first."""
    for node in reversed(list(ast.iter_child_nodes(tree))):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        names = (*above, node.name) if named else above  # type: ignore[attr-defined]
        if isinstance(node, ast.ClassDef):
            yield list(names), node
        yield from _classes(node, names)


def _methods(found: Any) -> Iterator[FunctionType]:
    """Yield the functions that a class body defines and whose source is known, without their decorators."""
    for one in vars(found).values():
        one = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        one = _innermost(one)
        if isinstance(one, FunctionType) and one.__code__.co_qualname.startswith(f"{found.__qualname__}.") and (
            linecache.getlines(one.__code__.co_filename)
        ):  # fmt: skip
            yield one


def _read(file: str, name: str) -> tuple[tuple[str, ...], ast.Module]:
    """Read the lines and the syntax tree of a file or notebook cell. `name`: of the definition, for messages. Raises
    UsageError."""
    linecache.checkcache(file)
    lines = tuple(linecache.getlines(file))
    if not lines:
        raise _no_source(name)
    return lines, _parsed("".join(lines), name)


def _no_source(name: str) -> UsageError:
    fix = "Define it in a file or in a notebook cell with `def` or `class`, not with exec() or under %%time"
    return UsageError(f"the source of {name!r} is not known", fix=fix)


def _parsed(text: str, name: str) -> ast.Module:
    """Parse a text into a new syntax tree. `name`: of the definition, for messages. Raises UsageError."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"the source of {name!r} is not valid Python ({error.msg})", fix="Load it again") from error


@functools.lru_cache(maxsize=32)
def _compiled_file(text: str, file: str) -> CodeType:
    code: CodeType = compile(text, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


def _innermost(value: Any) -> Any:
    """The function without its decorators, as far as they use functools.wraps."""
    while (inner := _wrapped(value)) is not None:
        value = inner
    return value


def _wrapped(value: Any) -> Any:
    """The function that a decorator wrapped with functools.wraps; None if there is none."""
    own = getattr(value, "__dict__", None)
    return own.get("__wrapped__") if isinstance(own, dict) else None  # of a class it is no dict


def _is_one_of(value: Any, other: Any) -> bool:
    """Whether two objects are the same object, or the same function with and without decorators."""
    return value is other or (_is_definition(value) and _innermost(value) is _innermost(other))


def _is_definition(value: Any) -> bool:
    return isinstance(value, type) or isinstance(_innermost(value), FunctionType)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and type(one) in (*CONSTANTS, float, *COLLECTIONS) and bool(one == other)


def _literal(node: ast.AST | None) -> tuple[Any] | None:
    """The value of a literal, in a tuple; None for another expression."""
    try:
        return None if node is None else (ast.literal_eval(node),)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None


def _construction(value: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """A call that creates an object equal to `value`: callable, arguments and keywords. None if the type of `value` is
    not supported."""
    match value:
        case re.Pattern():
            return re.compile, (value.pattern, value.flags), {}
        case collections.Counter():
            return collections.Counter, (dict(value),), {}
        case collections.OrderedDict():
            return collections.OrderedDict, ([list(pair) for pair in value.items()],), {}
        case collections.defaultdict():
            return collections.defaultdict, (value.default_factory, dict(value)), {}
        case collections.deque():
            return collections.deque, (list(value), value.maxlen), {}
        case range():
            return range, (value.start, value.stop, value.step), {}
        case Decimal():
            return Decimal, (str(value),), {}
        case Fraction():
            return Fraction, (value.numerator, value.denominator), {}
        case PurePath():
            return type(value), (str(value),), {}
        case functools.partial():
            return functools.partial, (value.func, *value.args), dict(value.keywords)
    return None


def _import_place(value: Any) -> tuple[str, str] | None:
    """The module and the name from which a scoring process can import an object; None if it must be copied."""
    kind = type(value)
    if kind in CONSTANTS or kind in COLLECTIONS or kind is float:
        return None
    home = getattr(value, "__module__", None)
    homes = [home] if isinstance(home, str) else [kind.__module__.partition(".")[0]]
    for module in homes:
        if module == "__main__":
            return None
        for name in (getattr(value, "__qualname__", ""), getattr(value, "__name__", "")):
            found = (
                getattr(sys.modules.get(module), name, None) if isinstance(name, str) and name.isidentifier() else None
            )
            if found is value and _can_import(module):
                return module, name
    return None


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module.partition(".")[0]]
    return []


def _is_found_here(top: str) -> bool:
    try:
        return top in sys.modules or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def _can_import(name: str) -> bool:
    """Whether a process with the same interpreter, started in another folder, would import the same module."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if top in ("", "__main__"):
        return False
    return _origin_elsewhere(top) in _origins(top)


def _origins(top: str) -> set[str]:
    """The files and folders from which this process has loaded a top-level module, or would load it."""
    module = sys.modules.get(top)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        spec = importlib.util.find_spec(top) if module is None else None
    return {
        str(one)
        for one in (getattr(spec, "origin", None), *(getattr(spec, "submodule_search_locations", None) or ()))
        if one
    }


@functools.cache
def _origin_elsewhere(top: str) -> str:
    """The file or folder from which a new process in another folder would load a top-level module; empty if it finds
    none."""
    program = (
        "import importlib.util, sys; s = importlib.util.find_spec(sys.argv[1]); "
        "print((s.origin or next(iter(s.submodule_search_locations), '')) if s else '')"
    )
    command = [sys.executable, "-P", "-c", program, top]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    return done.stdout.strip()
