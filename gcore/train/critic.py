"""The critic: a model of its own that says, before each token of a response, what is still to come.

It is a language model's backbone, of which only the last hidden states are wanted, and a head of one number. It is fed
the policy's micro-batches, and asked at the same places: where the policy predicts a token, the critic has seen the
prompt and the tokens before that one, and nothing else.

A new head is all zeros. So values begin at 0, and the first advantages are the returns themselves; random values would
be noise in them, of the size of the hidden states. The first update moves the head alone, since nothing flows through
zeros, and the backbone follows from the second on. The head computes in float32 whatever the backbone's arithmetic is:
a value rounded to bfloat16 is up to 0.4 % off, and its loss is made of small differences.

Under Hugging Face's names for a model that classifies tokens (`score`), so that such a model, or one of rewards with a
single number, can be started from, and what is saved is one. Does not know losses, nor when it is trained (`critique`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils import logging as transformers_logging

from gcore.config.train import TrainSpec
from gcore.errors import DataError
from gcore.train.batch import Feeding, MicroBatch
from gcore.train.module import check_names, load_module
from gcore.train.trained import Optimizing, TrainedModel
from gcore.weights.layout import MODEL_FILE

HEAD = "score"


class ValueHead(nn.Linear):
    """Hidden states [..., width] to values [..., 1], float32."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """In float32, from weights of any type."""
        return functional.linear(hidden.float(), self.weight.float(), self.bias.float())


class ValueModel(nn.Module):
    """A causal language model's backbone under its own name, and `score`. Takes what language models take.

    `vocabulary`: the number of tokens that it knows.
    """

    def __init__(self, language_model: nn.Module, head: ValueHead) -> None:
        super().__init__()
        model: Any = language_model
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._prefix: str = model.base_model_prefix
        self.add_module(self._prefix, model.base_model)
        self.add_module(HEAD, head)

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor, **more: Any) -> TokenClassifierOutput:
        """`logits`: the values [b, c, 1] at the columns `logits_to_keep` [c]."""
        hidden = self.get_submodule(self._prefix)(input_ids=input_ids, **more).last_hidden_state
        # A container that DeepSpeed looks into: it hangs its hooks on the tensors that a module gives.
        return TokenClassifierOutput(logits=self.get_submodule(HEAD)(hidden[:, logits_to_keep]))


class Critic(TrainedModel):
    """A model of values being trained."""

    @classmethod
    def of(cls, module: ValueModel, train: TrainSpec, feeding: Feeding) -> Critic:
        """A module in float32, ready to train, Adam's state zero; fed as the policy is."""
        assert train.critic is not None
        return cls(module, Optimizing.of(train, train.critic), feeding)

    def values(self, batch: MicroBatch) -> Tensor:
        """The value before each scored token of a micro-batch, [b, w] float32, 0 elsewhere."""
        return batch.spread(self.outputs_of(batch.inputs)[:, 0])


def load_backbone(folder: Path, *, trust_remote_code: bool) -> nn.Module:
    """The language model in `folder` whose backbone is wanted; its output layer may be new. Raises DataError."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a missing output layer and an unknown head are as they should be
    try:
        module: Any = load_module(folder, torch.float32, trust_remote_code=trust_remote_code)
    finally:
        transformers_logging.set_verbosity(before)
    check_names(folder, module, part=module.base_model_prefix)
    return module  # type: ignore[no-any-return]


def make_value_model(language_model: nn.Module, folder: Path | None) -> ValueModel:
    """Its backbone with the head that lies with the weights in `folder`, or with one of zeros. Raises DataError."""
    model: Any = language_model
    if model.base_model is model:
        raise DataError(
            f"{type(model).__name__} has no backbone to put a critic's head on",
            where="" if folder is None else str(folder),
            fix="Name a model of a class that has one in train.critic.path; nearly all have",
        )
    return ValueModel(model, _head(folder, int(model.get_output_embeddings().weight.shape[1])))


def _head(folder: Path | None, width: int) -> ValueHead:
    head = ValueHead(width)
    stored = {} if folder is None else dict(_stored_head(folder))
    if f"{HEAD}.weight" not in stored:
        return head
    shape = tuple(stored[f"{HEAD}.weight"].shape)
    if shape != (1, width):
        raise DataError(
            f"its head {HEAD!r} is {shape[0]} x {shape[-1]}, and a critic's is 1 x {width}",
            where=str(folder),
            fix="Name a model of one number, or a language model, which gets a new head",
        )
    with torch.no_grad():
        head.weight.copy_(stored[f"{HEAD}.weight"])
        if f"{HEAD}.bias" in stored:
            head.bias.copy_(stored[f"{HEAD}.bias"])
    return head


def _stored_head(folder: Path) -> Iterator[tuple[str, Tensor]]:
    names = (f"{HEAD}.weight", f"{HEAD}.bias")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        places = dict.fromkeys(names, MODEL_FILE) if (folder / MODEL_FILE).is_file() else {}
    for name in names:
        if name in places:
            with safe_open(folder / places[name], framework="pt") as file:
                if name in file.keys():  # noqa: SIM118  (safetensors' file is no mapping)
                    yield name, file.get_tensor(name)
