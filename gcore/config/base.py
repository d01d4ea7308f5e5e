"""The base of every section of a job spec: frozen, unknown keys are errors, a truth is no number."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

Option = str | int | float | bool
"""A setting of a plug-in's own: what it may be is the plug-in's to say."""


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Pydantic takes true for 1, and YAML 1.1 takes yes, no, on and off for truths.
        truths = isinstance(value, bool) or (
            isinstance(value, list | tuple) and any(isinstance(v, bool) for v in value)
        )
        if truths and cls.model_fields[info.field_name or ""].annotation not in (bool, bool | None):
            raise ValueError("true, false, yes, no, on and off are no value here; quote the word if it is meant")
        return value
