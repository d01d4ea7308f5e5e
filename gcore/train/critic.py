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
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils import logging as transformers_logging

from gcore.config.train import TrainSpec, learning_rate
from gcore.errors import DataError
from gcore.models.layout import MODEL_FILE
from gcore.train.advantages import RankReductions, ValueTargets, moments, value_targets
from gcore.train.backends.base import UpdateResult
from gcore.train.backends.deepspeed import DeepSpeedBackend, OptimizerSettings
from gcore.train.batching import BatchIndex, Feeding, MicroBatch, StepTensors
from gcore.train.hf_models import REMEDIES, check_names, explain_memory_error, load_module
from gcore.train.objectives import Count, ValueFit, ValueFunction
from gcore.train.rank.launch import RankLaunch

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


class Critic(DeepSpeedBackend):
    """A model of values being trained."""

    @classmethod
    def of(cls, module: ValueModel, train: TrainSpec, feeding: Feeding) -> Critic:
        """A module in float32, ready to train, Adam's state zero; fed as the policy is."""
        assert train.critic is not None
        return cls(module, OptimizerSettings.of(train, train.critic), feeding)

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


Tell = Callable[[str], None]


class ValueTally:
    """One rank's counts of the critic in one step."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}
        self._loss, self._clipped, self._tokens = 0.0, 0.0, 0.0
        self._norms: list[float] = []
        self._updates = 0
        self._rate = 0.0

    def before(
        self, step: StepTensors, targets: ValueTargets, values: Mapping[BatchIndex, Tensor], over_ranks: RankReductions
    ) -> None:
        """The step's values and what they lead to, before the updates. A collective."""
        exact = {place: value.double() for place, value in values.items()}
        left = {place: targets.returns[place] - value for place, value in exact.items()}
        value, goal = moments(step, exact, over_ranks), moments(step, targets.returns, over_ranks)
        gain, error = moments(step, targets.advantages, over_ranks), moments(step, left, over_ranks)
        self._found = {
            "value_mean": value.mean,
            "return_mean": goal.mean,
            # Returns that are all the same leave nothing to explain.
            "value_explained_variance": 1 - error.variance / goal.variance if goal.variance > 0 else math.nan,
            "advantage_mean": gain.mean,
            "advantage_std": math.sqrt(gain.variance),
        }

    def trained(self, loss: float, sums: Mapping[str, Tensor]) -> None:
        """A micro-batch went through an update; `loss` is its part of the update's, `sums` are its objective's metrics."""
        self._loss += loss
        self._clipped += float(sums["clipped"])
        self._tokens += float(sums["tokens"])

    def updated(self, result: UpdateResult, rate: float) -> None:
        """An update is over; the same on every rank."""
        self._updates += 1
        self._rate = rate
        if result.applied:
            self._norms.append(result.grad_norm)

    def metrics(self, over_ranks: RankReductions) -> dict[str, float]:
        """The step's. A collective."""
        loss, clipped, tokens = over_ranks.sum([self._loss, self._clipped, self._tokens])
        found = self._found | {
            "value_loss": loss / self._updates if self._updates else math.nan,
            "value_clip_fraction": clipped / tokens if tokens else math.nan,
            "critic_grad_norm": math.fsum(self._norms) / len(self._norms) if self._norms else math.nan,
            "critic_learning_rate": self._rate,
            "critic_skipped_updates": float(self._updates - len(self._norms)),
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


class CriticTrainer:
    """A critic in a job.

    The critic's part of a step: its values before the updates, and an update of its own for each mini-batch.

    Values are taken once, before anything is updated, in the micro-batches that the policy is trained in; what the
    critic is fitted to is computed from them and stays for all the step's updates, as do the values that its clip
    holds it near. An update has the same global denominator as the policy's, and the same aggregation. Masked samples
    train neither.

    Metrics, over the tokens that are trained:

        value_loss                  mean over the updates
        value_mean, return_mean     before the updates; of what the critic says, and of what it is fitted to
        value_explained_variance    1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one that says the same of
                                    every token, below 0 one that is worse than that
        value_clip_fraction         share of the tokens that the clip holds back
        advantage_mean, advantage_std    before whitening
        critic_grad_norm            global, before clipping, mean over the updates that were made
        critic_learning_rate        of the last update;  critic_skipped_updates: gradient not finite

    Does not know the policy, nor when a step's updates are its turn (`step`).
    """

    def __init__(self, critic: Critic, launch: RankLaunch) -> None:
        spec = launch.spec
        assert spec.train.critic is not None
        self.critic = critic
        self.launch = launch
        horizon = float(spec.train.horizon or spec.rollout.max_new_tokens)
        self.objective = ValueFunction(spec.train, horizon, spec.train.critic)

    def warms_up(self, step: int) -> bool:
        """Whether the critic alone is trained in step number `step`."""
        own = self.launch.spec.train.critic
        return own is not None and step <= own.warmup_steps

    def begin(
        self, step: StepTensors, penalties: Mapping[BatchIndex, Tensor], over_ranks: RankReductions, tell: Tell
    ) -> CriticStep:
        """Values of the whole step, and what follows from them. A collective."""
        train, values = self.launch.spec.train, {}
        with torch.no_grad():
            for place in step.places():
                tell("values")
                batch = step.at(place)
                with explain_memory_error(f"values: {batch.size}", train, REMEDIES):
                    values[place] = self.critic.values(batch)
        targets = value_targets(step, train, values, penalties)
        tally = ValueTally()
        tally.before(step, targets, values, over_ranks)
        return CriticStep(self, step, targets, values, tally)


class CriticStep:
    """The critic's part of one step, after its values are known."""

    def __init__(
        self,
        critique: CriticTrainer,
        step: StepTensors,
        targets: ValueTargets,
        values: Mapping[BatchIndex, Tensor],
        tally: ValueTally,
    ) -> None:
        assert critique.launch.spec.train.critic is not None
        self._critique = critique
        self._train = critique.launch.spec.train
        self._own = critique.launch.spec.train.critic
        self._step = step
        self._returns = {place: one.float() for place, one in targets.returns.items()}
        self._values = values
        self._tally = tally
        self.targets = targets

    def update(self, number: int, made: int, tell: Tell) -> UpdateResult | None:
        """Train on mini-batch `number`; None: it holds nothing. `made`: the critic's updates so far. A collective."""
        plan, batches = self._step.plans[number], self._step.batches[number]
        if not plan.tokens:
            return None  # every rank sees that in the seal
        divisor = self._critique.objective.denominator(Count(plan.tokens, plan.sequences))
        divisor *= self._step.work.seal.padding_scale
        for k, batch in enumerate(batches):
            tell("critic")
            with explain_memory_error(f"critic: {batch.size}", self._train, REMEDIES):
                self._backward(batch, BatchIndex(number, k), divisor, last=k + 1 == len(batches))
        launch = self._critique.launch
        rate = learning_rate(
            made,
            peak=self._own.learning_rate,
            warmup_updates=self._own.warmup_updates,
            schedule=self._train.schedule,
            total_updates=launch.critic_updates(self._step.work.seal.planned_steps),
        )
        with explain_memory_error("critic: the optimizer", self._train, ("zero_stage", "offload_reference")):
            result = self._critique.critic.update(rate)
        self._tally.updated(result, rate)
        return result

    def metrics(self, over_ranks: RankReductions) -> dict[str, float]:
        """The step's. A collective."""
        return self._tally.metrics(over_ranks)

    def _backward(self, batch: MicroBatch, place: BatchIndex, divisor: float, *, last: bool) -> None:
        objective, values = self._critique.objective, self._critique.critic.values(batch)
        fit = ValueFit(self._returns[place], self._values[place], batch.mask)
        loss = objective.loss(values, fit) / divisor
        self._critique.critic.backward(loss, last=last)
        self._tally.trained(float(loss.detach()), objective.metrics(values, fit))
