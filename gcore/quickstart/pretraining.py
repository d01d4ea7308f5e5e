"""Pretraining: a character-level qwen3 of 1.0M parameters learns a lesson from demonstrations.

Each demonstration shows the careless or the right answer at random. The resulting model prefers the careless answer: greedy accuracy is below
one half, but for nearly every prompt one of eight samples is right. A judge's lesson has no careless answers. In the last quarter of the
updates, accuracy on held-out prompts is measured regularly; the model of the last measurement within the band is kept.

Uses one thread, so that results do not depend on the number of cores. Restores global random state and the number of threads. Imports torch
and transformers, so preparations import this module only when they need it.
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
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from gcore.config.train import LoraSpec
from gcore.errors import DataError
from gcore.models.adapters import describe_base, stored_name
from gcore.models.hubs import ADAPTER_CONFIG
from gcore.models.layout import ADAPTER_FILE, BASE_FILE
from gcore.quickstart.folder import TeachingProgress
from gcore.quickstart.lessons import CONTEXT, Alphabet, Exercise, Lesson, save_tokenizer
from gcore.train.backends.adapters import adapter_config, add_adapters

THREADS = 1

INITIALIZER_RANGE = 0.05
"""Larger than the usual 0.02, which suits wider layers. At width 128 this saves the first hundred updates."""

NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Printed for ids without a character: padding, and ids beyond the alphabet."""


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A transformers network with the alphabet of its tokenizer."""

    network: Any
    alphabet: Alphabet


def torch_version() -> str:
    """Return the version of torch."""
    return str(torch.__version__)


def new_model(alphabet: Alphabet) -> SmallModel:
    """Return an untrained model, initialized from torch's random state."""
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
    return SmallModel(Qwen3ForCausalLM(config), alphabet)


def generate_responses(
    model: SmallModel, prompts: Sequence[str], tokens: int, generator: torch.Generator | None
) -> list[str]:
    """Generate a response to each prompt, up to the end of sequence or `tokens`: greedy without a generator, otherwise sampled
    at temperature 1."""
    written = [""] * len(prompts)
    for length in sorted(
        {len(prompt) for prompt in prompts}
    ):  # batch prompts of equal length, so that none needs padding
        places = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        asked = torch.tensor([model.alphabet.encode(prompts[i]) for i in places])
        for place, ids in zip(places, _generate(model.network, asked, tokens, generator).tolist(), strict=True):
            written[place] = _text(model.alphabet, ids)
    return written


def save_model(model: SmallModel, folder: Path) -> None:
    """Save a folder that `AutoModelForCausalLM`, `AutoTokenizer` and the `tokenizers` library can load. Raises OSError."""
    with _system_errors(folder), quiet_saving():
        model.network.save_pretrained(folder)
    save_tokenizer(model.alphabet, folder)


def save_adapter(model: SmallModel, rank: int, base: Path, folder: Path) -> None:
    """Save the adapter of a model that `teach_adapter` trained, in PEFT's layout and with the digests of its base.

    `base`: folder of the saved base model. `folder`: is created. Raises OSError.
    """
    tensors = {stored_name(name): one.data for name, one in model.network.named_parameters() if one.requires_grad}
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_bytes(adapter_config(model.network, LoraSpec(rank=rank), Path(base.name)).encode())
    (folder / BASE_FILE).write_bytes(describe_base(base))
    with _system_errors(folder):
        save_file(tensors, folder / ADAPTER_FILE)


@contextmanager
def _system_errors(folder: Path) -> Iterator[None]:
    """Raise the system's error behind an error of safetensors, such as a full disk: it is only in the text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


@contextmanager
def deterministic_torch(seed: int) -> Iterator[None]:
    """Run the block with one torch thread and torch's random state seeded; restore both afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _text(alphabet: Alphabet, ids: Sequence[int]) -> str:
    ended = ids[: ids.index(alphabet.eos)] if alphabet.eos in ids else ids
    return "".join(alphabet.characters[i] if i < len(alphabet.characters) else NO_CHARACTER for i in ended)


@torch.no_grad()
def _generate(network: Any, prompts: Tensor, tokens: int, generator: torch.Generator | None) -> Tensor:
    """Return responses to prompts of equal length, [n, tokens] int64."""
    network.eval()
    ids, cache, steps = prompts, None, []
    for _ in range(tokens):
        out = network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.logits[:, -1], out.past_key_values
        ids = (
            logits.argmax(-1, keepdim=True)
            if generator is None
            else torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        )
        steps.append(ids)
    network.train()
    return torch.cat(steps, 1)


