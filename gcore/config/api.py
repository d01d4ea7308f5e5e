"""The section `api` of a node's configuration: what its job API allows callers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gcore.config.base import Section


class ApiConfig(Section):
    """Bounds hold for each daemon by itself."""

    reflection: bool = Field(
        False, description="Whether the API tells its services and messages to tools such as grpcurl"
    )
    streams: Annotated[int, Field(ge=1, le=100_000)] = Field(
        512,
        description="Streams that are served at once, of events, logs, numbers, samples and books; who comes then is refused",
    )
    calls: Annotated[int, Field(ge=16, le=100_000)] = Field(
        4096,
        description="Calls and streams of people that are served at once, one person's no more than half; who comes then is refused",
    )
