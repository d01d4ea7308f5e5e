"""Sampling of tokens from logits.

Log-probabilities are those of `softmax(logits / T)` before any truncation (top-k, top-p, min-p, the minimum length):
the distribution that the trainer computes too. Greedy rows (T = 0) take the most likely token, and their
log-probabilities are those of the softmax at temperature 1.

A token is sampled by the inverse of the cumulative distribution, in order of token id, at a uniform number of its
request: the i-th number of the Philox stream whose key is the request's seed. So the randomness of a sample depends on
its seed alone, not on other requests. Every operation here treats each row separately: a row's token and
log-probability are bitwise independent of other rows.

A large vocabulary is processed in slabs of rows that stay in the processor's cache, and summed in blocks first, so that
the double-precision part touches one block per row. Nothing is sorted unless a row truncates, and then only its
`CANDIDATES` most likely tokens, unless these do not suffice.

Truncation: all but the `top_k` most likely tokens; tokens after more likely ones with a total of more than `top_p`;
tokens less likely than `min_p` times the most likely one. All three refer to the full distribution, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gcore.engines.request import RequestSampling, Top
from gcore.engines.torch.scheduler import BELOW_ONE, Doubles, Ints

SMALL_VOCABULARY = 4096
"""Up to this vocabulary size one cumulative sum over all of it is faster than the steps that avoid it."""

SLAB_CELLS = 512 * 1024
"""Number of logits processed at once on a CPU: 2 MiB of float32."""

BLOCK = 512
CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Truncation:
    """Rows that truncate their distribution with the same number of candidate tokens.

    `rows` [row]: their numbers in the batch. `top_p`, `top_k`, `min_p` [row, 1]: their parameters. `candidates`: number
    of most likely tokens that are considered first; 0: all.
    """

    candidates: int
    rows: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def groups(
        cls, rows: Ints, top_p: Doubles, top_k: Ints, min_p: Doubles, device: torch.device
    ) -> tuple[Truncation, ...]:
        """Group rows by the number of candidates that each requests, so that other rows do not influence a row's
        result.
        """
        wanted = np.where((top_k > 0) & (top_k < CANDIDATES), top_k, CANDIDATES)
        made = []
        for count in np.unique(wanted[rows]):
            own = rows[wanted[rows] == count]
            made.append(
                cls(
                    int(count),
                    torch.tensor(own, device=device),
                    torch.tensor(top_p[own], device=device)[:, None],
                    torch.tensor(top_k[own], device=device)[:, None],
                    torch.tensor(min_p[own], device=device)[:, None],
                )
            )
        return tuple(made)

    def only(self, places: torch.Tensor) -> Truncation:
        """Select the rows at `places`, with every token of the vocabulary as a candidate."""
        return Truncation(0, self.rows[places], self.top_p[places], self.top_k[places], self.min_p[places])


@dataclass(frozen=True, slots=True)
class BatchSamplingParams:
    """Sampling parameters of the running rows: tensors over rows, on the logits' device.

    `temperature` [row, 1] float32 (1 for a greedy row), None if all are 1. `greedy` [row] bool, or None if no row is.
    `truncating`: rows that truncate, with their parameters.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    all_greedy: bool
    truncating: tuple[Truncation, ...]

    @classmethod
    def of(
        cls, temperature: Doubles, top_p: Doubles, top_k: Ints, min_p: Doubles, device: torch.device
    ) -> BatchSamplingParams:
        """Create from arrays over rows: temperature 0 is greedy; top_p 1, top_k 0 and min_p 0 truncate nothing."""
        greedy = temperature == 0
        scale = np.where(greedy, 1.0, temperature)
        cut = np.flatnonzero(~greedy & ((top_p < 1) | (top_k > 0) | (min_p > 0)))
        return cls(
            torch.tensor(scale, dtype=torch.float32, device=device)[:, None] if (scale != 1).any() else None,
            torch.tensor(greedy, device=device) if greedy.any() else None,
            bool(greedy.all()),
            Truncation.groups(cut, top_p, top_k, min_p, device) if len(cut) else (),
        )

    @classmethod
    def of_requests(cls, requests: Sequence[RequestSampling], device: torch.device) -> BatchSamplingParams:
        """Create from the requests of the rows."""
        return cls.of(
            np.array([one.temperature for one in requests]),
            np.array([one.top_p for one in requests]),
            np.array([one.top_k or 0 for one in requests], np.int64),
            np.array([one.min_p for one in requests]),
            device,
        )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens [row] int64, and their log-probabilities [row] float32."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForbiddenTokens:
    """Tokens that must not be sampled in this step: token `tokens[i]` in row `rows[i]`, such as an end token before the
    minimum length. Log-probabilities are unchanged.
    """

    rows: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, cells: Sequence[tuple[int, int]], device: torch.device) -> ForbiddenTokens | None:
        """Create from pairs of row and token; None if there are none."""
        return cls(*torch.tensor(cells, device=device).unbind(1)) if cells else None

    @classmethod
    def of_requests(
        cls, requests: Sequence[RequestSampling], counts: Sequence[int], device: torch.device
    ) -> ForbiddenTokens | None:
        """Forbid the stop tokens of rows whose response has not reached its minimum length. `counts`: its tokens so far."""
        cells = [
            (row, token)
            for row, (one, count) in enumerate(zip(requests, counts, strict=True))
            if count < one.min_new_tokens
            for token in one.stop_token_ids
        ]
        return cls.of(cells, device)


