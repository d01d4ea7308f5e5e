"""A source, opened: its entries as prompts, and which of them it leaves out.

A prompt that is shorter or longer than its source allows is *filtered*: that was asked for, and is an outcome like any
other. One that leaves no room for its response is an error and never cut: a cut prompt is another prompt. Neither the
order of prompts nor their weight is known here (`gcore.prompts.stream`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gcore.config.sources import Source
from gcore.errors import DataError, GcoreError
from gcore.prompts.dataset import Dataset
from gcore.prompts.render import PromptRenderer
from gcore.types import Prompt, PromptRef

_MADE_TO_FIT = {
    False: "Shorten it, filter it with max_prompt_tokens, lower rollout.max_new_tokens",
    True: "Shorten it or take it out of the set (nothing is filtered in evaluation), lower eval.max_new_tokens",
}


class PromptFiltered(GcoreError):
    """The source's filters leave this prompt out. `what` is the outcome's reason, the same for all of a kind."""


@dataclass(frozen=True, slots=True)
class OpenSource:
    """`limit`: the most tokens that leave room for a response; None for no limit. `held_out`: it is for evaluation, which
    filters nothing. Safe to use from several threads."""

    source: Source
    dataset: Dataset
    renderer: PromptRenderer
    limit: int | None
    held_out: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name

    def prompt(self, index: int, ref: PromptRef) -> Prompt:
        """Entry `index` under `ref`, rendered and tokenized.

        Raises PromptFiltered; DataError naming the entry if it does not render or fit, DataChanged (a DataError) if the
        file is no longer what it was; IndexError outside range(len).
        """
        prompt = self.unfiltered(index, ref)
        reason = self.filtered(len(prompt.token_ids))
        if reason is not None:
            raise PromptFiltered(reason, where=self.dataset.name_of(index))
        self.check_fits(index, len(prompt.token_ids))
        return prompt

    def unfiltered(self, index: int, ref: PromptRef) -> Prompt:
        """As `prompt`, however long it is. Raises DataError, IndexError."""
        fields = self.dataset.entry(index)
        try:
            text = self.renderer.render(fields[self.dataset.prompt_field], fields)
            tokens = self.renderer.encode(text)
        except DataError as error:
            raise DataError(error.what, where=self.dataset.name_of(index), fix=error.fix) from error
        if not tokens:
            raise DataError(
                "the prompt has no tokens",
                where=self.dataset.name_of(index),
                fix="Remove the entry, or write a prompt",
            )
        return Prompt(ref, text, tokens, fields, self.name)

    def filtered(self, tokens: int) -> str | None:
        """Why a prompt of so many tokens is left out, or None."""
        least, most = self.source.min_prompt_tokens, self.source.max_prompt_tokens
        if least is not None and tokens < least:
            return f"the prompt is shorter than min_prompt_tokens ({least})"
        if most is not None and tokens > most:
            return f"the prompt is longer than max_prompt_tokens ({most})"
        return None

    def check_fits(self, index: int, tokens: int) -> None:
        """Raises DataError if a prompt of so many tokens leaves no room for the response."""
        if self.limit is not None and tokens > self.limit:
            raise DataError(
                f"the prompt has {tokens} tokens, and at most {self.limit} leave room for the response",
                where=self.dataset.name_of(index),
                fix=f"{_MADE_TO_FIT[self.held_out]}, or raise model.max_length if the model allows it",
            )


@dataclass(frozen=True, slots=True)
class EvalSource:
    """Held-out prompts of one source. Filters by length are training's: here every prompt is shown, or an error."""

    opened: OpenSource

    @property
    def source(self) -> Source:
        """What the spec says of it."""
        return self.opened.source

    def __len__(self) -> int:
        return len(self.opened)

    def prompt(self, index: int) -> Prompt:
        """Entry `index`, under ref 0/0/`index`. Raises DataError, IndexError as `OpenSource.prompt`."""
        return self.opened.prompt(index, PromptRef(0, 0, index))
