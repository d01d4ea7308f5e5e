"""The processes that agents run in on one controller, and what becomes of an agent that hangs, dies or raises.

An agent is foreign code that works on what a model wrote, so none of it runs in the controller. A few processes (`agent.workers`)
run one agent each at a time; who finds none free waits, and its time does not run yet. An agent that takes longer than it may, or
whose response is given up, costs its process, which is killed with all it started, and replaced; so with one that dies. One that raises
does not: its process has said so, and runs the next. But one that leaves something running, a thread or a process, costs its process too:
it would ask in the next response's name.

The processes are those that score, with another program in them (`gcore.reward.crew`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

from gcore.agents.api import AgentFault
from gcore.clock import Clock
from gcore.config.agent import AgentSpec
from gcore.reward.crew import Crew, Program
from gcore.reward.lines import line_of
from gcore.reward.pace import Scoring
from gcore.reward.process import ProcessEnded, RewardProcess, Unagreed
from gcore.together import end_all

NEVER_S = 1e8
"""How long a process is waited for: `watch` says when that is over."""


class AgentPool:
    """One event loop; close it."""

    def __init__(self, spec: AgentSpec, clock: Clock, group: str = "") -> None:
        """`group`: the control group of the processes."""
        setup = line_of({"agent": spec.name, "memory_mb": spec.memory_mb})
        program = Program("gcore.agents", setup, f"agent {spec.name!r}", "agent", spec.start_timeout_s, group)
        self._crew = Crew(program, spec.workers, clock)

    async def warm(self) -> None:
        """Have one process loaded. Raises PluginFault for an agent that cannot be had, CannotStart."""
        await self._crew.warm()

    async def run(
        self, call: Mapping[str, Any], began: Callable[[], None], watch: Callable[[], Coroutine[Any, Any, NoReturn]]
    ) -> float | None:
        """What the agent returns. `began` is called when it has a process; `watch` raises when it is to be ended.

        Raises AgentFault, what `watch` raises, and PluginFault if this node does not have the agent: no other would do better.
        """
        async with self._crew.lent() as loan:
            loan.process.ask(call)
            began()
            try:
                said = await self._said(loan.process, watch())
                told = _told(said)
            except Unagreed:
                raise _unagreed() from None
            except ProcessEnded:
                raise AgentFault(
                    f"took the process that ran it with it, which was {await self._crew.how_ended(loan.process)}",
                    where="agent",
                    fix="See the controller's log; raise agent.memory_mb if memory ran out",
                ) from None
            loan.fit = not said.get("threads")
            if isinstance(told, AgentFault):
                raise told
            return told

    @property
    def waits(self) -> Scoring:
        """Who waits for a process of an agent, and how many have been served."""
        return self._crew.waits

    async def close(self) -> None:
        """End every process."""
        await self._crew.close()

    async def _said(self, process: RewardProcess, watch: Coroutine[Any, Any, NoReturn]) -> Any:
        """What the process answers, unless `watch` raises first."""
        answer, watching = asyncio.ensure_future(process.told(NEVER_S)), asyncio.ensure_future(watch)
        try:
            await asyncio.wait((answer, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                watching.result()
            return answer.result()
        finally:
            await end_all((answer, watching))


def _told(said: Any) -> float | AgentFault | None:
    """What the agent returned, or raised. Raises AgentFault for what no such process says: more may come behind it."""
    match said:
        case {"reward": None}:
            return None
        case {"reward": float() | int() as reward}:
            return float(reward)
        case {"what": str(what), "trace": str(trace)}:
            return AgentFault(what, where="agent", fix="Correct the agent", trace=trace)
    raise _unagreed()


def _unagreed() -> AgentFault:
    return AgentFault(
        "let its process say what no such process says", where="agent", fix="Let it leave its socket alone"
    )
