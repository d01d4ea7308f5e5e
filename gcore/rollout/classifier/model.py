"""Loading a model with a sequence-classification head, and one pass through it.

Any model that transformers loads as `AutoModelForSequenceClassification` with one label. Questions of one pass are padded on the
right to the longest. A decoder looks for its last token by what is not the padding token: what its configuration calls that is
used, and where it names none, one that no question of the pass ends with. Whether a padded pass gives what each question gives
alone is found out at start, by trial; a model that does not bear it is asked one question at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from gcore.errors import DataError
from gcore.models.classifier import check_classifier
from gcore.models.folder import check_code
from gcore.rollout.engine.cache import CacheShape
from gcore.rollout.engine.model import CONTEXT, DTYPES, align, check_vocabulary, config_of, load_module
from gcore.rollout.engine.text import Text

TRIED = (3, 1, 7, 5)
"""Lengths of the questions of the trial."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far a score may be from what the question gives alone, beside 1 or the score."""


@dataclass(slots=True)
class Classifier:
    """A loaded model."""

    module: Any
    folder: Path
    shape: CacheShape
    """The weights' type and place; there is no cache."""
    vocabulary: int
    context: int
    """A question is shorter than this, as for one who generates."""
    pads: bool = True
    """Whether several questions of unequal lengths go through it together."""
    asleep: bool = False
    """Whether the weights are released."""

    def scores(self, questions: Sequence[Sequence[int]]) -> list[float]:
        """The number of each, by one pass."""
        longest = max(map(len, questions))
        padding = self._padding(questions)
        ids = torch.full((len(questions), longest), padding or 0, dtype=torch.long)
        mask = torch.zeros((len(questions), longest), dtype=torch.long)
        for row, question in enumerate(questions):
            ids[row, : len(question)] = torch.tensor(question)
            mask[row, : len(question)] = 1
        place = self.shape.device
        # A mask that masks nothing would only keep the quicker kinds of attention away.
        given = {} if bool(mask.all()) else {"attention_mask": mask.to(place)}
        config = self.module.config.get_text_config()
        named, config.pad_token_id = config.pad_token_id, padding
        try:
            with torch.inference_mode():
                logits: torch.Tensor = self.module(input_ids=ids.to(place), **given).logits
        finally:
            config.pad_token_id = named
        found: list[float] = logits.reshape(len(questions), -1)[:, 0].float().tolist()
        return found

    def _padding(self, questions: Sequence[Sequence[int]]) -> int | None:
        """The padding token of a pass. None: there is nothing to be padded, and the model names none."""
        named: int | None = getattr(self.module.config.get_text_config(), "pad_token_id", None)
        if named is not None or len(questions) == 1:
            return named
        last = {question[-1] for question in questions}
        return next((token for token in range(self.vocabulary) if token not in last), None)


def load_classifier(
    folder: Path, *, dtype: str, device: str, context: int | None, text: Text | None, trust_remote_code: bool = False
) -> Classifier:
    """Load from a local folder. Raises DataError in one sentence when it cannot be served."""
    config = config_of(folder)
    check_code(config, trusted=trust_remote_code, where=str(folder))
    check_classifier(config, where=str(folder))
    module = load_module(AutoModelForSequenceClassification, folder, DTYPES[dtype], trust_remote_code=trust_remote_code)
    c = module.config.get_text_config()
    c.use_cache = False  # nothing is said after a question
    vocabulary = int(module.get_input_embeddings().weight.shape[0])
    check_vocabulary(text, vocabulary, folder)
    place = torch.device(device)
    module.to(place).eval().requires_grad_(False)
    align(module)
    limit = _longest(module)
    length = min(limit, context or limit) if limit else context or CONTEXT
    model = Classifier(module, folder, CacheShape((), DTYPES[dtype], place), vocabulary, length)
    _try(model)
    return model


def _longest(module: Any) -> int | None:
    """Positions that there are. A RoBERTa counts them from behind its padding token on."""
    c = module.config.get_text_config()
    limit = getattr(c, "max_position_embeddings", None) or getattr(c, "n_positions", None)
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            return int(part.num_embeddings) - int(part.padding_idx) - 1
    return int(limit) if limit else None


def _try(model: Classifier) -> None:
    """Find out whether it bears padding. Raises DataError if it gives no single number, or fails."""
    tokens = [token for token in range(model.vocabulary) if token != model.module.config.get_text_config().pad_token_id]
    tried = [[tokens[(7 * i + n) % len(tokens)] for i in range(min(n, model.context))] for n in TRIED]
    try:
        alone = [model.scores([question])[0] for question in tried]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise DataError(
            f"the torch engine cannot serve this classifier ({' '.join(str(error).split())[:300]})",
            where=str(model.folder),
            fix="Serve it with SGLang instead",
        ) from error
    tolerance = TOLERANCES[model.shape.dtype]
    try:
        together = model.scores(tried)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        model.pads = False
    else:
        pairs = zip(alone, together, strict=True)
        model.pads = all(abs(one - other) <= tolerance * max(1.0, abs(one)) for one, other in pairs)
