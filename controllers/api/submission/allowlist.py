"""What a spec may name on this cluster (`AllowSection` of the node's configuration), checked before anything it names is opened.

A spec names code (plug-ins, models that bring code, arguments of a server) and files and secrets that the daemon's user can read.
`spec_paths` lists every path of a spec, also those in options of gcore's own plug-ins. What another plug-in does with its options is
not checked: a shared cluster allows only plug-ins that take no paths.

Where daemons tell callers apart, paths must lead into the configured roots. A path is followed to where its links lead now, and a
folder that is read is searched for links. Within a root, the daemon's own files may not be named: home, runs, and every file that
the configuration names as a key, certificate, token, password or secret. A link that is created after the submission is not noticed.
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
"""Files and folders of one folder that a spec names: a model or a saved dataset has hundreds."""

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
    """A path of a spec. `where`: the field that names it."""

    where: str
    path: str
    use: PathUse = PathUse.READ


class PathPolicy:
    """Says which paths a spec may name. Blocks: it asks the file system."""

    def __init__(self, section: AllowSection, own: NodeConfig | None = None) -> None:
        """`own`: of a daemon that tells its callers apart. None: nobody is a stranger, and what is not said is allowed."""
        self._hubs = section.hubs
        said = section.roots if section.roots is not None or own is None else ()
        self._roots = None if said is None else tuple(Path(root).resolve() for root in said)
        self._strangers = own is not None
        self._runs = () if own is None else tuple(Path(path).resolve() for path in job_paths(own))
        self._closed = () if own is None else tuple(Path(path).resolve() for path in daemon_paths(own))
        files = [one.removeprefix(FILE) for one in section.secrets or () if one.startswith(FILE)]
        self._secrets = tuple(str(Path(one).parent.resolve() / Path(one).name) for one in files) if own else ()

    def check(self, named: NamedPath) -> None:
        """Raises SpecError."""
        if named.use is PathUse.MODEL and named.path.startswith(HUB_SCHEMES):
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
        if named.use is not PathUse.WRITE:
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
        reads = named.use is not PathUse.WRITE
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


def job_paths(config: NodeConfig) -> tuple[str, ...]:
    """Where a daemon has what belongs to jobs: their runs, and copies of their states."""
    return config.run_root, str(home_folder(Path(config.memory_dir), config.home).parent)


def daemon_paths(config: NodeConfig) -> tuple[str, ...]:
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


class Allowlist:
    """The paths that specs may name on a node.

    `own`: the configuration of a daemon that tells its callers apart, so that a caller who submits is not as trusted as the daemon's owner;
    None: every caller is.
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
        """The flow of a spec that is not validated yet: for that the flow's code is loaded. Raises SpecError."""
        flow = tree.get("flow")
        name = flow.get("name") if isinstance(flow, dict) else None
        if isinstance(name, str):
            self._check_name("flow.name", "flows", name)

    def check(self, spec: JobSpec) -> None:
        """Raises SpecError for the first thing that is not allowed."""
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
                    "models may not bring code that is run on this cluster",
                    where=f"{where}.trust_remote_code",
                    fix="Leave it out, or ask for allow.remote_code in the nodes' configuration",
                )
        may = not self._strangers if self._section.engine_args is None else self._section.engine_args
        servings = [("rollout", spec.rollout.engine_args)]
        servings += [(f"judges.{n}.serving", judge.serving.engine_args) for n, judge in enumerate(spec.judges)]
        for where, arguments in servings:
            if arguments and not may:
                raise SpecError(
                    "arguments for SGLang's server are not allowed on this cluster",
                    where=f"{where}.engine_args",
                    fix="Leave them out, or ask for allow.engine_args in the nodes' configuration",
                )

    def _check_secret(self, where: str, reference: str) -> None:
        known = self._section.secrets
        if known is None and not self._strangers and reference.startswith("env:"):
            return
        if ".." in reference.split("/") or not any(_matches(reference, one) for one in known or ()):
            raise SpecError(
                f"the secret {reference[:80]!r} may not be named by specs on this cluster",
                where=where,
                fix=f"Allowed: {', '.join(sorted(known or ())) or 'none'} (allow.secrets of the nodes' configuration)",
            )


EVERYTHING = Allowlist(AllowSection())
"""Where nobody is told apart, and nothing is said."""


def _matches(reference: str, allowed: str) -> bool:
    """A `*` stands for any part of one name: of a folder's files, not of what is below its folders."""
    return reference.count("/") == allowed.count("/") and fnmatchcase(reference, allowed)


def _names(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Where the spec names a plug-in, the kind of plug-in, and its name."""
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
    """Every file or folder that the spec names."""
    yield NamedPath("model.path", spec.model.path, PathUse.MODEL)
    if spec.storage.root is not None:
        yield NamedPath("storage.root", spec.storage.root, PathUse.WRITE)
    if spec.train.critic is not None and spec.train.critic.path is not None:
        yield NamedPath("train.critic.path", spec.train.critic.path)
    for number, judge in enumerate(spec.judges):
        if judge.model is not None:
            yield NamedPath(f"judges.{number}.model.path", judge.model.path, PathUse.MODEL)
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
    """Where one of gcore's own trackers writes to by that option, if that is a folder or a file."""
    if (name, option) in (("tensorboard", "folder"), ("swanlab", "folder")):
        return value
    return _path_of_uri(value) if (name, option) == ("mlflow", "uri") else None


def _path_of_uri(uri: str) -> str | None:
    """The file or folder that MLflow takes a URI for; None: it is a server's."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri
    kind = parts.scheme.partition("+")[0]
    if kind == "sqlite":  # sqlite:///RELATIVE, sqlite:////WHOLE
        return unquote(parts.path[1:])
    if kind == "file":
        return unquote(parts.path)
    return uri if not kind and uri != "databricks" else None


def _secrets(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Where the spec refers to a secret, and to which."""
    for number, judge in enumerate(spec.judges):
        if judge.external is not None and (reference := judge.external.key_reference) is not None:
            yield f"judges.{number}.external", reference
