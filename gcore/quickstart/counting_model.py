"""The model of the counting example: a Qwen3-VL of 0.4M parameters, and its warm start.

Uses one thread, so that results do not depend on the number of cores. Imports torch and transformers, so preparations
import this module only when they need it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gcore.quickstart.counting_pictures import (
    CHARACTERS,
    COUNTING_BAND,
    EOS,
    IMAGE,
    LEAST_PASS_AT_8,
    MERGE,
    PAD,
    PATCH,
    SIZE,
    SPECIAL,
    TOKENS,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCABULARY,
    CountingQuestion,
    draw_picture,
)
from gcore.quickstart.folder import Reporter, TeachingProgress
from gcore.quickstart.pretraining import deterministic_torch, quiet_saving

BATCH = 48
RATE, WARM_UP, FALL, LAST = 2.5e-3, 30, 0.6, 0.1
"""Learning rate, its warm-up in updates, from which share of the updates on it falls, and its last fraction."""

RIGHT_ONLY, CARELESS = 0.72, 0.65
"""Share of the updates with right answers only, and share of careless answers after that."""

MEASURED_EVERY, MEASURED_AFTER = 20, 5
"""Updates between two measurements, before and after careless answers begin."""

SIDE = SIZE // PATCH
"""Patches in a row of a picture."""

_IDS = {character: len(SPECIAL) + number for number, character in enumerate(CHARACTERS)}


@dataclass(frozen=True, slots=True)
class TaughtCounter:
    """A network after its warm start. `greedy`, `pass_at_8`: accuracy on held-out questions."""

    network: Any
    greedy: float
    pass_at_8: float


def new_counter(vocabulary: int = VOCABULARY, patch: int = PATCH, side: int = SIDE) -> Any:
    """Return an untrained network, initialized from torch's random state.

    `vocabulary`: number of tokens. `patch`: width of a patch in pixels. `side`: patches in a row of a picture.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "hidden_size": 64,
        "depth": 1,
        "num_heads": 2,
        "intermediate_size": 128,
        "patch_size": patch,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": side * side,
        "initializer_range": 0.05,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def save_counter(network: Any, folder: Path) -> None:
    """Save the network with its tokenizer of characters and its image processor. Raises OSError."""
    from tokenizers import decoders, pre_tokenizers

    tokenizer = new_tokenizer(CHARACTERS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    save_seeing(network, tokenizer, folder, SIZE)


def new_tokenizer(tokens: Sequence[str]) -> Any:
    """Return a tokenizer that knows these tokens and `SPECIAL`, which come first."""
    from tokenizers import Tokenizer, models

    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[PAD]))
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save_seeing(network: Any, tokenizer: Any, folder: Path, size: int) -> None:
    """Save a network with its tokenizer, and an image processor that leaves pictures of this width and height as they are.
    Raises OSError."""
    with quiet_saving():
        network.save_pretrained(folder)
    patch = network.config.vision_config.patch_size
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # otherwise AutoTokenizer splits texts as Qwen's own tokenizer does
        "pad_token": SPECIAL[PAD],
        "eos_token": SPECIAL[EOS],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (patch * MERGE) ** 2, "longest_edge": 4 * size * size},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def teach_counting(
    lesson: Sequence[CountingQuestion],
    held_out: Sequence[CountingQuestion],
    updates: int,
    seed: int,
    reporter: Reporter,
) -> TaughtCounter:
    """Warm-start a network on the questions of `lesson`: right answers first, then also careless ones.

    Return the last measured network that `is_fit`. Numbers differ between processors: if none is after `updates` updates,
    teaching continues until one is, up to twice as many; return the last measured network if none is.
    """
    with deterministic_torch(seed):
        network = new_counter().train()
        pictures, shown = draw_pictures(lesson), draw_pictures(held_out)
        optimizer = new_optimizer(network)
        draw, accuracy = np.random.default_rng(seed), 0.0
        kept: TaughtCounter | None = None
        for update in range(1, 2 * updates + 1):
            chosen = draw.integers(len(lesson), size=BATCH).tolist()
            careless = update > RIGHT_ONLY * updates
            answers = [
                lesson[i].careless if careless and draw.random() < CARELESS else lesson[i].answer for i in chosen
            ]
            tokens, labels = answer_rows([prompt_ids(f"{lesson[i].colour}?") for i in chosen], answers)
            train_rows(network, optimizer, tokens, labels, pictures[chosen], min(1.0, update / updates), update)
            if update % (MEASURED_AFTER if careless else MEASURED_EVERY) == 0 or update == updates:
                accuracy, pass_at_8 = _measure(network, held_out, shown)
                found = TaughtCounter(copy.deepcopy(network).eval(), accuracy, pass_at_8)
                if careless and (is_fit(found) or kept is None or not is_fit(kept)):
                    kept = found  # the last one that fits
            reporter.report(TeachingProgress(update, updates if update <= updates else 2 * updates, accuracy))
            if update >= updates and kept is not None and is_fit(kept):
                break
    assert kept is not None
    return kept


def is_fit(taught: TaughtCounter) -> bool:
    """Whether the network counts as the example needs: often careless, and able to do better."""
    return COUNTING_BAND[0] <= taught.greedy <= COUNTING_BAND[1] and taught.pass_at_8 >= LEAST_PASS_AT_8


def new_optimizer(network: Any) -> torch.optim.AdamW:
    """Return the optimizer of a warm start."""
    return torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)


