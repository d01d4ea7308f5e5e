"""Choose the model runner (here also *lane*) that serves a model, by a trial at start.

The engine's own loop continues short prompts of different lengths, with every operation on rows: a prompt is prefilled
in two chunks, a row joins late with the prompt of a running row, rows leave and others move. The log-probabilities of
the results are compared with plain forward passes of the same module. If the runner handles positions, attention or
states of the model incorrectly, the numbers differ. So no table of supported models is needed. The fast or the
deterministic runner is tried first, then the generic one; a model that neither serves is refused. Features that have an
effect only in long contexts are found in the configuration: a sliding window that the attention function does not
receive, or layers of unknown kinds, need the generic runner.

For deterministic decoding, samples are generated alone and in a batch that fills more than a tile, and compared bit by
bit.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gcore.engines.pictures import PreparedPictures
from gcore.engines.request import GenerationRequest, RequestSampling, SequenceState
from gcore.engines.torch.attention import BLOCK, PrefillPass
from gcore.engines.torch.engine import Decoder
from gcore.engines.torch.fast_path import fast_decode_step
from gcore.engines.torch.kv_cache import CacheShape, LayerShape
from gcore.engines.torch.model import FORBIDDEN, TOLERANCES, Model, unservable_model
from gcore.engines.torch.model_runner import TILE, UNCUT, DeterministicRunner, FastRunner, GenericRunner, ModelRunner
from gcore.engines.torch.prefill import PrefillCache, PrefillChunk
from gcore.errors import DataError
from gcore.models.vision import picture_arguments
from gcore.system.memory import is_out_of_memory

log = logging.getLogger("gcore.engine")
LENGTHS = (3, 12)

PIECE = 7
"""Number of tokens in the first of two chunks of a prompt: more than the convolution of a state-space model spans."""

COMPARED = 64
"""Number of tokens, spread over the vocabulary, whose log-probabilities are compared at each position."""

CONTINUED = 4

ROWS = 8
"""Maximum number of rows of `FastRunner` in the trial; more than it needs."""

SHORT_WINDOW = 64
"""A sliding window of at most this many tokens is tested with a prompt that is longer than it."""

KINDS = frozenset({"full_attention", "sliding_attention"})
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class RunnerUnproved(Exception):
    """A runner cannot serve the model; the text says why."""


def select_runner(model: Model, *, deterministic: bool, chunk: int) -> ModelRunner:
    """Return the first runner that passes the trial, and set the model up for it. Raises DataError if none does.

    `deterministic`: only runners with deterministic decoding. `chunk`: multiple at which these cut prompts. A
    `FastRunner` has only as many rows as the trial needs; the caller creates one with the real limits.
    """
    if model.context < max(LENGTHS) + CONTINUED:
        raise DataError(f"the model's context of {model.context} tokens is too short to serve", where=str(model.folder))
    reasons: list[str] = []
    for lane in _lanes(model, deterministic, chunk, reasons):
        try:
            _prove(model, lane)
            if deterministic:
                _prove_bits(model, lane)
        except Exception as problem:  # the model's own code may raise anything
            if is_out_of_memory(problem):
                raise
            reasons.append(" ".join(str(problem).split())[:300] or repr(problem))
        else:
            if lane.name == "plain":
                log.warning("%s uses the plain lane, which is slow: %s", model.folder, reasons[0] if reasons else "")
            else:
                log.info("%s uses the %s lane", model.folder, lane.name)
            return lane
    raise unservable_model(model.folder, reasons[-1])


def _lanes(model: Model, deterministic: bool, chunk: int, reasons: list[str]) -> Iterator[ModelRunner]:
    """Yield the runners to try, best first. The model is set up for each when it is yielded.

    Reasons why better ones are not tried are added to `reasons`.
    """
    if (why := _unfit(model)) is not None:
        reasons.append(why)
    else:
        try:
            _measure(model)
        except Exception as problem:  # the model's own code may raise anything
            if is_out_of_memory(problem):
                raise
            reasons.append(" ".join(str(problem).split())[:300] or repr(problem))
        else:
            if not deterministic:
                yield FastRunner(model, slots=ROWS)
            else:
                if not any(getattr(model.module.config.get_text_config(), name, None) for name in EXPERTS):
                    yield DeterministicRunner(model, chunk=chunk, tile=TILE)
                yield DeterministicRunner(model, chunk=chunk, tile=1)
    model.use_plain_attention()
    model.straight = None
    for whole in (False, True):
        yield GenericRunner(model, whole=whole, alone=deterministic, chunk=chunk)


def _unfit(model: Model) -> str | None:
    """Return why `FastRunner` and `DeterministicRunner` cannot serve the model, as far as known without a trial."""
    c = model.module.config.get_text_config()
    if not getattr(model.module, "_supports_attention_backend", False):
        return f"a {c.model_type} has no attention that can be replaced"
    if kinds := set(getattr(c, "layer_types", None) or ()) - KINDS:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    return None


@torch.inference_mode()
def _measure(model: Model) -> None:
    """Run two tokens through the model to measure what its layers cache, and set `model.shape` and `model.straight`.

    Raises RunnerUnproved if the layers do not cache keys and values, one per token, with equal numbers of heads.
    """
    model.use_own_attention()
    model.attention.kind = PrefillPass()
    prefix, device = PrefillCache(), model.shape.device
    ids = torch.tensor([[1 % model.vocabulary, 0]], device=device)
    model.forward(ids, torch.arange(2, device=device)[None], prefix, wanted=([0], [1]))
    layers = tuple(
        LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
        for keys, values in zip(prefix.keys, prefix.values, strict=True)
    )
    if not layers:
        raise RunnerUnproved("its layers keep no keys and values")
    if len({layer.kv_heads for layer in layers}) > 1:
        raise RunnerUnproved("its layers have different numbers of key heads")
    if any(keys.shape[2] != 2 for keys in prefix.keys):
        raise RunnerUnproved("its layers do not keep one key a token")
    model.shape = CacheShape(layers, prefix.keys[0].dtype, device)
    model.straight = fast_decode_step(model.module, model.attention, model.vocabulary)


def _window(model: Model) -> int | None:
    """Return the size of the model's sliding window in tokens; None if there is none shorter than the context."""
    c = model.module.config.get_text_config()
    window = getattr(c, "sliding_window", None) if getattr(c, "use_sliding_window", True) else None
    kinds = getattr(c, "layer_types", None)
    if window is None or window >= model.context or (kinds and "sliding_attention" not in kinds):
        return None
    return int(window)


