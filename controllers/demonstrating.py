"""The answer that a prompt's entry holds, as if the model had given it: what supervised training is fed. Pure.

The answer is the field that the reward of the prompt's source names. Text is taken as it is, anything else as JSON writes it;
the tokenizer's end of sequence comes after it. It is never cut: half an answer is another answer.
"""

from __future__ import annotations

import json

from gcore.errors import DataError
from gcore.prompts.source import OpenSource
from gcore.types import Group, Outcome, Prompt, Sample, Version, VersionSpan


def demonstration(prompt: Prompt, opened: OpenSource, version: Version, max_new_tokens: int) -> Group | Outcome:
    """A group of one sample with reward 0 and log-probabilities of 0, in the name of `version`; or that it has failed."""
    field = opened.source.reward.answer
    answer = prompt.fields.get(field)
    if answer is None:
        return Outcome("failed", f"the entry has no answer in field {field!r} (reward.answer)")
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    try:
        tokens = opened.renderer.tokenizer.encode(text, add_special_tokens=False)
    except DataError as error:
        return Outcome("failed", error.what)
    end = opened.renderer.eos_token_id
    tokens = tokens if end is None else (*tokens, end)
    if not tokens:
        return Outcome("failed", f"the answer in field {field!r} has no tokens, and the tokenizer names no end")
    if len(tokens) > max_new_tokens:
        return Outcome("failed", f"the answer has {len(tokens)} tokens, more than max_new_tokens ({max_new_tokens})")
    spans = (VersionSpan(version, 0, len(tokens)),)
    sample = Sample(tokens, (0.0,) * len(tokens), text, "stop", spans)
    return Group(prompt.ref, prompt.token_ids, (sample,), prompt.source)