def train_rows(
    network: Any,
    optimizer: torch.optim.AdamW,
    tokens: Tensor,
    labels: Tensor,
    pictures: Tensor,
    done: float,
    update: int,
) -> None:
    """Make update number `update`, from 1, on rows of `answer_rows`. `done`: share of all updates with this one."""
    falling = 1.0 if done < FALL else 1 - (done - FALL) / (1 - FALL) * (1 - LAST)
    for group in optimizer.param_groups:
        group["lr"] = RATE * min(1.0, update / WARM_UP) * falling
    logits = row_logits(network, tokens, pictures)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


def draw_pictures(questions: Sequence[CountingQuestion]) -> Tensor:
    """Draw the pictures of questions: [n, height, width, 3] uint8."""
    return torch.from_numpy(np.stack([draw_picture(one) for one in questions]))


def text_ids(text: str) -> list[int]:
    """Return the tokens of a text without special tokens."""
    return [_IDS[one] for one in text]


def prompt_ids(text: str) -> list[int]:
    """Return the tokens of a picture and the text after it."""
    return [VISION_START, *[IMAGE] * TOKENS, VISION_END, *text_ids(text)]


def answer_rows(prompts: Sequence[Sequence[int]], answers: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens [row, token] of prompts with answers, and labels: -100 for all but the answer and its end."""
    ends = [[*text_ids(one), EOS] for one in answers]
    width = max(len(prompt) + len(end) for prompt, end in zip(prompts, ends, strict=True))
    tokens, labels = torch.full((len(prompts), width), PAD), torch.full((len(prompts), width), -100)
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        answered = torch.tensor(end)
        tokens[row, : len(prompt)] = torch.tensor(prompt)
        tokens[row, len(prompt) : len(prompt) + len(end)] = answered
        labels[row, len(prompt) - 1 : len(prompt) + len(end) - 1] = answered
    return tokens, labels


def labelled_rows(rows: Sequence[Sequence[int]], taught: Sequence[Sequence[tuple[int, int]]]) -> tuple[Tensor, Tensor]:
    """Tokens [row, token] of rows of one length, an end after each, and labels: -100 for all but the taught tokens.

    `taught`: by row, the first taught token and the number of taught tokens, for each run of them.
    """
    tokens = torch.tensor([[*row, EOS] for row in rows])
    labels = torch.full_like(tokens, -100)
    for row, runs in enumerate(taught):
        for start, count in runs:
            labels[row, start - 1 : start + count - 1] = tokens[row, start : start + count]
    return tokens, labels


def patches(pictures: Tensor, patch: int = PATCH) -> Tensor:
    """The patches of pictures [n, side, side, 3] uint8 as the image processor makes them: [n * patches, values]. `patch`:
    width of a patch in pixels."""
    count, side = len(pictures), pictures.shape[1] // patch
    blocks = side // MERGE
    scaled = (pictures.float() / 255 - 0.5) / 0.5
    cut = scaled.permute(0, 3, 1, 2).reshape(count, 3, blocks, MERGE, patch, blocks, MERGE, patch)
    ordered = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    return ordered.reshape(count * side * side, -1)


def row_logits(network: Any, tokens: Tensor, pictures: Tensor) -> Tensor:
    """Return the logits [row, token, vocabulary] of rows with pictures at the same places. `pictures`: of the first row, then
    of the next."""
    patch = network.config.vision_config.patch_size
    side = pictures.shape[1] // patch
    grid = torch.tensor([[1, side, side]])
    row = tokens[:1]  # its positions are those of all rows
    positions, _ = network.model.get_rope_index(
        row, mm_token_type_ids=(row == IMAGE).int(), image_grid_thw=grid.expand(len(pictures) // len(tokens), -1)
    )
    logits: Tensor = network(
        input_ids=tokens,
        pixel_values=patches(pictures, patch),
        image_grid_thw=grid.expand(len(pictures), -1),
        position_ids=positions.expand(3, len(tokens), -1),
        use_cache=False,
    ).logits
    return logits


@torch.no_grad()
def write_greedily(network: Any, tokens: Tensor, starts: Tensor, count: int, pictures: Any) -> Tensor:
    """Write the `count` likeliest tokens into rows with room for them, one by one; return the tokens with them.

    `starts` [row]: place of the first written token. Like engines, it never writes tokens that stand for media.
    """
    rows, written = torch.arange(len(tokens)), tokens.clone()
    for places in (starts + number for number in range(count)):
        logits = row_logits(network, written, pictures)[rows, places - 1]
        logits[:, [VISION_START, VISION_END, IMAGE, VIDEO]] = -torch.inf
        written[rows, places] = logits.argmax(-1)
    return written


@torch.no_grad()
def _measure(network: Any, questions: Sequence[CountingQuestion], pictures: Tensor) -> tuple[float, float]:
    """Greedy accuracy, and the expected share of questions for which one of eight samples is right."""
    prompts = [prompt_ids(f"{one.colour}?") for one in questions]
    tokens, _ = answer_rows(prompts, [one.answer for one in questions])
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    rows = torch.arange(len(questions))
    answers = row_logits(network, tokens, pictures)[rows, last]
    right = torch.tensor([_IDS[one.answer] for one in questions])
    chance = torch.softmax(answers, -1)[rows, right]
    return float((answers.argmax(-1) == right).float().mean()), float((1 - (1 - chance) ** 8).mean())
