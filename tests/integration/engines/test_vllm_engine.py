"""The vLLM engine under its supervisor's line, on the CPU (make test-vllm). The engine contract covers its routes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_processes import require_python, vllm_command
from sglang_worker import LONG_S, Worker, check_ended, start_worker

from gcore.engines.environments import VLLM
from gcore.engines.launch import VllmLaunch
from gcore.engines.vllm.command import ENVIRONMENT, engine_words
from gcore.testing.models import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=2000, ends=False, hidden=64, heads=2, kv_heads=1)


@pytest.fixture
def start(tmp_path: Path, folder: Path) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def begin(**more: Any) -> Worker:
        document = {"kind": "vllm", "model": str(folder), "batch_slots": 4, **more}
        started.append(start_worker(document, tmp_path / f"log{len(started)}", vllm_command()))
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


def test_it_serves_reports_progress_and_stops_on_request(start: Callable[..., Worker]) -> None:
    worker = start(weight_version="2.7", api_key="k")
    url = f"http://{worker.hear('serving')['address']}"
    with httpx.Client(base_url=url, headers={"authorization": "Bearer k"}, trust_env=False, timeout=LONG_S) as http:
        assert http.get("/model_info").json()["weight_version"] == "2.7"
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
        assert len(http.post("/generate", json=body).json()["output_ids"]) == 1500
        worker.hear("progress", phase="generate")
        assert worker.hear("progress", phase="waiting")["progress"] >= 1500
        refused = http.post("/release_memory_occupation", json={})
        assert refused.status_code == 400
        assert "cannot release its memory on a CPU" in refused.json()["error"]["message"]
        assert http.get("/server_info").json()["engine"] == "vLLM"
    worker.say("stop")
    assert worker.process.wait(LONG_S) == 0


def test_a_killed_engine_leaves_no_process_behind(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.hear("serving")
    processes = worker.below()
    os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait(LONG_S)
    check_ended(processes)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        pytest.param({"engine_args": ["--no-such-option"]}, "vLLM does not accept its arguments", id="an option"),
        pytest.param(
            {"engine_args": ["--async-scheduling"]}, "--async-scheduling is set by gcore", id="one of gcore's"
        ),
        pytest.param({"task": "classify"}, "vLLM serves no classifiers", id="a classifier"),
        pytest.param({"model": "/nowhere"}, "not a model folder", id="no model"),
    ],
)
def test_a_start_that_fails_is_reported_with_a_sentence(
    start: Callable[..., Worker], more: dict[str, Any], words: str
) -> None:
    worker = start(**more)
    assert words in worker.hear("failed")["reason"]
    assert worker.process.wait(LONG_S) != 0


def test_a_model_that_vllms_kernels_cannot_run_is_refused_before_it_serves(
    start: Callable[..., Worker], tmp_path: Path
) -> None:
    narrow = make_tiny_model(tmp_path / "narrow")  # heads of 8
    assert "vLLM cannot run this model: Unsupported" in start(model=str(narrow)).hear("failed")["reason"]


PARSE = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
args = EngineArgs.from_cli_args(parser.parse_args(sys.argv[1:]))
print(args.tensor_parallel_size, args.enable_sleep_mode, args.enable_prefix_caching, args.gpu_memory_utilization)
"""


def test_vllm_knows_every_option_that_a_gpu_engine_is_given_and_takes_the_jobs_word_last() -> None:
    more = ("--gpu-memory-utilization", "0.25")
    launch = VllmLaunch(model="/m", device="cuda", gpus=2, trust_remote_code=True, engine_args=more)
    command = [str(require_python(VLLM)), "-W", "ignore", "-c", PARSE, *engine_words(launch)]
    env = {**os.environ, **ENVIRONMENT}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-4:] == ["2", "True", "True", "0.25"]
