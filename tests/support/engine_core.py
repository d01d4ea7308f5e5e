"""The engine's core in the test's own process: small models of many kinds, whole runs, and plain transformers as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from gcore.engines.launch import EngineLaunch
from gcore.engines.request import GenerationRequest, RequestOutput, RequestSampling
from gcore.engines.torch.engine import EngineCore
from gcore.engines.torch.server import start_engine
from gcore.testing.models import VOCABULARY

SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
LLAMA_LIKE = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def save(config: Any, folder: Path, seed: int = 0, std: float = 0.2) -> Path:
    """A model of this configuration with weights far from uniform, as transformers saves it."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    return folder


def make_core(folder: Path, **launch: Any) -> EngineCore:
    """A core that serves the folder on the CPU."""
    return start_engine(EngineLaunch(model=str(folder), device="cpu", **launch), None)


def task(number: int, prompt: Iterable[int], limit: int, **sampling: Any) -> GenerationRequest:
    """Sample `number`, seeded by its number unless told otherwise."""
    return GenerationRequest(
        number, f"r{number}", tuple(prompt), RequestSampling(limit, **({"seed": number} | sampling))
    )


def prompt(number: int, length: int, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    """Some tokens; another number makes other tokens."""
    return tuple((number * 31 + i * 7) % (vocabulary - 3) + 3 for i in range(length))


def finish(
    core: EngineCore, tasks: list[GenerationRequest], between: Callable[[int], None] = lambda cycle: None
) -> dict[int, RequestOutput]:
    """Run the tasks to their end; `between` is called after each cycle with its number."""
    core.submit(tasks)
    cycle = 0
    while core.can_work:
        core.cycle()
        cycle += 1
        between(cycle)
    done = {delivery.number: delivery for delivery in core.outbox if delivery.ending is not None}
    core.outbox.clear()
    return done


class Plain:
    """Plain transformers, one full forward pass for each sequence."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def table(self, ids: Iterable[int], temperature: float = 1.0) -> torch.Tensor:
        """[token, vocabulary] log-probabilities of what follows each token."""
        logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float() / (temperature or 1.0), -1)

    def worst(self, one: GenerationRequest, delivery: RequestOutput) -> float:
        """The largest error of the delivery's log-probabilities."""
        tokens = torch.tensor(delivery.tokens)
        table = self.table([*one.prompt, *delivery.tokens], one.sampling.temperature)[len(one.prompt) - 1 : -1]
        expected = table.gather(-1, tokens[:, None])[:, 0]
        return float((expected - torch.tensor(delivery.logprobs)).abs().max())
