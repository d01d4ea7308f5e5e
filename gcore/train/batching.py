"""Converts a rank's samples of a step to tensors, and scores them: log-probabilities and entropies of their tokens.

A model's input (`ModelInputs`) is either one row of sequences end to end, or rows padded on the right. With sequence
parallelism it is this rank's slice of one row; outputs are gathered before anything else uses them. With causal
attention no real token sees the padding, so the model needs no mask. Logits are computed only where needed: for one row
exactly at the scored tokens, for several rows at the columns that contain any.

Outputs are rearranged by response: one row per sample, its tokens from column 0. Losses and counts use only this
layout, independent of how the model was fed.

Log-probabilities are those of the temperature-scaled, untruncated softmax, in float32, as in the engines. The
temperature is that of the sample's group (all samples of one prompt).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gcore.config.train import TrainSpec
from gcore.errors import DataError
from gcore.ledger.balance import SampleSlot
from gcore.models.vision import (
    REPEATS,
    PictureProcessor,
    PictureTensors,
    PositionCounter,
    TokenCounter,
    image_token_id,
    media_token_ids,
    picture_arguments,
    type_argument,
)
from gcore.train.backends.sequence_parallel import ALONE, SequenceGroup
from gcore.train.packing import CutSettings, MicroPlan, MiniBatchPlan, Packing, Rectangle, plan_step
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample

PIECE = 1 << 22
"""Number of logits that are converted to float32 at once, which bounds the additional memory."""


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    *,
    entropic: bool = False,
    forbidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target under softmax(logits / temperature), and the entropy of that softmax in
    nats.

    `logits` [n, vocabulary], `targets` [n] int64, `temperature` [n] float32 or None for 1. `forbidden` [k] int64: token
    IDs whose logits count as minus infinity. Returns two [n], float32 (or float64, if the logits are). The gradient
    flows through the log-probabilities, and through the entropies if `entropic`.

    With a vocabulary of 150k, logits are by far the largest tensor of a step. They are stored once, in the model's
    dtype, and float32 values are computed a few rows at a time: forward stores the log-sum-exp of each row, and
    backward recomputes the softmax from it.
    """
    if temperature is not None:
        temperature = temperature.to(_precise(logits.dtype))
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, targets, temperature, entropic, forbidden)
    return found


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _pieces(logits: Tensor) -> list[slice]:
    rows = max(1, PIECE // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def _scaled(logits: Tensor, temperature: Tensor | None, forbidden: Tensor | None, piece: slice) -> Tensor:
    part = logits[piece].to(_precise(logits.dtype))
    part = part if temperature is None else part / temperature[piece, None]
    return part if forbidden is None else part.index_fill(1, forbidden, -torch.inf)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        entropic: bool,
        forbidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(logits.shape[0], dtype=_precise(logits.dtype), device=logits.device)
        total, entropy = torch.empty_like(logp), torch.empty_like(logp)
        for piece in _pieces(logits):
            part = _scaled(logits, temperature, forbidden, piece)
            total[piece] = torch.logsumexp(part, dim=-1)
            logp[piece] = part.gather(1, targets[piece, None])[:, 0] - total[piece]
            weights = (part - total[piece, None]).exp_()
            # For a token that the model forbids with -inf, 0 · -inf would be NaN; its contribution is 0.
            entropy[piece] = total[piece] - weights.mul_(part).nan_to_num_(nan=0.0).sum(dim=-1)
        ctx.save_for_backward(logits, targets, temperature, total, entropy if entropic else None, forbidden)
        if not entropic:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, temperature, total, entropy, forbidden = ctx.saved_tensors
        out = torch.empty_like(logits)
        for piece in _pieces(logits):
            scale = gradients[0][piece] if temperature is None else gradients[0][piece] / temperature[piece]
            logp = _scaled(logits, temperature, forbidden, piece).sub(total[piece, None])
            if entropy is None:
                part = logp.exp_().mul_(-scale[:, None])
            else:
                # d entropy / d scaled logit j = -p_j (log p_j + entropy); a token forbidden with -inf has p = 0.
                pull = gradients[1][piece] if temperature is None else gradients[1][piece] / temperature[piece]
                bent = (logp + entropy[piece, None]).mul_(pull[:, None]).add_(scale[:, None])
                weights = logp.exp_()
                part = torch.where(weights == 0, 0.0, -weights * bent)
            part.scatter_add_(1, targets[piece, None], scale[:, None])
            out[piece] = part
        return out, None, None, None, None


DUMMY = Rectangle(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """Input of a model: token ids and the places at which logits are needed.

    `tokens`: packed, [1, t] with `positions` [1, t] in their sequences; or padded rows [b, t] with `positions` None.
    With sequence parallelism the t tokens and the logits are those of this rank's slice of the row. Logits are computed for the columns `columns` [c] int64, which gives [b·c] rows; of these, `rows` [n] int64 are kept
    (None: all). `rectangles`: how the tokens of the whole row are split into sequences (`gcore.train.packing`).

    Models that count positions in three dimensions get `positions` [3, 1, t] or [3, b, t]. `pictures`: None for jobs
    without pictures. `forbidden` [k] int64: token IDs whose logits count as minus infinity; None: none.
    """

    tokens: Tensor
    positions: Tensor | None
    rectangles: tuple[Rectangle, ...]
    columns: Tensor
    rows: Tensor | None
    pictures: PictureInputs | None = None
    forbidden: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PictureInputs:
    """The pictures of a forward pass.

    `arguments`: of the model's forward, with each distinct picture once. `places`: for each occurrence of a picture in
    the tokens, in order, its number among them; empty if no token is of a picture (then `arguments` has a dummy, so
    that all ranks run the vision tower).
    """

    arguments: Mapping[str, Tensor]
    places: tuple[int, ...]


LogitsOf = Callable[[ModelInputs], Tensor]
"""Maps inputs to the logits [n, vocabulary] of the scored tokens in this rank's slice."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A micro-batch of this rank: one row per sample of `slots`, columns are what is trained of it, padded to w.

    A dummy (without samples) has one row. `mask` [b, w] bool: tokens (or denoising steps) of unmasked samples, which are
    trained. `scored` [b, w] bool: the same, and those of masked samples if they are computed. `rollout_logp` [b, w] float32:
    the engine's log-probabilities, 0 where nothing is scored. `computed`: number of input tokens of the whole micro-batch;
    `real`: those of them that belong to samples, not to padding.
    """

    slots: tuple[SampleSlot, ...]
    mask: Tensor
    scored: Tensor
    rollout_logp: Tensor
    real: int
    computed: int

    @property
    def size(self) -> str:
        """Size of the micro-batch in words, for error messages."""
        return f"a micro-batch of {len(self.slots)} samples, {self.computed} tokens"


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch(MicroBatch):
    """A micro-batch of texts. Columns are the tokens of responses. Neither `mask` nor `scored` includes observed tokens (tool
    or environment output), which are only input of the model.

    By scored token, of which there is at least one (a dummy scores one token): `targets` [n] int64, its id;
    `temperature` [n] float32 (None: 1 for all); `places` [n] int64, its position in the flattened [b·w].

    With sequence parallelism all ranks of `group` have the same micro-batch; `targets`, `temperature` and `inputs` have
    only the tokens of this rank's slice of the row. `scored_by`: number of scored tokens in each rank's slice.
    """

    inputs: ModelInputs
    targets: Tensor
    temperature: Tensor | None
    places: Tensor
    group: SequenceGroup
    scored_by: tuple[int, ...]

    @property
    def size(self) -> str:
        """Size of the micro-batch in words, for error messages."""
        longest = max(one.length for one in self.inputs.rectangles)
        return f"a micro-batch of {len(self.slots)} samples, {self.computed} tokens, the longest {longest}"

    def spread(self, values: Tensor) -> Tensor:
        """Arrange values of the scored tokens as [b, w], 0 elsewhere. A collective of the sequence group.

        `values`: one for each scored token in this rank's slice.
        """
        values = self.group.gather(values, self.scored_by)
        flat = torch.zeros(self.mask.numel(), dtype=values.dtype, device=values.device)
        return flat.scatter(0, self.places, values).view(self.mask.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Log-probabilities [b, w] float32 and entropies [b, w] in nats of a micro-batch's tokens."""

    logp: Tensor
    entropy: Tensor

    def kept(self) -> Self:
        """What later passes compare with, without gradients."""
        return replace(self, logp=self.logp.detach(), entropy=self.entropy.detach())


OutputsOf = Callable[[Any], Tensor]
"""Maps the inputs of a micro-batch to the model's outputs for it."""


class Feeding(Protocol):
    """How a rank turns samples into micro-batches for its models, and the models' outputs into scores."""

    @property
    def device(self) -> torch.device:
        """Where the models compute."""
        ...

    @property
    def group(self) -> SequenceGroup:
        """The ranks that compute a packed row together."""
        ...

    def outputs_of(self, call: Callable[..., Any]) -> OutputsOf:
        """Wrap a module, or an engine around one, as a function from the inputs of a micro-batch to its outputs."""
        ...

    def dummy_inputs(self) -> Any:
        """Inputs of a micro-batch without samples."""
        ...

    def cut(self, work: StepInput, train: TrainSpec) -> StepTensors:
        """Split this rank's share of a step into micro-batches. Raises DataError for samples that do not fit the model."""
        ...

    def score(self, outputs_of: OutputsOf, batch: Any, *, entropic: bool = False) -> Scores:
        """Score a micro-batch of `cut` under a model. `entropic`: whether the gradient also flows through entropies."""
        ...


@dataclass(frozen=True, slots=True)
class TokenFeeding:
    """How a rank lays out tokens for its models; implements `Feeding`.

    `vocabulary`: the number of token ids that all of the models support. `group`: the ranks that compute a packed row
    together.
    """

    packing: Packing
    vocabulary: int
    device: torch.device
    group: SequenceGroup = ALONE
    forbidden: Tensor | None = None
    """Token IDs [k] int64 that stand for media: their logits count as minus infinity. None: a text model."""
    vision: VisionFeeding | None = None
    """Provides the pictures of samples; None: the job has none."""

    def outputs_of(self, call: Callable[..., Any]) -> LogitsOf:
        """Wrap a model, as `logits_of`."""
        return logits_of(call)

    def dummy_inputs(self) -> ModelInputs:
        """Inputs of a micro-batch without samples."""
        return make_dummy(self).inputs

    def cut(self, work: StepInput, train: TrainSpec) -> StepTensors:
        """Split this rank's share of a step, as `cut_step`."""
        return cut_step(work, train, self)

    def score(self, outputs_of: LogitsOf, batch: TokenBatch, *, entropic: bool = False) -> Scores:
        """Score a micro-batch, as `score_batch`."""
        return score_batch(outputs_of, batch, entropic=entropic)


def logits_of(call: Callable[..., Any]) -> LogitsOf:
    """Wrap a Hugging Face module, or a DeepSpeed engine around one, as a function from `ModelInputs` to logits.

    The function returns the logits [n, vocabulary] of the scored tokens. For a packed row it first tells the packed
    attention how the row is split.
    """
    from gcore.train.backends.packed_attention import PACKED  # imports transformers: seconds

    def logits(inputs: ModelInputs) -> Tensor:
        more: dict[str, Any] = {}
        if inputs.positions is not None:
            PACKED.lay(inputs.rectangles, inputs.tokens.device)
            more["position_ids"] = inputs.positions
        if inputs.pictures is not None:
            REPEATS.places = inputs.pictures.places
            more |= inputs.pictures.arguments
        out: Tensor = call(input_ids=inputs.tokens, use_cache=False, logits_to_keep=inputs.columns, **more).logits
        flat = out.flatten(0, 1)
        return flat if inputs.rows is None else flat.index_select(0, inputs.rows)

    return logits


class VisionFeeding:
    """Provides the pictures of samples, and positions, to a vision-language model."""

    def __init__(self, module: nn.Module, processor: PictureProcessor, blobs: Path) -> None:
        """`blobs`: the folder with the pictures, named by SHA-256."""
        model: Any = module
        self._processor = processor
        self._blobs = blobs
        self._positions = PositionCounter(module)
        self._counter = TokenCounter(module)
        self.image_token = image_token_id(model.config)
        self.media_tokens = media_token_ids(model.config)
        self._type_name = type_argument(module)
        self.dummy = processor.noise(32, 32)
        """A picture for passes without any."""
        self.trials = ((processor.noise(64, 64),), (processor.noise(64, 64), processor.noise(96, 64)))
        """Pictures of sequences with one and with two pictures, for the test of packing."""
        self.count(self.dummy)  # while the module is complete

    def row(self, row: _Row) -> RowPictures:
        """The pictures and positions of a sample with its prompt. Raises DataError if a picture cannot be read, or if
        the tokens have another number of placeholders than the pictures need.
        """
        names = tuple(one.sha256 for one in (*row.group.media, *row.sample.media) if one.kind == "picture")
        read = [self._processor.read(name, self._blobs / name) for name in names]
        ids = np.concatenate([row.group.prompt_ids, row.sample.token_ids])
        return self.sequence(ids, names, read, f"prompt {row.group.ref}")

    def sequence(
        self, ids: NDArray[np.int32], names: Sequence[str], read: Sequence[PictureTensors], where: str
    ) -> RowPictures:
        """The pictures and positions of the tokens `ids` [n]. `names`: distinct for distinct pictures. `where`: for
        errors. Raises DataError like `row`.
        """
        expected, found = sum(map(self.count, read)), int((ids == self.image_token).sum())
        if expected != found:
            raise DataError(
                f"the tokens have {found} placeholders, but the {len(read)} pictures need {expected}",
                where=where,
                fix="Use the processor and engine of the trained model",
            )
        grids = [one.grid for one in read if one.grid is not None]
        positions = self._positions.count(ids.tolist(), grids)[0].numpy() if self._positions.three and read else None
        return RowPictures(tuple(names), tuple(read), positions)

    def count(self, picture: PictureTensors) -> int:
        """The number of placeholders of a picture."""
        return self._counter.count(picture)

    def inputs(self, rows: Sequence[RowPictures], tokens: Tensor) -> PictureInputs:
        """The pictures of a forward pass with these sequences, in order. `tokens`: as in `ModelInputs`."""
        numbers: dict[str, int] = {}
        distinct: list[PictureTensors] = []
        for row in rows:
            for name, picture in zip(row.names, row.pictures, strict=True):
                if name not in numbers:
                    numbers[name] = len(distinct)
                    distinct.append(picture)
        arguments = picture_arguments(distinct or [self.dummy], tokens.device)
        if self._type_name:
            arguments[self._type_name] = (tokens == self.image_token).long()
        places = tuple(numbers[name] for row in rows for name in row.names)
        return PictureInputs(arguments, places)

    @property
    def three(self) -> bool:
        """Whether the model counts positions in three dimensions."""
        return self._positions.three


@dataclass(frozen=True, slots=True, eq=False)
class RowPictures:
    """The pictures of a sequence. `names`: SHA-256 of each. `positions` [3, n] int64; None: those of text."""

    names: tuple[str, ...] = ()
    pictures: tuple[PictureTensors, ...] = ()
    positions: NDArray[np.int64] | None = None


def make_batch(work: StepInput, plan: MicroPlan, feeding: TokenFeeding) -> TokenBatch:
    """Convert the samples of `plan` to a micro-batch on the device; a plan without samples gives a dummy.

    Raises DataError for a token outside of the model's vocabulary.
    """
    if not plan.slots:
        return make_dummy(feeding)
    return _tensors(plan.slots, _rows(work, plan), plan.rectangles, feeding)


def make_dummy(feeding: TokenFeeding) -> TokenBatch:
    """A micro-batch without samples, for a rank with fewer micro-batches than others: all ranks must run the same
    number.
    """
    return _tensors((), (), (DUMMY,), feeding)


def score_batch(outputs_of: LogitsOf, batch: TokenBatch, *, entropic: bool = False) -> Scores:
    """Log-probabilities and entropies of a micro-batch's scored tokens under a model, [b, w], 0 elsewhere.

    A collective of the sequence group. The caller enables or disables gradients. `entropic`: whether the gradient also flows through the entropies.
    """
    logits, forbidden = outputs_of(batch.inputs), batch.inputs.forbidden
    logp, entropy = token_logprobs(logits, batch.targets, batch.temperature, entropic=entropic, forbidden=forbidden)
    return Scores(batch.spread(logp), batch.spread(entropy))


@dataclass(frozen=True, slots=True)
class _Row:
    group: TrainGroup
    sample: TrainSample
    masked: bool


def _tensors(
    slots: tuple[SampleSlot, ...], rows: Sequence[_Row], rectangles: tuple[Rectangle, ...], feeding: TokenFeeding
) -> TokenBatch:
    group, rectangles = feeding.group, feeding.group.fill(rectangles)
    computed = sum(one.tokens for one in rectangles)
    tokens, starts = np.zeros(computed, dtype=np.int64), np.array(_starts(rectangles)[: len(rows)], dtype=np.int64)
    prompts = np.array([len(row.group.prompt_ids) for row in rows], dtype=np.int64)
    responses = np.array([len(row.sample.token_ids) for row in rows], dtype=np.int64)
    width = max(1, int(responses.max(initial=0)))
    scored = np.zeros((max(1, len(rows)), width), dtype=np.bool_)
    scored[: len(rows)] = np.arange(width) < responses[:, None]
    for number, row in enumerate(rows):
        for start, end in row.sample.observed:
            scored[number, start:end] = False
    mask, logprobs = scored.copy(), np.zeros(scored.shape, dtype=np.float32)
    mask[[number for number, row in enumerate(rows) if row.masked]] = False
    for number, (row, start, end) in enumerate(zip(rows, starts.tolist(), (starts + prompts).tolist(), strict=True)):
        tokens[start:end] = row.group.prompt_ids
        tokens[end : end + len(row.sample.token_ids)] = row.sample.token_ids
        logprobs[number, : len(row.sample.logprobs)] = row.sample.logprobs
    logprobs[~scored] = 0.0  # for observed tokens, which were not sampled
    _check(tokens, rows, slots, feeding.vocabulary)
    pictures = [] if feeding.vision is None else [feeding.vision.row(row) for row in rows]
    where, counts = np.flatnonzero(scored), scored[: len(rows)].sum(axis=1)
    scale = np.array([row.group.temperature for row in rows], dtype=np.float32).repeat(counts)
    # A token is predicted by the one before it; `where % width` counts a response's tokens.
    columns = (starts + prompts - 1).repeat(counts) + where % width
    if not len(where):
        # Score one token, so that the dummy's gradients reach every parameter.
        columns, where, scale = np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.float32)

    # Scored tokens are in the order of the row, so those of a slice follow each other.
    ends = np.searchsorted(columns, [group.slice_of(computed, number).stop for number in range(group.size)]).tolist()
    own = slice(ends[group.index - 1] if group.index else 0, ends[group.index])

    def put(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(feeding.device)

    return TokenBatch(
        slots=slots,
        mask=put(mask),
        scored=put(scored),
        rollout_logp=put(logprobs),
        real=int(prompts.sum() + responses.sum()),
        computed=computed,
        inputs=_inputs(tokens, columns[own], rectangles, pictures, feeding),
        targets=put(tokens[np.minimum(columns[own] + 1, computed - 1)]),
        temperature=None if bool((scale == 1.0).all()) else put(scale[own]),
        places=put(where),
        group=group,
        scored_by=tuple(end - start for start, end in itertools.pairwise([0, *ends])),
    )


def _rows(work: StepInput, plan: MicroPlan) -> list[_Row]:
    rows = []
    for slot in plan.slots:
        sealed = work.seal.groups[slot.group]
        group = work.groups[sealed.digest]
        rows.append(_Row(group, group.samples[slot.sample], slot.sample in sealed.masked))
    return rows


def _check(tokens: NDArray[np.int64], rows: Sequence[_Row], slots: Sequence[SampleSlot], vocabulary: int) -> None:
    """Raise DataError for a token outside of the model's vocabulary; torch's own message would not name it."""
    if not len(tokens) or (int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary):
        return
    for row, slot in zip(rows, slots, strict=True):
        for what, ids in (("prompt", row.group.prompt_ids), ("response", row.sample.token_ids)):
            wrong = ids[(ids < 0) | (ids >= vocabulary)]
            if len(wrong):
                raise DataError(
                    f"token {wrong[0]} in the {what} of sample {slot.sample} is not in the model's vocabulary of {vocabulary}",
                    where=f"prompt {row.group.ref}",
                    fix="Use the tokenizer and engine of the trained model",
                )


def _starts(rectangles: Sequence[Rectangle]) -> list[int]:
    """The offset of each row in the flat sequence of tokens when all rows are placed end to end."""
    starts, end = [], 0
    for one in rectangles:
        starts += [end + row * one.length for row in range(one.rows)]
        end += one.tokens
    return starts


def _inputs(
    tokens: NDArray[np.int64],
    scored: NDArray[np.int64],
    rectangles: tuple[Rectangle, ...],
    pictures: Sequence[RowPictures],
    feeding: TokenFeeding,
) -> ModelInputs:
    """Build the model's inputs. `tokens` [t]: all rows end to end. `scored` [n]: offsets whose logits this rank computes.
    `pictures`: of each row that is a sample; empty for text models.
    """
    device, vision = feeding.device, feeding.vision
    positions = token_positions(rectangles, pictures, three=vision is not None and vision.three)
    if feeding.packing == "packed":
        own = feeding.group.slice_of(len(tokens))
        row = torch.from_numpy(tokens[own]).to(device).unsqueeze(0)
        places = torch.from_numpy(positions[..., own]).to(device).unsqueeze(-2)
        columns = torch.from_numpy(scored - own.start).to(device)
        return ModelInputs(
            row,
            places,
            rectangles,
            columns,
            None,
            None if vision is None else vision.inputs(pictures, row),
            feeding.forbidden,
        )
    (one,) = rectangles
    padded = torch.from_numpy(tokens).to(device).view(one.rows, one.length)
    number, column = np.divmod(scored, one.length)
    first, last = int(column.min()), int(column.max())
    window = last + 1 - first
    rows = number * window + (column - first)
    everything = len(rows) == one.rows * window and bool((rows == np.arange(len(rows))).all())
    return ModelInputs(
        padded,
        None if vision is None else torch.from_numpy(positions).to(device).unflatten(-1, (one.rows, one.length)),
        rectangles,
        torch.arange(first, last + 1, device=device),
        None if everything else torch.from_numpy(rows).to(device),
        None if vision is None else vision.inputs(pictures, padded),
        feeding.forbidden,
    )


def token_positions(
    rectangles: tuple[Rectangle, ...], pictures: Sequence[RowPictures], *, three: bool
) -> NDArray[np.int64]:
    """The position of each token in its sequence: [t], or [3, t] if the model counts in `three` dimensions."""
    plain = np.concatenate([np.tile(np.arange(one.length), one.rows) for one in rectangles])
    if not three:
        return plain
    positions = np.repeat(plain[None], 3, axis=0)
    for start, row in zip(_starts(rectangles), pictures, strict=False):  # padding rows have none
        if row.positions is not None:
            positions[:, start : start + row.positions.shape[1]] = row.positions
    return positions


class BatchIndex(NamedTuple):
    """Identifies a micro-batch of a step: the mini-batch (update), and the micro-batch within it."""

    mini_batch: int
    micro_batch: int


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """One rank's samples of a sealed step as tensors. `batches[m][k]`: micro-batch k of mini-batch m; `plans[m]`: its
    plan.
    """

    work: StepInput
    plans: tuple[MiniBatchPlan, ...]
    batches: tuple[tuple[MicroBatch, ...], ...]

    def places(self) -> Iterator[BatchIndex]:
        """The indexes of all micro-batches, in the order in which they are trained."""
        for number, batches in enumerate(self.batches):
            for k in range(len(batches)):
                yield BatchIndex(number, k)

    def at(self, place: BatchIndex) -> MicroBatch:
        """The micro-batch at this index."""
        return self.batches[place.mini_batch][place.micro_batch]

    def reward(self, slot: SampleSlot) -> float:
        """Reward of a sample that this rank holds."""
        return self.work.groups[self.work.seal.groups[slot.group].digest].samples[slot.sample].reward

    def baseline(self, slot: SampleSlot) -> float:
        """The baseline reward that ReMax subtracts, of the group of a sample that this rank holds.

        Raises DataError if the flow has computed none.
        """
        group = self.work.groups[self.work.seal.groups[slot.group].digest]
        if group.baseline is None:
            raise DataError(
                "the group has no baseline, which train.advantage: remax needs",
                where=f"prompt {group.ref}",
                fix="Use a flow that computes one, such as remax, or another estimator",
            )
        return group.baseline


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedPasses:
    """Results by micro-batch, computed before the updates: advantages, and scores of the old policy and of the reference.

    `old` may lack the first mini-batch, which its first update fills in. `reference` is empty without a KL to it.
    """

    advantages: dict[BatchIndex, Tensor]
    old: dict[BatchIndex, Scores]
    reference: dict[BatchIndex, Scores]

    @property
    def old_logp(self) -> dict[BatchIndex, Tensor]:
        """Old log-probabilities [b, w] by micro-batch."""
        return {place: scores.logp for place, scores in self.old.items()}


def cut_step(work: StepInput, train: TrainSpec, feeding: TokenFeeding) -> StepTensors:
    """Split this rank's share of a step into micro-batches of tensors. Raises DataError for tokens outside of the
    vocabulary.
    """
    # With KL in the reward, masked samples are computed too, because their reward needs the KL of their tokens.
    cutting = CutSettings(
        train.micro_batch_tokens, feeding.packing, masked=train.rewards_kl, patches=train.most_patches
    )
    plans = plan_step(work.seal, work.layout, work.rank, cutting)
    batches = tuple(tuple(make_batch(work, one, feeding) for one in plan.micro_batches) for plan in plans)
    return StepTensors(work, plans, batches)
