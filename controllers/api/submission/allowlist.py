"""Checks whether a spec names only what the node's configuration allows (`AllowSection`), before any named file is
opened.

A spec names code (plug-ins, models with remote code, server arguments) and also files and secrets that the daemon's user can read.
`spec_paths` lists every path of a spec, including those in the options of gcore's own plug-ins. The options of other plug-ins are not
checked: a shared cluster should allow only plug-ins that take no paths.

If the daemon authenticates callers, paths must be below the configured roots. The check resolves symbolic links and searches a folder
that is read for links. Within a root, a spec may not name the daemon's own files: home, runs, and every file that the configuration
names as a key, certificate, token, password or secret. The check does not see links that are created after the submission.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from controllers.flow.job_data import rewards_of
from controllers.storage.run_folder import FOLDER as RUN_MARK
from gcore.config.base import HUB_SCHEMES
from gcore.config.data import SourcesSection
from gcore.config.node import AllowSection, NodeConfig
from gcore.config.reward import Fallback
from gcore.config.spec import JobSpec
from gcore.config.train import is_own_advantage, is_own_loss
from gcore.errors import SpecError, did_you_mean
from gcore.models.replicas import home_folder

MOST_ENTRIES = 20_000
"""Maximum number of files and folders in one folder that a spec names. A model or a saved dataset has hundreds."""

FILE = "file:"
_RUN = re.compile(r".+-[0-9a-f]{12}")
EXPORT = "`gcore export` copies a model out of a run, to a folder below allow.roots of the nodes' configuration"


class PathUse(Enum):
    """How a job uses a path: as a model, as input, or as output."""

    MODEL = "read, or fetched from a hub"
    READ = "read"
    WRITE = "written to"


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A path in a spec. `where`: the field that contains it."""

    where: str
    path: str
    use: PathUse = PathUse.READ


class PathPolicy:
    """Checks whether a spec may name a path: it must be below an allowed root and must not be one of the daemon's own
    files. Blocks: it reads the file system."""

    def __init__(self, section: AllowSection, own: NodeConfig | None = None) -> None:
        """`own`: the configuration of a daemon that authenticates callers. None: all callers are trusted, and an unset list allows everything."""
        self._hubs = section.hubs
        said = section.roots if section.roots is not None or own is None else ()
        self._roots = None if said is None else tuple(Path(root).resolve() for root in said)
        self._strangers = own is not None
        self._runs = () if own is None else tuple(Path(path).resolve() for path in job_paths(own))
        self._closed = () if own is None else tuple(Path(path).resolve() for path in daemon_paths(own))
        files = [one.removeprefix(FILE) for one in section.secrets or () if one.startswith(FILE)]
        self._secrets = tuple(str(Path(one).parent.resolve() / Path(one).name) for one in files) if own else ()

    def check(self, named: NamedPath) -> None:
        """Raise SpecError if the path is not allowed."""
        if named.use is PathUse.MODEL and named.path.startswith(HUB_SCHEMES):
            if not self._hubs:
                raise SpecError(
                    f"{named.path[:80]!r} is a hub model, and this cluster does not allow hub models",
                    where=named.where,
                    fix="Name a local folder, or ask an admin to set allow.hubs in the nodes' configuration",
                )
            return
        if self._roots is None:
            return
        leads = _followed(named)
        self._check_roots(named, leads, self._roots)
        if not self._strangers:
            return
        self._check_own(named, leads)
        if named.use is not PathUse.WRITE:
            for link in _links_in(named, leads):
                self._check_link(named, link)

    def _check_roots(self, named: NamedPath, leads: Path, roots: tuple[Path, ...]) -> None:
        if not roots:
            raise SpecError(
                f"{named.path[:200]!r} is not allowed: the nodes' configuration lists no folders that specs may use",
                where=named.where,
                fix="Ask an admin to list the folders of models and data in allow.roots of the nodes' configuration",
            )
        if not any(leads.is_relative_to(root) for root in roots):
            raise SpecError(
                f"{named.path[:200]!r} is outside the folders that jobs of this cluster may read and write",
                where=named.where,
                fix=f"Move it below {' or '.join(map(str, roots))} (allow.roots of the nodes' configuration)",
            )

    def _check_own(self, named: NamedPath, leads: Path, through: str = "") -> None:
        reads = named.use is not PathUse.WRITE
        if any(_touches(leads, run, around=reads) for run in self._runs) or _in_a_run(leads):
            # A spec that sets storage.root wants a folder for its runs. The nodes already have one.
            fix = EXPORT if reads else "Leave it out, since runs go to run_root by default, or name another folder"
            raise SpecError(
                f"{named.path[:200]!r} leads{through} into the folder of job runs, which specs may not name",
                where=named.where,
                fix=fix,
            )
        secret = any(fnmatchcase(str(leads), one) for one in self._secrets)
        if secret or any(_touches(leads, one, around=reads) for one in self._closed):
            raise SpecError(
                f"{named.path[:200]!r} leads{through} to the daemon's own files (home, keys, tokens or passwords)",
                where=named.where,
                fix="Name a folder below allow.roots of the nodes' configuration that contains no files of the daemon",
            )

    def _check_link(self, named: NamedPath, link: Path) -> None:
        try:
            leads = link.resolve()
        except (OSError, RuntimeError):  # a cycle of links has no target
            return
        through = f", through the link {link.name[:80]!r},"
        if not any(leads.is_relative_to(root) for root in self._roots or ()):
            raise SpecError(
                f"{named.path[:200]!r} leads{through} outside the folders that jobs of this cluster may read and write",
                where=named.where,
                fix="Replace the link by the file itself",
            )
        self._check_own(named, leads, through)


