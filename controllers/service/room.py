"""How many streams a daemon serves at once.

What one stream holds is small however slowly its client reads: a daemon sends no more than the client takes (HTTP/2's flow control), and
takes what it sends from what it has anyway. So the number of streams is what is bounded; who comes when there are too many is told so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from controllers.service.refusals import Exhausted


class StreamRoom:
    """Places for `most` streams."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """For one stream. Raises Exhausted."""
        if self.taken >= self._most:
            raise Exhausted(
                f"{self.taken} streams are served here already",
                fix="Ask another controller, or raise api.streams in the node's configuration",
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
