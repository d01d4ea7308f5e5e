"""vLLM's engine core as gcore drives it, with a scripted client in vLLM's place.

The client keeps to the rules of vLLM 0.32 that the core relies on: what it returns for a step, which calls preempt, and
how it sleeps and wakes. Its build for CPUs cannot sleep, so only this client shows that part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gcore.engines.detokenizer import Detokenizer
from gcore.engines.launch import VllmLaunch
from gcore.engines.request import GenerationRequest, RequestOutput, RequestSampling
from gcore.engines.torch.kv_cache import CacheShape
from gcore.engines.torch.model import StagedWeights
from gcore.engines.vllm.command import OURS, ROWS, check_engine_args, engine_words
from gcore.engines.vllm.core import ServedModel, VllmCore, VllmLimits, load_weights
from gcore.errors import EngineError, UsageError
from gcore.models.adapters import AdapterConfig, meta_tensors
from gcore.models.hubs import ADAPTER_CONFIG
from gcore.models.layout import ADAPTER_FILE
from gcore.testing.models import make_tiny_model, save_tokenizer

ALL = frozenset({"weights", "kv_cache"})
STOP, LENGTH = 0, 1
TENSORS = {"q": torch.empty(2, 2, device="meta"), "k": torch.empty(2, 2, device="meta")}


class ScriptedClient:
    """In vLLM's place: each step gives each running request its next token (0, 1, 2, ...)."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(running=[], waiting=[], requests={})
        self.engine_core = SimpleNamespace(scheduler=self.scheduler)
        self.loaded: list[dict[str, Any]] = []
        self.asleep: set[str] = set()
        self.calls: list[Any] = []

    def add_request(self, request: SimpleNamespace) -> None:
        self.scheduler.requests[request.name] = request
        self.scheduler.waiting.append(request)

    def get_output(self) -> SimpleNamespace:
        assert not self.asleep, "a sleeping engine has no step"
        self.scheduler.running += self.scheduler.waiting
        self.scheduler.waiting = []
        outputs = [self._step(request) for request in list(self.scheduler.running)]
        return SimpleNamespace(outputs=outputs)

    def _step(self, request: SimpleNamespace) -> SimpleNamespace:
        token = request.made
        request.made += 1
        ends = LENGTH if request.made == request.most else None
        if ends is not None:
            self.abort_requests([request.name])
        logprobs = (np.array([[token]]), np.array([[-0.5]], np.float32), None, None)
        stats = SimpleNamespace(num_cached_tokens=0)
        return SimpleNamespace(
            request_id=request.name,
            new_token_ids=[token],
            new_logprobs=logprobs,
            new_prompt_logprobs_tensors=None,
            prefill_stats=stats,
            finish_reason=ends,
            stop_reason=None,
        )

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            request = self.scheduler.requests.pop(name, None)
            for queue in (self.scheduler.running, self.scheduler.waiting):
                if request in queue:
                    queue.remove(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        for request in self.scheduler.running:
            request.num_preemptions += 1
        self.scheduler.waiting = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler.running = []
        return True

    def collective_rpc(self, method: Any, kwargs: dict[str, Any]) -> None:
        assert method is load_weights
        assert not self.asleep, "vLLM would write to memory that it has released"
        self.loaded.append(kwargs)

    def sleep(self, level: int, mode: str) -> None:
        assert not self.asleep, "vLLM's allocator fails if memory is released twice"
        assert (level, mode) == (1, "keep"), "other levels lose the weights, other modes the waiting requests"
        self.asleep = set(ALL)
        self.calls.append("sleep")

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep, "vLLM's allocator fails if memory is restored twice"
        self.asleep -= set(tags)
        self.calls.append(tags)


def request_of(name: str, task: GenerationRequest) -> SimpleNamespace:
    return SimpleNamespace(name=name, made=0, most=task.sampling.max_new_tokens, num_preemptions=0)


def make_core(
    text: Detokenizer | None = None,
    *,
    sleeps: bool = True,
    shares: bool = False,
    folder: Path = Path("model"),
    tensors: Mapping[str, torch.Tensor] = TENSORS,
) -> VllmCore:
    shape = CacheShape((), torch.float32, torch.device("cpu"))
    model = ServedModel(folder, tensors, 49, 100, (1,), None, shape)
    limits = VllmLimits(4, 1000, shares_prefixes=shares, sleeps=sleeps)
    return VllmCore(ScriptedClient(), model, text, limits, version="0.0", request_of=request_of)


def client_of(core: VllmCore) -> ScriptedClient:
    client: ScriptedClient = core._client
    return client


def ask(core: VllmCore, number: int = 0, *, most: int = 8, **more: Any) -> None:
    core.submit([GenerationRequest(number, f"r{number}", (5, 6), RequestSampling(most, seed=1, **more))])


def outputs(core: VllmCore) -> list[RequestOutput]:
    found, core.outbox = core.outbox, []
    return found


def test_each_token_has_the_version_that_was_served_at_its_step() -> None:
    core = make_core()
    ask(core, most=5)
    core.cycle()
    core.cycle()
    core.pause("retract")
    core.rename("0.1")
    core.resume()
    while core.can_work:
        core.cycle()
    (output,) = outputs(core)
    assert [(span.version, span.start, span.end) for span in output.spans] == [("0.0", 0, 2), ("0.1", 2, 5)]
    assert (output.tokens, output.retractions) == ((0, 1, 2, 3, 4), 1)
    assert output.logprobs == (-0.5,) * 5


def test_an_abort_returns_the_tokens_so_far_and_frees_them_in_vllm() -> None:
    core = make_core()
    ask(core, 0)
    ask(core, 1)
    core.cycle()
    core.abort(lambda task: task.number == 1)
    (output,) = outputs(core)
    assert (output.number, output.tokens, output.ending and output.ending.kind) == (1, (0,), "abort")
    assert list(client_of(core).scheduler.requests) == ["0"]
    assert (core.running, core.waiting) == (1, 0)


def test_a_stop_string_ends_the_request_in_vllm_too(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, ends=False)
    text = Detokenizer.load(tmp_path)
    assert text is not None
    stop = text.decode([4], skip_special_tokens=False)
    core = make_core(text)
    ask(core, most=30, stop=(stop,))
    for _ in range(5):
        core.cycle()
    (output,) = outputs(core)
    assert (output.tokens, output.ending and output.ending.matched) == ((0, 1, 2, 3, 4), stop)
    assert not client_of(core).scheduler.requests


def test_weights_and_cache_are_released_once_and_restored_part_by_part() -> None:
    core = make_core()
    ask(core)
    core.cycle()
    with pytest.raises(EngineError, match="1 requests are running"):
        core.release(ALL)
    core.pause("abort")
    core.release(ALL)
    core.release(ALL)
    assert core.asleep == ALL
    with pytest.raises(EngineError, match="weights are released"):
        core.change_weights(StagedWeights({}), "0.1", flush=True, abort=False)
    core.wake(frozenset({"weights"}))
    core.wake(frozenset({"weights"}))
    assert core.asleep == {"kv_cache"}
    core.wake(ALL)
    assert core.asleep == frozenset()
    assert client_of(core).calls == ["sleep", ["weights"], ["kv_cache"]]
    core.resume()
    ask(core, 1, most=1)
    core.cycle()
    assert [output.number for output in outputs(core)] == [0, 1]


def test_a_release_while_a_part_is_restored_restores_the_other_part_first() -> None:
    core = make_core()
    core.release(ALL)
    core.wake(frozenset({"weights"}))
    core.release(ALL)
    assert core.asleep == ALL
    assert client_of(core).calls == ["sleep", ["weights"], ["kv_cache"], "sleep"]


def test_a_release_that_vllm_cannot_do_is_refused_and_changes_nothing() -> None:
    with pytest.raises(EngineError, match=r"on a CPU.*placement\.memory: kept"):
        make_core(sleeps=False).release(ALL)
    core = make_core()
    with pytest.raises(EngineError, match="together, not only weights"):
        core.release(frozenset({"weights"}))
    assert not core.asleep
    assert not client_of(core).calls


def test_broadcast_tensors_are_loaded_together_once_all_are_there() -> None:
    core = make_core()
    first, last = StagedWeights({"q": torch.ones(2, 2)}), StagedWeights({"k": torch.ones(2, 2)})
    with pytest.raises(EngineError, match="k was not received"):
        core.change_weights(first, "0.1", flush=True, abort=False)
    core.change_weights(first, None, flush=True, abort=False)
    assert (core.version, client_of(core).loaded) == ("0.0", [])
    core.change_weights(last, "0.1", flush=True, abort=False)
    (options,) = client_of(core).loaded
    assert {name for name, _ in options["weights_iterator"]} == {"q", "k"}
    assert core.version == "0.1"


@pytest.mark.parametrize(("flush", "shares", "preempted"), [(False, False, 0), (True, False, 1), (False, True, 1)])
def test_a_cache_that_later_requests_would_share_does_not_outlive_its_weights(
    flush: bool, shares: bool, preempted: int
) -> None:
    core = make_core(shares=shares)
    ask(core, most=2)
    core.cycle()
    core.pause("in_place")
    core.change_weights(StagedWeights({name: torch.ones(2, 2) for name in TENSORS}), "0.1", flush=flush, abort=False)
    core.resume()
    core.cycle()
    assert outputs(core)[0].retractions == preempted


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"q": torch.ones(2, 2)}, "lacks k"),
        ({"q": torch.ones(2, 2), "k": torch.ones(3, 2)}, "has in another shape k"),
        ({"q": torch.ones(2, 2), "k": torch.ones(2, 2).to(torch.int8)}, "has as integers k"),
        ({name: torch.ones(2, 2) for name in "qkv"}, "has, unknown to the model, v"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_before_vllm_reads_it(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=words):
        make_core().stage_weights(tmp_path)
    fitting = {name: torch.ones(2, 2) for name in ("q", "k", "lm_head.weight")}
    save_file(fitting, tmp_path / "model.safetensors")
    make_core().stage_weights(tmp_path)


def test_adapters_alone_are_added_to_the_model_that_was_loaded(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    tensors = meta_tensors(base)
    name = next(one for one in tensors if one.endswith("q_proj.weight")).removesuffix(".weight")
    rows, columns = tensors[f"{name}.weight"].shape
    a, b = torch.randn(2, columns), torch.randn(rows, 2)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    prefix = f"base_model.model.{name}"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, adapter / ADAPTER_FILE)
    (adapter / ADAPTER_CONFIG).write_bytes(AdapterConfig(str(base), 2, 4.0, ("q_proj",)).encode())
    core = make_core(folder=base, tensors=tensors)
    for version in ("0.1", "0.2"):
        core.change_weights(core.stage_weights(adapter), version, flush=True, abort=False)
        loaded = dict(client_of(core).loaded[-1]["weights_iterator"])
        expected = load_file(base / "model.safetensors")
        expected[f"{name}.weight"] = expected[f"{name}.weight"] + 2 * (b @ a)
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[one], expected[one]) for one in expected)