def _work(model: Model, number: int, length: int, *, temperature: float = 0.0) -> SequenceState:
    prompt = tuple((7 * number + 5 * i + 1) % model.vocabulary for i in range(length))
    named = tuple(range(0, model.vocabulary, max(1, model.vocabulary // COMPARED)))
    sampling = RequestSampling(CONTINUED, seed=number, temperature=temperature, named_tokens=named)
    adapters = 0 if model.adapters is None else len(model.adapters.names)
    adapter = (number + 1) % (adapters + 1)  # sequences of different adapters share the trial's batches
    return SequenceState(GenerationRequest(number, "proof", prompt, sampling, adapter=adapter))


def _seeing(model: Model, number: int) -> list[SequenceState]:
    """Sequences with one picture and with two of unequal size, if they fit into the model's context."""
    assert model.vision is not None
    reader = model.vision.reader
    media = set() if model.forbidden is None else set(model.forbidden.tolist())
    first, *between = [token for token in range(model.vocabulary) if token not in media][:4]
    found: list[SequenceState] = []
    for sizes in (((64, 64),), ((64, 64), (96, 64))):
        pictures = [(hashlib.sha256(repr(size).encode()).hexdigest(), reader.noise(*size)) for size in sizes]
        short = [first, *(one for _ in sizes for one in (reader.token, *between))]
        tokens = reader.expand(short, pictures)
        if len(tokens) + CONTINUED < model.context:
            work = _work(model, number + len(found), 1)
            task = replace(work.task, prompt=tokens, pictures=reader.prompt(tokens, pictures), key=b"")
            found.append(SequenceState(task))
    return found


def _prove(model: Model, lane: ModelRunner) -> None:
    """Raise RunnerUnproved if the runner's log-probabilities differ from those of a plain forward pass."""
    window = _window(model)
    lengths = list(LENGTHS)
    if window is not None and window <= SHORT_WINDOW and window + 2 * CONTINUED < model.context:
        lengths.append(window + CONTINUED)
    works = [_work(model, number, length) for number, length in enumerate(lengths)]
    if model.vision is not None:
        works += _seeing(model, len(works))
    late = SequenceState(replace(works[-1].task, number=len(works)))
    leaver = SequenceState(GenerationRequest(len(works) + 1, "proof", (2 % model.vocabulary,), works[0].task.sampling))
    done = _run(model, lane, [leaver, *works], late)
    if window is not None and lane.name != "plain" and window not in model.attention.windows:
        raise RunnerUnproved(f"its attention does not receive its sliding window of {window} tokens")
    if lane.name != "plain":
        model.use_plain_attention()
    error = max(_error(model, work) for work in done)
    if lane.name != "plain":
        model.use_own_attention()
    if not error <= TOLERANCES[model.shape.dtype]:
        raise RunnerUnproved(f"its log-probabilities differ by {error:.3g}")


def _run(model: Model, lane: ModelRunner, works: list[SequenceState], late: SequenceState) -> list[SequenceState]:
    """Generate a few tokens for `works` with the runner, and return all sequences.

    The first leaves early, the last is prefilled in two chunks, and `late` joins later.
    """
    decoder = Decoder(model, lane, len(works) + 1)
    prompts = [decoder.prompt(work) for work in works]
    if lane.grid != UNCUT:
        decoder.read([PrefillChunk(prompts[-1], PIECE)])
    decoder.read([PrefillChunk(prompt, prompt.left) for prompt in prompts])
    decoder.join(works)
    decoder.step()
    (first,) = decoder.leave([decoder.rows.works.index(works[0])])
    if decoder.key(late) not in decoder.known():
        decoder.read([PrefillChunk(decoder.prompt(late), len(late.task.prompt))])
    decoder.join([late])
    for _ in range(CONTINUED - 2):
        decoder.step()
    done = [first, *decoder.leave(range(decoder.rows.active))]
    lane.release()
    return done


@torch.inference_mode()
def _error(model: Model, work: SequenceState) -> float:
    """Return the largest difference between a sequence's log-probabilities and those of a plain forward pass."""
    ids = torch.tensor([[*work.task.prompt, *work.tokens]], device=model.shape.device)
    model.select_adapters([work.task.adapter])
    more: dict[str, Any] = {}
    if (pictures := work.task.pictures) is not None:
        assert isinstance(pictures, PreparedPictures)
        assert model.vision is not None
        more = picture_arguments(pictures.pictures, ids.device)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inspect.signature(model.module.forward).parameters:
                more[name] = (ids == model.vision.reader.token).long()
    logits: Any = model.module(input_ids=ids, use_cache=False, **more).logits
    if model.forbidden is not None:
        logits = logits.index_fill(-1, model.forbidden, FORBIDDEN)
    begin = len(work.task.prompt) - 1
    plain = torch.log_softmax(logits[0, begin:-1].float(), dim=-1)[:, list(work.task.sampling.named_tokens)].cpu()
    possible = plain > FORBIDDEN / 2
    return float((plain - torch.tensor(work.named))[possible].abs().max())


def _prove_bits(model: Model, lane: ModelRunner) -> None:
    """Raise RunnerUnproved if a sample differs in any bit when others are in the batch."""
    # One of them crosses from one block of the cache to the next.
    lengths = [length for length in (1, 7, BLOCK - 2) if length + CONTINUED <= model.context]
    alone = [_sampled(model, lane, [_work(model, n, length, temperature=1.0)])[0] for n, length in enumerate(lengths)]
    crowd = [_work(model, 100 + n, 2 + n % 9, temperature=1.0) for n in range(getattr(lane, "tile", 2) + 2)]
    same = [_work(model, n, length, temperature=1.0) for n, length in enumerate(lengths)]
    together = _sampled(model, lane, [*crowd[: len(crowd) // 2], *same, *crowd[len(crowd) // 2 :]])
    for work in alone:
        twin = next(other for other in together if other.task.number == work.task.number)
        if work.tokens != twin.tokens or work.logprobs != twin.logprobs:
            raise RunnerUnproved("its samples depend on what else is in the batch")


def _sampled(model: Model, lane: ModelRunner, works: Sequence[SequenceState]) -> list[SequenceState]:
    decoder = Decoder(model, lane, len(works))
    decoder.read([PrefillChunk(decoder.prompt(work), len(work.task.prompt)) for work in works])
    decoder.join(works)
    for _ in range(CONTINUED - 1):
        decoder.step()
    done = decoder.leave(range(decoder.rows.active))
    lane.release()
    return done
