"""Plug-ins (flows, rewards, filters, curricula, verdict parsers, ...), found by name through Python entry points.

A spec names a plug-in, and `find_plugin` loads it. An unknown name raises an error with the nearest known name. A name that two packages
provide, a plug-in that raises on import, and one that is not callable raise errors with their location. The caller handles a plug-in that
raises while it runs; `plugin_trace` returns the plug-in's own traceback, without gcore's frames, for the event that reports it
(`PluginFault`).

On a local cluster a plug-in may also be a file: `reward.py:score` in place of a name. A spec says `file: reward.py:score` or uses it as the
name. `resolve_plugin_files` makes the paths absolute, relative to the spec's folder. A controller copies each file into the run's folder, as
`code/DIGEST/reward.py`, and the stored spec names the copy. `load_plugin_file` rejects a copy whose bytes do not have this digest.

This module does not know the parameters and results of the kinds of plug-ins.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import shlex
import stat
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from gcore.errors import GcoreError, SpecError, TracedError, did_you_mean

MAX_SENTENCE = 500
"""Maximum number of characters of a plug-in error's text in messages, because some errors have a whole page in one
line.
"""

MAX_TRACE = 4000
"""Maximum number of characters of a traceback. The end is kept, because the error is there."""

RAISED = (Exception, SystemExit)
"""Exceptions to catch from plug-in code. They include SystemExit, because sys.exit in a plug-in must not end the controller
that runs it."""

_OURS = ("gcore", "controllers", "placement", "importlib", "asyncio")
"""Packages whose code is not a plug-in's own; a plug-in's traceback starts after their frames."""


@dataclass(frozen=True, slots=True)
class PluginKind:
    """A kind of plug-in, such as rewards. `noun`: its name in messages. `group`: its entry-point group.

    `where`: the spec key that names a plug-in of this kind.
    """

    noun: str
    group: str
    where: str


class PluginFault(TracedError, SpecError):
    """A plug-in cannot be loaded or is invalid. `trace`: the traceback of its own code, or empty."""


def find_plugin(kind: PluginKind, name: str) -> Callable[..., Any]:
    """Load the plug-in `name` of this kind, from its entry point or from its file. Raises PluginFault."""
    if (file := parse_plugin_file(name)) is not None:
        return _loaded_file(kind, file)
    known = entry_points(group=kind.group)
    points = [point for point in known if point.name == name]
    if not points:
        raise _unknown(kind, name, {point.name for point in known})
    targets = sorted({point.value for point in points})
    if len(targets) > 1:
        raise PluginFault(
            f"{kind.noun} {name!r} is provided more than once, by {' and '.join(targets)}",
            where=kind.where,
            fix="Uninstall all but one of the packages",
        )
    return _loaded(kind, name, points[0])


def check_plugin(kind: PluginKind, name: str) -> None:
    """Check that the plug-in `name` of this kind exists. An entry point is not loaded, but a plug-in file is.

    Raises PluginFault.
    """
    if (file := parse_plugin_file(name)) is not None:
        _loaded_file(kind, file)
        return
    names = {point.name for point in entry_points(group=kind.group)}
    if name not in names:
        raise _unknown(kind, name, names)


def check_parameters(kind: PluginKind, name: str, function: Callable[..., Any], *given: str) -> None:
    """Check that a plug-in accepts the positional arguments that gcore passes. `given`: their names. Raises PluginFault."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        what = f"{kind.noun} {shown_name(name)!r} cannot be called with ({', '.join(given)}): {error}"
        raise PluginFault(what, where=kind.where, fix="Correct its parameters") from error


