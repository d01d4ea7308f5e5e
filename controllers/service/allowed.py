"""What a spec may name on this cluster, as the node's configuration says (`gcore.config.securing.AllowSection`): checked at submission, before
anything that the spec names is looked up, opened or read.

A spec carries no code, but names it: plug-ins that are installed, models that may bring code, arguments of a server. And it
names files and secrets that the daemon's user can read, which whoever submits perhaps cannot: where paths may lead is
`controllers.service.grounds`'. Every path of a spec stands in one list here (`paths_of`), those in the options of gcore's own plug-ins too. What
another plug-in does with its options is the plug-in's business: a cluster that is shared allows those that take no paths from strangers.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote, urlsplit

from controllers.material import rewards_of
from controllers.service.grounds import Grounds, NamedPath, Use
from gcore.config import JobSpec, NodeConfig
from gcore.config.algorithms import is_own_advantage, is_own_loss
from gcore.config.judges import Fallback
from gcore.config.securing import AllowSection
from gcore.config.sources import Origin
from gcore.errors import SpecError
from gcore.nearest import did_you_mean


class Allowed:
    """`own`: the configuration of a daemon that tells its callers apart, so that not everybody who submits is as good as its owner; None:
    everybody is."""

    def __init__(self, section: AllowSection, own: NodeConfig | None = None) -> None:
        self._section = section
        self._strangers = own is not None
        self._grounds = Grounds(section, own)

    @classmethod
    def of(cls, config: NodeConfig) -> Allowed:
        """What specs may name on a node."""
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
        for path in paths_of(spec):
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


EVERYTHING = Allowed(AllowSection())
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


def paths_of(spec: JobSpec) -> Iterator[NamedPath]:
    """Every file or folder that the spec names."""
    yield NamedPath("model.path", spec.model.path, Use.MODEL)
    if spec.storage.root is not None:
        yield NamedPath("storage.root", spec.storage.root, Use.WRITE)
    if spec.train.critic is not None and spec.train.critic.path is not None:
        yield NamedPath("train.critic.path", spec.train.critic.path)
    for number, judge in enumerate(spec.judges):
        if judge.model is not None:
            yield NamedPath(f"judges.{number}.model.path", judge.model.path, Use.MODEL)
        if judge.template_file is not None:
            yield NamedPath(f"judges.{number}.template_file", judge.template_file)
    for section, origin in (("data", spec.data), ("eval", spec.eval)):
        yield from _of(section, origin)
    for number, tracker in enumerate(spec.tracking):
        for option, value in tracker.options.items():
            if (path := _path_of_tracker(tracker.name, option, str(value))) is not None:
                yield NamedPath(f"tracking.{number}.options.{option}", path, Use.WRITE)


def _of(section: str, origin: Origin) -> Iterator[NamedPath]:
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
