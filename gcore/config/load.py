"""Load a YAML file, `--set a.b=c` overrides and a flow's settings into a frozen `JobSpec`. Errors name the file and the key.

YAML is restricted to plain values: no aliases, no tags, no duplicate keys. A flow may change the schema's defaults:

    @flow(train={"advantage": "rloo"}, flow={"samples_per_prompt": 4})
    async def rloo(peer: Peer) -> None: ...

Then `flow.name: rloo` alone selects RLOO. Before validation, the flow's settings are merged *under* the user's tree, key by key
along the schema's sections (a list, or the options of a plug-in, counts as one value). This happens once, when a spec is new. A
stored spec has every key and looks up no flow, so a newer gcore or flow does not change a running job.
"""

from __future__ import annotations

import copy
import inspect
import re
import stat
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from gcore.config.base import HUB_SCHEMES, PathMark, explain_errors, shorten_text
from gcore.config.reward import LONGEST_TEMPLATE
from gcore.config.spec import JobSpec
from gcore.config.train import STORED, FlowSpec
from gcore.errors import SpecError, did_you_mean
from gcore.plugins import PluginFault, PluginKind, check_parameters, find_plugin, resolve_plugin_files

F = TypeVar("F", bound=Callable[..., Any])
Tree = dict[str, Any]
FLOWS = PluginKind("flow", "gcore.flows", "flow.name")
_SETTINGS = "__gcore_settings__"

_NOT_A_FLOWS = ("name", "seed", "model", "data")
"""Sections that are specific to a job, so that a flow cannot set them."""


def flow(**settings: Mapping[str, Any]) -> Callable[[F], F]:
    """Return a decorator that attaches defaults for the spec to a flow. `settings`: values by section, as in a spec.

    Values in the user's spec take precedence. Raises ValueError for a section that a flow cannot set.
    """
    for section, values in settings.items():
        if section in _NOT_A_FLOWS or section not in JobSpec.model_fields or (section == "flow" and "name" in values):
            what = "flow.name" if section == "flow" else section
            raise ValueError(f"a flow cannot set {what!r}: {_why_not(section)}")

    def marked(function: F) -> F:
        setattr(function, _SETTINGS, copy.deepcopy(dict(settings)))
        return function

    return marked


def _why_not(section: str) -> str:
    if section in JobSpec.model_fields:
        return "it belongs to the job"
    return "a spec has no such section" + did_you_mean(section, JobSpec.model_fields.keys() - set(_NOT_A_FLOWS))


def find_flow(name: str) -> Callable[..., Awaitable[None]]:
    """Return the flow (`gcore.flows.api.Flow`) with this entry-point name. Raises PluginFault with the nearest name if it is unknown."""
    found = find_plugin(FLOWS, name)
    if not inspect.iscoroutinefunction(found) and not inspect.iscoroutinefunction(type(found).__call__):
        raise PluginFault(
            f"flow {name!r} is not a coroutine function, so gcore cannot await it",
            where=FLOWS.where,
            fix="Write `async def`",
        )
    check_parameters(FLOWS, name, found, "peer")
    return found


