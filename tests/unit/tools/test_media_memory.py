"""The benchmark of memory by process: which processes count, and what happens at the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import write_spec
from benchmarks.media_memory import (
    GENERATED,
    MARK,
    PAYLOADS,
    MemorySampler,
    Payload,
    generated_spec,
    job_spec,
    kind_of,
    make_model,
    merge_cases,
    write_data,
    wrong,
)
from gcore.config import load_spec, parse_spec
from gcore.media.pictures import inspect_picture
from gcore.media.placeholders import PictureRule
from gcore.models.diffusion.files import PipelineFiles
from gcore.models.diffusion.requests import PictureRequests
from gcore.models.diffusion.windows import kept_states

HOLD = "data = bytearray(64 << 20); print(len(data), flush=True); import time; time.sleep(60)"


def holder(mark: str) -> subprocess.Popen[bytes]:
    """A process that holds 64 MiB until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, env={**os.environ, MARK: mark})
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def holders() -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    own, other = holder("own"), holder("other")
    yield own, other
    for process in (own, other):
        process.kill()
        process.communicate()


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_only_processes_of_the_measured_system_count(holders: Any) -> None:
    own, _ = holders
    with MemorySampler("own") as sampler:
        until(lambda: sampler.total > 64 << 20)
    assert list(sampler.processes) == [own.pid]
    assert sampler.processes[own.pid].anonymous > 64 << 20
    assert sampler.figures()["out_of_memory"] is None


def test_a_system_above_its_limit_is_killed_and_its_memory_reported(holders: Any) -> None:
    own, other = holders
    with MemorySampler("own", limit=32 << 20) as sampler:
        assert own.wait(30) == -9
        until(lambda: sampler.exhausted is not None)
    assert other.poll() is None
    found = sampler.figures()["out_of_memory"]
    assert found["mb"] > 64
    assert sum(found["kinds"].values()) == pytest.approx(found["mb"], abs=2)


def test_processes_are_named_by_their_command_lines() -> None:
    assert kind_of(["python", "-P", "-m", "gcore.media"]) == "blob store"
    assert kind_of(["python", "-m", "controllers.daemon", "--home", "h"]) == "controller"
    assert kind_of(["ray::AgentLoopWorker.generate_sequences"]) == "rollout worker"
    assert kind_of(["python", "-m", "a.module"]) == "a.module"
    assert kind_of(["/bin/sh", "-c", "read never"]) == "sh"


def case(system: str, nodes: int, **more: Any) -> dict[str, Any]:
    return {"system": system, "payload": PAYLOADS["64x8"].name, "nodes": nodes, "pictures": True, **more}


def test_a_result_keeps_cases_that_were_not_measured_again() -> None:
    earlier = [case("gcore", 2, commit="a"), case("verl", 2, commit="a")]
    found = merge_cases(earlier, [case("verl", 2, commit="b"), case("gcore", 4, commit="b")])
    assert [(one["system"], one["nodes"], one["commit"]) for one in found] == [
        ("gcore", 2, "a"),
        ("gcore", 4, "b"),
        ("verl", 2, "b"),
    ]


def test_a_message_above_the_limit_and_memory_that_ran_out_fail_the_benchmark() -> None:
    good = case("gcore", 2, out_of_memory=None, messages_bytes={"gRPC /a": 1 << 20})
    assert wrong({"cases": [good, case("verl", 2, out_of_memory={"mb": 9000})]}) == ""
    assert "more than 1 MiB" in wrong({"cases": [good | {"messages_bytes": {"gRPC /a": (1 << 20) + 1}}]})
    assert "out of memory" in wrong({"cases": [good | {"out_of_memory": {"mb": 9000}}]})


def test_a_busiest_store_that_holds_no_less_on_more_nodes_fails_the_benchmark() -> None:
    def stores(*made: float) -> dict[str, Any]:
        found = {f"node-{number}": {"made": one, "fetched": 1.0} for number, one in enumerate(made)}
        return {"stores_mb": found, "out_of_memory": None, "messages_bytes": {}}

    two, four = case("gcore", 2, **stores(100, 90)), case("gcore", 4, **stores(60, 40, 50, 50))
    assert wrong({"cases": [four, two]}) == ""
    assert "as many bytes" in wrong({"cases": [two, case("gcore", 4, **stores(100, 10, 20, 60))]})


def test_prompts_of_text_have_as_many_tokens_as_those_with_pictures(tmp_path: Path) -> None:
    payload = Payload(groups=1, samples=2, group_mb=3, sample_mb=1, side=576)
    model = make_model(tmp_path / "model")
    write_data(tmp_path / "data", payload, model, steps=1)
    seen, text = (json.loads((tmp_path / "data" / f"{name}.jsonl").read_text()) for name in ("pictures", "text"))
    rule = PictureRule.load(model)
    pictures = [inspect_picture(tmp_path / "data" / name) for name in seen["images"]]
    tokens = sum(rule.token_count(one.height, one.width) + 2 for one in pictures)
    assert len(text["prompt"]) == tokens + len(seen["prompt"].replace("<image>", ""))
    assert len(pictures) == 3
    for wanted in (True, False):
        parse_spec(job_spec(tmp_path / "data", payload, model, 1, pictures=wanted))


@pytest.mark.parametrize("name", list(GENERATED))
def test_jobs_of_generated_pictures_keep_the_states_that_are_computed(name: str, tmp_path: Path) -> None:
    drawn = GENERATED[name]
    spec = load_spec(write_spec(tmp_path / "job.yaml", generated_spec(tmp_path, drawn, 1, large=True)))
    requests = PictureRequests(spec, PipelineFiles.read(tmp_path / "pipeline"))
    assert requests.state_shape == (16, 64, 64)
    asked = requests.params("a", 0, (1, 2)).random_steps
    assert drawn.states == (1 if asked is None else len(kept_states(asked)))
    assert drawn.state_bytes == drawn.states << 18, "a state has 256 KiB"


def test_generated_pictures_need_the_computed_bytes_and_a_controller_without_them() -> None:
    drawn = GENERATED["generated-last"]
    states = drawn.state_bytes * 64 * 16 / 1e6

    def of(made: float, mb: float, *, large: bool) -> dict[str, Any]:
        found = case("gcore", 2, payload=drawn.name, steps=1, out_of_memory=None, messages_bytes={})
        stores = {"node-0": {"made": made, "fetched": 0.0}}
        return found | {"pictures": large, "stores_mb": stores, "kinds": {"controller": {"anonymous_mb": mb}}}

    small = of(1.0, 90.0, large=False)
    assert wrong({"cases": [of(states + 900, 95.0, large=True), small]}) == ""
    assert "were made" in wrong({"cases": [of(states - 1, 95.0, large=True), small]})
    assert "were made" in wrong({"cases": [of(states + 2000, 95.0, large=True), small]})
    assert "60 MB more" in wrong({"cases": [of(states + 900, 150.0, large=True), small]})
