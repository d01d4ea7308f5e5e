"""The processes of one home on this machine, found by their command lines.

`gcore down` promises that nothing is left, also when what `gcore up` wrote down is lost or out of date. So it asks the
kernel: daemons, workers and trackers' processes carry `--home HOME`, the local etcd its data folder under it, and whatever a worker started is
its descendant. The command line itself (`gcore run --home HOME`) is none of them. Only this user's processes are looked
at. Signals nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore.worker.process import ProcessId, identify

Kind = Literal["controller", "worker", "child", "etcd"]

_PROGRAMS: Mapping[str, Kind] = {
    "controllers.daemon": "controller",
    "gcore-controller": "controller",
    "gcore.worker.main": "worker",
    "gcore-worker": "worker",
    "gcore.emulated.host": "worker",
    "gcore.tracking": "child",
}


@dataclass(frozen=True, slots=True)
class HomeProcess:
    """A process of the home. `child`: an engine, a rank or a tracker, or what it started."""

    process: ProcessId
    kind: Kind


def kind_of(arguments: Sequence[str], home: Path) -> Kind | None:
    """What a process with this command line is to `home` (absolute, resolved); None: nothing."""
    if not arguments:
        return None
    if Path(arguments[0]).name == "etcd":
        folders = [a.removeprefix("--data-dir=") for a in arguments if a.startswith("--data-dir=")]
        return "etcd" if any(_is_under(folder, home) for folder in folders) else None
    # The program is the module behind -m, the script behind the interpreter, or the first word itself.
    program = next((_PROGRAMS[name] for a in arguments[:9] if (name := Path(a).name) in _PROGRAMS), None)
    return program if program is not None and _home_of(arguments) == home else None


def processes_of(home: Path) -> tuple[HomeProcess, ...]:
    """Every living process of `home`, but for this one and its ancestors."""
    table = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    spared = _ancestors(os.getpid(), table)
    kinds: dict[int, Kind] = {}
    for pid in table.keys() - spared:
        kind = kind_of(_arguments(pid), home)
        if kind is not None:
            kinds[pid] = kind
    for pid in _descendants([p for p, kind in kinds.items() if kind == "worker"], table) - spared:
        kinds.setdefault(pid, "child")
    found = ((identify(pid), kind) for pid, kind in sorted(kinds.items()))
    return tuple(HomeProcess(process, kind) for process, kind in found if process is not None)


def _home_of(arguments: Sequence[str]) -> Path | None:
    for position, argument in enumerate(arguments):
        if argument == "--home" and position + 1 < len(arguments):
            return Path(arguments[position + 1]).resolve()
        if argument.startswith("--home="):
            return Path(argument.removeprefix("--home=")).resolve()
    return None


def _is_under(folder: str, home: Path) -> bool:
    return Path(folder).resolve().is_relative_to(home)


def _pids() -> Iterable[int]:
    """This user's processes. One that ends meanwhile is passed over."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.getuid():
                    yield int(entry.name)
            except OSError:
                continue


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _arguments(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="surrogateescape") for part in raw.split(b"\0")[:-1]]


def _ancestors(pid: int, table: Mapping[int, int]) -> frozenset[int]:
    found = {pid}
    while (parent := table.get(pid)) is not None and parent not in found:
        found.add(parent)
        pid = parent
    return frozenset(found)


def _descendants(roots: Iterable[int], table: Mapping[int, int]) -> frozenset[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in table.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return frozenset(found)
