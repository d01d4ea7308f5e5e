"""Whole runs with plug-ins of every kind in files and from Python, on local clusters, and what a local cluster refuses of them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_run import ClusterRun, gcore

import gcore as package
from controllers.cli.local import home_processes
from gcore.client.local import PROGRAM
from gcore.client.models import Job
from gcore.config.local_cluster import LocalClusterState
from gcore.errors import NotAllowed, UsageError
from gcore.quickstart.arithmetic import prepare_arithmetic

pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]

LENGTH = 3


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A spec whose model has learned nothing."""
    folder = tmp_path_factory.mktemp("example") / "arithmetic"
    prepare_arithmetic(folder, progress=False, warm_updates=1, must_fit=False)
    return {
        "name": "own",
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "train.jsonl")},
        "flow": {"steps": 2, "groups_per_step": 8, "samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
        "train": {"dtype": "fp32"},
    }


def test_a_reward_in_a_file_runs_from_the_copy_in_the_runs_folder(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(response, fields):\n    return len(response) / 8\n")
    (tmp_path / "reward.py").chmod(0o600)
    spec = tmp_path / "own.yaml"
    sections = {**tree, "reward": {"file": "reward.py:score"}}
    spec.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
    run = ClusterRun(spec, tmp_path / "home")
    try:
        ended = run.wait()
    finally:
        run.close()
    assert ended.code == 0, ended.output
    assert ended.summary["audit"] == "clean"
    (copy,) = (tmp_path / "home" / "runs").glob("own-*/code/*/reward.py")
    assert copy.read_text() == (tmp_path / "reward.py").read_text()


def graded(response: str) -> float:
    return min(len(response), LENGTH) / LENGTH


def test_a_function_is_run_from_python_on_a_cluster_that_is_started_and_stopped(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="'len' is not a function"):
        package.run(tree, reward=len, home=tmp_path / "home", progress=False)
    assert not (tmp_path / "home").exists()
    run = package.run(tree, reward=graded, home=tmp_path / "home", progress=False)
    assert run.job.state == "SUCCEEDED"
    assert len(run.metrics()) == 2
    assert all(0.0 <= sample.reward <= 1.0 for sample in run.samples())
    assert (run.export(tmp_path / "trained") / "model.safetensors").is_file()
    assert not (tmp_path / "home" / "cluster.json").exists()


PLUGINS = """
import json, urllib.request

import gcore
from gcore.environments import Done, Observation
from gcore.flows import flow


@flow(train={"epochs": 2})
async def two_epochs(peer):
    async for step in peer.steps():
        async with step.collect() as batch:
            async for prompt in peer.prompts(step):
                batch.start(produce(peer, prompt))
        await step.train()
        await step.publish()


async def produce(peer, prompt):
    return await peer.filter(prompt, await peer.score(prompt, await peer.rollout(prompt)))


def even_prompts(group, fields, options):
    return None if int(fields["answer"]) % 2 == 0 else "the answer is odd"


def centered(outcomes, groups):
    return outcomes - outcomes.mean()


def plain(logp, old, advantages, mask, *, clip_low, clip_high):
    return -(logp - old.detach()).exp() * advantages


@gcore.batch_reward
def rank(completions, answer, **columns):
    if len(completions) == 4 and len({id(one) for one in answer}) != 1:
        raise ValueError("the responses belong to several prompts")
    order = sorted(range(len(completions)), key=lambda number: len(completions[number]))
    return [order.index(number) / len(order) for number in range(len(completions))]


def digits(response):
    return sum(letter.isdigit() for letter in response) / 8


def shout(argument):
    return argument.upper() + "7"


class Echo:
    def __init__(self, setting):
        self.tools = setting.tools
        assert setting.tools.names == ("shout",), setting.tools.names

    async def reset(self):
        return Observation((await self.tools.call("shout", "1")).text)

    async def step(self, turn):
        return Done(len(turn.text) / 8)

    async def close(self):
        pass


def asker(rollout):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": rollout.fields["prompt"]}]})
    headers = {"authorization": "Bearer " + rollout.api_key}
    request = urllib.request.Request(rollout.base_url + "/chat/completions", body.encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return len(json.load(answer)["choices"][0]["message"]["content"] or "") / 8
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a plug-in of each kind."""
    file = tmp_path_factory.mktemp("plugins") / "mine.py"
    file.write_text(PLUGINS)
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[package.LocalCluster]:
    """A local cluster that the jobs of this module share."""
    with package.LocalCluster(tmp_path_factory.mktemp("shared") / "home", controllers=1, slots="cpu:2") as found:
        yield found


def groups_of(run: Any) -> list[list[Any]]:
    """The responses of the newest step by prompt."""
    return [list(group) for _, group in itertools.groupby(run.samples(), key=lambda sample: sample.prompt)]


def test_a_flow_a_filter_an_estimator_a_loss_and_several_rewards_run_from_a_file(
    cluster: package.LocalCluster, tree: dict[str, Any], plugins: Path
) -> None:
    spec = {
        **tree,
        "name": "training",
        "flow": {
            "file": f"{plugins}:two_epochs",
            "filters": [{"file": f"{plugins}:even_prompts"}],
            "steps": 2,
            "groups_per_step": 4,
            "samples_per_prompt": 4,
        },
        "reward": [
            {"file": f"{plugins}:rank"},
            {"file": f"{plugins}:digits", "weight": 0.5},
            {"name": "length", "weight": 0.0, "options": {"limit": 4}},
        ],
        "train": {"dtype": "fp32", "advantage": f"{plugins}:centered", "loss": f"{plugins}:plain"},
    }
    run = cluster.run(spec, progress=False)
    assert run.job.spec["train"]["epochs"] == 2
    for sample in run.samples():
        parts = dict(sample.parts)
        assert parts.keys() >= {"rank", "digits", "length"}
        assert sample.reward == pytest.approx(parts["rank"] + 0.5 * parts["digits"])
    groups = [[sample.parts["rank"] for sample in group] for group in groups_of(run)]
    assert all(sorted(ranks) == [0.0, 0.25, 0.5, 0.75] for ranks in groups)
    steps = [one.values for one in cluster.client.metrics(run.job)]
    assert all({"reward_part/rank", "reward_part/digits", "reward_part/length"} <= step.keys() for step in steps)


def test_an_environment_and_its_tool_run_from_a_file(
    cluster: package.LocalCluster, tree: dict[str, Any], plugins: Path
) -> None:
    environment = {"file": f"{plugins}:Echo", "tools": {"names": [f"{plugins}:shout"]}, "max_turns": 3}
    spec = {**tree, "name": "turns", "environment": environment, "reward": {"name": "environment"}}
    run = cluster.run(spec, progress=False)
    samples = run.samples()
    assert samples
    assert all(sample.response.startswith("17") for sample in samples)


def test_an_agent_runs_from_a_file(
    cluster: package.LocalCluster, tree: dict[str, Any], plugins: Path, tmp_path: Path
) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    spec = {
        **tree,
        "name": "agents",
        "model": {**tree["model"], "chat": True},
        "data": {**tree["data"], "template": str(template)},
        "agent": {"file": f"{plugins}:asker", "workers": 2},
        "reward": {"name": "agent"},
    }
    run = cluster.run(spec, progress=False)
    assert run.job.state == "SUCCEEDED"
    assert len(run.metrics()) == 2


@package.batch_reward
def shortest(responses: list[str], spec: Any) -> list[float]:
    return [float(len(one) == min(map(len, responses))) for one in responses]


def test_several_functions_are_added_up_from_python(cluster: package.LocalCluster, tree: dict[str, Any]) -> None:
    run = cluster.run({**tree, "name": "functions"}, reward=[graded, shortest], progress=False)
    for group in groups_of(run):
        assert any(sample.parts["shortest"] == 1.0 for sample in group)
        assert all(sample.reward == pytest.approx(sum(sample.parts.values())) for sample in group)


def test_a_batch_reward_of_the_wrong_length_fails_the_prompts_and_says_why(
    cluster: package.LocalCluster, tree: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "import gcore\n\n@gcore.batch_reward\ndef score(responses):\n"
        "    return [0.0] * (len(responses) - len(responses[0]) % 2)\n"
    )
    file.chmod(0o600)
    cluster.run({**tree, "name": "wrong-length", "reward": {"file": f"{file}:score"}}, progress=False)
    said = [event.message for event in cluster.client.events("wrong-length", follow=False)]
    assert any("returned 1 results for 2 responses" in message for message in said), said


def test_a_copy_that_changes_before_the_start_of_its_job_does_not_run(
    cluster: package.LocalCluster, tree: dict[str, Any], plugins: Path
) -> None:
    """The job waits for the slots of another one meanwhile."""
    client = cluster.client
    first = client.submit({**tree, "name": "first", "flow": {**tree["flow"], "steps": 100_000}})
    wait_until_running(client, first)
    second = client.submit({**tree, "name": "second", "reward": {"file": f"{plugins}:digits"}})
    (copy,) = Path(second.run_dir).glob("code/*/mine.py")
    copy.write_text(PLUGINS + "# later\n")
    client.cancel(first)
    ended = client.wait(second)
    assert ended.state == "FAILED"
    assert "has changed since the job was submitted" in ended.reason
    assert plugins.read_text() == PLUGINS


def wait_until_running(client: Any, job: Job) -> None:
    for event in client.events(job):
        if event.kind == "step":
            return
    raise AssertionError(f"job {job.name} ended before its first step: {client.get(job).reason}")


REFUSED = [
    pytest.param(None, "reward.py:score", "No such file", id="missing"),
    pytest.param(" \n", "reward.py:score", "the plug-in file is empty", id="empty"),
    pytest.param("def score(:\n", "reward.py:score", "syntax error", id="a syntax error"),
    pytest.param(
        "import no_such_module\n\ndef score(r):\n    return 1\n", "reward.py:score", "no_such_module", id="an import"
    ),
    pytest.param("def other(r):\n    return 1\n", "reward.py:score", "its functions: other", id="no such function"),
    pytest.param("score = 1\n", "reward.py:score", "cannot be called", id="no function"),
    pytest.param(
        "def score(r):\n    return 1\n", "reward.py", "no reward is called 'reward.py'", id="no function named"
    ),
]


@pytest.mark.parametrize(("text", "reference", "said"), REFUSED)
def test_a_bad_reward_file_is_refused_in_one_sentence_and_leaves_nothing(
    cluster: package.LocalCluster,
    tree: dict[str, Any],
    tmp_path: Path,
    text: str | None,
    reference: str,
    said: str,
) -> None:
    if text is not None:
        (tmp_path / "reward.py").write_text(text)
        (tmp_path / "reward.py").chmod(0o600)
    check_refused(cluster, tree, tmp_path, "submit", {"name": reference}, said)


def check_refused(
    cluster: package.LocalCluster, tree: dict[str, Any], folder: Path, command: str, reward: Any, said: str
) -> None:
    """A command refuses a spec with this reward in one line, and the cluster has neither a job nor a folder of it."""
    spec = folder / "spec.yaml"
    spec.write_text(json.dumps({**tree, "name": "refused", "reward": reward}))
    done = gcore(command, str(spec), "--home", str(cluster.home), check=None)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("The cluster in")]
    assert len(lines) == 1, done.stderr
    assert said in lines[0]
    assert "refused" not in [job.name for job in cluster.client.list()]
    assert not list((cluster.home / "runs").glob("refused-*"))


