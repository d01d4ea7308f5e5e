"""The critic: a model that estimates the expected return at each token of a response, before the token is generated.

It consists of a language model's backbone, of which only the last hidden states are used, and a head with one output.
It gets the policy's micro-batches and is evaluated at the same positions: where the policy predicts a token, the critic
has seen the prompt and the earlier tokens only.

A new head is all zeros, so values start at 0 and the first advantages are the returns. Random values would add noise of
the size of the hidden states. The first update changes only the head, because no gradient flows through zeros; the
backbone follows from the second update on. The head computes in float32 regardless of the backbone's dtype, because a
value rounded to bfloat16 has an error of up to 0.4 %, and its loss consists of small differences.

Parameter names are those of Hugging Face token classification models (`score`). A job can start from such a model or
from a reward model with one output, and a saved critic is such a model.
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

from gcore.config.train import learning_rate
from gcore.errors import DataError
from gcore.models.layout import MODEL_FILE
from gcore.train.advantages import RankReductions, ValueTargets, moments, value_targets
from gcore.train.backends.base import TrainBackend, UpdateResult
from gcore.train.batching import BatchIndex, MicroBatch, StepTensors, TokenBatch
from gcore.train.hf_models import REMEDIES, STATE_REMEDIES, check_names, explain_memory_error, load_module
from gcore.train.objectives import Count, ValueFit, ValueFunction
from gcore.train.rank.launch import RankLaunch

HEAD = "score"


class ValueHead(nn.Linear):
    """Linear layer that maps hidden states [..., width] to values [..., 1], float32; initialized with zeros."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the values in float32, whatever the dtype of hidden states and weights."""
        return functional.linear(hidden.float(), self.weight.float(), self.bias.float())


class ValueModel(nn.Module):
    """A causal language model's backbone, under its Hugging Face name, with a value head named `score`.

    Its forward takes the same arguments as a language model's. `vocabulary`: number of token ids that it supports.
    """

    def __init__(self, language_model: nn.Module, head: ValueHead) -> None:
        super().__init__()
        model: Any = language_model
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._prefix: str = model.base_model_prefix
        self.add_module(self._prefix, model.base_model)
        self.add_module(HEAD, head)

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor, **more: Any) -> TokenClassifierOutput:
        """Compute the values [b, c, 1] at the columns `logits_to_keep` [c]; they are `logits` of the result."""
        hidden = self.get_submodule(self._prefix)(input_ids=input_ids, **more).last_hidden_state
        # DeepSpeed attaches hooks to output tensors, and finds them in this type.
        return TokenClassifierOutput(logits=self.get_submodule(HEAD)(hidden[:, logits_to_keep]))


def values_of(critic: TrainBackend, batch: MicroBatch) -> Tensor:
    """The critic's value at each scored token of a micro-batch, before that token, [b, w] float32; 0 elsewhere."""
    assert isinstance(batch, TokenBatch), "only texts have values"
    return batch.spread(critic.outputs_of(batch.inputs)[:, 0])


