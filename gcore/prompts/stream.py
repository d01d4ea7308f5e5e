"""From a prompt ref to the prompt: order, entry, text and tokens in one call, and the check that all of them fit.

Whoever shows a prompt to an engine takes it from here, so that the same ref is the same tokens everywhere. A prompt that
leaves no room for its response is an error and never cut: a cut prompt is another prompt. That is found when it is
rendered; `check_lengths` finds it before the job starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gcore.errors import DataError
from gcore.prompts.cursor import StreamShape, shard_lengths
from gcore.prompts.dataset import Dataset
from gcore.prompts.render import PromptRenderer
from gcore.prompts.shards import entry_index
from gcore.types import Prompt, PromptRef


@dataclass(frozen=True, slots=True)
class LengthReport:
    """Of the prompts looked at, in tokens. `longest_entry`: which entry is the longest."""

    checked: int
    longest: int
    longest_entry: int
    mean: float


class PromptStream:
    """The prompts of one job. `limit`: the most tokens a prompt may have, None for no limit."""

    def __init__(
        self, dataset: Dataset, renderer: PromptRenderer, *, shards: int, seed: int, limit: int | None
    ) -> None:
        if len(dataset) < shards:
            raise DataError(
                f"the dataset holds {len(dataset)} prompts, and data.shards is {shards}; every shard needs at least one",
                where=str(dataset.path),
                fix=f"Set data.shards to {len(dataset)} or less",
            )
        self.shape: StreamShape = shard_lengths(len(dataset), shards)
        self._dataset = dataset
        self._renderer = renderer
        self._seed = seed
        self._limit = limit

    def prompt(self, ref: PromptRef) -> Prompt:
        """The prompt that `ref` stands for. Raises DataError if it does not fit, IndexError outside the stream."""
        return self.entry(entry_index(self.shape, self._seed, ref), ref)

    def entry(self, index: int, ref: PromptRef) -> Prompt:
        """Dataset entry `index` as a prompt under `ref`. Raises DataError, IndexError."""
        return make_prompt(self._dataset, self._renderer, index, ref, self._limit)


def prompt_limit(context: int | None, max_new_tokens: int) -> int | None:
    """The most tokens a prompt may have if a response of `max_new_tokens` shall fit into `context` after it.

    None if the context is not known. Raises DataError if no prompt fits at all.
    """
    if context is None:
        return None
    if max_new_tokens >= context:
        raise DataError(
            f"rollout.max_new_tokens ({max_new_tokens}) leaves no room for a prompt in the model's context of {context}",
            fix="Lower rollout.max_new_tokens, or raise model.max_length if the model allows it",
        )
    return context - max_new_tokens


def make_prompt(dataset: Dataset, renderer: PromptRenderer, index: int, ref: PromptRef, limit: int | None) -> Prompt:
    """Entry `index` rendered and tokenized. Raises DataError naming the entry, its tokens and the limit."""
    fields = dataset.entry(index)
    where = dataset.name_of(index)
    try:
        text = renderer.render(fields[dataset.prompt_field])
    except DataError as error:
        raise DataError(error.what, where=where, fix=error.fix) from error
    tokens = renderer.encode(text)
    if not tokens:
        raise DataError("the prompt has no tokens", where=where, fix="Remove the entry, or write a prompt")
    if limit is not None and len(tokens) > limit:
        raise DataError(
            f"the prompt has {len(tokens)} tokens, and at most {limit} leave room for the response",
            where=where,
            fix="Shorten it, lower rollout.max_new_tokens, or raise model.max_length if the model allows it",
        )
    return Prompt(ref, text, tokens, fields)


def check_lengths(
    dataset: Dataset,
    renderer: PromptRenderer,
    limit: int | None,
    *,
    sample: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LengthReport:
    """Render and count every entry, or `sample` of them spread evenly over the file (the first and the last included).

    `progress` is called with entries done and entries in all. Raises DataError for the first that does not render or fit.
    """
    chosen = _spread(len(dataset), sample)
    longest, longest_entry, total = 0, 0, 0
    for done, index in enumerate(chosen, 1):
        tokens = len(make_prompt(dataset, renderer, index, PromptRef(0, 0, index), limit).token_ids)
        total += tokens
        if tokens > longest:
            longest, longest_entry = tokens, index
        if progress is not None and (done % 1024 == 0 or done == len(chosen)):
            progress(done, len(chosen))
    return LengthReport(len(chosen), longest, longest_entry, total / len(chosen))


def _spread(count: int, sample: int | None) -> range | list[int]:
    if sample is None or sample >= count:
        return range(count)
    if sample < 2:
        return range(1)
    return sorted({number * (count - 1) // (sample - 1) for number in range(sample)})