@contextmanager
def quiet_saving() -> Iterator[None]:
    """Disable transformers' own progress bar while the block runs, and DeepSpeed's warning that there is no accelerator:
    saving a model imports DeepSpeed if it is installed."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    given = os.environ.get("DS_ACCELERATOR")
    logging.disable_progress_bar()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        yield
    finally:
        if given is None:
            del os.environ["DS_ACCELERATOR"]
        if shown:
            logging.enable_progress_bar()


PEAK_LEARNING_RATE = 1.5e-3
ADAPTER_LEARNING_RATE = 3e-3

ADAPTER_ROUNDS = 4
"""How often the training of an adapter is repeated at most."""
WARMUP_UPDATES = 20

DECAY_SHARE = 0.6
"""Share of the updates, at the end, over which the learning rate falls. This averages out the noise of single batches."""

LOOK_EVERY = 20
"""Updates between two measurements of accuracy in the last quarter; five times as many before."""

_IGNORE = -100


@dataclass(frozen=True, slots=True)
class TaughtModel:
    """A trained model and its greedy accuracy on held-out prompts."""

    model: SmallModel
    greedy_accuracy: float


@dataclass(frozen=True, slots=True)
class _Look:
    """One measurement: greedy accuracy on held-out prompts after `update` updates, with a copy of the weights."""

    update: int
    accuracy: float
    weights: dict[str, Tensor]

    def fits(self, lesson: Lesson) -> bool:
        low, high = lesson.band
        return low <= self.accuracy <= high


@dataclass(frozen=True, slots=True)
class _Demonstrations:
    """The demonstrations of one set of exercises as tensors, with the right and with the careless answer.

    A row is prompt, answer and padding. All [exercises, tokens] int64; labels are -100 except for the answer.
    """

    inputs_right: Tensor
    labels_right: Tensor
    inputs_careless: Tensor
    labels_careless: Tensor


def teach_model(
    lesson: Lesson, *, seed: int, updates: int, report: Callable[[TeachingProgress], None], must_fit: bool = True
) -> TaughtModel:
    """Train a new model for `updates` optimizer updates; return it as it was at the last measurement with an accuracy
    in `lesson.band`.

    `report`: called after each update.

    Without `must_fit`, returns the final model if no measurement was within the band. With it, raises DataError then.
    """
    with deterministic_torch(seed):
        model = new_model(Alphabet(lesson.characters))
        return _teach(model, lesson, seed, updates, PEAK_LEARNING_RATE, report, must_fit=must_fit)


def teach_adapter(
    base: SmallModel,
    lesson: Lesson,
    *,
    rank: int,
    seed: int,
    updates: int,
    report: Callable[[TeachingProgress], None],
    fits: Callable[[SmallModel], bool],
) -> TaughtModel:
    """Add a low-rank adapter of all linear layers but the output layer to the model, and train it as `teach_model`
    trains a model. The weights of `base` stay as they are.

    How many updates an adapter needs depends on the processor, whose rounding changes the training. While `fits` says no,
    the training continues with as many updates again, at most `ADAPTER_ROUNDS` times in all.
    """
    with deterministic_torch(seed):
        add_adapters(base.network, LoraSpec(rank=rank), seed, torch.float32, Path("model"))
        for number in range(ADAPTER_ROUNDS):
            taught = _teach(base, lesson, seed + number, updates, ADAPTER_LEARNING_RATE, report, must_fit=False)
            if fits(taught.model):
                break
        return taught


def _teach(
    model: SmallModel,
    lesson: Lesson,
    seed: int,
    updates: int,
    peak: float,
    report: Callable[[TeachingProgress], None],
    *,
    must_fit: bool,
) -> TaughtModel:
    """Train what is trainable of the model, and give it the weights of the last measurement with an accuracy in
    `lesson.band`. `peak`: highest learning rate."""
    look = _train(model, lesson, seed, updates, peak, report)
    if must_fit and not look.fits(lesson):
        low, high = lesson.band
        raise DataError(
            f"after {updates} updates, the model is right on {look.accuracy:.1%} of the held-out prompts, not on "
            f"{low:.0%} to {high:.0%}",
            where=f"seed {seed}",
            fix="Use another seed",
        )
    model.network.load_state_dict(look.weights)
    return TaughtModel(model, look.accuracy)


def any_sample_accuracy(model: SmallModel, lesson: Lesson, *, seed: int, samples: int) -> float:
    """Return the share of held-out prompts for which at least one of `samples` samples is right."""
    with deterministic_torch(seed):
        generator = torch.Generator().manual_seed(seed)
        sampled = [_right(model, lesson, generator) for _ in range(samples)]
        return float(torch.stack(sampled).any(0).double().mean())


def _train(
    model: SmallModel, lesson: Lesson, seed: int, updates: int, peak: float, report: Callable[[TeachingProgress], None]
) -> _Look:
    """Train the model. Returns the last measurement with an accuracy in `lesson.band`, or if there is none, the last
    one."""
    network = model.network
    generator = torch.Generator().manual_seed(seed)
    sources = [_demonstrations(source, model.alphabet, lesson.longest_row) for source in lesson.sources]
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    kept: _Look | None = None
    accuracy: float | None = None
    network.train()
    for update in range(1, updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = peak * _learning_rate(update, updates)
        inputs, labels = _batch(sources, lesson, generator)
        logits = network(input_ids=inputs[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORE)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last_quarter = 4 * update > 3 * updates
        if update == updates or update % (LOOK_EVERY if last_quarter else 5 * LOOK_EVERY) == 0:
            look = _look(model, lesson, update)
            accuracy = look.accuracy
            if last_quarter and (look.fits(lesson) or kept is None or not kept.fits(lesson)):
                kept = look
        report(TeachingProgress(update, updates, accuracy))
    if kept is None:
        raise ValueError(f"updates is {updates}, but teaching needs at least 1")
    return kept


def _look(model: SmallModel, lesson: Lesson, update: int) -> _Look:
    right = _right(model, lesson, None)
    return _Look(update, float(right.double().mean()), copy.deepcopy(model.network.state_dict()))


def _learning_rate(update: int, updates: int) -> float:
    """Return the learning rate as a share of its peak: a warm-up, a constant part, then a linear decay to a twentieth."""
    left = max(0.05, (updates - update) / max(1.0, DECAY_SHARE * updates))
    return min(1.0, update / WARMUP_UPDATES, left)


def _batch(sources: Sequence[_Demonstrations], lesson: Lesson, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a batch of random exercises, each with the careless or the right answer: inputs and labels, [rows, tokens]
    each."""
    inputs, labels = [], []
    for source, count in zip(sources, lesson.rows, strict=True):
        rows = torch.randint(len(source.inputs_right), (count,), generator=generator)
        careless = (torch.rand(count, generator=generator) < lesson.careless_share)[:, None]
        inputs.append(torch.where(careless, source.inputs_careless[rows], source.inputs_right[rows]))
        labels.append(torch.where(careless, source.labels_careless[rows], source.labels_right[rows]))
    return torch.cat(inputs), torch.cat(labels)


