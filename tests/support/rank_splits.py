"""The ways to split a model over train ranks, by number: the three stages of ZeRO, and FSDP2."""

from __future__ import annotations

FSDP2 = 4


def named(size: int, split: int) -> str:
    """How tests call a world of `size` ranks."""
    return f"{size} x {'FSDP2' if split == FSDP2 else f'ZeRO {split}'}"


def split_of(split: int) -> dict[str, object]:
    """The fields of the section `train`."""
    return {"zero_stage": 3, "backend": "fsdp2"} if split == FSDP2 else {"zero_stage": split}
