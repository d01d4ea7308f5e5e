"""The engine as a process: how it starts, what it tells its supervisor, which models it refuses, how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from gcore.rollout.engine.core import Core
from gcore.rollout.engine.model import install, load, stage
from gcore.rollout.engine.prove import prove
from gcore.rollout.engine.tasks import Delivery, Sampling, Task
from gcore.testing.tiny_model import VOCABULARY, make_tiny_model
from gcore.worker.child import CONTROL_FD, ORPHANED_EXIT

TIMEOUT_S = 120


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=40_000, ends=False)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **more}


class Supervisor:
    """The other end of the control line."""

    def __init__(self, launch: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gcore.rollout.engine"],
            env=environment(**{CONTROL_FD: str(theirs.fileno())}),
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        ours.settimeout(TIMEOUT_S)
        self._socket = ours
        self._lines = ours.makefile("r", encoding="utf-8")
        self.say(launch)

    def say(self, message: dict[str, Any]) -> None:
        self._socket.sendall((json.dumps(message) + "\n").encode())

    def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._lines.readline())
        return message

    def hear_until(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        heard = [self.hear()]
        while not wanted(heard[-1]):
            heard.append(self.hear())
        return heard

    def hang_up(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    started: list[Supervisor] = []

    def start(model: Path, **more: Any) -> Supervisor:
        document = {"kind": "engine", "model": str(model), "host": "127.0.0.1", "port": 0, "batch_slots": 4}
        document |= {"threads": 1, "dtype": "float32", "weight_version": "2.5"}
        started.append(Supervisor(document | more))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.process.kill()
        supervisor.process.communicate()
        supervisor.hang_up()


def test_a_supervised_engine_tells_that_it_serves_and_how_it_gets_on_and_stops_when_told(
    folder: Path, supervise: Callable[..., Supervisor]
) -> None:
    supervisor = supervise(folder)
    serving = supervisor.hear()
    assert serving["event"] == "serving"
    assert supervisor.hear() == {"event": "progress", "phase": "waiting", "progress": 0}
    with httpx.Client(base_url=f"http://{serving['address']}", trust_env=False, timeout=TIMEOUT_S) as http:
        assert http.get("/model_info").json()["weight_version"] == "2.5"
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4000}}
        assert http.post("/generate", json=body).status_code == 200
    heard = supervisor.hear_until(lambda m: m["phase"] == "waiting")
    assert {m["event"] for m in heard} == {"progress"}
    assert {m["phase"] for m in heard[:-1]} == {"generate"}
    progress = [m["progress"] for m in heard]
    assert len(progress) > 2
    assert all(later > earlier for earlier, later in pairwise(progress[:-1]))
    supervisor.say({"command": "stop"})
    assert supervisor.process.wait(TIMEOUT_S) == 0


def test_stop_ends_an_engine_that_is_busy(folder: Path, supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(folder)
    address = supervisor.hear()["address"]
    body = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 30_000}}).encode()
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        supervisor.hear_until(lambda m: m.get("phase") == "generate")
        supervisor.say({"command": "stop"})
        assert supervisor.process.wait(TIMEOUT_S) == 0


def test_an_engine_does_not_outlive_its_supervisor(folder: Path, supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(folder)
    supervisor.hear()
    supervisor.hang_up()
    assert supervisor.process.wait(TIMEOUT_S) == ORPHANED_EXIT


def test_a_supervisor_hears_why_an_engine_could_not_start(tmp_path: Path, supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(tmp_path)
    heard = supervisor.hear()
    assert heard["event"] == "failed"
    assert str(tmp_path) in heard["reason"]
    assert supervisor.process.wait(TIMEOUT_S) == 2


def test_a_launch_document_with_an_unknown_key_is_refused(folder: Path, supervise: Callable[..., Supervisor]) -> None:
    assert "slots" in supervise(folder, slots=4).hear()["reason"]


@pytest.mark.parametrize(
    "prepare", ["nothing there", "an empty folder", "a broken config", "no weights", "broken weights"]
)
def test_a_folder_that_is_no_model_is_one_sentence_and_exit_code_two(
    tmp_path: Path, folder: Path, prepare: str
) -> None:
    model = tmp_path / "model"
    if prepare != "nothing there":
        model.mkdir()
    if prepare == "a broken config":
        (model / "config.json").write_text("{")
    if prepare in ("no weights", "broken weights"):
        (model / "config.json").write_text((folder / "config.json").read_text())
    if prepare == "broken weights":
        (model / "model.safetensors").write_bytes(b"nothing")
    one_sentence(run_engine("--model", str(model)), str(model))


def test_a_port_in_use_is_one_sentence_and_exit_code_two(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one_sentence(run_engine("--model", str(folder), "--port", str(port)), f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("option", "value"), [("--batch-slots", "0"), ("--dtype", "int3"), ("--port", "x"), ("--device", "cuda")]
)
def test_an_option_that_does_not_fit_is_one_sentence_and_exit_code_two(folder: Path, option: str, value: str) -> None:
    one_sentence(run_engine("--model", str(folder), option, value), value)


def run_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gcore.rollout.engine", *arguments],
        env=environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def one_sentence(ended: subprocess.CompletedProcess[str], names: str) -> None:
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert names in ended.stderr
    assert ended.stdout == ""


def test_an_interrupted_engine_ends_without_a_traceback(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore.rollout.engine", "--model", str(folder)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving on 127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert errors == ""
    assert process.returncode == 130


SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
LLAMA_LIKE = {
    **SMALL, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
SERVED: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA_LIKE),
    "llama with other rope": lambda: transformers.LlamaConfig(
        **LLAMA_LIKE, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA_LIKE),
    "mistral with a window as long as its context": lambda: transformers.MistralConfig(**LLAMA_LIKE, sliding_window=128),
    "mixture of experts": lambda: transformers.Qwen3MoeConfig(
        **LLAMA_LIKE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, n_positions=128, vocab_size=VOCABULARY, eos_token_id=None, bos_token_id=None
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_attention_heads=4, max_position_embeddings=128
    ),
}  # fmt: skip
REFUSED: dict[str, Callable[[], Any]] = {
    "a sliding window": lambda: transformers.MistralConfig(**LLAMA_LIKE, sliding_window=32),
    "some layers with a window": lambda: transformers.Qwen3Config(
        **LLAMA_LIKE, head_dim=8, use_sliding_window=True, sliding_window=32, max_window_layers=1
    ),
    "soft-capped attention": lambda: transformers.Gemma2Config(**LLAMA_LIKE, head_dim=8, sliding_window=128),
    "a state space": lambda: transformers.MambaConfig(**SMALL, hidden_size=32, state_size=8),
    "attention with a linear bias": lambda: transformers.BloomConfig(
        n_layer=2, n_head=4, hidden_size=32, vocab_size=VOCABULARY
    ),
    "positions that depend on the batch": lambda: transformers.LlamaConfig(
        **LLAMA_LIKE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
}  # fmt: skip


def save(config: Any, folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def finish(core: Core, tasks: list[Task]) -> dict[int, Delivery]:
    core.submit(tasks)
    while core.can_work:
        core.cycle()
    return {delivery.number: delivery for delivery in core.outbox}


@pytest.mark.parametrize("name", SERVED)
def test_a_model_with_full_attention_is_served_as_its_plain_forward_pass_says(tmp_path: Path, name: str) -> None:
    folder = save(SERVED[name](), tmp_path)
    model = load(folder, dtype="float32", device="cpu", context=None, text=None)
    prove(model, folder)
    prompts = [tuple(range(3, 3 + length)) for length in (2, 30, 7, 1, 12, 30)]
    tasks = [Task(n, "", ids, Sampling(60 - 7 * n, seed=n)) for n, ids in enumerate(prompts)]
    done = finish(Core(model, None, slots=2, version="0.0"), tasks)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, ids in enumerate(prompts):
        tokens = torch.tensor([[*ids, *done[number].tokens]])
        with torch.inference_mode():
            logits = plain(tokens).logits[0, len(ids) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(-1, tokens[0, len(ids) :, None])[:, 0]
        assert (expected - torch.tensor(done[number].logprobs)).abs().max() < 1e-4
        assert len(done[number].tokens) == 60 - 7 * number


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_its_cache_cannot_serve_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    folder = save(REFUSED[name](), tmp_path)
    ended = run_engine("--model", str(folder))
    one_sentence(ended, "the torch engine cannot serve this model")
    assert "Serve it with SGLang instead" in ended.stderr


@pytest.mark.parametrize("name", ["llama", "mixture of experts"])
def test_weights_are_changed_from_a_folder_as_transformers_saves_it(tmp_path: Path, name: str) -> None:
    first, second = save(SERVED[name](), tmp_path / "first"), save(SERVED[name](), tmp_path / "second", seed=1)
    model = load(first, dtype="float32", device="cpu", context=None, text=None)
    install(model, stage(model, second))
    expected = transformers.AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32).state_dict()
    found = model.module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_weights_that_become_nonsense_end_samples_with_a_reason(folder: Path) -> None:
    model = load(folder, dtype="float32", device="cpu", context=None, text=None)
    prove(model, folder)
    core = Core(model, None, slots=2, version="0.0")
    core.submit([Task(n, "", (3, 4), Sampling(50, seed=n)) for n in range(3)])
    for _ in range(5):
        core.cycle()
    with torch.no_grad():
        model.module.get_input_embeddings().weight.fill_(float("nan"))
    while core.can_work:
        core.cycle()
    assert len(core.outbox) == 3
    for delivery in core.outbox:
        assert delivery.ending is not None
        assert delivery.ending.kind == "abort"
        assert "not finite" in str(delivery.ending.message)
        assert len(delivery.tokens) == len(delivery.logprobs)
        assert all(logprob == logprob for logprob in delivery.logprobs)


def test_half_precision_is_served_near_its_plain_forward_pass(folder: Path) -> None:
    model = load(folder, dtype="bfloat16", device="cpu", context=None, text=None)
    prove(model, folder)
    done = finish(Core(model, None, slots=2, version="0.0"), [Task(0, "", (3, 4, 5), Sampling(40, seed=0))])
    assert len(done[0].tokens) == 40
