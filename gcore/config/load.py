"""From a YAML file and `--set a.b=c` to a frozen `JobSpec`; every mistake is one sentence with file and key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from gcore.config.spec import JobSpec
from gcore.errors import SpecError

MAX_SPEC_BYTES = 1 << 20
MAX_SPEC_DEPTH = 16


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases (a bomb is built of them) and without doubled keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed in a spec", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a spec file. Paths in it become absolute, relative to the file's folder. Raises SpecError."""
    try:
        if path.stat().st_size > MAX_SPEC_BYTES:
            raise SpecError(
                f"the spec is larger than {MAX_SPEC_BYTES} bytes",
                where=str(path),
                fix="A spec is short; data goes into files",
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
        raise SpecError(
            f"cannot read the spec ({reason})", where=str(path), fix="Name an existing YAML file"
        ) from error
    try:
        # A SafeLoader subclass: builds plain values only.
        tree = yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"not valid YAML: {problem}", where=where, fix="Correct the file") from error
    if not isinstance(tree, dict):
        raise SpecError(
            "the spec is not a mapping of sections", where=str(path), fix="Start from examples/arithmetic/grpo.yaml"
        )
    _check_depth(tree, str(path))
    return parse_spec(apply_overrides(tree, overrides), where=str(path), base=path.parent)


def parse_spec(tree: dict[str, Any], *, where: str = "spec", base: Path | None = None) -> JobSpec:
    """Validate a mapping. With `base`, relative paths are resolved against it. Raises SpecError."""
    try:
        spec = JobSpec.model_validate(tree)
    except ValidationError as error:
        raise SpecError("; ".join(_explain(error)), where=where, fix="See `gcore schema` for every field") from error
    return _absolute(spec, base) if base is not None else spec


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `a.b=c` in order; values are YAML. Returns a new tree. Raises SpecError."""
    result = dict(tree)
    for override in overrides:
        dotted, equals, value = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise SpecError(
                f"{override!r} is not of the form section.field=value",
                where="--set",
                fix="For example --set train.learning_rate=1e-4",
            )
        try:
            # A SafeLoader subclass: builds plain values only.
            parsed = yaml.load(value, Loader=_PlainLoader)
        except yaml.YAMLError as error:
            raise SpecError(f"the value in {override!r} is not valid YAML", where="--set", fix="Quote it") from error
        if isinstance(parsed, str):
            parsed = _number(parsed)
        node = result
        for key in keys[:-1]:
            child = node.get(key)
            if child is not None and not isinstance(child, dict):
                raise SpecError(
                    f"{key!r} in {override!r} is a value, not a section", where="--set", fix="See `gcore schema`"
                )
            node[key] = dict(child or {})
            node = node[key]
        node[keys[-1]] = parsed
    return result


def _number(text: str) -> Any:
    """YAML 1.1 reads 1e-4 as a string; people mean a number."""
    try:
        return float(text)
    except ValueError:
        return text


def _check_depth(node: Any, where: str, depth: int = 0) -> None:
    if depth > MAX_SPEC_DEPTH:
        raise SpecError(
            f"the spec is nested more than {MAX_SPEC_DEPTH} deep", where=where, fix="A spec is two levels deep"
        )
    children: Any = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        _check_depth(child, where, depth + 1)


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        dotted = ".".join(str(part) for part in problem["loc"]) or "spec"
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(dotted, list(_known_keys(JobSpec)), n=1, cutoff=0.5)
            yield f"unknown key {dotted!r}" + (f", did you mean {near[0]!r}?" if near else "")
        elif problem["type"] == "missing":
            yield f"{dotted!r} is missing"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            shown = problem["input"] if isinstance(problem["input"], str | int | float | bool) else None
            yield f"{dotted}: {message}" + (f" (got {shown!r})" if shown is not None else "")


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _known_keys(kind, f"{prefix}{name}.")


def _absolute(spec: JobSpec, base: Path) -> JobSpec:
    def resolve(path: str) -> str:
        return str((base / Path(path).expanduser()).resolve())

    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"path": resolve(spec.model.path)}),
            "data": spec.data.model_copy(update={"path": resolve(spec.data.path)}),
            "eval": spec.eval.model_copy(update={"path": resolve(spec.eval.path)} if spec.eval.path else {}),
        }
    )