def flow_settings(found: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the defaults that `@flow` attached to the flow `found`, by section of the spec; empty if there are none."""
    settings = getattr(found, _SETTINGS, {})
    return settings if isinstance(settings, Mapping) else {}


def apply_flow_settings(tree: Tree) -> Tree:
    """Return a user's spec with its flow's settings merged under it. Raises PluginFault if the flow cannot be loaded.

    Returns a tree whose `flow` is not a section unchanged; validation reports it.
    """
    section = tree.get("flow")
    if not isinstance(section, Mapping):
        return tree
    name = section.get("name", FlowSpec.model_fields["name"].default)
    if not isinstance(name, str):
        return tree
    settings = flow_settings(find_flow(name))  # runs the flow's foreign code: only for new specs
    return _under(tree, settings, JobSpec) if settings else tree


def _under(tree: Mapping[str, Any], settings: Mapping[str, Any], model: type[BaseModel]) -> Tree:
    """Return `tree` with the keys of `settings` that it lacks, section by section. `model`: the class of the section `tree`."""
    merged = dict(tree)
    for key, value in settings.items():
        section = _section(model, key)
        if key not in merged:
            merged[key] = copy.deepcopy(value)
        elif section is not None and isinstance(merged[key], Mapping) and isinstance(value, Mapping):
            merged[key] = _under(merged[key], value, section)
    return merged


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the class of the section under `key` of `model`; None if `key` is unknown or has a single value."""
    field = model.model_fields.get(key)
    if field is None:
        return None
    kinds = get_args(field.annotation) if isinstance(field.annotation, types.UnionType) else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def blame_flow(tree: Tree, problems: list[str], own: list[str]) -> list[str]:
    """Return `problems` of a spec with its flow's settings; those that the settings cause (not in `own`) name the flow.

    `own`: problems of the spec as the user wrote it.
    """
    section = tree.get("flow")
    name = section.get("name", "") if isinstance(section, Mapping) else ""
    return [p if p in own else f"{p} (with the settings of flow {name!r})" for p in problems]


class YamlNotPlain(ValueError):
    """The text is not plain YAML. `place` is the position (":line:column", or empty)."""

    def __init__(self, problem: str, place: str) -> None:
        self.problem = problem
        self.place = place
        super().__init__(problem)


class PlainLoader(yaml.SafeLoader):
    """YAML loader without aliases (they allow exponential expansion), tags (`!!int x` crashes PyYAML) and duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose as SafeLoader does, but raise ComposerError for an alias or a tag."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not allowed"
        elif getattr(event, "tag", None) is not None:
            problem = "tags (!name) are not allowed"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct as SafeLoader does, but raise for a duplicate key instead of keeping the last value."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_plain(text: str) -> Any:
    """Parse a YAML document that may contain only plain values. Raises YamlNotPlain."""
    try:
        # PlainLoader is a SafeLoader, so it builds plain values only.
        return yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        problem = getattr(error, "problem", None) or next(iter(str(error).splitlines()), type(error).__name__)
        raise YamlNotPlain("nested too deeply" if isinstance(error, RecursionError) else str(problem), place) from error


MAX_SPEC_BYTES = 1 << 16
MAX_SPEC_DEPTH = 16
MAX_PROBLEMS = 8
S = TypeVar("S", bound=BaseModel)
_UNSTORABLE = re.compile("[\\x00\\ud800-\\udfff]")

# YAML 1.1 reads a number without a point before its exponent (1e-4) as a string; users mean a number.
_EXPONENT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]{1,3}")


def load_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a spec file. Relative paths are resolved against the file's folder. Raises SpecError."""
    where = str(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would block, and a device might never end
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise SpecError(f"the spec is {kind}", where=where, fix="Name a YAML file")
        if found.st_size > MAX_SPEC_BYTES:
            raise SpecError(
                f"the spec is larger than {MAX_SPEC_BYTES} bytes",
                where=where,
                fix="Put data into separate files",
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
        raise SpecError(f"cannot read the spec ({reason})", where=where, fix="Name an existing YAML file") from error
    tree = _read_yaml(text, where)
    if not isinstance(tree, dict):
        raise SpecError(
            "the spec is not a mapping of sections", where=where, fix="Start from examples/arithmetic/grpo.yaml"
        )
    return new_spec(apply_overrides(tree, overrides), where=where, base=path.parent)


def new_spec(tree: dict[str, Any], *, where: str = "spec", base: Path | None = None) -> JobSpec:
    """Validate a spec that a user wrote, after filling it up with the settings of its flow. Raises SpecError.

    `where`: name of the spec in errors. `base`: the folder of the spec, if it is on this machine; resolves relative paths. Complete specs go to
    `parse_spec`, and stored ones to `stored_spec`; these look up no flow.
    """
    _check_tree(tree, where)
    tree = resolve_plugin_files(tree, base)
    whole = apply_flow_settings(tree)
    return _checked(whole, where, base, blame=lambda problems: blame_flow(tree, problems, _problems(tree)))


def parse_spec(tree: dict[str, Any]) -> JobSpec:
    """Validate a complete spec without the settings of its flow. Raises SpecError."""
    return _checked(tree, "spec", None)


def stored_spec(tree: dict[str, Any]) -> JobSpec:
    """Validate a spec that a job's record in the store contains. Its plug-ins need not be installed here. Raises SpecError."""
    return _checked(tree, "the job's record", None, context=STORED)


def dump_explicit(spec: JobSpec) -> str:
    """Return the spec as JSON without fields left at their defaults. An older gcore can read it as long as it sets no newer field,
    and each version of gcore applies its own defaults."""
    return spec.model_dump_json(exclude_unset=True)


def _checked(
    tree: dict[str, Any],
    where: str,
    base: Path | None,
    *,
    blame: Callable[[list[str]], list[str]] = lambda problems: problems,
    context: dict[str, Any] | None = None,
) -> JobSpec:
    """Validate a spec and make its paths absolute. Raises SpecError with at most `MAX_PROBLEMS` problems.

    `blame` gets the problems, one sentence each, and returns them for the error. `context`: validation context (`STORED` for a stored spec).
    """
    _check_tree(tree, where)
    try:
        spec = JobSpec.model_validate(tree, context=context)
    except ValidationError as error:
        problems = blame(list(explain_errors(error, JobSpec, root="spec")))
        more = len(problems) - MAX_PROBLEMS
        text = "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise SpecError(text, where=where, fix="See `gcore schema` for every field") from error
    return _absolute(spec, base, where) if base is not None else spec


def _problems(tree: dict[str, Any]) -> list[str]:
    """Return what is wrong with a spec, one sentence per problem; empty if it is valid."""
    try:
        JobSpec.model_validate(tree)
    except ValidationError as error:
        return list(explain_errors(error, JobSpec, root="spec"))
    return []


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `a.b=c` overrides in order and return a new tree. Values are YAML; a number selects an item of a list.

    Raises SpecError.
    """
    result = tree
    for override in overrides:
        dotted, equals, value = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise SpecError(
                f"{shorten_text(repr(override))} does not have the form section.field=value",
                where="--set",
                fix="Write, for example, --set train.learning_rate=1e-4",
            )
        parsed = _read_yaml(value, f"--set {shorten_text(override)}")
        if isinstance(parsed, str) and _EXPONENT.fullmatch(parsed):
            parsed = float(parsed)
        if len(keys) > MAX_SPEC_DEPTH:
            raise SpecError(
                f"{shorten_text(repr(override))} is nested more than {MAX_SPEC_DEPTH} levels deep",
                where="--set",
                fix="Name a field that `gcore schema` prints",
            )
        result = _replaced(result, keys, parsed, override)
    return result


def _replaced(node: Any, keys: Sequence[str], value: Any, override: str, above: str = "") -> Any:
    """Return a copy of `node` (found under the key `above`) with the value at `keys` replaced."""
    if not keys:
        return value
    key, *rest = keys
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise SpecError(
                f"{shorten_text(repr(key))} in {shorten_text(repr(override))} is not an index of the list, which has {len(node)} items",
                where="--set",
                fix=f"Use an index from 0 to {len(node) - 1}" if node else "Give the whole list",
            )
        place = int(key)
        return [*node[:place], _replaced(node[place], rest, value, override, key), *node[place + 1 :]]
    if node is not None and not isinstance(node, dict):
        raise SpecError(
            f"{shorten_text(repr(above))} in {shorten_text(repr(override))} is a value, not a section",
            where="--set",
            fix="See `gcore schema`",
        )
    if key.isdecimal() and not node and not above.endswith("options"):
        raise SpecError(
            f"{shorten_text(repr(override))} names an item of a list, but the spec has no list there",
            where="--set",
            fix="Give the whole list: SECTION=[{name: NAME}]",
        )
    section = node or {}
    return {**section, key: _replaced(section.get(key), rest, value, override, key)}


def _read_yaml(text: str, where: str) -> Any:
    try:
        return read_plain(text)
    except YamlNotPlain as error:
        where = where if where.startswith("--set") else where + error.place
        raise SpecError(
            f"not valid YAML: {shorten_text(error.problem)}", where=where, fix="Correct or quote it"
        ) from error


def _check_tree(node: Any, where: str, path: tuple[str, ...] = ()) -> None:
    """Reject what validation does not check: deep nesting, text that files and the store cannot hold, and integers over 63
    bits."""
    if len(path) > MAX_SPEC_DEPTH:
        raise SpecError(
            f"the spec is nested more than {MAX_SPEC_DEPTH} levels deep",
            where=where,
            fix="Remove the nesting; see `gcore schema`",
        )
    if isinstance(node, str) and _UNSTORABLE.search(node):
        raise SpecError(
            f"{shorten_text('.'.join(path))}: {shorten_text(repr(node))} contains a NUL or a lone surrogate",
            where=where,
            fix="Remove it",
        )
    # An integer of thousands of digits passes every check but cannot be printed; the store and the API take 64 bits.
    if isinstance(node, int) and node.bit_length() >= 64:
        raise SpecError(
            f"{shorten_text('.'.join(path))}: the whole number has {node.bit_length()} bits",
            where=where,
            fix="Use a number of at most 63 bits",
        )
    if isinstance(node, dict):
        for key, child in node.items():
            _check_tree(key, where, (*path, "key"))
            _check_tree(child, where, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for number, child in enumerate(node):
            _check_tree(child, where, (*path, str(number)))


def _absolute(spec: JobSpec, base: Path, where: str) -> JobSpec:
    """Return the spec with absolute paths, and with judges' template files replaced by their text."""
    spec = _with_paths(spec, base, where)
    judges = []
    for number, judge in enumerate(spec.judges):
        if judge.template_file is not None:
            text = _template_text(Path(judge.template_file), where, f"judges.{number}.template_file")
            judge = judge.model_copy(update={"template": text, "template_file": None})
        judges.append(judge)
    return spec.model_copy(update={"judges": tuple(judges)}) if judges else spec


def _with_paths(section: S, base: Path, where: str, prefix: str = "") -> S:
    """Return the section with absolute paths (`PathMark`). Sections without paths keep their unset fields unset."""
    update: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        mark = next((one for one in (*field.metadata, *_marks(field.annotation)) if isinstance(one, PathMark)), None)
        if isinstance(value, BaseModel):
            new: Any = _with_paths(value, base, where, f"{key}.")
        elif isinstance(value, tuple):
            new = tuple(
                _with_paths(one, base, where, f"{key}.{number}.") if isinstance(one, BaseModel) else one
                for number, one in enumerate(value)
            )
        elif mark is None or value is None or (mark.hub and value.startswith(HUB_SCHEMES)):
            continue
        else:
            new = _resolved(value, base, where, key)
        if new != value:
            update[name] = new
    return section.model_copy(update=update) if update else section


def _marks(annotation: Any) -> Iterator[Any]:
    """Yield the metadata of each `Annotated` type in a union such as `Annotated[...] | None`."""
    for kind in get_args(annotation):
        yield from getattr(kind, "__metadata__", ())


def _resolved(path: str, base: Path, where: str, key: str) -> str:
    try:
        return str((base / Path(path).expanduser()).resolve())
    except (OSError, ValueError, RuntimeError) as error:  # unknown user, loop of links, NUL
        raise SpecError(
            f"{key}: {shorten_text(repr(path))} is not a valid path ({shorten_text(str(error))})",
            where=where,
            fix="Name an existing file or folder",
        ) from error


def _template_text(path: Path, where: str, key: str) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "it is not a regular file")
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(
            f"{key}: cannot read {shorten_text(repr(str(path)))} ({reason})", where=where, fix="Name a Jinja file"
        ) from error
    if len(text) > LONGEST_TEMPLATE or _UNSTORABLE.search(text):
        what = f"more than {LONGEST_TEMPLATE} characters" if len(text) > LONGEST_TEMPLATE else "a NUL"
        raise SpecError(f"{key}: {shorten_text(repr(str(path)))} contains {what}", where=where, fix="Name a Jinja file")
    return text
