"""The JSON schema of a job spec's file, which editors use to complete and check a spec.

It is the schema of `JobSpec` with the two short forms that files may use: a list of rewards in place of a section, and `file` in
place of `name` for a plug-in in a Python file.
"""

from __future__ import annotations

from typing import Any

from gcore.config.reward import RewardPart, RewardSpec
from gcore.config.rollout import AgentSpec, EnvironmentSpec
from gcore.config.spec import JobSpec
from gcore.config.train import FilterSpec, FlowSpec
from gcore.plugins import REFERENCE_PATTERN

_WITH_PLUGIN = (RewardSpec, RewardPart, FlowSpec, FilterSpec, EnvironmentSpec, AgentSpec)
"""Sections in which `name` names a plug-in."""

_FILE = {
    "description": "A function in a Python file, as FILE.py:FUNCTION, in place of `name`. Only on a local cluster",
    "pattern": f"^{REFERENCE_PATTERN}$",
    "title": "File",
    "type": "string",
}


def job_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a job spec's file."""
    schema = JobSpec.model_json_schema()
    for section in _WITH_PLUGIN:
        _allow_file(schema["$defs"][section.__name__])
    _allow_list(schema)
    return schema


def _allow_file(section: dict[str, Any]) -> None:
    properties = section["properties"]
    section["properties"] = {"name": properties.pop("name"), "file": _FILE, **properties}
    required = section.pop("required", [])
    if "name" in required:
        section["oneOf"] = [{"required": ["name"]}, {"required": ["file"]}]
    else:
        section["not"] = {"required": ["name", "file"]}
    if others := [name for name in required if name != "name"]:
        section["required"] = others


def _allow_list(schema: Any) -> None:
    """Change each reference to the section of rewards, in place."""
    if isinstance(schema, list):
        for part in schema:
            _allow_list(part)
    if not isinstance(schema, dict):
        return
    for part in schema.values():
        _allow_list(part)
    if schema.get("$ref") == "#/$defs/RewardSpec":
        parts = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/RewardPart"}}
        schema["anyOf"] = [{"$ref": schema.pop("$ref")}, parts]
