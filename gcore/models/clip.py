"""CLIP models as scorers of pictures: one number for a text and a picture, or for a picture alone.

The score is exp(logit_scale) * cos(text, picture) of their projected embeddings, as CLIPModel's `logits_per_image`: CLIP
score and PickScore (arXiv 2305.01569). HPSv2 (arXiv 2306.09341) reports the cosine itself, so its score is this number
divided by the model's scale, which is about 100. With a head in the folder (`HEAD_FILES`) the score is that of the head for
the picture's normalized embedding, and the text is not read: LAION's aesthetic predictors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gcore.errors import DataError, one_line

HEAD_FILES = ("score_head.safetensors", "score_head.pth")
"""Files of a head in a model's folder: linear layers from the embedding's width to one number."""

PICTURES_AT_ONCE = 32
"""Pictures that pass through the vision tower at once, which bounds its memory."""

LEGACY_END = 2
"""ID of the end token in configurations of CLIP that name a wrong one. transformers then takes the highest ID as the end."""

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Allowed difference between two computations of a score, relative to the model's scale, or to the score of a head."""


class ClipScores:
    """Computes the scores of a CLIPModel. `head`: scores a picture's embedding; None: the text is compared with it."""

    def __init__(self, module: Any, head: nn.Module | None) -> None:
        self.module = module
        self.head = head

    def __call__(
        self, texts: Sequence[Sequence[int]], names: Sequence[str], pixels: Mapping[str, Tensor]
    ) -> list[float]:
        """Return the score of each text (token IDs) with its picture. Equal texts and equal pictures are embedded once.

        `names`: of the pictures, one for each text. `pixels` [1, 3, height, width]: of each name.
        """
        order, distinct = list(pixels), list(dict.fromkeys(map(tuple, texts)))
        with torch.inference_mode():
            parts = [order[first : first + PICTURES_AT_ONCE] for first in range(0, len(order), PICTURES_AT_ONCE)]
            seen = torch.cat([self._of_pictures(torch.cat([pixels[name] for name in part])) for part in parts])
            places = torch.tensor([order.index(name) for name in names], device=seen.device)
            if self.head is not None:
                found: Tensor = self.head(seen)[:, 0][places]
            else:
                said = self._of_texts(distinct)[[distinct.index(tuple(text)) for text in texts]]
                found = self.module.logit_scale.float().exp() * (said * seen[places]).sum(-1)
        scores: list[float] = found.tolist()
        return scores

    def _of_pictures(self, pixels: Tensor) -> Tensor:
        """Normalized embeddings [n, width] of pictures, float32. `pixels` [n, 3, height, width]."""
        given = pixels.to(self.module.device, self.module.dtype)
        return _normalized(self.module.get_image_features(pixel_values=given).pooler_output)

    def _of_texts(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Normalized embeddings [n, width] of texts, float32. Padding is on the right, where the causal mask hides it."""
        ids = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        place = self.module.device
        given = {} if bool(mask.all()) else {"attention_mask": mask.to(place)}
        return _normalized(self.module.get_text_features(input_ids=ids.to(place), **given).pooler_output)

    def own_score(self, text: Sequence[int], pixels: Tensor) -> float:
        """The score of a text and a picture by the model's own pass, without a head. `pixels` [1, 3, height, width]."""
        place, dtype = self.module.device, self.module.dtype
        with torch.inference_mode():
            made = self.module(input_ids=torch.tensor([list(text)], device=place), pixel_values=pixels.to(place, dtype))
        return float(made.logits_per_image[0, 0])

    def are_equal(self, expected: float, score: float) -> bool:
        """Whether two computations of a score agree, but for rounding."""
        scale = abs(expected) if self.head is not None else float(self.module.logit_scale.exp())
        return abs(expected - score) <= TOLERANCES[self.module.dtype] * max(1.0, scale)

    def ends(self, text: Sequence[int]) -> bool:
        """Whether a text ends with the model's end token, whose state is the text's embedding. Otherwise another one's
        would be taken."""
        end = self.module.config.text_config.eos_token_id
        return bool(text) and text[-1] == (max(text) if end == LEGACY_END else end)

    def trial_texts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Texts of so many tokens before the end token, all different."""
        c = self.module.config.text_config
        end = c.vocab_size - 1 if c.eos_token_id == LEGACY_END else c.eos_token_id
        words = [token for token in range(c.vocab_size) if token not in (0, end)]
        most = c.max_position_embeddings - 2
        return [[*(words[(7 * i + n) % len(words)] for i in range(min(n, most))), end] for n in lengths]


def _normalized(embeddings: Tensor) -> Tensor:
    wide: Tensor = embeddings.float()
    norm: Tensor = wide.norm(dim=-1, keepdim=True)
    return wide / norm.masked_fill(norm == 0, 1.0)


def load_head(folder: Path, width: int) -> nn.Sequential | None:
    """Load the head of a folder, if it has one: linear layers without activations between them, which take embeddings of
    `width` numbers. Raises DataError.

    The layers are in the order of the numbers in their names, such as `layers.0.weight` and `layers.0.bias`. Layers that are
    more than two places apart had activations between them, which weights do not describe; they are refused.
    """
    files = [folder / name for name in HEAD_FILES if (folder / name).is_file()]
    if not files:
        return None
    file = files[0]
    if len(files) > 1:
        raise _head_error(file, f"the folder has two heads, {file.name} and {files[1].name}")
    tensors = _read_head(file)
    names = sorted((name.removesuffix("weight") for name in tensors if name.endswith("weight")), key=_numbers)
    unknown = tensors.keys() - {f"{name}{part}" for name in names for part in ("weight", "bias")}
    if not names or unknown:
        raise _head_error(file, f"it has a tensor {min(unknown)!r}" if unknown else "it has no weights")
    for before, after in pairwise(_numbers(name) for name in names):
        if not after or not before or after[-1] - before[-1] > 2:
            raise _head_error(file, "its layers seem to have activations between them")
    layers = nn.Sequential()
    for name in names:
        weight, bias = tensors[f"{name}weight"], tensors.get(f"{name}bias")
        if weight.dim() != 2 or weight.shape[1] != width or (bias is not None and bias.shape != weight.shape[:1]):
            raise _head_error(file, f"{name}weight has the shape {list(weight.shape)}, and gets {width} numbers")
        layer = nn.Linear(width, weight.shape[0], bias=bias is not None)
        layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        layers.append(layer)
        width = weight.shape[0]
    if width != 1:
        raise _head_error(file, f"it returns {width} numbers")
    return layers.float().eval().requires_grad_(False)


def _read_head(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a head. torch reads only tensors from a .pth file, and runs no code in it. Raises DataError."""
    try:
        safe = file.suffix == ".safetensors"
        found: object = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a broken file leads to
        raise _head_error(file, one_line(error)) from error
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise _head_error(file, "it is not a table of tensors (a state_dict)")
    return {str(name): tensor for name, tensor in found.items()}


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


def _head_error(file: Path, why: str) -> DataError:
    return DataError(
        f"the head cannot be used: {why}",
        where=str(file),
        fix="Save linear layers from the embedding's width to 1 number, in float, as a safetensors file or a state_dict",
    )
