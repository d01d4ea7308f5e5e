"""An agent, tried before there is a job: loaded in a process as it will be. It is not called: there is no policy to ask yet.

For code that has no event loop.
"""

from __future__ import annotations

import asyncio

from gcore.agents.pool import AgentPool
from gcore.clock import SystemClock
from gcore.config.agent import AgentSpec
from gcore.plugins import PluginFault
from gcore.worker.process import CannotStart


def try_agent(spec: AgentSpec) -> None:
    """Blocks. Not within an event loop. Raises PluginFault."""
    asyncio.run(_tried(spec))


async def _tried(spec: AgentSpec) -> None:
    pool = AgentPool(spec.model_copy(update={"workers": 1}), SystemClock())
    try:
        await pool.warm()
    except CannotStart as error:
        raise PluginFault(error.what, where=error.where or "agent", fix=error.fix) from error
    finally:
        await pool.close()
