"""Workers start without torch's compiler and import it on demand. In separate processes, because imports cannot be undone."""

from __future__ import annotations

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


def run(program: str) -> str:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "program",
    ["import gcore.engines.torch.server; ", "import gcore.train.models, gcore.train.step; ", TINY],
    ids=["an engine", "a rank", "a model and an optimizer's step"],
)
def test_no_worker_loads_the_compiler_at_its_start(program: str) -> None:
    assert run(BEFORE + program + f"print([m for m in {HEAVY!r} if m in sys.modules])") == "[]"


@pytest.mark.large
def test_numbers_are_those_of_an_untouched_process() -> None:
    program = "import torch; torch.manual_seed(0); " + TINY + "print(loss.item(), model.lm_head.weight.sum().item())"
    assert run(BEFORE + program) == run(program)


def test_compiler_is_the_real_one_when_imported() -> None:
    program = (
        "import torch, torch._dynamo; "
        "real = torch._dynamo.config; import torch._dynamo.eval_frame; "
        "print(real.cache_size_limit > 0, type(sys.modules['torch._dynamo']).__name__, "
        "sys.modules['torch._dynamo'] is torch._dynamo)"
    )
    assert run(BEFORE + program) == "True module True"


@pytest.mark.large
def test_a_function_can_still_be_compiled() -> None:
    program = "import torch; compiled = torch.compile(lambda x: x * 2, backend='eager'); print(compiled(torch.ones(1)).item())"
    assert run(BEFORE + TINY + program) == "2.0"


def test_transformers_masks_get_the_compiler_s_helper_when_they_need_it() -> None:
    program = (
        "import transformers.masking_utils as masks; "
        "made = masks.TransformGetItemToIndex(); print(type(made).__module__, callable(made.__enter__))"
    )
    assert run(BEFORE + program) == "torch._dynamo._trace_wrapped_higher_order_op True"
