"""The ways to split a model over train ranks, by number: the three stages of ZeRO, and FSDP2."""

from __future__ import annotations

FSDP2 = 4


def grouped_cases(split: int, *, few: bool) -> tuple[str, ...]:
    """The cases that four ranks run in sequence groups of two: a KL to another model, a ratio of whole sequences, mini-batches of
    unequal work, parts of a step. `few`: one for each library.
    """
    if few:
        return {3: ("gspo",), FSDP2: ("engine",)}.get(split, ())
    return ("engine", "gspo", "again", "updates", "streamed-engine")


def vision_cases(split: int, cases: tuple[str, ...], size: int = 2) -> tuple[str, ...]:
    """The cases with pictures that so many ranks run: all at one split of ZeRO, elsewhere those in which ranks have unequal work."""
    return cases if split == 3 or size == 1 else ("mixed", "lonely", "frozen")


def named(size: int, split: int) -> str:
    """How tests call a world of `size` ranks."""
    return f"{size} x {'FSDP2' if split == FSDP2 else f'ZeRO {split}'}"


def split_of(split: int) -> dict[str, object]:
    """The fields of the section `train`."""
    return {"zero_stage": 3, "backend": "fsdp2"} if split == FSDP2 else {"zero_stage": split}
