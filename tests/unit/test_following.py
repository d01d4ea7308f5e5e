"""Following a job: no event is lost to what happens while others are sent on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from controllers.changes import Changes
from controllers.service.events import Event
from controllers.service.jobs import JobsService


def event(sequence: int) -> Event:
    return Event(sequence, 0.0, "step", "", {})


class Runner:
    """A job that ends while its first event is on its way."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.closed = False
        self.mirror = SimpleNamespace(status=None)
        self.events = SimpleNamespace(after=lambda after: [e for e in self.known if e.sequence > after])
        self.known = [event(1)]

    def end(self) -> None:
        self.known.append(event(2))
        self.mirror.status = SimpleNamespace(record=SimpleNamespace(phase=SimpleNamespace(ended=True)))
        self.closed = True
        self.changes.notify()


async def test_the_last_event_of_a_job_that_ends_meanwhile_is_sent() -> None:
    runner = Runner()
    service: Any = JobsService(None, None, None, None)  # type: ignore[arg-type]

    async def settled(uid: str) -> Runner:
        return runner

    service._settled = settled
    got = []
    async for one in service._follow("u", 0):
        got.append(one.sequence)
        if one.sequence == 1:
            runner.end()
    assert got == [1, 2]
