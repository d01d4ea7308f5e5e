"""How much a daemon serves at once: calls, and of these streams.

What one stream holds is small however slowly its client reads: a daemon sends no more than the client takes (HTTP/2's flow control), and
takes what it sends from what it has anyway. So the number is what is bounded; who comes when there are too many is told so. Where people
are told apart nobody has more than half of the places, so that one whose program forgets its streams shuts nobody else out.

Daemons, which ask for whoever asked them, count among streams as one, and among calls by themselves: what people do takes no
place of theirs. Strangers, to whom health alone is answered, have a few places apart; there machines are told apart in place of people.

A call has its place until it is over, not until it was answered: whoever takes no answer holds what stands behind it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from controllers.service.access import Caller, Role, caller
from controllers.service.refusals import Exhausted, TooManyCalls

STRANGERS = 128
"""Calls of strangers at once."""
WATCHERS = 16
"""Strangers that watch health, each a stream without an end."""


class Places:
    """`most` places for `what`, of which nobody with a name has more than half."""

    def __init__(self, most: int, what: str, kind: type[Exhausted], fix: str) -> None:
        self._most = most
        self._most_of_one = -(-most // 2)
        self._what = what
        self._kind = kind
        self._fix = fix
        self._by_name: Counter[str] = Counter()
        self.taken = 0

    def take(self, name: str) -> None:
        """One more of `name`'s; without a name, of anybody's. Raises Exhausted."""
        if self.taken >= self._most:
            raise self._kind(f"{self.taken} {self._what} are served here already", fix=self._fix)
        if name and self._by_name[name] >= self._most_of_one:
            raise self._kind(
                f"{self._by_name[name]} {self._what} of {name} are served here already, which is half of all there may be",
                fix="End some of them, or ask another controller",
            )
        self.taken += 1
        self._by_name[name] += 1

    def give(self, name: str) -> None:
        """One of `name`'s is free again."""
        self.taken -= 1
        self._by_name[name] -= 1
        if not self._by_name[name]:
            del self._by_name[name]


class StreamRoom:
    """Places for `most` streams."""

    def __init__(self, most: int) -> None:
        fix = "Ask another controller, or raise api.streams in the node's configuration"
        self._places = Places(most, "streams", Exhausted, fix)

    @property
    def taken(self) -> int:
        """Streams that there are."""
        return self._places.taken

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """For one stream. Raises Exhausted."""
        name = _named(caller())
        self._places.take(name)
        try:
            yield
        finally:
            self._places.give(name)


class CallRoom:
    """Places for `most` calls of people, and for as many of daemons. `context`: of the call, which tells when it is over."""

    def __init__(self, most: int) -> None:
        fix = "Ask another controller, or raise api.calls in the node's configuration"
        self._people = Places(most, "calls", TooManyCalls, fix)
        self._nodes = Places(most, "calls of nodes", TooManyCalls, fix)
        self._strangers = Places(STRANGERS, "calls without a token", TooManyCalls, "Ask another controller")
        self._watchers = Places(WATCHERS, "watchers of health", TooManyCalls, "Ask for it with Check")

    @property
    def taken(self) -> int:
        """Calls that there are."""
        return sum(one.taken for one in (self._people, self._nodes, self._strangers, self._watchers))

    def enter(self, one: Caller, context: Any) -> None:
        """A call of somebody who is known. Raises TooManyCalls."""
        _enter(self._nodes if one.role is Role.NODE else self._people, _named(one), context)

    def enter_stranger(self, context: Any, *, watches: bool) -> None:
        """A call of whoever it may be. Raises TooManyCalls."""
        machine = str(context.peer() or "").rpartition(":")[0]
        _enter(self._watchers if watches else self._strangers, machine, context)


def most_at_once(most: int) -> int:
    """Calls that a server takes whose `CallRoom` has `most` places: those, and some that are being refused."""
    return 2 * most + 2 * (STRANGERS + WATCHERS)


def _named(one: Caller) -> str:
    return "" if one.role is Role.NODE else one.name


def _enter(places: Places, name: str, context: Any) -> None:
    places.take(name)
    context.add_done_callback(lambda _: places.give(name))
