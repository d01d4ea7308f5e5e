"""Long and short responses compete for places in steps: virtual time, several controllers, the ledger's own rules.

A response takes time in proportion to its length; lengths have a long tail. Between a seal and its commit the trainer works. At
staleness 0 generation pauses meanwhile; otherwise responses in flight continue and more are started. Controllers may be killed together with
their responses. With `seats` each controller has at most so many in flight. With `longest_first` it starts those first that it expects to be
the longest, with an accuracy like that of real ones. The module has no rule of its own about which responses are due, sealed, awaited or too old; only
`take_first` has, as a negative example.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from controllers.flow.peer import DuePrompt, sort_longest_first
from controllers.rules.decide import shard_assignment
from gcore.ledger import chain
from gcore.ledger import selection as stream
from gcore.ledger import staleness as carried
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import Assignment, EndedRef, Head, InFlightRef, Offer, OfferedGroup, Seal
from gcore.ledger.selection import AwaitGroups, Choice, CloseStep, OffersView, SealStep, StreamRules, is_acceptable
from gcore.types import PromptRef, Version

WRITER = ChainWriter("a", "n")
TRAIN_TIME = 30.0
"""In tokens, like all times here: most responses are shorter, some very much longer."""
HANGS = 10.0**9


def long_tailed(chance: random.Random) -> int:
    """A response's length: half are below 36 tokens, one in a hundred is above 900."""
    return min(int(20 * chance.paretovariate(1.2)), 3000)


@dataclass
class Flight:
    """A group being made."""

    ref: PromptRef
    version: Version
    length: int
    number: int
    named: InFlightRef
    """How its controller's offer names it."""
    awaited_since: float | None = None


@dataclass
class Racer:
    """A controller: what it has finished, and what it is about."""

    name: str
    groups: dict[PromptRef, OfferedGroup] = field(default_factory=dict)
    outcomes: dict[PromptRef, EndedRef] = field(default_factory=dict)
    flights: dict[PromptRef, Flight] = field(default_factory=dict)
    given_up: dict[PromptRef, int] = field(default_factory=dict)
    turns: dict[PromptRef, DuePrompt] = field(default_factory=dict)


