"""A job's controller connects to external judges, queries them, and records their cost, without an engine or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeOpenAI
from job_session import make_session

from controllers.inference.judges import JudgeMetricsObserver, open_judges
from gcore.config import parse_spec
from gcore.ledger.usage import NodeSpent
from gcore.observability.metrics import Metrics
from gcore.store.keys import JobKeys
from gcore.system.clock import SystemClock
from gcore.testing import MemoryCluster, MemoryStore
from gcore.types import Prompt, PromptRef

PROMPT = Prompt(PromptRef(0, 0, 0), "1+2=", (1,), {})
KEY_ENV = "THE_KEY_OF_THE_TEST"


async def test_a_controller_asks_with_its_key_and_its_node_remembers_what_that_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, "sk-x")
    clock, metrics = SystemClock(), Metrics()
    store = MemoryStore(MemoryCluster(clock))
    async with FakeOpenAI(lambda asked: "about 0.5", key="sk-x") as fake:
        outside = {"url": fake.url, "model": "m", "key_env": KEY_ENV, "price_out": 1e6, "most_cost": 100}
        tree: dict[str, Any] = {"name": "t", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
        tree |= {"rollout": {"max_new_tokens": 4}, "reward": {"judge": "far"}}
        spec = parse_spec(tree | {"judges": [{"name": "far", "template": "{{ response }}?", "external": outside}]})
        session = make_session(tmp_path, store, clock, spec, metrics)
        external, counts = session.external, JudgeMetricsObserver(metrics, lambda topic, said: None)
        engines: Any = None  # the cluster serves none of them
        opened = [open_judges(spec, engines, counts, clock, external)["far"] for _ in range(2)]
        judge = opened[-1]  # a preparation that was tried twice
        assert (await judge.value(PROMPT, "3")).value == 0.5
        assert (await judge.value(PROMPT, "3")).value == 0.5
        assert [asked["messages"] for asked in fake.asked] == [[{"role": "user", "content": "3?"}]]
        await external.close()
        for one in opened:
            with pytest.raises(RuntimeError, match="client has been closed"):
                await one.value(PROMPT, "4")
    kv = await store.get(JobKeys("u").spent("n"))
    assert kv is not None
    assert NodeSpent.decode(kv.value).uses["far"].tokens_out == 2
    assert external.spending.cost("far") == 2
    assert metrics.registry.get_sample_value("gcore_judge_cost_total", {"judge": "far"}) == 2
    assert counts.scoring.waiting == 0
