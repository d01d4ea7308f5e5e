"""Workers start without torch's compiler and import it on demand. In separate processes, because imports cannot be undone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

BEFORE = "import sys; from gcore.system.torch_imports import leave_compiler_out; leave_compiler_out(); "
TINY = (
    "import torch; from transformers import Qwen3Config, Qwen3ForCausalLM; "
    "model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, "
    "num_attention_heads=2, num_key_value_heads=1, head_dim=4)); "
    "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1); "
    "loss = model(input_ids=torch.arange(8)[None], attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])).logits.sum(); "
    "loss.backward(); optimizer.step(); "
)
HEAVY = ("torch._inductor", "torch._dynamo.eval_frame", "torch.distributed.tensor", "sympy")
STARTS = {
    "an engine": "import gcore.engines.torch.server, gcore.engines.sglang.adapter",
    "a rank": "import gcore.train.models, gcore.train.step",
    "a model and an optimizer's step": TINY,
    "a process group": (
        "import torch.distributed as dist; dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    ),
    "activation checkpointing": (
        "import torch; from torch.utils.checkpoint import checkpoint; "
        "checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()"
    ),
}
ON_DEMAND = {
    "compiler": (
        "import torch, torch._dynamo; "
        "real = torch._dynamo.config; import torch._dynamo.eval_frame; "
        "result = [real.cache_size_limit > 0, type(sys.modules['torch._dynamo']).__name__, "
        "sys.modules['torch._dynamo'] is torch._dynamo]"
    ),
    "settings": (
        "import torch; torch._dynamo.config.cache_size_limit = 3; import torch._dynamo.config as real; "
        "result = [real.cache_size_limit]"
    ),
    "adapters": (
        TINY + "from pathlib import Path; from gcore.config.train import LoraSpec; "
        "from gcore.train.backends.adapters import add_adapters; "
        "add_adapters(model, LoraSpec(rank=2), 0, torch.float32, Path('model')); "
        "result = [sum('.lora_' in name for name, _ in model.named_parameters())]"
    ),
    "masks": (
        "import transformers.masking_utils as masks; "
        "made = masks.TransformGetItemToIndex(); result = [type(made).__module__, callable(made.__enter__)]"
    ),
}
PROGRAM = f"""
{BEFORE}
import json, os, traceback
def loaded(*names):
    return [name for name in names if name in sys.modules]
results = {{}}
for name, start in {STARTS!r}.items():
    exec(start, {{}})
    results[name] = {{"heavy": loaded(*{HEAVY!r}), "grpc": loaded("grpc")}}
print(json.dumps(results), flush=True)
for name, program in {ON_DEMAND!r}.items():
    if os.fork() == 0:
        scope = {{"sys": sys, "result": ["failed"]}}
        try:
            exec(program, scope)
        except Exception:
            traceback.print_exc()
        print(json.dumps({{name: scope["result"]}}), flush=True)
        os._exit(0)
    os.wait()
sys.stderr.flush()
os._exit(0)  # gloo's threads may stop the interpreter on its way out
"""


def run(program: str) -> str:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, list[str]]]:
    """Start everything of `STARTS` in one process, one after the other, and each of `ON_DEMAND` in a child of it."""
    return {name: value for line in run(PROGRAM).splitlines() for name, value in json.loads(line).items()}


@pytest.mark.parametrize("name", STARTS)
def test_no_worker_loads_the_compiler_at_its_start(results: dict[str, dict[str, list[str]]], name: str) -> None:
    assert results[name]["heavy"] == []


def test_engines_serve_http_without_grpc(results: dict[str, dict[str, list[str]]]) -> None:
    assert results["an engine"]["grpc"] == []


@pytest.mark.large
def test_numbers_are_those_of_an_untouched_process() -> None:
    program = "import torch; torch.manual_seed(0); " + TINY + "print(loss.item(), model.lm_head.weight.sum().item())"
    assert run(BEFORE + program) == run(program)


def test_compiler_is_the_real_one_when_imported(results: dict[str, list[object]]) -> None:
    assert results["compiler"] == [True, "module", True]


@pytest.mark.large
def test_a_function_can_still_be_compiled() -> None:
    program = "import torch; compiled = torch.compile(lambda x: x * 2, backend='eager'); print(compiled(torch.ones(1)).item())"
    assert run(BEFORE + TINY + program) == "2.0"


def test_a_setting_of_the_compiler_is_made_in_the_real_one(results: dict[str, list[object]]) -> None:
    assert results["settings"] == [3]


def test_adapters_are_added_in_a_process_without_the_compiler(results: dict[str, list[object]]) -> None:
    assert results["adapters"] == [14]


def test_transformers_masks_get_the_compiler_s_helper_when_they_need_it(results: dict[str, list[object]]) -> None:
    assert results["masks"] == ["torch._dynamo._trace_wrapped_higher_order_op", True]
