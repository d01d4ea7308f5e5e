"""What an engine still owes of one request: responses, or the tokens that are expected of them. For routing, and for whoever decides
whether slots are lent (`placement.loads`).

Where nothing is expected a response counts as one of the request before, so that requests of both kinds can be added up; where
nobody expects anything all count 1. As responses grow, and the first of them are finished, less is owed, and more is known of
the others. Of an engine that tells nothing on the way, all is owed until it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gcore.types import Sample


@dataclass(frozen=True, slots=True)
class Expect:
    """What is expected of responses to a prompt. `left`: tokens still to come, of the lengths of those that are finished, and the tokens
    that the others have; `weighs`: whether engines are weighed by it, or it is only told to who asks."""

    left: Callable[[Sequence[int], Sequence[int]], float]
    weighs: bool = True


class Owing:
    """Of one request of `count` responses. Mutable."""

    def __init__(self, count: int, expect: Expect | None, usual: float) -> None:
        self._expect = expect
        self._weighs = expect is not None and expect.weighs
        self._growing = dict.fromkeys(range(count), 0)
        self._finished: list[int] = []
        self.tokens = self._now() if self._weighs else usual * count
        """Or responses, where each counts 1."""
        self.each = self.tokens / count if count and self.tokens > 0 else usual
        """What one of them counted at first."""

    def hears(self, place: int, sample: Sample) -> float:
        """The engine tells of one of them. By how much what is owed changes."""
        if self._expect is None or place not in self._growing:
            return 0.0
        self._growing[place] = len(sample.token_ids)
        if sample.finish_reason != "abort":
            self._finished.append(self._growing.pop(place))
        if not self._weighs:
            return 0.0
        before, self.tokens = self.tokens, self._now()
        return self.tokens - before

    def foreseen(self) -> tuple[float, int]:
        """Tokens that are expected to come yet, and of how many responses; of none where nobody expects anything."""
        return (self._now(), len(self._growing)) if self._expect is not None else (0.0, 0)

    def _now(self) -> float:
        assert self._expect is not None
        return self._expect.left(self._finished, tuple(self._growing.values()))
