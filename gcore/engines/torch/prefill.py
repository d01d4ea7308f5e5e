"""Prefill of prompts: computes keys and values, the logits after the last token, and requested log-probabilities.

A prompt may be prefilled in several chunks. Their keys and values stay in a separate buffer until the sequence joins
the running batch. Complete prompts share forward passes, padded on the right. Attention is causal, so real tokens never
attend to the padding, and the padding is never copied into the KV cache. This module does not choose which prompts are
prefilled, and does not sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from gcore.engines.pictures import PassPart, PreparedPictures, PromptFeatures, pass_positions
from gcore.engines.request import PromptLogprobs, Top
from gcore.engines.torch.attention import PrefillPass
from gcore.engines.torch.kv_cache import CacheShape, new_table
from gcore.engines.torch.model import Model
from gcore.engines.torch.sampler import token_logprobs, top_logprobs
from gcore.engines.torch.scheduler import IDLE_TOKENS


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Prompts (as indexes) of one forward pass, padded on the right to `width` tokens."""

    members: tuple[int, ...]
    width: int


def prefill_batches(lengths: Sequence[int], *, most_tokens: int) -> tuple[PrefillBatch, ...]:
    """Divide prompts with these lengths into forward passes, prompts of similar length together.

    A pass has at most `most_tokens` tokens with padding, and at most a quarter of it is padding. A prompt longer than
    `most_tokens` has its own pass.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batches: list[PrefillBatch] = []
    members: list[int] = []
    tokens = 0
    for index in order:
        length = lengths[index]
        padded = length * (len(members) + 1)
        if members and (padded > most_tokens or 4 * (tokens + length) < 3 * padded):
            batches.append(PrefillBatch(tuple(members), lengths[members[-1]]))
            members, tokens = [], 0
        members.append(index)
        tokens += length
    if members:
        batches.append(PrefillBatch(tuple(members), lengths[members[-1]]))
    return tuple(batches)


LOGIT_CELLS = 32 * 1024 * 1024
"""Maximum number of logits (positions x vocabulary) in one pass if log-probabilities of prompt tokens are requested."""


@dataclass(slots=True, eq=False)
class PromptPrefill:
    """Progress of the prefill of a prompt, or of a preempted sample with its tokens.

    `kept`: where the model runner has the keys and values. `tops`: number of most likely tokens that are requested per
    position. `values`, `likeliest`, `named`: log-probabilities computed so far, by position.
    """

    tokens: tuple[int, ...]
    logprobs_from: int | None = None
    """First prompt position whose log-probability is requested; None: no position."""
    tops: int = 0
    names: tuple[int, ...] = ()
    """Tokens whose log-probabilities are requested at the same positions, likely or not."""
    adapter: int = 0
    """Number of the adapter of the sequences that have this prompt."""
    pictures: PreparedPictures | None = None
    """The prompt's pictures; None: it has none."""
    features: PromptFeatures | None = None
    """Features of the pictures with the present weights, once they are computed."""
    done: int = 0
    """Number of tokens prefilled so far."""
    kept: Any = None
    logits: torch.Tensor | None = None
    """[vocabulary]: logits after the last token, once all are prefilled."""
    stale: bool = False
    """Whether older weights than the present ones prefilled a part of the prompt."""
    values: list[float | None] = field(default_factory=list)
    likeliest: list[Top | None] = field(default_factory=list)
    named: list[tuple[float, ...] | None] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Number of tokens still to prefill."""
        return len(self.tokens) - self.done

    @property
    def logprobs(self) -> PromptLogprobs | None:
        """Requested log-probabilities of the prompt's tokens; None if none are requested."""
        if self.logprobs_from is None:
            return None
        return PromptLogprobs(self.logprobs_from, tuple(self.values), tuple(self.likeliest), tuple(self.named))

    def most(self, vocabulary: int) -> int | None:
        """Return the maximum number of tokens in one pass, which bounds the memory for logits; None: no limit."""
        return None if self.logprobs_from is None else max(1, LOGIT_CELLS // vocabulary)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next `count` tokens of a prompt, to be prefilled now."""

    prompt: PromptPrefill
    count: int

    @property
    def alone(self) -> bool:
        """Whether the chunk cannot share a pass with other prompts: it is only a part of a prompt, or log-probabilities
        of prompt tokens are requested.
        """
        return self.count < len(self.prompt.tokens) or self.prompt.logprobs_from is not None


class PrefillCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of the prompts of one pass, by layer [prompt, kv_head, token, head_dim].

    With `length` it is a buffer for one prompt of this many tokens, which is prefilled in several passes. `begin`:
    first position that the next pass writes.
    """

    is_compileable = False

    def __init__(self, shape: CacheShape | None = None, length: int | None = None) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.begin = 0
        self._buffered = length is not None
        if shape is not None and length is not None:
            for layer in shape.layers:
                self.keys.append(new_table((1, layer.kv_heads, length, layer.key_dim), shape))
                self.values.append(new_table((1, layer.kv_heads, length, layer.value_dim), shape))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values, and return those of all tokens so far. The model calls it in each layer."""
        if not self._buffered:
            assert layer_idx == len(self.keys), "layers must come in order"
            self.keys.append(key_states)
            self.values.append(value_states)
            return key_states, value_states
        end = self.begin + key_states.shape[2]
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[:, :, self.begin : end] = key_states
        values[:, :, self.begin : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the model receives every position and must not count tokens itself."""
        return 0


@dataclass(frozen=True, slots=True)
class PrefixSlice:
    """Where the keys and values of a prefilled prompt are: at `index` of `prefix`."""

    prefix: PrefillCache
    index: int


def prefill(model: Model, chunks: Sequence[PrefillChunk], *, grid: int | None = None) -> None:
    """Prefill all chunks, in as few forward passes as possible.

    `grid`: prefill each chunk alone, in passes that end at multiples of this many tokens.
    """
    sharing = [chunk.prompt for chunk in chunks if grid is None and not chunk.alone]
    for chunk in chunks:
        if grid is not None or chunk.alone:
            _read_alone(model, chunk, grid)
    for batch in prefill_batches([len(prompt.tokens) for prompt in sharing], most_tokens=IDLE_TOKENS):
        _read_together(model, [sharing[m] for m in batch.members], batch.width)


def _read_together(model: Model, prompts: Sequence[PromptPrefill], width: int) -> None:
    device = model.shape.device
    padded = [[*prompt.tokens, *(0,) * (width - len(prompt.tokens))] for prompt in prompts]
    prefix = PrefillCache()
    model.attention.kind = PrefillPass()
    model.select_adapters([prompt.adapter for prompt in prompts])
    ids = torch.tensor(padded, device=device)
    positions, more = picture_inputs(model, [(prompt, 0, len(prompt.tokens)) for prompt in prompts], ids)
    logits = model.forward(
        ids,
        positions,
        prefix,
        wanted=(list(range(len(prompts))), [len(prompt.tokens) - 1 for prompt in prompts]),
        pictures=more,
    )
    for index, prompt in enumerate(prompts):
        prompt.kept, prompt.logits, prompt.done = PrefixSlice(prefix, index), logits[index], len(prompt.tokens)


def _read_alone(model: Model, chunk: PrefillChunk, grid: int | None) -> None:
    prompt, device = chunk.prompt, model.shape.device
    if prompt.kept is None:
        prompt.kept = PrefixSlice(PrefillCache(model.shape, len(prompt.tokens)), 0)
    left = chunk.count
    while left:
        count = chunk_length(prompt, left, model.vocabulary, grid)
        begin, end = prompt.done, prompt.done + count
        prefix: PrefillCache = prompt.kept.prefix
        prefix.begin = begin
        model.attention.kind = PrefillPass(past=begin)
        model.select_adapters([prompt.adapter])
        wanted = logit_positions(prompt, begin, end)
        ids = torch.tensor([prompt.tokens[begin:end]], device=device)
        positions, more = picture_inputs(model, [(prompt, begin, end)], ids)
        logits = model.forward(
            ids,
            positions,
            prefix,
            wanted=([0] * len(wanted), [position - begin for position in wanted]),
            pictures=more,
        )
        record_logits(prompt, wanted, logits)
        prompt.done = end
        left -= count


def picture_inputs(
    model: Model, parts: Sequence[tuple[PromptPrefill, int, int]], ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The positions of a pass over parts of prompts ([begin, end) of each), and its arguments for pictures.

    `ids` [part, token]: the tokens of the pass, padded on the right. Runs the vision tower for prompts whose pictures
    have no features yet.
    """
    vision, width = model.vision, ids.shape[1]
    if vision is None:
        begins = torch.tensor([begin for _, begin, _ in parts], device=ids.device)
        return begins[:, None] + torch.arange(width, device=ids.device), {}
    found = [PassPart(prompt.tokens, begin, end, prompt.pictures, prompt.features) for prompt, begin, end in parts]
    vision.compute(found)
    for (prompt, _, _), part in zip(parts, found, strict=True):
        prompt.features = part.features
    positions = pass_positions(found, width, three=vision.reader.three).to(ids.device)
    return positions, vision.arguments(found, ids)


def chunk_length(prompt: PromptPrefill, left: int, vocabulary: int, grid: int | None) -> int:
    """Return how many of the `left` tokens of a prompt the next pass prefills. `grid`: see `prefill`."""
    to_line = left if grid is None else grid - prompt.done % grid
    return min(left, to_line, prompt.most(vocabulary) or left)


def logit_positions(prompt: PromptPrefill, begin: int, end: int) -> list[int]:
    """Return the positions in [begin, end) whose logits are needed; at least the last, because a pass must have one."""
    if prompt.logprobs_from is None:
        return [end - 1]
    # The logits at a position predict the next token.
    return list(range(min(max(begin, prompt.logprobs_from - 1), end - 1), end))


def record_logits(prompt: PromptPrefill, positions: Sequence[int], logits: torch.Tensor) -> None:
    """Store what is requested of a prompt's logits [position, vocabulary] at these positions: log-probabilities, and
    the logits after the last token.
    """
    length = len(prompt.tokens)
    if positions[-1] == length - 1:
        prompt.logits = logits[-1]
    start = prompt.logprobs_from
    if start is None or start >= length:
        return
    if start == 0 and not prompt.values:
        # The first token has no prediction.
        prompt.values.append(None)
        prompt.likeliest += [None] if prompt.tops else []
        prompt.named += [None] if prompt.names else []
    judged = [(i, position + 1) for i, position in enumerate(positions) if start <= position + 1 < length]
    if not judged:
        return
    rows = logits[torch.tensor([i for i, _ in judged], device=logits.device)]
    targets = torch.tensor([prompt.tokens[t] for _, t in judged], device=logits.device)
    logprobs = torch.log_softmax(rows.float(), dim=-1)
    prompt.values += logprobs.gather(-1, targets[:, None])[:, 0].cpu().tolist()
    if prompt.tops:
        prompt.likeliest += top_logprobs(rows, [1.0] * len(judged), prompt.tops)
    if prompt.names:
        prompt.named += token_logprobs(rows, [1.0] * len(judged), prompt.names)
