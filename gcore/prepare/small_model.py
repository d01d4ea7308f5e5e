"""A qwen3 of 1.0M parameters that reads and writes characters: begun, asked, and saved with a tokenizer of its own.

One thread, so that nothing depends on how many cores there are. Global random state and the number of threads are left as
they were. What it is taught is not known here (`gcore.prepare.teaching`). This is a leaf: it imports torch and
transformers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gcore.prepare.tokens import CONTEXT, Alphabet, save_tokenizer

THREADS = 1

INITIALIZER_RANGE = 0.05
"""Larger than the usual 0.02, which is meant for wider layers: at width 128 the first hundred updates are saved."""

NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Stands for a token that is none: padding, and ids beyond the alphabet."""


@dataclass(frozen=True, slots=True)
class SmallModel:
    """The network, and the characters that are its tokens."""

    network: Any
    alphabet: Alphabet


def torch_version() -> str:
    """The torch that trains."""
    return str(torch.__version__)


def new_model(alphabet: Alphabet) -> SmallModel:
    """A model that knows nothing yet; its weights are drawn from torch's random state."""
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


def responses(model: SmallModel, prompts: Sequence[str], tokens: int, generator: torch.Generator | None) -> list[str]:
    """What the model writes behind each prompt, up to the end of sequence or `tokens`: greedy without a generator, else
    sampled at temperature 1."""
    written = [""] * len(prompts)
    for length in sorted({len(prompt) for prompt in prompts}):  # no padding: prompts of a length go together
        places = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        asked = torch.tensor([model.alphabet.encode(prompts[i]) for i in places])
        for place, ids in zip(places, _generate(model.network, asked, tokens, generator).tolist(), strict=True):
            written[place] = _text(model.alphabet, ids)
    return written


def save_model(model: SmallModel, folder: Path) -> None:
    """A folder that `AutoModelForCausalLM`, `AutoTokenizer` and the `tokenizers` library load. Raises OSError."""
    try:
        with _without_progress_bars():
            model.network.save_pretrained(folder)
    except SafetensorError as error:
        # Only its words hold what the system said, a full disk for one.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    save_tokenizer(model.alphabet, folder)


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """A fixed number of threads and a seeded random state; both as before afterwards."""
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
    """Responses to prompts of equal length, [n, tokens] int64."""
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
