"""How many streams a daemon serves at once.

What one stream holds is small however slowly its client reads: a daemon sends no more than the client takes (HTTP/2's flow control), and
takes what it sends from what it has anyway. So the number of streams is what is bounded; who comes when there are too many is told so.
Where people are told apart nobody has more than half of the places, so that one whose program forgets its streams shuts nobody else out.
Daemons, which ask for whoever asked them, are not counted so.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from controllers.service.access import Role, caller
from controllers.service.refusals import Exhausted


class StreamRoom:
    """Places for `most` streams."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_one = -(-most // 2)
        self._by_name: Counter[str] = Counter()
        self.taken = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """For one stream. Raises Exhausted."""
        if self.taken >= self._most:
            raise Exhausted(
                f"{self.taken} streams are served here already",
                fix="Ask another controller, or raise api.streams in the node's configuration",
            )
        one = caller()
        name = "" if one.role is Role.NODE else one.name
        if name and self._by_name[name] >= self._most_of_one:
            raise Exhausted(
                f"{self._by_name[name]} streams of {name} are served here already, which is half of all there may be",
                fix="End some of them, or ask another controller",
            )
        self.taken += 1
        self._by_name[name] += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._by_name[name] -= 1
            if not self._by_name[name]:
                del self._by_name[name]