class Race:
    """One seeded run of a job of `rules`."""

    def __init__(
        self,
        seed: int,
        rules: StreamRules,
        *,
        take_first: bool = False,
        filtered: float = 0.0,
        kill_every: float | None = None,
        hanging: float = 0.0,
        limit: float = 6000.0,
        max_reissues: int = 2,
        seats: int | None = None,
        longest_first: bool = False,
    ) -> None:
        self.rules = rules
        self.seats, self.longest_first = seats, longest_first
        self.take_first = take_first
        self.filtered, self.hanging, self.limit, self.max_reissues = filtered, hanging, limit, max_reissues
        self.kill_every = kill_every
        self.seed = seed
        self.chance = random.Random(seed)
        self.now = 0.0
        self.head: Head = chain.base_entry(len(rules.shape.lengths), "w", WRITER).head
        self.seal: Seal | None = None
        self.assign: Assignment | None = None
        self.racers: list[Racer] = []
        self.issued: list[int] = []
        self.trained: list[int] = []
        self.lengths: dict[PromptRef, list[int]] = {}
        """Of each prompt, every time that it was issued."""
        self.passed_over = 0
        """Finished groups that were begun for earlier steps than one that a seal took in their place."""
        self.ended: dict[PromptRef, EndedRef] = {}
        self.first_issued: dict[PromptRef, int] = {}
        self.losses: dict[PromptRef, int] = {}
        self.oldest_trained = 0
        self.beyond_bound = -1
        """By how many steps any prompt was trained later than it may be: within k steps, and k + 2 more each time it was lost."""
        self.mixed = 0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, str, str, object]] = []
        self._made: dict[tuple[str, PromptRef], int] = {}
        self._order: dict[str, int] = {}
        for _ in range(3):
            self._join()
        if kill_every is not None:
            self._at(kill_every, "kill", "", None)

    def run(self, steps: int) -> None:
        """Until `steps` are committed."""
        self._look()
        while self.head.step < steps:
            assert self._events, "nothing goes on and nothing is due: stuck"
            self.now, _, kind, who, what = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(who, what)
            self._look()

    def _at(self, time: float, kind: str, who: str, what: object) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), kind, who, what))

    def _join(self) -> None:
        self.racers.append(Racer(f"c{next(self._numbers)}"))
        self.assign = shard_assignment([r.name for r in self.racers], len(self.rules.shape.lengths), self.assign)

    # What happens.

    def _finish(self, who: str, number: object) -> None:
        racer = next((r for r in self.racers if r.name == who), None)
        flight = next((f for f in racer.flights.values() if f.number == number), None) if racer else None
        if racer is None or flight is None:
            return
        del racer.flights[flight.ref]
        versions = tuple(dict.fromkeys((flight.version, self.head.version)))
        if self.chance.random() < self.filtered:
            racer.outcomes[flight.ref] = EndedRef(ref=flight.ref, kind="filtered", versions=versions)
        elif is_acceptable(self.head, self.head.step + 1, versions, self.rules.staleness):
            digest = f"{who}:{flight.number}"
            self._order[digest] = next(self._numbers)
            racer.groups[flight.ref] = OfferedGroup(
                ref=flight.ref, digest=digest, prompt_tokens=1, response_tokens=(flight.length,), versions=versions
            )

    def _commit(self, who: str, what: object) -> None:
        assert self.seal is not None
        for group in self.seal.groups:
            self.trained.extend(group.response_tokens)
            self.oldest_trained = max(self.oldest_trained, self.seal.step - 1 - group.versions[0].step)
            self.mixed += len(group.versions) > 1
        advance = chain.commit_entry(self.head, self.seal, self.rules.shape, WRITER, keep_cursors=False)
        self._end(advance.entry.delta)
        self.head, self.seal = advance.head, None
        self._prune()

    def _kill(self, who: str, what: object) -> None:
        """One controller and all it holds; another comes at once."""
        victim = self.racers.pop(self.chance.randrange(len(self.racers)))
        for ref in [*victim.flights, *victim.groups, *victim.outcomes]:
            self.losses[ref] = self.losses.get(ref, 0) + 1
        self._join()
        held = {g.ref for r in self.racers for g in r.groups.values()}
        if self.seal is not None and any(g.ref not in held for g in self.seal.groups) and self.chance.random() < 0.5:
            # It died before every rank had its part: the batch is open again.
            self.seal = None
            self._events = [event for event in self._events if event[2] != "commit"]
            heapq.heapify(self._events)
        assert self.kill_every is not None
        self._at(self.now + self.chance.uniform(0.2, 1.8) * self.kill_every, "kill", "", None)

    def _limit(self, who: str, what: object) -> None:
        """Only that everybody looks again: the wait for a prompt may have been too long."""

    # What everybody does after each event.

    def _look(self) -> None:
        if self.seal is not None:
            if self.rules.staleness and not self.take_first:
                self._issue(self._offered())
            return
        offered = self._offered()
        while True:
            chosen = self._chosen(offered)
            if isinstance(chosen, CloseStep):
                advance = chain.account_entry(self.head, chosen.outcomes, self.rules.shape, WRITER)
                self._end(advance.entry.delta)
                self.head = advance.head
                self._prune()
                offered = self._offered()
                continue
            if isinstance(chosen, SealStep) and chosen.groups:
                assert stream.refuse_seal(self.rules, self.head, (), chosen) is None
                self._look_for_passed_over(chosen, offered)
                sealed = chain.seal_slot(None, self.head, chosen, world_size=1, mini_batches=1, sealer="a")
                self.seal = chain.ready_slot(sealed)
                self._at(self.now + TRAIN_TIME, "commit", "", None)
                if self.take_first or not self.rules.staleness:
                    for racer in self.racers:
                        for ref in racer.flights:
                            self.losses[ref] = self.losses.get(ref, 0) + 1
                        racer.flights.clear()
                return
            break
        self._issue(self._offered() if self._give_up(offered) else offered)

    def _chosen(self, offered: OffersView) -> Choice:
        if self.take_first:
            there = sorted(offered.groups.values(), key=lambda g: self._order[g.digest])
            if len(there) >= self.rules.quota:
                return SealStep(tuple(there[: self.rules.quota]), tuple(offered.outcomes.values()))
            return AwaitGroups(PromptRef(0, 0, 0), self.rules.quota - len(there))
        rule = carried.choose_seal if self.rules.staleness else stream.choose_seal
        return rule(self.rules, self.head, (), offered)

    def _due(self, offered: OffersView) -> Collection[PromptRef]:
        if self.take_first:
            order = (r for r in stream.refs_in_order(self.rules, self.head, ()) if r not in offered.outcomes)
            return list(itertools.islice((r for r in order), 2 * self.rules.quota))
        rule = carried.due_refs if self.rules.staleness else stream.due_refs
        return rule(self.rules, self.head, () if self.seal is None else (self.seal,), offered)

    def _offered(self) -> OffersView:
        offers = [
            Offer(
                incarnation=racer.name,
                groups=tuple(racer.groups.values()),
                outcomes=tuple(racer.outcomes.values()),
                in_flight=tuple(f.named for f in racer.flights.values()) if self.rules.staleness else (),
            )
            for racer in self.racers
        ]
        return OffersView.collect(self.rules, self.head, offers)

    def _give_up(self, offered: OffersView) -> bool:
        """Restart a response that has been awaited too long; after several restarts it fails. Return whether anything was restarted."""
        if not self.rules.staleness:
            return False
        late = set(carried.awaited_refs(self.rules, self.head, (), offered))
        lost = False
        for racer in self.racers:
            for flight in list(racer.flights.values()):
                if flight.ref not in late:
                    flight.awaited_since = None
                elif flight.awaited_since is None:
                    flight.awaited_since = self.now
                    self._at(self.now + self.limit, "limit", "", None)
                elif self.now - flight.awaited_since >= self.limit:
                    self._lose(racer, flight)
                    lost = True
        return lost

    def _lose(self, racer: Racer, flight: Flight) -> None:
        del racer.flights[flight.ref]
        self.losses[flight.ref] = self.losses.get(flight.ref, 0) + 1
        tries = racer.given_up[flight.ref] = racer.given_up.get(flight.ref, 0) + 1
        if tries > self.max_reissues:
            racer.outcomes[flight.ref] = EndedRef(ref=flight.ref, kind="failed", reason="stale")

    def _issue(self, offered: OffersView) -> None:
        assert self.assign is not None
        due = self._due(offered)
        for racer in self.racers:
            mine = set(self.assign.shards_of(racer.name))
            known = {*racer.flights, *racer.groups, *racer.outcomes}
            fresh = [ref for ref in due if ref.shard in mine and ref not in known]
            if self.longest_first:
                racer.turns = {r: racer.turns.get(r) or DuePrompt(self.head.version, self._guess(r)) for r in fresh}
                fresh = sort_longest_first(fresh, racer.turns)
            for ref in fresh if self.seats is None else fresh[: max(self.seats - len(racer.flights), 0)]:
                self._begin(racer, ref)

    def _next_length(self, ref: PromptRef) -> int:
        """Of the next response to `ref`: so that it can be guessed at, it depends on nothing but the ref."""
        return long_tailed(random.Random(f"{self.seed} {ref} {len(self.lengths.get(ref, ()))}"))

    def _guess(self, ref: PromptRef) -> float:
        """Right within a factor of two, mostly."""
        return self._next_length(ref) * random.Random(f"guess {ref}").lognormvariate(0.0, 0.7)

    def _look_for_passed_over(self, chosen: SealStep, offered: OffersView) -> None:
        taken = {group.ref for group in chosen.groups}
        newest = max(group.versions[0].step for group in chosen.groups)
        left = (group for ref, group in offered.groups.items() if ref not in taken)
        self.passed_over += sum(group.versions[0].step < newest for group in left)

    def _begin(self, racer: Racer, ref: PromptRef) -> None:
        length = self._next_length(ref) if self.longest_first else long_tailed(self.chance)
        self.lengths.setdefault(ref, []).append(length)
        number = next(self._numbers)
        version = self.head.version
        racer.flights[ref] = Flight(ref, version, length, number, InFlightRef(ref=ref, version=version))
        self.first_issued.setdefault(ref, self.head.step)
        hangs = random.Random(str(ref)).random() < self.hanging
        if not hangs:
            self.issued.append(length)
        self._at(self.now + (HANGS if hangs else length), "finish", racer.name, number)

    def _prune(self) -> None:
        """Drop what a change of head makes useless, and restart responses in flight that are too old."""
        for racer in self.racers:
            for ref, group in list(racer.groups.items()):
                gone = self.head.cursors.is_terminal(self.rules.shape, ref)
                stale = not is_acceptable(self.head, self.head.step + 1, group.versions, self.rules.staleness)
                if stale and not gone:
                    self.losses[ref] = self.losses.get(ref, 0) + 1
                if gone or stale:
                    del racer.groups[ref]
            for ref in [r for r in racer.outcomes if self.head.cursors.is_terminal(self.rules.shape, r)]:
                del racer.outcomes[ref]
            for flight in list(racer.flights.values()):
                if self.head.cursors.is_terminal(self.rules.shape, flight.ref):
                    del racer.flights[flight.ref]
                elif carried.steps_left(self.rules, self.head, flight.version) < 0:
                    self._lose(racer, flight)

    def _bound(self, ref: PromptRef) -> int:
        return self.rules.staleness + (self.rules.staleness + 2) * self.losses.get(ref, 0)

    def _end(self, delta: Sequence[EndedRef]) -> None:
        for one in delta:
            assert one.ref not in self.ended, f"{one.ref} ended twice"
            self.ended[one.ref] = one
            if one.kind != "trained":  # an outcome may lie there for a while before it is written down
                continue
            age = self.head.step - self.first_issued[one.ref]
            self.beyond_bound = max(self.beyond_bound, age - self._bound(one.ref))


def largest_gap(a: Sequence[int], b: Sequence[int]) -> float:
    """The two-sample statistic of Kolmogorov and Smirnov: the largest distance of the two empirical distributions."""
    points = sorted({*a, *b})
    left, right = sorted(a), sorted(b)
    gap, i, j = 0.0, 0, 0
    for point in points:
        while i < len(left) and left[i] <= point:
            i += 1
        while j < len(right) and right[j] <= point:
            j += 1
        gap = max(gap, abs(i / len(left) - j / len(right)))
    return gap


def largest_gap_by_chance(a: Sequence[int], b: Sequence[int], coefficient: float = 1.63) -> float:
    """What the statistic exceeds in one of a hundred pairs of samples of one distribution (1.63: level 0.01)."""
    return coefficient * math.sqrt((len(a) + len(b)) / (len(a) * len(b)))
