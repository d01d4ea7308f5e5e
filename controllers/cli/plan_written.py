"""The placement that was found, as a spec says it, and a spec with that in it. Pure but for the last function.

A spec is a text that a person wrote, so its words and comments stay where they can: sections are replaced or put behind. What comes
out is read again; where it does not say what it should, the spec is written anew, without its comments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gcore.atomic import whole_file
from gcore.config import JobSpec
from gcore.config.load import apply_overrides, load_spec
from gcore.errors import UsageError
from placement.mapping.search import Fit
from placement.replicas import sizes_of

Section = dict[str, dict[str, Any]]
JUDGES = "judges"
"""In a section: by the judge's name, what to write into its `serving`."""
SAID_ANEW = ("policy", "train", "reward")
"""Of the section `placement`, what a first placement decides. Who has the memory is decided too, where slots are shared; where they are
not, a policy that moves slots may share them later, and keeps what it says of that."""


def section_of(spec: JobSpec, fit: Fit) -> Section:
    """What to write into the spec so that the job begins so. A policy that moves slots keeps its name, and begins with these sizes; all
    slots in turn have none, for it knows one world only there."""
    policy, split = spec.placement.policy, fit.way.split
    live = spec.placement.is_live
    section: Section = {"placement": {"policy": policy}}
    if split.mode == "coexisting":
        reward = {"reward": split.reward} if split.reward else {}
        section["placement"] = {"policy": policy if live else "static", "train": split.train} | reward
    elif not live:
        section["placement"] = {"policy": "colocated"}
        section["train"] = {"ranks": split.train}
    if split.mode == "colocated":
        section["placement"]["memory"] = "in_turns" if fit.way.asleep else "kept"
    sizes, way = sizes_of(spec), fit.way
    if way.rollout_size != sizes.rollout:
        section["rollout"] = {"slots_per_engine": way.rollout_size}
    # An engine that is left to itself would fill what the ranks beside it need.
    if "rollout" in fit.room.bound:
        section["rollout"] = section.get("rollout", {}) | {"cache_tokens": dict(fit.room.cells)["rollout"]}
    if way.reward_size != sizes.reward:
        section[JUDGES] = {judge.name: {"slots_per_engine": way.reward_size} for judge in spec.served_judges}
    return section


def pasted(section: Section) -> tuple[Section, tuple[str, ...]]:
    """The section as it is pasted by hand, and what is to be set besides: judges stand in a list."""
    fields = [
        f"set serving.{key}: {value} of judge {name}"
        for name, serving in section.get(JUDGES, {}).items()
        for key, value in serving.items()
    ]
    return {name: fields for name, fields in section.items() if name != JUDGES}, tuple(fields)


def left_standing(spec: JobSpec, section: Section) -> tuple[str, ...]:
    """What to delete of the spec where the section is pasted by hand: what it says of another split. `write_spec` does so by itself."""
    placement, wanted = spec.placement, section["placement"]
    gone = [
        f"placement.{key}" for key in ("train", "reward") if key not in wanted and getattr(placement, key) is not None
    ]
    if wanted.get("policy") == "static" and placement.memory is not None:
        gone.append("placement.memory")
    if "train" in wanted and spec.train.ranks is not None:
        gone.append("train.ranks")
    return (f"delete {' and '.join(gone)}, which the spec says of another placement",) if gone else ()


def with_section(tree: Mapping[str, Any], section: Section) -> dict[str, Any]:
    """The spec's tree with that in it: what it said of the same is replaced, all else stays."""
    changed = dict(tree)
    for name, fields in section.items():
        if name == JUDGES:
            changed[name] = [_served(judge, fields.get(judge.get("name"), {})) for judge in tree.get(name) or ()]
            continue
        said = tree.get(name) or {}
        anew: tuple[str, ...] = SAID_ANEW if name == "placement" else ()
        if fields.get("policy") == "static":
            anew += ("memory",)
        changed[name] = {**{key: value for key, value in said.items() if key not in anew}, **fields}
    if "train" in section["placement"] and isinstance(changed.get("train"), dict):
        changed["train"] = {key: value for key, value in changed["train"].items() if key != "ranks"}
    return changed


def _served(judge: Mapping[str, Any], serving: Mapping[str, Any]) -> dict[str, Any]:
    return {**judge, "serving": {**(judge.get("serving") or {}), **serving}} if serving else dict(judge)


def with_section_in_text(text: str, section: Section) -> str:
    """The same for a text whose comments are to stay; whether it came out right is the caller's to see."""
    for name, fields in pasted(section)[0].items():
        block = yaml.safe_dump({name: fields}, sort_keys=False)
        found = re.search(rf"^{name}:[^\n]*\n(?:(?:[ \t]+[^\n]*|[ \t]*#[^\n]*|[ \t]*)\n)*", text, re.MULTILINE)
        if found is None:
            text = f"{text.rstrip()}\n\n{block}"
        elif name == "placement":
            kept = re.search(r"\n[ \t]*\n*\Z", found[0])
            text = f"{text[: found.start()]}{block}{chr(10) if kept else ''}{text[found.end() :]}"
        else:
            text = text[: found.start()] + _with_fields(found[0], fields) + text[found.end() :]
    if "train" in section["placement"]:
        text = re.sub(
            r"(^train:[^\n]*\n(?:[ \t]+[^\n]*\n|\n)*?)[ \t]+ranks:[^\n]*\n", r"\1", text, count=1, flags=re.MULTILINE
        )
    return text


def _with_fields(block: str, fields: Mapping[str, Any]) -> str:
    for key, value in fields.items():
        line = re.compile(rf"^([ \t]+){key}:[^\n#]*", re.MULTILINE)
        if line.search(block):
            block = line.sub(rf"\g<1>{key}: {value} ", block, count=1)
        else:
            head, _, rest = block.partition("\n")
            indent = re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)*([ \t]+)\S", rest)
            block = f"{head}\n{indent[1] if indent else '  '}{key}: {value}\n{rest}"
    return block


def write_spec(spec: Path, to: Path, section: Section, overrides: Sequence[str] = ()) -> None:
    """Write the spec with the section in it to `to`, which lies beside it. Raises UsageError."""
    if to.resolve().parent != spec.resolve().parent:
        raise UsageError(
            "paths in a spec are relative to its folder, so a copy elsewhere would name other files",
            where=str(to),
            fix=f"Name a file in {spec.resolve().parent}",
        )
    if to.exists() and to.resolve() != spec.resolve():
        raise UsageError("there is a file of that name", where=str(to), fix="Name a new file, or the spec itself")
    text = spec.read_text(encoding="utf-8")
    wanted = with_section(apply_overrides(yaml.safe_load(text), overrides), section)
    written = text if overrides else with_section_in_text(text, section | {"placement": wanted["placement"]})
    try:
        same = yaml.safe_load(written) == wanted
    except yaml.YAMLError:
        same = False
    if not same:
        written = yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)
    try:
        whole_file(to, written.encode())
    except OSError as error:
        raise UsageError(
            f"the spec cannot be written ({error.strerror or error})", where=str(to), fix="Name another file"
        ) from error
    load_spec(to)
