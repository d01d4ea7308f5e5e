"""The policy: the model whose log-probabilities are trained, and whose weights engines serve."""

from __future__ import annotations

import torch
from torch import nn

from gcore.config.train import TrainSpec
from gcore.train.batch import Feeding, LogitsOf
from gcore.train.module import vocabulary_of
from gcore.train.packing import Packing
from gcore.train.trained import Optimizing, TrainedModel


class Policy(TrainedModel):
    """A causal language model being trained."""

    @classmethod
    def of(cls, module: nn.Module, train: TrainSpec, packing: Packing, device: torch.device) -> Policy:
        """A module in float32, ready to train, Adam's state zero. The module is the policy's from now on."""
        return cls(module, Optimizing.of(train, train), Feeding(packing, vocabulary_of(module), device))

    @property
    def logits_of(self) -> LogitsOf:
        """The logits of the scored tokens, [n, vocabulary]."""
        return self.outputs_of