def job_paths(config: NodeConfig) -> tuple[str, ...]:
    """Folders in which a daemon keeps job data: runs and copies of train states."""
    return config.run_root, str(home_folder(Path(config.memory_dir), config.home).parent)


def daemon_paths(config: NodeConfig) -> tuple[str, ...]:
    """The daemon's own paths: its home and the files that its configuration names."""
    sections = (config.tls, config.auth, config.etcd.tls, config.etcd.user)
    named = [value for section in sections if section is not None for _, value in section]
    return config.home, *(value for value in named if isinstance(value, str) and value.startswith("/"))


def _followed(named: NamedPath) -> Path:
    """The path with all symbolic links resolved. Raises SpecError if that fails."""
    if not named.path.startswith("/"):
        raise SpecError(
            f"{named.path[:200]!r} is not an absolute path, so each node would resolve it differently",
            where=named.where,
            fix="Write an absolute path. `gcore submit` resolves paths relative to the spec's folder",
        )
    try:
        return Path(named.path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"{named.path[:80]!r} is not a valid path ({error})", where=named.where, fix="Name a file or a folder"
        ) from error


def _touches(leads: Path, own: Path, *, around: bool) -> bool:
    """Whether the path `leads` is `own` or below it. With `around`, also whether `own` is below the path."""
    return leads.is_relative_to(own) or (around and own.is_relative_to(leads))


def _in_a_run(leads: Path) -> bool:
    """Whether the path is in the folder of a run, wherever that is: a job's spec may set its own `storage.root`. The
    folder is recognized by its name and its content."""
    return any(_RUN.fullmatch(one.name) and os.path.isdir(one / RUN_MARK) for one in (leads, *leads.parents))


def _links_in(named: NamedPath, folder: Path) -> Iterator[Path]:
    """Yield the symbolic links in a folder and its subfolders; none if `folder` is a file."""
    seen = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            seen += 1
            if seen > MOST_ENTRIES:
                raise SpecError(
                    f"{named.path[:200]!r} has more than {MOST_ENTRIES} files and folders",
                    where=named.where,
                    fix="Name the folder that contains only the model or the data",
                )
            one = Path(parent, name)
            if one.is_symlink():
                yield one


