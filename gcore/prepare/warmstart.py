"""The warm start: a small qwen3 learns from a careless hand, and is saved with a tokenizer of its own.

The model is supervised on the demonstrations of a `gcore.prepare.lesson.Lesson`: for each a coin decides anew whether the
careless answer or the right one is shown. What it prefers to say then is wrong wherever carelessness does harm, and it says
the right thing now and then: greedy accuracy below one half, and for nearly every prompt some right answer among eight
samples. The accuracy on held-out prompts is looked at every few updates of the last quarter, and the model kept is that of
the last look within the band; training past it would not help, as the demonstrations stay careless.

One thread, so that the result does not depend on how many cores there are. Global random state and the number of threads
are left as they were. This is a leaf: it imports torch and transformers, and is imported by `prepare` when needed.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from gcore.errors import DataError
from gcore.prepare.lesson import Exercise, Lesson
from gcore.prepare.progress import WarmStartProgress
from gcore.prepare.tokens import CONTEXT, Alphabet, save_tokenizer

THREADS = 1

BATCH = 64
PEAK_LEARNING_RATE = 1.5e-3
WARMUP_UPDATES = 20
DECAY_SHARE = 0.6
"""The learning rate falls over this last part of the updates, which takes the noise of single batches out of the model."""

LOOK_EVERY = 20
INITIALIZER_RANGE = 0.05
"""Larger than the usual 0.02, which is meant for wider layers: at width 128 the first hundred updates are saved."""

_IGNORE = -100


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The model, the share of held-out prompts it is right on greedily, and of those it is right on in one of 8 samples."""

    model: Any
    alphabet: Alphabet
    greedy_accuracy: float
    pass_at_8: float


@dataclass(frozen=True, slots=True)
class _Look:
    update: int
    accuracy: float
    weights: dict[str, Tensor]

    def fits(self, lesson: Lesson) -> bool:
        low, high = lesson.band
        return low <= self.accuracy <= high


@dataclass(frozen=True, slots=True)
class _Demonstrations:
    """Rows of prompt, answer, padding. [exercises, tokens] int64 each; labels are -100 but at the answer."""

    inputs_right: Tensor
    labels_right: Tensor
    inputs_careless: Tensor
    labels_careless: Tensor


def torch_version() -> str:
    """The torch that trains."""
    return str(torch.__version__)


def warm_start(
    lesson: Lesson, *, seed: int, updates: int, report: Callable[[WarmStartProgress], None], must_fit: bool = True
) -> WarmStart:
    """Train for `updates` and return the model as the last look within the lesson's band found it.

    Without `must_fit`, a model that was never within the band is returned as it ended. Raises DataError otherwise.
    """
    alphabet = Alphabet(lesson.characters)
    with _deterministic(seed):
        model = _new_model(alphabet)
        look = _train(model, lesson, alphabet, seed, updates, report)
        if must_fit and not look.fits(lesson):
            low, high = lesson.band
            raise DataError(
                f"after {updates} updates the warm-started model is right on {look.accuracy:.1%} of the held-out "
                f"prompts, not on {low:.0%} to {high:.0%}",
                where=f"seed {seed}",
                fix="Use another seed",
            )
        model.load_state_dict(look.weights)
        generator = torch.Generator().manual_seed(seed)
        sampled = [_right(model, lesson, alphabet, generator) for _ in range(8)]
        return WarmStart(model, alphabet, look.accuracy, float(torch.stack(sampled).any(0).double().mean()))


def save_model(started: WarmStart, folder: Path) -> None:
    """A folder that `AutoModelForCausalLM`, `AutoTokenizer` and the `tokenizers` library load. Raises OSError."""
    try:
        with _without_progress_bars():
            started.model.save_pretrained(folder)
    except SafetensorError as error:
        # Only its words hold what the system said, a full disk for one.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    save_tokenizer(started.alphabet, folder)


def _new_model(alphabet: Alphabet) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=alphabet.vocabulary_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=alphabet.eos,
        pad_token_id=alphabet.pad,
    )
    return Qwen3ForCausalLM(config)


