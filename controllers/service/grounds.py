"""Where the paths of a spec may lead on a cluster whose daemons tell their callers apart: into the roots of the nodes' configuration, and never to
what is the daemon's own.

The daemon reads and writes with rights that whoever submits has not: its keys, the admin's token and the runs of everybody lie open to it. So
a path is followed to where its links lead now, and that is what is judged; a folder that is read is looked through, because a link in it
leads on. Of what lies in a root only what is no daemon's own may be named: home, runs, and every file that the configuration names
as a key, a certificate, a token, a password or a secret.

What this cannot know is what somebody puts there afterwards: a link that is made in a root after a job was submitted is
followed by those who read for the job. Reads names and links, and the content of nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from controllers.storage import FOLDER as RUN_MARK
from gcore.config import NodeConfig
from gcore.config.load import HUB_SCHEMES
from gcore.config.securing import AllowSection
from gcore.errors import SpecError
from gcore.weights.copies import home_folder

MOST_ENTRIES = 20_000
"""Files and folders of one folder that a spec names: a model or a saved dataset has hundreds."""
FILE = "file:"
_RUN = re.compile(r".+-[0-9a-f]{12}")
EXPORT = "`gcore export` copies a model out of a run, to a folder below allow.roots of the nodes' configuration"


class Use(Enum):
    """What becomes of a path."""

    MODEL = "read, or fetched from a hub"
    READ = "read"
    WRITE = "written to"


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A path of a spec. `where`: the field that names it."""

    where: str
    path: str
    use: Use = Use.READ


class Grounds:
    """Judges paths. Blocks: it asks the file system."""

    def __init__(self, section: AllowSection, own: NodeConfig | None = None) -> None:
        """`own`: of a daemon that tells its callers apart. None: nobody is a stranger, and what is not said is allowed."""
        self._hubs = section.hubs
        said = section.roots if section.roots is not None or own is None else ()
        self._roots = None if said is None else tuple(Path(root).resolve() for root in said)
        self._strangers = own is not None
        self._runs = () if own is None else tuple(Path(path).resolve() for path in runs_of(own))
        self._closed = () if own is None else tuple(Path(path).resolve() for path in files_of(own))
        files = [one.removeprefix(FILE) for one in section.secrets or () if one.startswith(FILE)]
        self._secrets = tuple(str(Path(one).parent.resolve() / Path(one).name) for one in files) if own else ()

    def check(self, named: NamedPath) -> None:
        """Raises SpecError."""
        if named.use is Use.MODEL and named.path.startswith(HUB_SCHEMES):
            if not self._hubs:
                raise SpecError(
                    f"{named.path[:80]!r} is on a hub, and models of hubs are not allowed on this cluster",
                    where=named.where,
                    fix="Name a folder, or ask for allow.hubs in the nodes' configuration",
                )
            return
        if self._roots is None:
            return
        leads = _followed(named)
        self._check_roots(named, leads, self._roots)
        if not self._strangers:
            return
        self._check_own(named, leads)
        if named.use is not Use.WRITE:
            for link in _links_in(named, leads):
                self._check_link(named, link)

    def _check_roots(self, named: NamedPath, leads: Path, roots: tuple[Path, ...]) -> None:
        if not roots:
            raise SpecError(
                f"{named.path[:200]!r} cannot be named: the nodes' configuration names no folder in which specs may name paths",
                where=named.where,
                fix="Have whoever runs the cluster name the folders of models and data in allow.roots of the nodes' configuration",
            )
        if not any(leads.is_relative_to(root) for root in roots):
            raise SpecError(
                f"{named.path[:200]!r} does not lie where jobs of this cluster may read and write",
                where=named.where,
                fix=f"Put it below {' or '.join(map(str, roots))} (allow.roots of the nodes' configuration)",
            )

    def _check_own(self, named: NamedPath, leads: Path, through: str = "") -> None:
        reads = named.use is not Use.WRITE
        if any(_touches(leads, run, around=reads) for run in self._runs) or _in_a_run(leads):
            # Whoever names storage.root wants a folder for the runs, and the nodes have one.
            fix = EXPORT if reads else "Leave it out: runs lie in run_root anyway; or name another folder"
            raise SpecError(
                f"{named.path[:200]!r} leads{through} to where runs of jobs lie, and these are not for specs to name",
                where=named.where,
                fix=fix,
            )
        secret = any(fnmatchcase(str(leads), one) for one in self._secrets)
        if secret or any(_touches(leads, one, around=reads) for one in self._closed):
            raise SpecError(
                f"{named.path[:200]!r} leads{through} to what is the daemon's own: its home, keys, tokens and passwords",
                where=named.where,
                fix="Name a folder below allow.roots of the nodes' configuration that holds nothing of the daemon's",
            )

    def _check_link(self, named: NamedPath, link: Path) -> None:
        try:
            leads = link.resolve()
        except (OSError, RuntimeError):  # a circle of links leads nowhere
            return
        through = f", by its link {link.name[:80]!r},"
        if not any(leads.is_relative_to(root) for root in self._roots or ()):
            raise SpecError(
                f"{named.path[:200]!r} leads{through} out of where jobs of this cluster may read and write",
                where=named.where,
                fix="Put the file itself in the place of the link",
            )
        self._check_own(named, leads, through)


def runs_of(config: NodeConfig) -> tuple[str, ...]:
    """Where a daemon has what belongs to jobs: their runs, and copies of their states."""
    return config.run_root, str(home_folder(Path(config.memory_dir), config.home).parent)


def files_of(config: NodeConfig) -> tuple[str, ...]:
    """What is a daemon's own besides: its home, and the files that its configuration names for it alone."""
    sections = (config.tls, config.auth, config.etcd.tls, config.etcd.user)
    named = [value for section in sections if section is not None for _, value in section]
    return config.home, *(value for value in named if isinstance(value, str) and value.startswith("/"))


def _followed(named: NamedPath) -> Path:
    """Where a path leads."""
    if not named.path.startswith("/"):
        raise SpecError(
            f"{named.path[:200]!r} is no whole path, and every node would look for it elsewhere",
            where=named.where,
            fix="Write it from the root on, beginning with /; `gcore submit` does so for what is relative to the spec's folder",
        )
    try:
        return Path(named.path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"{named.path[:80]!r} is no path ({error})", where=named.where, fix="Name a file or a folder"
        ) from error


def _touches(leads: Path, own: Path, *, around: bool) -> bool:
    """Whether a path lies in `own`, or (`around`) holds it."""
    return leads.is_relative_to(own) or (around and own.is_relative_to(leads))


def _in_a_run(leads: Path) -> bool:
    """Whether it lies in the run's folder of a job whose spec names a `storage.root` of its own."""
    return any(_RUN.fullmatch(one.name) and os.path.isdir(one / RUN_MARK) for one in (leads, *leads.parents))


def _links_in(named: NamedPath, folder: Path) -> Iterator[Path]:
    """The links in a folder and in those below it; of a file there are none."""
    seen = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            seen += 1
            if seen > MOST_ENTRIES:
                raise SpecError(
                    f"there are more than {MOST_ENTRIES} files and folders in {named.path[:200]!r}",
                    where=named.where,
                    fix="Name the folder of the model or of the data alone",
                )
            one = Path(parent, name)
            if one.is_symlink():
                yield one
