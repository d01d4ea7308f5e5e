"""How what a rank is fed is cut into calls: parts of a bounded size, each with a time-out that follows from its bytes.

So a large step over a slow line gets there, what has arrived is not sent again when a later part fails, and no message
comes near to what gRPC or protobuf can hold. A group is never cut. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gcore.types import Group

PART_BYTES = 16 << 20
"""A feed is cut into parts of about so many bytes."""
LEAST_S = 30.0
"""For the smallest part: so long may a rank be busy with something else."""
SLOWEST_BYTES_S = 1 << 20
"""A line that brings less a second is none."""

Share = tuple[Group, frozenset[int]]
"""A group, and the indexes of those of its samples that are meant."""


def parts_of(shares: Iterable[Share], limit: int = PART_BYTES) -> Iterator[tuple[Share, ...]]:
    """The shares in their order, in parts of about `limit` bytes at most; a larger one is a part of its own."""
    part: list[Share] = []
    size = 0
    for share in shares:
        more = share_bytes(share)
        if part and size + more > limit:
            yield tuple(part)
            part, size = [], 0
        part.append(share)
        size += more
    if part:
        yield tuple(part)


def share_bytes(share: Share) -> int:
    """About what it takes on the line: four bytes for a token's id, four for its log-probability. Digests are little."""
    group, samples = share
    return 4 * len(group.prompt_ids) + sum(8 * len(group.samples[index].token_ids) for index in samples)


def timeout_s(size: int) -> float:
    """How long a call that brings `size` bytes may take."""
    return LEAST_S + size / SLOWEST_BYTES_S
