"""The environment `tools`: a model that may call tools, turn after turn, until it ends a turn without a call.

    environment: {name: tools, tools: {names: [calculator]}, options: {form: tags, open: "<<", close: ">>"}}

How calls are written is `gcore.environments.calls`; how tools are run, `gcore.environments.pool`. It gives no reward: what an answer is
worth the spec's reward says.
"""

from __future__ import annotations

from gcore.environments.api import Done, Observation, Said, Setting, Turn
from gcore.environments.calls import form_of


class ToolEnvironment:
    """Implements `Environment`."""

    def __init__(self, setting: Setting) -> None:
        self._tools = setting.tools
        self._form = form_of(setting.options, setting.tools.names, chat=setting.chat)
        self.stop = (self._form.stop,)

    async def reset(self) -> Observation:
        """Nothing: the prompt was shown."""
        return Observation()

    async def step(self, turn: Turn) -> Observation | Done:
        """What the tool says, if the turn ends in a call."""
        call = self._form.call(turn.text) if turn.finish_reason == "stop" else None
        if call is None:
            return Done()
        if call.problem:
            return self._form.result(call, Said(f"error: {call.problem}", failed=True))
        return self._form.result(call, await self._tools.call(call.name, call.argument))

    async def close(self) -> None:
        """Nothing is held."""
