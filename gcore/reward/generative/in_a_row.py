"""What is wrong with a server, and what with one question: failures in a row of different questions are the server's.

One question that always fails, however often it is tried, says nothing of the others.
"""

from __future__ import annotations


class InARow:
    """Counts different questions that failed with no answer between them. Mutable."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failed: set[str] = set()

    def failed(self, question: str) -> bool:
        """Whether so many have failed by now that it is not theirs."""
        if len(self._failed) < self._most:
            self._failed.add(question)
        return len(self._failed) >= self._most

    def ended(self) -> None:
        """One did not fail."""
        self._failed.clear()
