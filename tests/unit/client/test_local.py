"""`gcore.run`: what a call may be given, and what a run shows, without a cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import gcore
from gcore.client.local import LocalCluster, LocalRun, _prepare
from gcore.client.local import _line as progress_line
from gcore.client.models import Job
from gcore.errors import Unreachable, UsageError
from gcore.ledger.records.job import KeptPicture
from gcore.observability.events import JobEvent
from gcore.observability.samples import KeptGroup, KeptSample, KeptText, step_folder, write_samples
from gcore.types import PromptRef, Version

TREE: dict[str, Any] = {
    "name": "mine",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "flow": {"steps": 2},
    "rollout": {"max_new_tokens": 4},
}
TEXT = "".join(f"{key}: {json.dumps(value)}\n" for key, value in TREE.items())


def score(response: str, fields: dict[str, Any]) -> float:
    return float(response == fields["answer"])


def exact(response: str) -> float:
    return 1.0


async def waits(response: str) -> float:
    return 1.0


def yields(response: str) -> Any:
    yield 1.0


def takes_nothing() -> float:
    return 1.0


def needs_more(response: str, fields: Any, spec: Any, more: Any) -> float:
    return 1.0


def needs_a_keyword(response: str, *, weight: float) -> float:
    return weight


def weighted(response: str, weight: float = 2.0) -> float:
    return weight


def weighted_third(response: str, fields: Any, weight: float = 2.0) -> float:
    return weight


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in TREE.items() if name != key}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        pytest.param(lambda **k: gcore.run(TREE, reward=exact, **k), "'exact' has the name of an installed reward", id="installed name"),
        pytest.param(lambda **k: gcore.run(TREE, reward=[score, score], **k), "two reward functions are called 'score'", id="twice"),
        pytest.param(
            lambda **k: gcore.run({**TREE, "reward": {"name": "exact"}}, reward=score, **k),
            "the spec has `reward.name`, and the call has the reward function 'score'", id="reward in both",
        ),
        pytest.param(lambda **k: gcore.run(TREE, reward=[], **k), "`reward` is an empty list", id="no function"),
        pytest.param(lambda **k: gcore.run(TREE, reward=waits, **k), "'waits' is asynchronous", id="async"),
        pytest.param(lambda **k: gcore.run(TREE, reward=yields, **k), "'yields' has `yield`", id="generator"),
        pytest.param(lambda **k: gcore.run(TREE, reward=takes_nothing, **k), "takes no response", id="no argument"),
        pytest.param(lambda **k: gcore.run(TREE, reward=needs_more, **k), "needs the argument 'more'", id="four arguments"),
        pytest.param(lambda **k: gcore.run(TREE, reward=needs_a_keyword, **k), "needs the argument 'weight'", id="keyword"),
        pytest.param(lambda **k: gcore.run(TREE, reward=weighted, **k), "receive the fields of the prompt as 'weight'", id="default"),
        pytest.param(lambda **k: gcore.run(TREE, reward=weighted_third, **k), "receive the RewardSpec as 'weight'", id="third default"),
        pytest.param(lambda **k: gcore.run(TREE, reward=len, **k), "'len' is not a function", id="built-in"),
        pytest.param(lambda **k: gcore.run(TREE, reward="exact", **k), "object of type str is not a function", id="a name"),
        pytest.param(lambda **k: gcore.run(without("model"), reward=score, **k), "model", id="no model"),
        pytest.param(lambda **k: gcore.run(without("data"), reward=score, **k), "data", id="no data"),
        pytest.param(lambda **k: gcore.run(without("name"), reward=score, **k), "name", id="no name"),
        pytest.param(lambda **k: gcore.run({**TREE, "modle": {}}, reward=score, **k), "modle", id="unknown section"),
        pytest.param(lambda **k: gcore.run({}, **k), "name", id="empty"),
        pytest.param(lambda **k: gcore.run("nowhere.yaml", **k), "cannot read the spec", id="no file"),
        pytest.param(lambda **k: gcore.run("name: [\nmine", **k), "not valid YAML", id="bad text"),
        pytest.param(lambda **k: gcore.run("- a\n- b\n", **k), "not a mapping", id="list"),
        pytest.param(lambda **k: gcore.run(7, **k), "an object of type int", id="number"),
        pytest.param(lambda **k: gcore.run(TREE, set=["flow.steps"], **k), "section.field=value", id="set"),
        pytest.param(lambda **k: gcore.run(TREE, reward=score, **k), "the model folder does not exist", id="no model folder"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_in_a_sentence_and_starts_nothing(
    call: Callable[..., Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said) as raised:
        call(home=tmp_path / "home", progress=False)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def prepared(spec: Any, *, set: tuple[str, ...] = (), reward: Any = None) -> dict[str, Any]:
    """The spec of a call, with the functions in the working directory."""
    return _prepare(spec, set, reward).write_functions(Path("functions").absolute())


def test_a_file_a_mapping_and_a_text_give_the_same_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TEXT)
    found = prepared(TREE)
    assert found["model"]["path"] == str(tmp_path / "model")
    assert prepared("mine.yaml") == prepared(Path("mine.yaml")) == prepared(TEXT) == found
    assert prepared(TEXT, set=("flow.steps=7",))["flow"]["steps"] == 7


def test_a_function_keeps_the_other_settings_of_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = prepared({**TREE, "reward": {"timeout_s": 60, "answer": "a.b"}}, reward=score)["reward"]
    file, _, name = section["name"].rpartition(":")
    assert (section["timeout_s"], section["answer"], name) == (60, "a.b", "score")
    assert "def score(" in Path(file).read_text()
    assert Path(file).stat().st_mode & 0o777 == 0o600


@gcore.batch_reward
def ranked(responses: list[str], answer: list[str], spec: Any, weight: float = 1.0) -> list[float]:
    return [weight for _ in responses]


def test_several_functions_are_parts_of_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = prepared(TREE, reward=[score, ranked])["reward"]["parts"]
    assert [part["name"].rpartition(":")[2] for part in parts] == ["score", "ranked"]


JOB = Job(
    uid="0123456789ab", name="mine", namespace="default", state="RUNNING", reason="training", step=2, steps=4, lineage=0, priority=0, slots=2,
    queue_position=0, owner="", created=0.0, ended=None, run_dir="", checkpoint="", spec={},
)  # fmt: skip


@pytest.fixture
def under_way(tmp_path: Path) -> LocalRun:
    """A run that has trained steps 1 and 2 and then a second time step 2."""
    import dataclasses

    job = dataclasses.replace(JOB, run_dir=str(tmp_path))
    cluster = SimpleNamespace(_job=lambda known: known, home=tmp_path)
    return LocalRun(job, cast(LocalCluster, cluster))


def write_lines(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


LINES: tuple[dict[str, Any], ...] = (
    {"kind": "start", "seq": 0, "lineage": 0, "step": 0},
    {"kind": "step", "seq": 1, "lineage": 0, "step": 1, "metrics": {"reward": 0.25}},
    {"kind": "step", "seq": 2, "lineage": 0, "step": 2, "metrics": {"reward": 0.5}},
    {"kind": "rollback", "seq": 3, "lineage": 1, "step": 1},
    {"kind": "step", "seq": 4, "lineage": 1, "step": 2, "metrics": {"reward": 0.75}},
    {"kind": "eval", "id": "1.2", "lineage": 1, "step": 2, "metrics": {"accuracy": 0.5}},
)


def test_a_run_before_its_first_step_has_no_numbers_and_no_samples(under_way: LocalRun) -> None:
    assert len(under_way.metrics()) == 0
    assert under_way.evaluations() == []
    assert under_way.samples() == ()
    assert "mine" in repr(under_way)
    assert "RUNNING" in under_way._repr_html_()


def test_metrics_are_rows_without_pandas_and_discarded_steps_are_left_out(
    under_way: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(under_way.folder, *LINES)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert under_way.metrics() == [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.75}]
    assert repr(under_way.metrics()) == "<2 steps: step, reward, ...>"
    assert under_way.evaluations() == [{"step": 2, "accuracy": 0.5}]
    assert "50.0% at step 2" in under_way._repr_html_()


@pytest.mark.notebook
def test_metrics_are_a_data_frame_with_pandas(under_way: LocalRun) -> None:
    import pandas

    write_lines(under_way.folder, *LINES)
    frame = under_way.metrics()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["reward"].to_dict() == {1: 0.25, 2: 0.75}


@pytest.mark.notebook
def test_curves_are_an_image(under_way: LocalRun) -> None:
    write_lines(under_way.folder, *LINES)
    assert under_way.plot()._repr_png_().startswith(b"\x89PNG")


def test_curves_without_matplotlib_are_refused_in_a_sentence(
    under_way: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="matplotlib is not installed"):
        under_way.plot()


def test_samples_are_plain_objects_of_the_newest_step_or_of_a_given_one(under_way: LocalRun) -> None:
    sample = KeptSample(
        response=KeptText(text="4"), tokens=1, reward=0.5, parts=(("right", 1.0),), finish_reason="stop"
    )
    for version in (Version(0, 1), Version(1, 2)):
        group = KeptGroup(
            ref=PromptRef(shard=0, data_epoch=0, seq=version.step), digest=f"d{version.step}", source="data",
            prompt=KeptText(text="2+2="), prompt_tokens=4, answer="4", holder="a", samples=(sample,),
        )  # fmt: skip
        write_samples(under_way.folder, version, "a", [group])
    (newest,) = under_way.samples()
    assert (newest.step, newest.prompt, newest.response, newest.answer) == (2, "2+2=", "4", "4")
    assert (newest.reward, newest.parts, newest.finish_reason) == (0.5, {"right": 1.0}, "stop")
    assert under_way.samples(1)[0].step == 1
    assert "2+2=" in under_way.samples()._repr_html_()
    assert "picture" not in under_way.samples()._repr_html_()
    with pytest.raises(UsageError, match="step 7 has no samples"):
        under_way.samples(7)


def test_a_sample_of_a_policy_that_generates_pictures_names_the_file(under_way: LocalRun) -> None:
    there, gone = (KeptPicture(sha256=name * 32, size=8, height=8, width=8) for name in ("ab", "cd"))
    samples = tuple(
        KeptSample(response=KeptText(text=""), tokens=0, steps=4, reward=1.0, finish_reason="stop", picture=one)
        for one in (there, gone)
    )
    group = KeptGroup(
        ref=PromptRef(shard=0, data_epoch=0, seq=1), digest="d", source="data",
        prompt=KeptText(text="red"), prompt_tokens=4, holder="a", samples=samples,
    )  # fmt: skip
    write_samples(under_way.folder, Version(0, 3), "a", [group])
    file = step_folder(under_way.folder, Version(0, 3)) / f"{there.sha256}.png"
    file.touch()
    assert [one.picture for one in under_way.samples()] == [file, None]
    assert str(file) in under_way.samples()._repr_html_()


def test_a_line_of_progress_has_the_reward_and_no_control_codes() -> None:
    event = JobEvent(1, 0.0, "step", "step 3 committed\nmore", {"step": 3, "stats": {"reward": 0.25}, "failed": 2})
    assert progress_line(event) == "step: step 3 committed (reward 0.250, 2 prompts failed)"


def test_client_looks_for_the_cluster_in_home_then_in_gcore_home_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GCORE_ADDRESS", "GCORE_CONTEXT", "GCORE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def searched(home: Path | None) -> str | None:
        with pytest.raises(Unreachable) as found:
            gcore.Client(home=home)
        return found.value.where

    assert searched(None) == str(tmp_path / ".gcore/cluster.json")
    monkeypatch.setenv("GCORE_HOME", str(tmp_path / "elsewhere"))
    assert searched(None) == str(tmp_path / "elsewhere/cluster.json")
    assert searched(tmp_path / "given") == str(tmp_path / "given/cluster.json")
    monkeypatch.setenv("GCORE_ADDRESS", "10.0.0.7:7500, 10.0.0.8:7500")
    assert searched(tmp_path / "given") == str(tmp_path / "given/cluster.json")
    client = gcore.Client()
    assert client._inner.jobs.addresses == ("10.0.0.7:7500", "10.0.0.8:7500")
    client.close()
