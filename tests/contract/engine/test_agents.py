"""An agent's conversation with each real engine over HTTP: the trained tokens are those that the engine processed."""

from __future__ import annotations

import httpx
import pytest
from engine_contract import Serving, chosen, plain_logprobs

from gcore.data.renderer import PromptRenderer
from gcore.rollout.agents.chat_protocol import SamplingRules
from gcore.rollout.agents.server import AgentHttpServer
from gcore.rollout.agents.session import AgentSession, DialogueLimits
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.system.clock import SystemClock
from gcore.types import Sample

TURNS, EACH = 3, 7


@pytest.mark.parametrize("streams", [False, True])
async def test_recorded_conversation_has_the_models_log_probabilities(
    serving: Serving, client: EngineClient, streams: bool
) -> None:
    folder = serving.weights[0]
    renderer = PromptRenderer.load(folder, chat=True)
    endpoint = AgentHttpServer()

    async def say(tokens: tuple[int, ...], most: int, stop: tuple[str, ...], made: int) -> Sample:
        params = SamplingParams(temperature=0.8, max_new_tokens=most, stop=stop)
        (sample,) = await client.generate(tokens, params, seeds=(100 + made,), rid=f"agent-{streams}-{made}")
        return sample

    limits = DialogueLimits(turns=TURNS, own=100, room=400, context=renderer.max_length, own_s=60)
    served = AgentSession(renderer, say, SamplingRules((0.8,), (1.0,), 100), limits, SystemClock(), stop=("0",))
    url = endpoint.base_url(await endpoint.begin(served))
    messages = [{"role": "system", "content": "add"}]
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"1+{turn}="})
            response = await http.post(
                f"{url}/chat/completions", json={"messages": messages, "max_tokens": EACH, "stream": streams}
            )
            assert response.status_code == 200, response.text
            if streams:
                told = httpx.Response(200, text=response.text.split("\n\n")[0].removeprefix("data: ")).json()
                messages.append({"role": "assistant", "content": told["choices"][0]["delta"]["content"]})
            else:
                messages.append(response.json()["choices"][0]["message"])
    await endpoint.close()
    sample = served.sample()
    assert sample.prompt_ids == renderer.encode(renderer.render(messages[:2]))
    ids = [*sample.prompt_ids, *sample.token_ids]
    plain = chosen(plain_logprobs(folder, ids, 0.8), ids)[len(sample.prompt_ids) - 1 :].tolist()
    shown = {place for start, end in sample.observed for place in range(start, end)}
    assert len(shown) + sample.own_tokens == len(sample.token_ids)
    assert sample.own_tokens > TURNS
    for place, logprob in enumerate(sample.logprobs):
        assert logprob == 0 if place in shown else logprob == pytest.approx(plain[place], abs=serving.tolerance)
    # What ended at a stop text has it among its tokens, and the agent was not sent it.
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert all("0" not in one for one in said)
    behind = "".join(f"{words}0?/user:1+{turn + 1}=/assistant:" for turn, words in enumerate(said[:-1]))
    assert renderer.decode(ids).count("assistant:") >= TURNS
    assert len(sample.text) <= len(behind) + EACH
