"""How long the prompts of a source are, in tokens, and how many its filters leave out: counted before a job starts.

Counting renders and tokenizes; of a large source, a sample spread evenly over it may be enough. A prompt that does not
render or fit is an error here, as it would be a failed prompt later; one that is filtered is only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gcore.errors import DataError
from gcore.prompts.source import OpenSource
from gcore.types import Prompt, PromptRef

TELL_EVERY = 256
"""Prompts between two reports of progress."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthReport:
    """Of `entries` prompts of a source, those `checked` that were looked at.

    `tokens` [prompts shown] uint32: those that are neither filtered nor too long. `filtered`: how many, by reason.
    `longest_entry`: which entry is the longest that is shown. `unknown`: prompts with text that the tokenizer does not
    know. `first`: the first that is shown.
    """

    checked: int
    entries: int
    tokens: npt.NDArray[np.uint32]
    filtered: Mapping[str, int]
    longest_entry: int
    unknown: int
    first: Prompt

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.tokens.max())

    @property
    def mean(self) -> float:
        """Mean tokens."""
        return float(self.tokens.mean())

    def percentile(self, percent: float) -> int:
        """Tokens that so many percent of the prompts do not exceed."""
        return int(np.percentile(self.tokens, percent, method="inverted_cdf"))


def check_lengths(
    opened: OpenSource,
    *,
    among: int | None = None,
    sample: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LengthReport:
    """Render and count every entry, or `sample` of them spread evenly (the first and the last included).

    `among`: only the first so many entries are asked about. `progress` is called with entries done and entries in all. Raises DataError for the first that does not render or
    fit, or if the filters leave none.
    """
    count = len(opened) if among is None else min(among, len(opened))
    chosen = _spread(count, sample)
    tokens = np.zeros(len(chosen), dtype=np.uint32)
    filtered: Counter[str] = Counter()
    unknown_id = opened.renderer.tokenizer.unknown_token_id
    shown, unknown, longest, longest_entry, first = 0, 0, 0, 0, None
    for done, index in enumerate(chosen, 1):
        prompt = opened.unfiltered(index, PromptRef(0, 0, index))
        length = len(prompt.token_ids)
        reason = opened.filtered(length)
        if reason is not None:
            filtered[reason] += 1
        else:
            opened.check_fits(index, length)
            first = first or prompt
            unknown += unknown_id is not None and unknown_id in prompt.token_ids
            tokens[shown] = length
            shown += 1
            if length > longest:
                longest, longest_entry = length, index
        if progress is not None and (done % TELL_EVERY == 0 or done == len(chosen)):
            progress(done, len(chosen))
    if first is None:
        looked_at = "all" if len(chosen) == count else f"all {len(chosen)} looked at"
        raise DataError(
            f"the filters leave no prompt: of {looked_at}, {'; '.join(f'{n}: {why}' for why, n in filtered.items())}",
            where=str(opened.dataset.path),
            fix="Correct min_prompt_tokens and max_prompt_tokens",
        )
    return LengthReport(len(chosen), count, tokens[:shown], dict(filtered), longest_entry, unknown, first)


def _spread(count: int, sample: int | None) -> range | list[int]:
    if sample is None or sample >= count:
        return range(count)
    if sample < 2:
        return range(1)
    return sorted({number * (count - 1) // (sample - 1) for number in range(sample)})