def error_sentence(error: BaseException) -> str:
    """Return the error's type and the first line of its text, at most MAX_SENTENCE characters."""
    try:
        first = next(iter(str(error).splitlines()), "")
    except Exception:  # noqa: BLE001  foreign code: even str() of an error may raise
        first = ""
    first = first if len(first) <= MAX_SENTENCE else f"{first[: MAX_SENTENCE - 1]}…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def describe_result(result: object) -> str:
    """Describe an object of a user, such as a wrong result, for an error: `None`, `an int`, `a coroutine, ...`.

    A coroutine is closed, so that Python does not warn that it was never awaited.
    """
    if result is None:
        return "None"
    if inspect.iscoroutine(result):
        result.close()
        return "a coroutine, because it is written with `async def`"
    name = type(result).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def plugin_trace(error: BaseException | None) -> str:
    """Return the traceback of the plug-in's own code, from `error` or its cause; empty without plug-in code.

    It has at most MAX_TRACE characters; the start is cut off.
    """
    if error is None:
        return ""
    told = getattr(error, "trace", None)
    if isinstance(told, str):
        return told[-MAX_TRACE:]
    if isinstance(error, GcoreError):  # an error of gcore's own needs no traceback
        return plugin_trace(error.__cause__)
    lines = traceback.format_exception(type(error), error, _theirs(error.__traceback__), chain=False)
    return "".join(lines).strip()[-MAX_TRACE:]


def _unknown(kind: PluginKind, name: str, names: set[str]) -> PluginFault:
    hint = did_you_mean(name, names)
    known = ", ".join(sorted(names)) or "none"
    return PluginFault(
        f"no {kind.noun} is called {name!r}{hint}",
        where=kind.where,
        fix=f"Known: {known}. To use your own, install its package where controllers run",
    )


def _loaded_file(kind: PluginKind, file: PluginFile) -> Callable[..., Any]:
    try:
        found = load_plugin_file(file, kind.where)
    except SpecError as error:
        raise PluginFault(error.what, where=error.where, fix=error.fix) from error
    except (*RAISED, CancelledError) as error:  # the edge to foreign code: running it may raise anything
        what = f"{kind.noun} {shown_name(str(file))!r} cannot be loaded ({error_sentence(error)}){_place_of(error)}"
        trace = plugin_trace(error)
        raise PluginFault(what, where=kind.where, fix="Correct the file", trace=trace) from error
    if not callable(found):
        what = f"{kind.noun} {shown_name(str(file))!r} is {describe_result(found)}, which cannot be called"
        raise PluginFault(what, where=kind.where, fix="Name a function")
    return found  # type: ignore[no-any-return]


def _loaded(kind: PluginKind, name: str, point: EntryPoint) -> Callable[..., Any]:
    try:
        found = point.load()
    except (*RAISED, CancelledError) as error:  # foreign code: importing it may raise anything
        raise PluginFault(
            f"{kind.noun} {name!r} cannot be loaded from {point.value} ({error_sentence(error)}){_place_of(error)}",
            where=kind.where,
            fix="Correct or reinstall the package that provides it",
            trace=plugin_trace(error),
        ) from error
    if not callable(found):
        raise PluginFault(
            f"{kind.noun} {name!r} at {point.value} is {describe_result(found)}, which is not callable",
            where=kind.where,
            fix="Point the entry point to a function",
        )
    return found  # type: ignore[no-any-return]


def _place_of(error: BaseException) -> str:
    """Return `, raised at FILE:LINE` for the last line of the plug-in's own code; empty if none of it ran."""
    place, frame = "", error.__traceback__
    while frame is not None:
        if not _is_ours(frame):
            place = f", raised at {_shown_path(Path(frame.tb_frame.f_code.co_filename))}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the plug-in's own code on; the whole one if none of it ran."""
    frame = trace
    while frame is not None and _is_ours(frame):
        frame = frame.tb_next
    return frame or trace


def _is_ours(frame: TracebackType) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


MOST_FILE_BYTES = 1 << 20
"""Maximum size of a plug-in file in bytes."""

CODE_FOLDER = "code"
"""Name of the folder for copies of plug-in files, in the run folder of a job."""

REFERENCE_PATTERN = r"([^\0\n]*[^/\0\n]\.py):([A-Za-z_]\w*)"
"""Regular expression of a reference to a function in a file: the groups are the path and the name."""

_REFERENCE = re.compile(REFERENCE_PATTERN)
_DIGEST = re.compile(r"[0-9a-f]{32}")

FILE_SECTIONS = ("reward", "parts", "flow", "filters", "environment", "agent")
"""Sections of a spec, and lists of sections, that name a plug-in file with the key `file`."""

SINGLE_NAMES = ("name", "advantage", "loss", "policy", "curriculum", "parser")
"""Keys of a spec whose value names one plug-in. The key `names` has a list of names."""