def sample(
    logits: torch.Tensor, uniforms: torch.Tensor, params: BatchSamplingParams, forbidden: ForbiddenTokens | None = None
) -> SampledTokens:
    """Sample one token per row. `logits` [row, vocabulary], any float dtype; `uniforms` [row] float64 in [0, 1)."""
    rows, vocabulary = logits.shape
    if vocabulary <= SMALL_VOCABULARY:
        return _draw_small(logits, uniforms, params, forbidden)
    slab = rows if logits.device.type != "cpu" else max(1, SLAB_CELLS // vocabulary)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    for begin in range(0, rows, slab):
        own = slice(begin, begin + slab)
        temperature = None if params.temperature is None else params.temperature[own]
        scaled = _scaled(logits[own], temperature)
        weights = torch.softmax(scaled, dim=-1)
        # The largest probability is 1 / sum(exp(scaled - largest)), so the normaliser needs no second pass of
        # exponentials.
        normaliser = scaled.amax(-1) - weights.amax(-1).log()
        tokens[own] = _choose(scaled, weights, uniforms[own], params, forbidden, begin)
        logprobs[own] = scaled.gather(-1, tokens[own, None])[:, 0] - normaliser
    return SampledTokens(tokens, logprobs)


def _draw_small(
    logits: torch.Tensor, uniforms: torch.Tensor, params: BatchSamplingParams, forbidden: ForbiddenTokens | None
) -> SampledTokens:
    scaled = _scaled(logits, params.temperature)
    logprobs = torch.log_softmax(scaled, dim=-1)
    tokens = _choose(scaled, None if params.all_greedy else logprobs.exp(), uniforms, params, forbidden, 0)
    return SampledTokens(tokens, logprobs.gather(-1, tokens[:, None])[:, 0])


def top_logprobs(logits: torch.Tensor, temperatures: Sequence[float], count: int) -> list[Top]:
    """Return the `count` most likely tokens of each row, of softmax(logits / T); temperature 0 counts as 1."""
    values, tokens = _tempered(logits, temperatures).topk(min(count, logits.shape[-1]), dim=-1)
    return [
        tuple(zip(row, ids, strict=True)) for row, ids in zip(values.cpu().tolist(), tokens.cpu().tolist(), strict=True)
    ]


def token_logprobs(
    logits: torch.Tensor, temperatures: Sequence[float], tokens: Sequence[int]
) -> list[tuple[float, ...]]:
    """Return the log-probabilities of these tokens in each row, of softmax(logits / T); temperature 0 counts as 1."""
    picked = _tempered(logits, temperatures)[:, torch.tensor(tokens, device=logits.device)]
    return [tuple(row) for row in picked.cpu().tolist()]


def _tempered(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    scale = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float32, device=logits.device)[:, None]
    return torch.log_softmax(logits.float() / scale, dim=-1)


def _scaled(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    scaled = logits.float()
    return scaled if temperature is None else scaled / temperature


def _choose(
    scaled: torch.Tensor,
    weights: torch.Tensor | None,
    uniforms: torch.Tensor,
    params: BatchSamplingParams,
    forbidden: ForbiddenTokens | None,
    first: int,
) -> torch.Tensor:
    """Choose the tokens of a slab of rows, which begins at row `first` of the batch. Returns [row].

    `scaled`: logits / T. `weights`: probabilities; None if all rows are greedy.
    """
    rows = scaled.shape[0]
    cells = None if forbidden is None else _within(forbidden, first, rows)
    tokens: torch.Tensor | None = None
    if weights is not None:
        if cells is not None:
            weights[cells] = 0.0
        tokens = _inverse(weights, uniforms)
        for truncation in params.truncating:
            inside = (truncation.rows >= first) & (truncation.rows < first + rows)
            own = truncation if bool(inside.all()) else _some(truncation, inside)
            if len(own.rows):
                places = own.rows - first
                tokens[places] = _truncated(weights[places], uniforms[places], own)
    if params.greedy is None:
        assert tokens is not None
        return tokens
    # Compare logits: normalisation may round two of them to the same value.
    if cells is not None:
        scaled = scaled.clone()
        scaled[cells] = float("-inf")
    best = scaled.argmax(-1)
    return best if tokens is None else torch.where(params.greedy[first : first + rows], best, tokens)


def _within(forbidden: ForbiddenTokens, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    inside = (forbidden.rows >= first) & (forbidden.rows < first + rows)
    return forbidden.rows[inside] - first, forbidden.tokens[inside]


def _some(truncation: Truncation, inside: torch.Tensor) -> Truncation:
    t = truncation
    return Truncation(t.candidates, t.rows[inside], t.top_p[inside], t.top_k[inside], t.min_p[inside])


def _inverse(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample by the inverse of the cumulative distribution. Returns [row]: the first index at which the cumulative
    weight exceeds uniform x total. `weights` [row, token], `uniforms` [row].
    """
    rows, width = weights.shape
    if width <= SMALL_VOCABULARY:
        return _search(weights, uniforms).index
    # In double precision, because the tail of a large vocabulary would be lost in rounding; over blocks, because that
    # would be slow.
    whole = width // BLOCK
    sums = weights[:, : whole * BLOCK].view(rows, whole, BLOCK).sum(-1)
    if whole * BLOCK < width:
        sums = torch.cat([sums, weights[:, whole * BLOCK :].sum(-1, keepdim=True)], -1)
    found = _search(sums, uniforms)
    block, within = found.index, found.within()
    index = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)[None, :]
    inside = weights.gather(-1, index.clamp(max=width - 1)).masked_fill_(index >= width, 0.0)
    return block * BLOCK + _search(inside, within).index


@dataclass(frozen=True, slots=True)
class DrawPosition:
    """Result of `_search`: in which weight's interval of the cumulative distribution each row's uniform number lies.

    `column` [row, 1] int64: index of that weight. `target` [row, 1]: uniform x total.
    """

    column: torch.Tensor
    weights: torch.Tensor
    cumulative: torch.Tensor
    target: torch.Tensor

    @property
    def index(self) -> torch.Tensor:
        """Index of the weight, [row]."""
        return self.column[:, 0]

    def within(self) -> torch.Tensor:
        """Relative position of the target inside the weight's interval, [row] in [0, 1): a new uniform number."""
        own = self.weights.gather(-1, self.column).double()
        into = (self.target - (self.cumulative.gather(-1, self.column) - own)) / own
        return into[:, 0].nan_to_num_(0.0).clamp_(0.0, BELOW_ONE)


def _search(weights: torch.Tensor, uniforms: torch.Tensor) -> DrawPosition:
    """Find in each row the first index at which the cumulative weight exceeds uniform x total."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    column = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    return DrawPosition(column, weights, cumulative, target)


def _truncated(weights: torch.Tensor, uniforms: torch.Tensor, cut: Truncation) -> torch.Tensor:
    """Sample tokens [row] from `weights` [row, token] after truncation by top-k, top-p and min-p."""
    width = weights.shape[-1]
    everything = cut.candidates == 0 or cut.candidates * 4 >= width
    if everything:
        ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    else:
        ordered, index = weights.topk(cut.candidates, dim=-1)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    # Forbidden tokens have weight 0, so the total may be less than 1.
    total = cumulative[:, -1:] if everything else weights.sum(-1, keepdim=True).double()
    rank = torch.arange(ordered.shape[-1], device=weights.device)[None, :]
    keep = (cut.top_k == 0) | (rank < cut.top_k)
    # A row with top_p = 1 keeps all tokens, even if rounding makes the sum exceed 1.
    keep &= (cut.top_p >= 1) | (cumulative - ordered <= cut.top_p * total)
    keep &= ordered >= cut.min_p * ordered[:, :1]
    keep[:, 0] = True
    # In order of token id, as without truncation.
    place = torch.where(keep, index, width)
    place, order = place.sort(dim=-1)
    kept = torch.where(keep, ordered, 0.0).gather(-1, order)
    tokens = place.gather(-1, _search(kept, uniforms).column)[:, 0]
    if not everything:
        short = keep[:, -1] & ((cut.top_k[:, 0] == 0) | (cut.top_k[:, 0] > cut.candidates))
        if bool(short.any()):
            tokens[short] = _truncated(weights[short], uniforms[short], cut.only(short))
    return tokens
