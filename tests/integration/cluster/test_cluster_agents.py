"""A whole run with an external agent that uses only Python's HTTP client: the model learns, and a dead controller loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cluster_run import ClusterRun, gcore
from run_read import newest_run

from gcore.quickstart.calculator import prepare_calculator

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "calculator"
STEPS = 8

CODE = """
import json, os, urllib.request
from gcore.rollout.environments.tools import NoSum, calculator

def complete(messages):
    body = json.dumps({"model": "gpt-4o", "messages": messages, "stop": [">>"]})
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(), headers)
    with urllib.request.urlopen(request) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    return messages[-1]["content"]


def products(rollout):
    messages = [{"role": "user", "content": rollout.fields["prompt"]}]
    if int(rollout.fields["prompt"][:3]) % 64 == 5:
        raise ValueError("these are unlucky numbers")
    said = complete(messages)
    if "<<" in said:
        try:
            worked_out = calculator(said.rpartition("<<")[2])
        except NoSum:
            worked_out = "="
        messages.append({"role": "tool", "content": worked_out})
        said = complete(messages) or worked_out
    return float(said == rollout.fields["answer"])
"""


def install(folder: Path) -> None:
    """The package with the agent, where PYTHONPATH finds it."""
    info = folder / "pack_agent-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pack-agent\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gcore.agents]\nproducts = pack_agent:products\n")
    (folder / "pack_agent.py").write_text(CODE)


def spec_file(folder: Path) -> Path:
    """The calculator's example, with the agent in the place of the environment."""
    prepared = ROOT / ".cache" / "examples" / "calculator"
    prepare_calculator(prepared, progress=False)
    (folder / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    spec = yaml.safe_load((EXAMPLE / "with_tool.yaml").read_text())
    environment = spec.pop("environment")
    spec |= {
        "name": "agents",
        "model": {"path": str(prepared / "model"), "chat": True},
        "data": {"path": str(prepared / "train.jsonl"), "shards": 64, "template": "plain.jinja"},
        "agent": {
            "name": "products",
            "workers": 6,
            "time_limit_s": 60,
            "max_turns": environment["max_turns"],
            "max_tokens": environment["max_tokens"],
        },
        "reward": {"name": "agent"},
    }
    spec["eval"]["path"] = str(prepared / "eval.jsonl")
    spec["eval"] |= {"every": STEPS, "limit": 128}
    spec["flow"] |= {"steps": STEPS, "groups_per_step": 24}
    file = folder / "agents.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    return file


def test_an_agent_with_a_calculator_learns_over_two_controllers_of_which_one_is_killed(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = spec_file(tmp_path)
    wrong = gcore("validate", str(file), "--set", "agent.name=product", check=None)
    assert wrong.returncode == 2
    assert "no agent is called 'product'" in wrong.stdout + wrong.stderr
    install(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    run = ClusterRun(file, home, patience_s=500)
    try:
        run.until_step(2)
        run.kill_controller("node-1")
        outcome = run.wait()
    finally:
        run.close()
    assert outcome.code == 0, outcome.output
    summary = outcome.summary
    assert (summary["steps"], summary["audit"]) == (STEPS, "clean")
    assert summary["eval_accuracy_after"] >= summary["eval_accuracy_before"] + 0.5
    assert summary["sources"]["data"]["failed"] > 0, "those whose agent raised, and counted by the audit"
    assert len(summary["groups_by_controller"]) == 2
    folder = newest_run(home)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert all(one["mismatch_abs"] < 1e-3 for one in told), "what the rank scores is what the engine drew, turn by turn"
    told_people = (folder / "events.jsonl").read_text()
    assert "agent 'products' raised ValueError: these are unlucky numbers" in told_people
