"""The start of SGLang's server: command line, environment variables and error output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.engines.launch import SglangLaunch, parse_launch
from gcore.engines.sglang.adapter import last_log_lines
from gcore.engines.sglang.command import (
    CPU_CACHE_TOKENS,
    DROPPED,
    GUARDS,
    OURS,
    server_command,
    server_environment,
)
from gcore.errors import UsageError


def launch(**more: Any) -> SglangLaunch:
    return SglangLaunch.model_validate({"python": "/env/bin/python", "model": "/m"} | more)


def options(words: tuple[str, ...]) -> dict[str, str]:
    """Options with their values, as argparse takes them: the last one stands."""
    found = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else ""
            found[word] = value
    return found


def test_a_cpu_server_is_told_everything_that_keeps_it_to_the_cpu() -> None:
    words = server_command(launch(batch_slots=7, prefill_chunk_tokens=64), 4711)
    assert words[:3] == ("/env/bin/python", "-m", "sglang.launch_server")
    assert options(words) == {
        "--model-path": "/m",
        "--host": "127.0.0.1",
        "--port": "4711",
        "--weight-version": "0.0",
        "--dtype": "float32",
        "--max-running-requests": "7",
        "--chunked-prefill-size": "64",
        "--enable-metrics": "",
        "--sleep-on-idle": "",
        "--log-level-http": "warning",
        "--skip-server-warmup": "",
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--mem-fraction-static": "0.3",
        "--disable-overlap-schedule": "",
        "--disable-cuda-graph": "",
        "--disable-radix-cache": "",
        "--max-total-tokens": str(CPU_CACHE_TOKENS),
    }


def test_a_gpu_server_sleeps_shares_its_memory_and_keeps_sglangs_own_kernels() -> None:
    said = options(server_command(launch(device="cuda", gpus=2, first_gpu=4, dtype="bfloat16"), 1))
    assert said["--device"] == "cuda"
    assert said["--tp-size"] == "2"
    assert said["--base-gpu-id"] == "4"
    assert said["--dtype"] == "bfloat16"
    assert 0 < float(said["--mem-fraction-static"]) < 1
    assert "--enable-memory-saver" in said
    assert not said.keys() & {"--attention-backend", "--sampling-backend", "--disable-cuda-graph", "--max-total-tokens"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_bound_on_the_cache_and_a_context_length_are_passed_on(device: str) -> None:
    said = options(
        server_command(launch(device=device, cache_tokens=999, context_length=100, trust_remote_code=True), 1)
    )
    assert said["--max-total-tokens"] == "999"
    assert said["--context-length"] == "100"
    assert "--trust-remote-code" in said


def test_a_cpu_cache_holds_at_least_one_whole_context() -> None:
    said = options(server_command(launch(context_length=CPU_CACHE_TOKENS + 1), 1))
    assert said["--max-total-tokens"] == str(CPU_CACHE_TOKENS + 1)


def test_engine_args_of_the_job_come_last() -> None:
    words = server_command(launch(engine_args=("--mem-fraction-static", "0.5", "--max-running-requests=3")), 1)
    assert words[-3:] == ("--mem-fraction-static", "0.5", "--max-running-requests=3")
    assert options(words)["--mem-fraction-static"] == "0.5"


@pytest.mark.parametrize("name", [*OURS, *GUARDS, "--api-k", "--ssl-cert", "--conf"])
@pytest.mark.parametrize("form", ["{} x", "{}=x"])
def test_engine_args_that_gcore_sets_are_refused(name: str, form: str) -> None:
    with pytest.raises(UsageError, match=rf"rollout\.engine_args: {name} is set by gcore"):
        server_command(launch(engine_args=tuple(form.format(name).split())), 1)


def test_a_server_that_others_reach_has_a_key_and_a_certificate() -> None:
    tls = {"ca": "/ca.pem", "cert": "/cert.pem", "key": "/key.pem"}
    told = options(server_command(launch(api_key="k", tls=tls), 4711))
    assert (told["--api-key"], told["--ssl-certfile"], told["--ssl-keyfile"]) == ("k", "/cert.pem", "/key.pem")
    assert "--enable-ssl-refresh" in told
    assert not {"--api-key", "--ssl-certfile"} & options(server_command(launch(), 4711)).keys()
    assert "'k'" not in repr(launch(api_key="k"))


@given(st.dictionaries(st.sampled_from([*DROPPED, "PATH", "HOME", "OMP_NUM_THREADS"]), st.text("ab", max_size=2)))
def test_the_servers_environment_keeps_all_but_what_would_mislead_it(base: dict[str, str]) -> None:
    env = server_environment(launch(threads=3), base, Path("/s"))
    assert not env.keys() & set(DROPPED)
    assert {name: value for name, value in base.items() if name in ("PATH", "HOME")}.items() <= env.items()
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert env["TMPDIR"] == "/s"


def test_a_vision_language_model_never_samples_media_tokens_and_the_server_opens_no_urls(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": 7, "vision_start_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = options(server_command(launch(model=str(tmp_path)), 1))
    assert json.loads(said["--preferred-sampling-params"]) == {"logit_bias": dict.fromkeys(("5", "7", "151656"), -1e9)}
    assert said["--allowed-media-domains"].endswith(".invalid")
    assert (
        server_environment(launch(), {"SGLANG_VLM_CACHE_SIZE_MB": "100"}, Path("/s"))["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert "--preferred-sampling-params" not in options(server_command(launch(model=str(tmp_path)), 1))


def test_a_document_that_does_not_fit_names_the_field() -> None:
    with pytest.raises(UsageError, match=r"batch_slots: .*not 0"):
        parse_launch(SglangLaunch, {"kind": "sglang", "python": "p", "model": "m", "batch_slots": 0})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param((), "", id="nothing"),
        pytest.param(("loading", "", "Killed"), "Killed", id="no error is named"),
        pytest.param(
            (
                "Traceback (most recent call last):",
                "safetensors._safetensors_rust.SafetensorError: header too large",
                "nanobind: leaked 7 types!",
                "[12:00:00] kill_process_tree called",
            ),
            "safetensors._safetensors_rust.SafetensorError: header too large | [12:00:00] kill_process_tree called",
            id="an error under the noise of a falling server",
        ),
        pytest.param(
            ("usage: launch_server.py", "launch_server.py: error: unrecognized arguments: --x"),
            "launch_server.py: error: unrecognized arguments: --x",
            id="argparse's",
        ),
        pytest.param(("ValueError: a", "RuntimeError: b"), "RuntimeError: b", id="the last of several"),
    ],
)
def test_the_last_words_name_the_error(lines: tuple[str, ...], words: str) -> None:
    assert last_log_lines(lines) == words
