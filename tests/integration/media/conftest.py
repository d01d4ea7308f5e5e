"""Stores that end with their test, and the HTTP client that asks them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from blob_stores import Start, StoreProcess

from gcore.api.tls import PLAIN
from gcore.media.client import BlobHttp, open_blob_http


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[StoreProcess] = []

    def begin(name: str = "n1", **launch: Any) -> StoreProcess:
        started.append(StoreProcess(name, tmp_path / name, **launch))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


@pytest.fixture
async def http() -> AsyncIterator[BlobHttp]:
    async with open_blob_http(PLAIN) as one:
        yield one
