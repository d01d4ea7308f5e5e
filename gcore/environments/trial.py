"""An environment and its tools, tried out before there is a job: made for a prompt's entry, and asked what it shows first.

For code that has no event loop. What cannot be loaded, an option that is misspelt, a tool that nobody provides: all of that fails here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gcore.clock import SystemClock
from gcore.config.environment import EnvironmentSpec
from gcore.environments.api import EnvironmentFault, EnvironmentMaker, Setting
from gcore.environments.episode import unending
from gcore.environments.pool import ToolPool
from gcore.environments.registry import CheckedEnvironment, find_environment
from gcore.plugins import PluginFault
from gcore.together import Unending, in_time, told_to_end
from gcore.worker.process import CannotStart


def try_environment(spec: EnvironmentSpec, fields: Mapping[str, Any], *, chat: bool) -> None:
    """Blocks. Not within an event loop. Raises PluginFault."""
    maker = find_environment(spec.name)
    asyncio.run(_tried(spec, maker, fields, chat=chat))


async def _tried(spec: EnvironmentSpec, maker: EnvironmentMaker, fields: Mapping[str, Any], *, chat: bool) -> None:
    clock = SystemClock()
    tools = ToolPool(spec.tools.model_copy(update={"workers": 1}), clock)
    try:
        await tools.warm()
        environment = CheckedEnvironment(spec.name, maker, Setting(spec.options, fields, 0, tools, chat))
        await in_time(environment.reset(), spec.step_timeout_s, clock)
        await in_time(environment.close(), spec.step_timeout_s, clock)
    except EnvironmentFault as error:
        raise _refused(error) from error
    except CannotStart as error:
        raise PluginFault(error.what, where="environment.tools", fix=error.fix) from error
    except Unending as error:
        raise _refused(unending(spec.step_timeout_s)) from error
    except TimeoutError as error:
        raise PluginFault(
            f"environment {spec.name!r} took longer than {spec.step_timeout_s:g} s to begin",
            where="environment.step_timeout_s",
            fix="Raise it, or make the environment quicker",
        ) from error
    finally:
        await tools.close()
        for left in asyncio.all_tasks() - {asyncio.current_task()}:
            await told_to_end(left, clock)


def _refused(error: EnvironmentFault) -> PluginFault:
    return PluginFault(error.what, where=error.where or "environment", fix=error.fix, trace=error.trace)