class Allowlist:
    """The paths that specs may name on a node.

    `own`: the configuration of a daemon that authenticates callers, so that a caller is less trusted than the daemon's owner. None: every
    caller is trusted.
    """

    def __init__(self, section: AllowSection, own: NodeConfig | None = None) -> None:
        self._section = section
        self._strangers = own is not None
        self._grounds = PathPolicy(section, own)

    @classmethod
    def of(cls, config: NodeConfig) -> Allowlist:
        """The allowlist of a node's configuration."""
        return cls(config.allow, config if config.tells_apart else None)

    def check_flow(self, tree: dict[str, Any]) -> None:
        """Check the flow of a spec before it is validated, because validation loads the flow's code. Raises SpecError."""
        flow = tree.get("flow")
        name = flow.get("name") if isinstance(flow, dict) else None
        if isinstance(name, str):
            self._check_name("flow.name", "flows", name)

    def check(self, spec: JobSpec) -> None:
        """Raise SpecError for the first name, path or secret that is not allowed."""
        for where, kind, name in _names(spec):
            self._check_name(where, kind, name)
        self._check_code(spec)
        for path in spec_paths(spec):
            self._grounds.check(path)
        for where, reference in _secrets(spec):
            self._check_secret(where, reference)

    def _check_name(self, where: str, kind: str, name: str) -> None:
        known: tuple[str, ...] | None = getattr(self._section, kind)
        if known is not None and name not in known:
            raise SpecError(
                f"{name[:80]!r} is not allowed on this cluster{did_you_mean(name, set(known))}",
                where=where,
                fix=f"Allowed: {', '.join(sorted(known)) or 'none'} (allow.{kind} of the nodes' configuration)",
            )

    def _check_code(self, spec: JobSpec) -> None:
        brings = [("model", spec.model.trust_remote_code)]
        judged = ((n, judge.model) for n, judge in enumerate(spec.judges) if judge.model is not None)
        brings += [(f"judges.{n}.model", model.trust_remote_code) for n, model in judged]
        may = not self._strangers if self._section.remote_code is None else self._section.remote_code
        for where, code in brings:
            if code and not may:
                raise SpecError(
                    "this cluster does not run code that comes with a model",
                    where=f"{where}.trust_remote_code",
                    fix="Leave it out, or ask an admin to set allow.remote_code in the nodes' configuration",
                )
        may = not self._strangers if self._section.engine_args is None else self._section.engine_args
        servings = [("rollout", spec.rollout.engine_args)]
        servings += [(f"judges.{n}.serving", judge.serving.engine_args) for n, judge in enumerate(spec.judges)]
        for where, arguments in servings:
            if arguments and not may:
                raise SpecError(
                    "this cluster does not allow arguments for the command lines of engines",
                    where=f"{where}.engine_args",
                    fix="Leave them out, or ask an admin to set allow.engine_args in the nodes' configuration",
                )

    def _check_secret(self, where: str, reference: str) -> None:
        known = self._section.secrets
        if known is None and not self._strangers and reference.startswith("env:"):
            return
        if ".." in reference.split("/") or not any(_matches(reference, one) for one in known or ()):
            raise SpecError(
                f"specs on this cluster may not use the secret {reference[:80]!r}",
                where=where,
                fix=f"Allowed: {', '.join(sorted(known or ())) or 'none'} (allow.secrets of the nodes' configuration)",
            )


EVERYTHING = Allowlist(AllowSection())
"""For daemons that authenticate no callers and configure no limits."""


def _matches(reference: str, allowed: str) -> bool:
    """Whether a name matches a pattern. They are compared between slashes, so a `*` matches the files of a folder but
    not those of its subfolders."""
    return reference.count("/") == allowed.count("/") and fnmatchcase(reference, allowed)


