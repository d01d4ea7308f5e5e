"""gcore's sampler in vLLM's workers: vLLM computes the logits, and the torch engine's sampler samples.

vLLM's own sampler reports log-probabilities without the temperature or after truncation, truncates by top_p after top_k,
and keeps one generator a request, which on a CPU fails with prompts that are prefilled in parts. The torch engine's
sampler has gcore's meaning of all parameters, and a token depends on its request's seed and position alone.

vLLM calls both classes: `SeededRows` learns which request is in which row of a batch, `SeededSampler` samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.sampler import Sampler

from gcore.engines.request import RequestSampling
from gcore.engines.torch.sampler import BatchSamplingParams, ForbiddenTokens, SampledTokens, sample
from gcore.engines.torch.scheduler import Doubles, PhiloxStreams

SAMPLING = "gcore"
"""Name under which a request's `RequestSampling` is among the extra arguments of vLLM's parameters."""

FEWEST_DRAWN = 64
"""Minimum number of uniform numbers that are drawn at once for a row."""


@dataclass(slots=True)
class _Row:
    """A request in a row. `made`: its output tokens, which vLLM extends. `uniforms`: the beginning of its stream."""

    sampling: RequestSampling
    made: list[int]
    uniforms: Doubles = field(default_factory=lambda: np.zeros(0))


class SeededRows(LogitsProcessor):
    """The requests in the rows of vLLM's batch. Changes no logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._streams = PhiloxStreams()
        self._params: BatchSamplingParams | None = None

    def is_argmax_invariant(self) -> bool:
        """Return True, so that vLLM lists it beside min_p."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits unchanged."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow a change of the batch: removed, added and moved rows, in this order."""
        if batch_update is None:
            return
        self._params = None
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, made in batch_update.added:
            self._rows[row] = _Row((params.extra_args or {})[SAMPLING], made)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def asked(self, count: int) -> list[RequestSampling]:
        """Return the parameters of the first `count` rows."""
        return [self._rows[row].sampling for row in range(count)]

    def draw(self, logits: torch.Tensor) -> SampledTokens:
        """Sample one token for each row of `logits` (row, vocabulary)."""
        rows = [self._rows[row] for row in range(logits.shape[0])]
        asked = [row.sampling for row in rows]
        if self._params is None:
            self._params = BatchSamplingParams.of_requests(asked, logits.device)
        uniforms = torch.tensor([self._uniform(row) for row in rows], dtype=torch.float64, device=logits.device)
        forbidden = ForbiddenTokens.of_requests(asked, [len(row.made) for row in rows], logits.device)
        return sample(logits, uniforms, self._params, forbidden)

    def _uniform(self, row: _Row) -> float:
        place = len(row.made)
        if row.sampling.temperature == 0:
            return 0.0
        if place >= len(row.uniforms):
            row.uniforms = self._streams.draw(row.sampling.seed, max(FEWEST_DRAWN, 2 * place))
        return float(row.uniforms[place])


class SeededSampler(Sampler):
    """Samples with the torch engine's sampler.

    A row of its log-probabilities has the sampled token, the likeliest ones, and the tokens that the request names.
    Ranks, which gcore does not use, are 0.
    """

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """Sample one token for each row of `logits` (row, vocabulary)."""
        processors = sampling_metadata.logitsprocs.argmax_invariant
        rows = next(one for one in processors if isinstance(one, SeededRows))
        drawn = rows.draw(logits)
        ids, values = drawn.tokens[:, None], drawn.logprobs[:, None]
        count, asked = sampling_metadata.max_num_logprobs or 0, rows.asked(logits.shape[0])
        if count or any(one.named_tokens for one in asked):
            ids = torch.cat([ids, _others(logits, count, asked)], 1)
            scale = torch.tensor([one.temperature or 1.0 for one in asked], dtype=torch.float32, device=logits.device)
            values = torch.log_softmax(logits.float() / scale[:, None], -1).gather(-1, ids)
        return SamplerOutput(drawn.tokens.to(torch.int32)[:, None], _tensors(ids, values))

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        """Select the log-probabilities of a prompt's tokens (`token_ids`) and of the likeliest tokens."""
        ids = torch.cat([token_ids[:, None], logprobs.topk(num_logprobs, -1).indices], 1)
        return _tensors(ids, logprobs.gather(-1, ids))


def _others(logits: torch.Tensor, count: int, asked: list[RequestSampling]) -> torch.Tensor:
    """Return the `count` likeliest tokens of each row, and behind them those that it names, padded with token 0."""
    width = max(len(one.named_tokens) for one in asked)
    named = torch.zeros((len(asked), width), dtype=torch.int64)
    for row, one in enumerate(asked):
        named[row, : len(one.named_tokens)] = torch.tensor(one.named_tokens, dtype=torch.int64)
    return torch.cat([logits.topk(count, -1).indices, named.to(logits.device)], 1)


def _tensors(ids: torch.Tensor, values: torch.Tensor) -> LogprobsTensors:
    ranks = torch.zeros(ids.shape[0], dtype=torch.int32, device=ids.device)
    return LogprobsTensors(ids.to(torch.int32), values, ranks)


def install_sampler(worker: Any) -> None:
    """Replace the sampler of one of vLLM's workers. vLLM calls it in each worker."""
    worker.model_runner.sampler = SeededSampler()