def load_backbone(folder: Path, *, trust_remote_code: bool) -> nn.Module:
    """Load the language model in `folder`, to use its backbone; its output layer may be missing. Raises DataError."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a missing output layer and an unknown head are expected
    try:
        module: Any = load_module(folder, torch.float32, trust_remote_code=trust_remote_code, headless=True)
    finally:
        transformers_logging.set_verbosity(before)
    check_names(folder, module, part=module.base_model_prefix)
    return module  # type: ignore[no-any-return]


def make_value_model(language_model: nn.Module, folder: Path | None) -> ValueModel:
    """Combine the backbone of `language_model` with a value head: that in `folder`, or a new one of zeros.

    `folder` None, or without a head: a new one. Raises DataError if the stored head has not one output, or if the model
    has no separate backbone.
    """
    model: Any = language_model
    if model.base_model is model:
        raise DataError(
            f"{type(model).__name__} has no separate backbone, which a critic needs",
            where="" if folder is None else str(folder),
            fix="Set train.critic.path to a model whose class has one; nearly all classes do",
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
            f"the model's head {HEAD!r} is {shape[0]} x {shape[-1]}, but a critic's is 1 x {width}",
            where=str(folder),
            fix="Use a model with one output, or a language model, which gets a new head",
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
                if name in file.keys():  # noqa: SIM118  (a safetensors file is not a mapping)
                    yield name, file.get_tensor(name)


Tell = Callable[[str], None]


class ValueTally:
    """One rank's running sums of the critic's statistics in one step."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}
        self._loss, self._clipped, self._tokens = 0.0, 0.0, 0.0
        self._norms: list[float] = []
        self._updates = 0
        self._rate = 0.0

    def before(
        self, step: StepTensors, targets: ValueTargets, values: Mapping[BatchIndex, Tensor], over_ranks: RankReductions
    ) -> None:
        """Record mean, variance and explained variance of values, returns and advantages before the updates. A
        collective.
        """
        exact = {place: value.double() for place, value in values.items()}
        left = {place: targets.returns[place] - value for place, value in exact.items()}
        value, goal = moments(step, exact, over_ranks), moments(step, targets.returns, over_ranks)
        gain, error = moments(step, targets.advantages, over_ranks), moments(step, left, over_ranks)
        self._found = {
            "value_mean": value.mean,
            "return_mean": goal.mean,
            # Undefined for constant returns.
            "value_explained_variance": 1 - error.variance / goal.variance if goal.variance > 0 else math.nan,
            "advantage_mean": gain.mean,
            "advantage_std": math.sqrt(gain.variance),
        }

    def trained(self, loss: float, sums: Mapping[str, Tensor]) -> None:
        """Add the loss and metrics of a micro-batch that was trained.

        `loss`: its part of the update's loss. `sums`: `ValueFunction.metrics` of the micro-batch.
        """
        self._loss += loss
        self._clipped += float(sums["clipped"])
        self._tokens += float(sums["tokens"])

    def updated(self, result: UpdateResult, rate: float) -> None:
        """Count a critic update, applied or skipped, and its learning rate; the same on every rank."""
        self._updates += 1
        self._rate = rate
        if result.applied:
            self._norms.append(result.grad_norm)

    def metrics(self, over_ranks: RankReductions) -> dict[str, float]:
        """The critic's metrics by name (see `CriticTrainer`), summed over ranks. A collective."""
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
    """Trains the critic of a job: computes values before the updates of a step, then makes one critic update per
    mini-batch.

    Values are computed once, before any update, in the policy's micro-batches. The targets computed from them stay
    fixed for all updates of the step, and so do the old values for the clip. An update has the same global denominator
    and aggregation as the policy's. Masked samples do not train the critic.

    Metrics, over the trained tokens:

        value_loss                  mean over the updates
        value_mean, return_mean     before the updates; of the values, and of their targets
        value_explained_variance    1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for constant values,
                                    below 0 for worse ones
        value_clip_fraction         share of tokens whose gradient the clip removes
        advantage_mean, advantage_std    before whitening
        critic_grad_norm            global, before clipping, mean over the applied updates
        critic_learning_rate        of the last update
        critic_skipped_updates      number of updates that were skipped because their gradient was not finite
    """

    def __init__(self, critic: TrainBackend, launch: RankLaunch) -> None:
        spec = launch.spec
        assert spec.train.critic is not None
        self.critic = critic
        self.launch = launch
        horizon = float(spec.train.horizon or spec.rollout.max_new_tokens)
        self.objective = ValueFunction(spec.train, horizon, spec.train.critic)

    def warms_up(self, step: int) -> bool:
        """Whether step number `step` is a warm-up step, which trains only the critic and not the policy."""
        own = self.launch.spec.train.critic
        return own is not None and step <= own.warmup_steps

    def begin(
        self, step: StepTensors, penalties: Mapping[BatchIndex, Tensor], over_ranks: RankReductions, tell: Tell
    ) -> CriticStep:
        """Compute the values of the whole step, and from them the targets of its updates. A collective.

        `penalties` [b, w] by micro-batch: subtracted from the rewards (KL in the reward); may be empty.
        """
        train, values = self.launch.spec.train, {}
        with torch.no_grad():
            for place in step.places():
                tell("values")
                batch = step.at(place)
                with explain_memory_error(f"values: {batch.size}", train, REMEDIES):
                    values[place] = values_of(self.critic, batch)
        targets = value_targets(step, train, values, penalties)
        tally = ValueTally()
        tally.before(step, targets, values, over_ranks)
        return CriticStep(self, step, targets, values, tally)


class CriticStep:
    """The critic's updates of one step. `targets`: advantages and returns, computed before the first update."""

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
        """Train the critic on mini-batch `number` and update it. Returns None if the mini-batch has no trained token.

        `made`: the critic's updates so far in the job, for the learning-rate schedule. A collective.
        """
        plan, batches = self._step.plans[number], self._step.batches[number]
        if not plan.tokens:
            return None  # the same on every rank, because it depends on the seal only
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
        with explain_memory_error("critic: the optimizer", self._train, STATE_REMEDIES):
            result = self._critique.critic.update(rate)
        self._tally.updated(result, rate)
        return result

    def metrics(self, over_ranks: RankReductions) -> dict[str, float]:
        """The critic's metrics of this step by name (see `CriticTrainer`). A collective."""
        return self._tally.metrics(over_ranks)

    def _backward(self, batch: MicroBatch, place: BatchIndex, divisor: float, *, last: bool) -> None:
        objective, values = self._critique.objective, values_of(self._critique.critic, batch)
        fit = ValueFit(self._returns[place], self._values[place], batch.mask)
        loss = objective.loss(values, fit) / divisor
        self._critique.critic.backward(loss, last=last)
        self._tally.trained(float(loss.detach()), objective.metrics(values, fit))
