"""The source of a function with what it needs, as a module: how a function of a notebook cell comes to the processes of a cluster.

The module has the imports, constants, functions and classes that the function names, and nothing else of where it was defined. A function that
refers to a live object (an open file, a model, a variable of an enclosing function) cannot be written down and is refused.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from gcore.errors import UsageError

CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
COLLECTIONS = (list, tuple, set, frozenset, dict)


def function_source(function: Callable[..., Any]) -> str:
    """A module that defines `function` under its name. Raises UsageError."""
    if not isinstance(function, FunctionType):
        raise UsageError(f"{function!r} is not a function", fix="Pass a function that was defined with `def`")
    if function.__name__ == "<lambda>":
        raise UsageError("a lambda has no source of its own", fix="Define the function with `def`")
    parts: dict[str, str] = {}
    _add_function(function, function.__name__, parts)
    imports = sorted(text for text in parts.values() if text.startswith(("import ", "from ")))
    rest = [text for text in parts.values() if not text.startswith(("import ", "from "))]
    return "\n".join(["from __future__ import annotations\n", *imports, "", "\n\n\n".join(rest)]) + "\n"


def _add_function(found: FunctionType | type, name: str, parts: dict[str, str]) -> None:
    parts[name] = ""  # its place; it may refer to itself
    if isinstance(found, FunctionType) and found.__closure__:
        free = ", ".join(found.__code__.co_freevars)
        what = f"function {found.__name__!r} uses variables of the function that it is defined in ({free})"
        raise UsageError(what, fix="Make them arguments with defaults, or constants of the module")
    try:
        text = textwrap.dedent(inspect.getsource(found))
    except (OSError, TypeError) as error:
        what = f"the source of {found.__name__!r} is not known"
        raise UsageError(what, fix="Define it in a file or in a notebook cell, with `def`") from error
    for used in _global_names(text):
        if used not in parts and used != name:
            _add_global(used, found, parts)
    attributes = _attributes(found, parts) if isinstance(found, FunctionType) else []
    parts.pop(name)
    parts[name] = "\n".join([text.rstrip(), *attributes])


def _attributes(function: FunctionType, parts: dict[str, str]) -> list[str]:
    """Assignments of the function's attributes, such as `start` and `batch` of a reward."""
    lines = []
    for key, value in vars(function).items():
        if key.startswith("__"):
            continue
        if isinstance(value, FunctionType):
            if value.__name__ not in parts:
                _add_function(value, value.__name__, parts)
            lines.append(f"{function.__name__}.{key} = {value.__name__}")
        elif _is_constant(value):
            lines.append(f"{function.__name__}.{key} = {value!r}")
        else:
            what = f"attribute {key!r} of function {function.__name__!r} is a {type(value).__name__} that cannot be written down"
            raise UsageError(what, fix="Make it a function or a constant")
    return lines


def _global_names(text: str) -> list[str]:
    """The names that a definition reads and does not define itself, in order."""
    tree = ast.parse(text)
    bound: set[str] = set()
    read: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.append(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str() as name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {alias.asname or alias.name.partition(".")[0] for alias in names}
    return [name for name in dict.fromkeys(read) if name not in bound]


def _add_global(name: str, user: FunctionType | type, parts: dict[str, str]) -> None:
    module = sys.modules.get(user.__module__)
    known = user.__globals__ if isinstance(user, FunctionType) else vars(module) if module is not None else {}
    if name not in known:
        if hasattr(builtins, name):
            return
        raise UsageError(f"{user.__name__!r} uses {name!r}, which is not defined", fix="Define it before the function")
    value = known[name]
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
        if "." in value.__name__ and name == value.__name__.partition(".")[0]:
            parts[name] = f"import {value.__name__}"
    elif _is_installed(value, user):
        parts[name] = f"from {value.__module__} import {value.__qualname__}" + (
            f" as {name}" if name != value.__qualname__ else ""
        )
    elif isinstance(value, FunctionType | type) and value.__name__ == name:
        _add_function(value, name, parts)
    elif isinstance(value, re.Pattern):
        parts.setdefault("re", "import re")
        parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
    elif _is_constant(value):
        parts[name] = f"{name} = {value!r}"
    else:
        what = f"{user.__name__!r} uses {name!r}, a {type(value).__name__} that cannot be written down"
        raise UsageError(what, fix="Create it inside the function, or put the function and what it needs into a file")


def _is_installed(value: Any, user: FunctionType | type) -> bool:
    """Whether another module defines it under its name, so that it can be imported from there."""
    home = getattr(value, "__module__", None)
    if not isinstance(home, str) or home in ("__main__", user.__module__):
        return False
    name = getattr(value, "__qualname__", "")
    return isinstance(name, str) and name.isidentifier() and getattr(sys.modules.get(home), name, None) is value


def _is_constant(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_constant(one) for pair in value.items() for one in pair)
    if type(value) in COLLECTIONS:
        return all(_is_constant(one) for one in value)
    return type(value) in CONSTANTS
