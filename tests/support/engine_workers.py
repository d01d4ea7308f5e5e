"""Serving engines for tests of their callers: registrations, and a fake for each engine's client."""

from __future__ import annotations

from gcore.types import Version
from gcore.worker.records import WorkerRecord


def engines_at(**addresses: str) -> dict[str, WorkerRecord]:
    """By instance, each at its host:port."""
    return {
        name: WorkerRecord(
            instance=name,
            node="n",
            role="rollout",
            job_uid="u",
            slot="cpu:0",
            pid=1,
            pid_started=1,
            state="serving",
            address=address,
        )
        for name, address in addresses.items()
    }


class ServingEngine:
    """A fake behind the client's methods: it serves a version and executes every other call at once. Each test defines its requests' outcomes."""

    def __init__(self, version: Version) -> None:
        self.version = version

    async def served(self) -> Version:
        """Which weights it has."""
        return self.version

    async def update_weights(self, folder: str, version: Version) -> None:
        """It has them."""
        self.version = version

    async def resume(self) -> None:
        """It goes on."""

    async def abort(self, rid: str, count: int) -> None:
        """Nothing is given up."""

    async def close(self) -> None:
        """Nothing was open."""