def test_files_that_others_can_write_and_labels_that_collide_are_refused(
    cluster: package.LocalCluster, tree: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def exact(response):\n    return 1.0\n")
    file.chmod(0o622)
    check_refused(cluster, tree, tmp_path, "submit", {"file": "reward.py:exact"}, "other users can write the file")
    file.chmod(0o600)
    both = [{"file": "reward.py:exact"}, {"name": "exact"}]
    check_refused(cluster, tree, tmp_path, "submit", both, "two parts have the label 'exact'")
    check_refused(cluster, tree, tmp_path, "submit", [], "the list of rewards is empty")
    file.write_text("import no_such_module\n")
    check_refused(cluster, tree, tmp_path, "run", {"file": "reward.py:exact"}, "no_such_module")


def test_a_run_with_a_bad_file_starts_no_cluster(tree: dict[str, Any], tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({**tree, "reward": {"file": "absent.py:score"}}))
    done = gcore("run", str(spec), "--home", str(tmp_path / "home"), check=2)
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "home").exists()


def test_without_the_key_in_the_home_of_the_cluster_a_file_is_refused(
    cluster: package.LocalCluster, tree: dict[str, Any], plugins: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({**tree, "name": "refused", "reward": {"file": f"{plugins}:digits"}}))
    known = LocalClusterState.load(cluster.home)
    assert known is not None
    done = gcore("submit", str(spec), "--address", known.addresses[0], check=NotAllowed.exit_code)
    assert "only the owner of this local cluster" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "refused" not in [job.name for job in cluster.client.list()]


INTERRUPTED = """
import json, sys
import gcore
def graded(response): return len(response) / 8
gcore.run(json.loads(sys.argv[1]), reward=graded, home=sys.argv[2])
"""


@pytest.mark.parametrize("when", ["while the cluster starts", "while the job runs"])
def test_an_interrupted_call_leaves_no_process_and_no_half_started_cluster(
    when: str, tree: dict[str, object], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    endless = json.dumps({**tree, "flow": {"steps": 10_000, "groups_per_step": 8, "samples_per_prompt": 2}})
    script = tmp_path / "call.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, "-u", str(script), endless, str(home)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        if when == "while the cluster starts":
            while process.poll() is None and not home_processes(home):
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGINT)
            said = process.stdout.read()
        else:
            said = ""
            for line in process.stdout:
                said += line
                if line.startswith("step: "):
                    os.killpg(process.pid, signal.SIGINT)
                    break
            said += process.stdout.read()
            assert "the same call continues the job" in said
        assert process.wait() != 0, said
        assert "KeyboardInterrupt" in said
        assert home_processes(home) == (), said
        assert not (home / "cluster.json").exists()
    finally:
        subprocess.run([sys.executable, "-c", PROGRAM, "down", "--home", str(home)], capture_output=True, check=False)
