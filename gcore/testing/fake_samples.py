"""Samples and groups made up from texts and rewards: a token is a character, and one more ends each response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gcore.types import Group, PromptRef, Sample, Version, VersionSpan


def tokens_of(text: str) -> tuple[int, ...]:
    """A token for each character; 0 is the end."""
    return tuple(ord(character) for character in text) or (1,)


def sample_of(text: str, version: Version, longest: int) -> Sample:
    """A response of that text, cut off at `longest` tokens."""
    tokens = (*(ord(character) for character in text), 0)
    cut = len(tokens) > longest
    tokens, text = (tokens[:longest], text[:longest]) if cut else (tokens, text)
    spans = (VersionSpan(version, 0, len(tokens)),)
    return Sample(tokens, (-1.0,) * len(tokens), text, "length" if cut else "stop", spans)


def group_of(rewards: Sequence[float], prompt: str = "a prompt") -> Group:
    """A scored group with these rewards."""
    made = (sample_of(f"response {number}", Version(0, 0), 64) for number in range(len(rewards)))
    samples = tuple(replace(sample, reward=reward) for sample, reward in zip(made, rewards, strict=True))
    return Group(PromptRef(0, 0, 0), tokens_of(prompt), samples, "data")