def _names(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the field that names a plug-in, the kind of plug-in, and its name."""
    yield "flow.name", "flows", spec.flow.name
    for number, one in enumerate(spec.flow.filters):
        yield f"flow.filters.{number}", "filters", one.name
    for source, reward in rewards_of(spec).items():
        if not reward.parts and reward.judge is None:
            yield f"reward of source {source!r}", "rewards", reward.name
        for part in reward.parts:
            if part.name is not None:
                yield f"reward of source {source!r}", "rewards", part.name
    for number, judge in enumerate(spec.judges):
        yield f"judges.{number}.verdict.parser", "verdicts", judge.verdict.parser
        if isinstance(judge.on_error, Fallback):
            yield f"judges.{number}.on_error.fallback", "rewards", judge.on_error.fallback
    if spec.data.curriculum is not None:
        yield "data.curriculum", "curricula", spec.data.curriculum
    yield "placement.policy", "policies", spec.placement.policy
    if spec.environment is not None:
        yield "environment.name", "environments", spec.environment.name
        for tool in spec.environment.tools.names:
            yield "environment.tools.names", "tools", tool
    if spec.agent is not None:
        yield "agent.name", "agents", spec.agent.name
    for number, tracker in enumerate(spec.tracking):
        yield f"tracking.{number}", "trackers", tracker.name
    if is_own_advantage(spec.train.advantage):
        yield "train.advantage", "advantages", spec.train.advantage
    if is_own_loss(spec.train.loss):
        yield "train.loss", "losses", spec.train.loss


def spec_paths(spec: JobSpec) -> Iterator[NamedPath]:
    """Yield every file and folder that the spec names."""
    yield NamedPath("model.path", spec.model.path, PathUse.MODEL)
    if spec.storage.root is not None:
        yield NamedPath("storage.root", spec.storage.root, PathUse.WRITE)
    if spec.train.critic is not None and spec.train.critic.path is not None:
        yield NamedPath("train.critic.path", spec.train.critic.path)
    for number, judge in enumerate(spec.judges):
        if judge.model is not None:
            yield NamedPath(f"judges.{number}.model.path", judge.model.path, PathUse.MODEL)
        if judge.adapter is not None:
            yield NamedPath(f"judges.{number}.adapter", judge.adapter)
        if judge.template_file is not None:
            yield NamedPath(f"judges.{number}.template_file", judge.template_file)
    for section, origin in (("data", spec.data), ("eval", spec.eval)):
        yield from _of(section, origin)
    for number, tracker in enumerate(spec.tracking):
        for option, value in tracker.options.items():
            if (path := _path_of_tracker(tracker.name, option, str(value))) is not None:
                yield NamedPath(f"tracking.{number}.options.{option}", path, PathUse.WRITE)


def _of(section: str, origin: SourcesSection) -> Iterator[NamedPath]:
    places = [(section, origin), *((f"{section}.sources.{n}", one) for n, one in enumerate(origin.sources))]
    for where, one in places:
        for name in ("path", "template", "tools"):
            path = getattr(one, name, None)
            if path is not None:
                yield NamedPath(f"{where}.{name}", path)


def _path_of_tracker(name: str, option: str, value: str) -> str | None:
    """The path that an option of one of gcore's own trackers writes to, or None if the option is no path."""
    if (name, option) in (("tensorboard", "folder"), ("swanlab", "folder")):
        return value
    return _path_of_uri(value) if (name, option) == ("mlflow", "uri") else None


def _path_of_uri(uri: str) -> str | None:
    """The path that MLflow reads from a URI, or None for the URI of a server."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri
    kind = parts.scheme.partition("+")[0]
    if kind == "sqlite":  # sqlite:///RELATIVE, sqlite:////ABSOLUTE
        return unquote(parts.path[1:])
    if kind == "file":
        return unquote(parts.path)
    return uri if not kind and uri != "databricks" else None


def _secrets(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield each field that refers to a secret, and the reference."""
    for number, judge in enumerate(spec.judges):
        if judge.external is not None and (reference := judge.external.key_reference) is not None:
            yield f"judges.{number}.external", reference
