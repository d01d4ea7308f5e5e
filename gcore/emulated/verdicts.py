"""What an emulated judge says at the end of its answers, so that the job's verdict parser can read it.

Found by trying: whatever the section `verdict` names (its words, its bounds, a number or a word in a JSON object, the settings of
a parser of somebody's own) is written down in the judge's own tokens behind some that mean nothing, and read by the parser itself. What it
takes for the most is the best verdict, what it takes for the least the worst. A judge whose parser can read none of it cannot be emulated,
which is said in words; no number is made up for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from gcore.config.judges import VerdictSpec
from gcore.emulated.responses import Verdict, Vocabulary
from gcore.errors import DataError, GcoreError
from gcore.reward.generative.verdicts import find_parser
from gcore.rollout.engine.text import Text

BETWEEN = (" ", "\n", "", ". ")
"""What stands in front of a verdict, so that it is no part of the word or number before it; the first that serves."""
TRIED_BEHIND = 64
"""Tokens of no meaning behind which a verdict has to be readable."""


def verdict_of(judge: str, spec: VerdictSpec, words: Vocabulary, text: Text | None) -> Verdict:
    """The judge's best and worst verdict. Raises DataError if it has none, and for a parser that there is not."""
    if text is None:
        raise DataError(f"the model of judge {judge!r} has no tokenizer.json, and what it says is text")
    parse = find_parser(spec.parser)
    for between in BETWEEN:
        found: dict[tuple[int, ...], float] = {}
        for body in _bodies(spec):
            tokens = _spelt(f"{between}{spec.after or ''}{between if spec.after else ''}{body}", text)
            if tokens is None:
                continue
            try:
                values = {
                    parse(text.decode((*words.ordinary[:2], last, *tokens), skip_special_tokens=True), spec)
                    for last in words.ordinary[:TRIED_BEHIND]
                }
            except GcoreError:
                continue
            if len(values) == 1:
                found[tokens] = values.pop()
        if found:
            return Verdict(max(found, key=found.__getitem__), min(found, key=found.__getitem__))
    raise DataError(
        f"no verdict that judge {judge!r} can say in its tokens is read by parser {spec.parser!r}",
        fix="Emulated judges know the parsers words, number and json; take a tokenizer that has the characters",
    )


def _bodies(spec: VerdictSpec) -> Iterator[str]:
    """What a verdict may look like."""
    yield from spec.words
    numbers = [f"{bound:g}" for bound in (spec.most, spec.least) if math.isfinite(bound)]
    yield from numbers
    for value in (*map(json.dumps, spec.words), *numbers):
        yield f"{{{json.dumps(spec.field)}: {value}}}"
    yield from (value for value in spec.options.values() if isinstance(value, str))


def _spelt(said: str, text: Text) -> tuple[int, ...] | None:
    """In tokens that say this again, whatever the tokenizer adds by itself; None if there are none."""
    try:
        encoded = text.encode(said)
    except Exception:  # noqa: BLE001 - the tokenizers library raises it bare for a character that it has no token for
        return None
    tokens = tuple(t for t in encoded if text.decode((t,), skip_special_tokens=True))
    back = text.decode(tokens, skip_special_tokens=True)
    return tokens if tokens and back.strip() == said.strip() else None