@dataclass(frozen=True, slots=True)
class PluginFile:
    """A plug-in in a file: the function `name` in the Python file `path`."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def parse_plugin_file(reference: str) -> PluginFile | None:
    """Parse a reference `FILE.py:NAME`; None if it is the name of an installed plug-in instead."""
    found = _REFERENCE.fullmatch(reference)
    return None if found is None else PluginFile(Path(found[1]), found[2])


def short_name(reference: str) -> str:
    """Shorten a reference for labels: the function's name for a plug-in file, otherwise the plug-in's name."""
    file = parse_plugin_file(reference)
    return reference if file is None else file.name


def shown_name(reference: str) -> str:
    """The reference as messages name it: without the folder for the copy of a plug-in file, which is not the user's own file."""
    file = parse_plugin_file(reference)
    return reference if file is None else f"{_shown_path(file.path)}:{file.name}"


def _shown_path(path: Path) -> str:
    return path.name if _DIGEST.fullmatch(path.parent.name) else str(path)


def replace_plugin_files(tree: Any, change: Callable[[PluginFile, str], str], where: str = "") -> Any:
    """Return the spec `tree` with each reference to a plug-in file replaced by `change(file, dotted key)`.

    A key `file` becomes the key `name`. `where`: dotted key of `tree` itself. Raises SpecError for a plug-in with both
    keys, and for a file that is named in a wrong way.
    """
    if isinstance(tree, list | tuple):
        return [_replaced(one, change, f"{where}.{number}", "") for number, one in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    new: dict[Any, Any] = {}
    for key, value in tree.items():
        path = f"{where}.{key}".lstrip(".")
        if key in ("options", "template_variables"):  # their names are the plug-in's or the template's own
            new[key] = value
        elif key == "file" and _last_word(where) in FILE_SECTIONS:
            if "name" in tree:
                raise SpecError("a plug-in has a file or a name, not both", where=where, fix="Remove one of them")
            if not isinstance(value, str) or parse_plugin_file(value) is None:
                what = f"{value!r} does not name a Python file and a function in it"
                raise SpecError(what, where=path, fix="Write FILE.py:FUNCTION, for example reward.py:score")
            new["name"] = _replaced(value, change, path, "name")
        elif key == "names" and isinstance(value, list | tuple):
            new[key] = [_replaced(one, change, f"{path}.{number}", "name") for number, one in enumerate(value)]
        else:
            new[key] = _replaced(value, change, path, str(key))
    return new


def _replaced(value: Any, change: Callable[[PluginFile, str], str], where: str, key: str) -> Any:
    if isinstance(value, str) and key in SINGLE_NAMES and (file := parse_plugin_file(value)) is not None:
        return change(file, where)
    _check_form(value, where, key)
    return replace_plugin_files(value, change, where)


def _check_form(value: Any, where: str, key: str) -> None:
    """Raise SpecError for a plug-in file as text where a section is needed, and for a section where text is needed."""
    if isinstance(value, str) and _last_word(where) in FILE_SECTIONS and parse_plugin_file(value) is not None:
        what = "a plug-in file is named by the key `file`"
        raise SpecError(what, where=where, fix=f"Write {{file: {value}}} instead of {value}")
    if isinstance(value, dict) and list(value) == ["file"] and (key in SINGLE_NAMES or _last_word(where) == "names"):
        what = "the plug-in is named by text here, not by a section with the key `file`"
        raise SpecError(what, where=where, fix=f"Write {value['file']!r}")


def _last_word(where: str) -> str:
    """The last word of a dotted key, without the numbers of list items."""
    return next((word for word in reversed(where.split(".")) if not word.isdigit()), "")


def resolve_plugin_files(tree: Any, base: Path | None) -> Any:
    """Return the spec `tree` with absolute paths of its plug-in files. Raises SpecError.

    `base`: the folder of the spec. Relative paths start there, and the files are checked, but not run. None: the paths
    are absolute already, and the files are not checked.
    """

    def resolve(file: PluginFile, where: str) -> str:
        path = ((base or Path("/")) / file.path.expanduser()).resolve()
        if base is not None:
            read_plugin_file(path, where)
        return f"{path}:{file.name}"

    return replace_plugin_files(tree, resolve)


def plugin_files(tree: Any) -> list[tuple[str, PluginFile]]:
    """List the plug-in files in the spec `tree`, each with the dotted key that names it."""
    found: list[tuple[str, PluginFile]] = []

    def note(file: PluginFile, where: str) -> str:
        found.append((where, file))
        return str(file)

    replace_plugin_files(tree, note)
    return found


def read_plugin_file(path: Path, where: str) -> bytes:
    """Read a plug-in file and check its syntax. `where`: the spec key that names it.

    Raises SpecError, also if the file belongs to another user or other users can write it.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SpecError("a plug-in file must be a regular file", where=f"{where}: {path}", fix="Name a file")
            if status.st_uid != os.geteuid():
                what = "the file belongs to another user, so the cluster does not run it"
                raise SpecError(what, where=f"{where}: {path}", fix="Copy it into a file of your own")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                what = "other users can write the file, so the cluster does not run it"
                raise SpecError(what, where=f"{where}: {path}", fix=f"chmod go-w {shlex.quote(str(path))}")
            data = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        what = f"cannot read the plug-in file ({error.strerror or error})"
        raise SpecError(what, where=f"{where}: {path}", fix="Name an existing file") from error
    if not data.strip():
        raise SpecError("the plug-in file is empty", where=f"{where}: {path}", fix="Write a function in it")
    if len(data) > MOST_FILE_BYTES:
        raise SpecError(
            f"the plug-in file has more than {MOST_FILE_BYTES} bytes", where=f"{where}: {path}", fix="Package it"
        )
    _check_syntax(data, path, where)
    return data


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting: a pipe would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_syntax(data: bytes, path: Path, where: str) -> None:
    try:
        ast.parse(data)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        what = f"the plug-in file has a syntax error ({error.msg})"
        raise SpecError(what, where=f"{where}: {path}{line}", fix="Correct the file") from error
    except (ValueError, RecursionError, MemoryError) as error:
        what = f"the plug-in file is not Python ({error_sentence(error)})"
        raise SpecError(what, where=f"{where}: {path}", fix="Correct the file") from error


def file_digest(data: bytes) -> str:
    """BLAKE2b hash of the bytes of a plug-in file; 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def copied_file(folder: Path, data: bytes, name: str) -> Path:
    """Path of the copy of a plug-in file with this name and content, below the run folder `folder`."""
    return folder / CODE_FOLDER / file_digest(data) / name


def portable_reference(file: PluginFile) -> str:
    """Shorten the reference to a copied plug-in file to DIGEST/FILE.py:NAME, so that copies in two run folders compare equal.

    The reference to another file is returned unchanged.
    """
    if _DIGEST.fullmatch(file.path.parent.name) is None:
        return str(file)
    return f"{file.path.parent.name}/{file.path.name}:{file.name}"


class _FileLoader(InspectLoader):
    """Import loader that runs a module from bytes that were already read and checked, instead of reading the file
    again.
    """

    def __init__(self, data: bytes, path: Path) -> None:
        self._data = data
        self._path = path

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._data)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._data, str(self._path))


def load_plugin_file(file: PluginFile, where: str) -> Any:
    """Run a plug-in file, once per process and content, and return the object that it defines under its name.

    `where`: the spec key that names the file. Raises what the file raises. Raises SpecError if the file does not define
    the name, has changed since the job was submitted, or is refused by `read_plugin_file`.
    """
    data = read_plugin_file(file.path, where)
    digest = file_digest(data)
    if _DIGEST.fullmatch(file.path.parent.name) and file.path.parent.name != digest:
        what = f"{file.path} has changed since the job was submitted"
        raise SpecError(what, where=where, fix="Submit the job again with --new")
    module_name = f"gcore_file_{digest}"
    module = sys.modules.get(module_name)
    if module is None:
        loader = _FileLoader(data, file.path)
        module = importlib.util.module_from_spec(ModuleSpec(module_name, loader, origin=str(file.path)))
        module.__file__ = str(file.path)
        sys.modules[module_name] = module
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    try:
        return getattr(module, file.name)
    except AttributeError:
        names = ", ".join(_functions(module)) or "none"
        what = f"{file.path} defines no {file.name!r}; its functions: {names}"
        raise SpecError(what, where=where, fix="Name a function of the file") from None


def _functions(module: Any) -> Iterator[str]:
    return (name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