def _train(
    model: Any,
    lesson: Lesson,
    alphabet: Alphabet,
    seed: int,
    updates: int,
    report: Callable[[WarmStartProgress], None],
) -> _Look:
    generator = torch.Generator().manual_seed(seed)
    sources = [_demonstrations(source, alphabet, lesson.longest_row) for source in lesson.sources]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    kept: _Look | None = None
    accuracy: float | None = None
    model.train()
    for update in range(1, updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(update, updates)
        inputs, labels = _batch(sources, lesson.careless_share, generator)
        logits = model(input_ids=inputs[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORE)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last_quarter = 4 * update > 3 * updates
        if update == updates or update % (LOOK_EVERY if last_quarter else 5 * LOOK_EVERY) == 0:
            look = _look(model, lesson, alphabet, update)
            accuracy = look.accuracy
            if last_quarter and (look.fits(lesson) or kept is None or not kept.fits(lesson)):
                kept = look
        report(WarmStartProgress(update, updates, accuracy))
    if kept is None:
        raise ValueError(f"a warm start of {updates} updates")
    return kept


def _look(model: Any, lesson: Lesson, alphabet: Alphabet, update: int) -> _Look:
    right = _right(model, lesson, alphabet, None)
    return _Look(update, float(right.double().mean()), copy.deepcopy(model.state_dict()))


def _learning_rate(update: int, updates: int) -> float:
    """Rises over the warm-up, then stays, then falls to a twentieth along a line."""
    left = max(0.05, (updates - update) / max(1.0, DECAY_SHARE * updates))
    return PEAK_LEARNING_RATE * min(1.0, update / WARMUP_UPDATES, left)


def _batch(
    sources: Sequence[_Demonstrations], careless_share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and labels, [about BATCH, tokens] each: exercises drawn at random, and for each a coin."""
    inputs, labels = [], []
    count = BATCH // len(sources)
    for source in sources:
        rows = torch.randint(len(source.inputs_right), (count,), generator=generator)
        careless = (torch.rand(count, generator=generator) < careless_share)[:, None]
        inputs.append(torch.where(careless, source.inputs_careless[rows], source.inputs_right[rows]))
        labels.append(torch.where(careless, source.labels_careless[rows], source.labels_right[rows]))
    return torch.cat(inputs), torch.cat(labels)


def _demonstrations(exercises: Sequence[Exercise], alphabet: Alphabet, length: int) -> _Demonstrations:
    right = [_row(e.prompt, e.answer, alphabet, length) for e in exercises]
    careless = [_row(e.prompt, e.careless_answer, alphabet, length) for e in exercises]
    return _Demonstrations(
        torch.tensor([row for row, _ in right]),
        torch.tensor([row for _, row in right]),
        torch.tensor([row for row, _ in careless]),
        torch.tensor([row for _, row in careless]),
    )


def _row(prompt: str, answer: str, alphabet: Alphabet, length: int) -> tuple[list[int], list[int]]:
    """Input ids and labels of one demonstration, padded to `length` tokens."""
    asked, told = alphabet.encode(prompt), [*alphabet.encode(answer), alphabet.eos]
    rest = length - len(asked) - len(told)
    return asked + told + [alphabet.pad] * rest, [_IGNORE] * len(asked) + told + [_IGNORE] * rest


def _right(model: Any, lesson: Lesson, alphabet: Alphabet, generator: torch.Generator | None) -> Tensor:
    """[held-out prompts] bool: the response begins with the right answer and the end of sequence."""
    lengths = sorted({len(e.prompt) for e in lesson.held_out})
    right = torch.zeros(len(lesson.held_out), dtype=torch.bool)
    for length in lengths:  # no padding: prompts of a length go together
        places = [i for i, e in enumerate(lesson.held_out) if len(e.prompt) == length]
        prompts = torch.tensor([alphabet.encode(lesson.held_out[i].prompt) for i in places])
        responses = _generate(model, prompts, lesson.longest_answer, generator).tolist()
        for place, response in zip(places, responses, strict=True):
            expected = [*alphabet.encode(lesson.held_out[place].answer), alphabet.eos]
            right[place] = response[: len(expected)] == expected
    return right


@torch.no_grad()
def _generate(model: Any, prompts: Tensor, tokens: int, generator: torch.Generator | None) -> Tensor:
    """Responses to prompts of equal length, [n, tokens] int64: greedy, or sampled at temperature 1."""
    model.eval()
    ids, cache, steps = prompts, None, []
    for _ in range(tokens):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.logits[:, -1], out.past_key_values
        ids = (
            logits.argmax(-1, keepdim=True)
            if generator is None
            else torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        )
        steps.append(ids)
    model.train()
    return torch.cat(steps, 1)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Saving one small file needs no bar of transformers' own beside ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """A fixed number of threads and a seeded random state; both as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