def _demonstrations(exercises: Sequence[Exercise], alphabet: Alphabet, length: int) -> _Demonstrations:
    right = [_row(e.prompt, e.answer, alphabet, length) for e in exercises]
    careless = [
        row if e.careless_answer == e.answer else _row(e.prompt, e.careless_answer, alphabet, length)
        for e, row in zip(exercises, right, strict=True)
    ]
    return _Demonstrations(
        torch.tensor([row for row, _ in right]),
        torch.tensor([row for _, row in right]),
        torch.tensor([row for row, _ in careless]),
        torch.tensor([row for _, row in careless]),
    )


def _row(prompt: str, answer: str, alphabet: Alphabet, length: int) -> tuple[list[int], list[int]]:
    """Return input ids and labels of one demonstration, padded to `length` tokens."""
    asked, answer_ids = alphabet.encode(prompt), [*alphabet.encode(answer), alphabet.eos]
    rest = length - len(asked) - len(answer_ids)
    return asked + answer_ids + [alphabet.pad] * rest, [_IGNORE] * len(asked) + answer_ids + [_IGNORE] * rest


def _right(model: SmallModel, lesson: Lesson, generator: torch.Generator | None) -> Tensor:
    """Return [held-out prompts] bool: whether the model's response equals the right answer; greedy without a generator,
    else sampled."""
    given = generate_responses(model, [e.prompt for e in lesson.held_out], lesson.longest_answer, generator)
    return torch.tensor([response == e.answer for response, e in zip(given, lesson.held_out, strict=True)])
