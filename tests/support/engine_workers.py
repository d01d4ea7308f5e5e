"""Registrations of engines that serve, for tests of whoever asks them."""

from __future__ import annotations

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