def launch(**more: Any) -> VllmLaunch:
    return VllmLaunch.model_validate({"model": "/m"} | more)


def options(words: tuple[str, ...]) -> dict[str, str]:
    """Options with their values, as argparse takes them: the last one stands."""
    pairs = zip(words, (*words[1:], "--"), strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_the_command_line_of_vllm_keeps_its_core_in_step_and_the_jobs_arguments_last() -> None:
    told = options(engine_words(launch(batch_slots=7, prefill_chunk_tokens=64, context_length=90)))
    assert (told["--max-num-seqs"], told["--max-num-batched-tokens"], told["--max-model-len"]) == ("7", "71", "90")
    assert told["--logits-processors"] == ROWS
    assert {"--no-async-scheduling", "--enforce-eager", "--no-enable-prefix-caching"} <= told.keys()
    gpu = options(engine_words(launch(device="cuda", gpus=2, engine_args=("--gpu-memory-utilization", "0.8"))))
    assert (gpu["--tensor-parallel-size"], gpu["--gpu-memory-utilization"]) == ("2", "0.8")
    assert {"--enable-sleep-mode", "--enable-prefix-caching"} <= gpu.keys()
    assert "--enforce-eager" not in gpu


@pytest.mark.parametrize("name", [*OURS, "--async", "--logits_processors", "-t"])
@pytest.mark.parametrize("form", ["{} x", "{}=x"])
def test_engine_args_that_gcore_sets_are_refused(name: str, form: str) -> None:
    with pytest.raises(UsageError, match=rf"rollout\.engine_args: {name.replace('_', '-')} is set by gcore"):
        check_engine_args(form.format(name).split())
