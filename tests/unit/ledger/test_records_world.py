"""New worlds that resume from copies: the names of head's states, and no sequence of transactions loses or repeats a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore.data.order import shard_lengths
from gcore.ledger import chain, transactions
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import (
    EndedRef,
    Head,
    HeldState,
    LogEntry,
    NodeCopies,
    SealedGroup,
    SealState,
    StateName,
    WorldState,
    head_state_names,
    whole_state,
)
from gcore.ledger.records.job import EnginePlace, JobPhase, JobStatus, Plan, RankPlace
from gcore.ledger.selection import SealStep
from gcore.ledger.transactions import Transaction, Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster
from gcore.types import PromptRef, Token, Version

KEYS = JobKeys("u")
SHAPE = shard_lengths(400, 2)


def plan(world: str, generation: int) -> Plan:
    return Plan(
        generation=generation,
        world=world,
        ranks=(RankPlace(rank=0, node="a", slot="cpu:0"),),
        engines=(EnginePlace(node="a", slot="cpu:0"),),
    )


def entry(seq: int, kind: str, **more: object) -> LogEntry:
    fields = {"seq": seq, "parent": seq - 1 if seq else None, "lineage": 0, "step": 0, "world": "w0", "nonce": "n"}
    return LogEntry.model_validate(fields | {"kind": kind} | more)


HEAD = chain.base_entry(2, "w0", ChainWriter("a", "n")).head


class TestWhatHeadsStateIsCalled:
    """By the world and token that trained it, or by what its world began with."""

    def test_a_step_is_called_by_its_world_and_token(self) -> None:
        log = {1: entry(1, "train", step=1, token=Token(0, 1, 3))}
        assert head_state_names(HEAD.model_copy(update={"seq": 1, "step": 1}), log) == (StateName("w0", 0, 1, 3),)

    def test_accounts_after_it_change_nothing(self) -> None:
        log = {1: entry(1, "train", step=1, token=Token(0, 1, 1))} | {n: entry(n, "account", step=1) for n in (2, 3)}
        assert head_state_names(HEAD.model_copy(update={"seq": 3, "step": 1}), log) == (StateName("w0", 0, 1, 1),)

    def test_after_a_rollback_it_is_what_the_new_world_began_with_or_began_from(self) -> None:
        state = WorldState(world="w0", lineage=0, step=4, attempt=2, shards=2)
        head = HEAD.model_copy(update={"seq": 9, "step": 4, "lineage": 1})
        back = {9: entry(9, "rollback", step=4, lineage=1, world="w1")}
        assert head_state_names(head, back) == (StateName("w1", 1, 4, 0),)
        on = {9: entry(9, "rollback", step=4, lineage=1, world="w1", state=state)}
        assert head_state_names(head, on) == (StateName("w1", 1, 4, 0), StateName("w0", 0, 4, 2))

    def test_the_base_has_no_name_and_neither_has_what_the_log_no_longer_says(self) -> None:
        assert head_state_names(HEAD, {0: entry(0, "base")}) == ()
        head = HEAD.model_copy(update={"seq": 7, "step": 3})
        assert head_state_names(head, {}) == ()
        assert head_state_names(head, {7: entry(7, "account", step=3)}) == ()


def stock(node: str, *held: tuple[WorldState, tuple[int, ...]]) -> NodeCopies:
    return NodeCopies(node=node, by=node, seq=1, held=tuple(HeldState(state=s, shards=n) for s, n in held))


class TestWhetherAStateIsWhole:
    """Every shard on one of the nodes at least; shards of two states are never taken together."""

    STATE = WorldState(world="w", lineage=0, step=3, attempt=1, shards=3)
    NAME = StateName("w", 0, 3, 1)

    def whole(self, held: Mapping[str, NodeCopies], nodes: str) -> WorldState | None:
        return whole_state([self.NAME], held, frozenset(nodes))

    def test_it_is_when_the_nodes_have_all_shards_between_them(self) -> None:
        held = {"a": stock("a", (self.STATE, (0, 2))), "b": stock("b", (self.STATE, (1, 0)))}
        assert self.whole(held, "ab") == self.STATE
        assert self.whole(held, "a") is None
        assert self.whole(held, "abc") == self.STATE

    @pytest.mark.parametrize(
        "other", [{"world": "v"}, {"lineage": 1}, {"step": 2}, {"attempt": 2}, {"attempt": 0}, {"shards": 2}]
    )
    def test_a_shard_of_another_state_is_none_of_its(self, other: dict[str, object]) -> None:
        strange = self.STATE.model_copy(update=other)
        held = {"a": stock("a", (self.STATE, (0, 2))), "b": stock("b", (strange, (1,)))}
        assert self.whole(held, "ab") is None


class Story:
    """A job's chain under controllers with old views, and worlds that may be alive though they were given up.

    What a world holds is the set of refs that it has trained; `states` is what copies hold, by name.
    """

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.cluster = MemoryCluster(FakeClock())
        self.states: dict[StateName, frozenset[PromptRef]] = {}
        self.worlds: dict[str, tuple[frozenset[PromptRef], int]] = {"w0": (frozenset(), 0)}
        """By name: what it holds, and the last step it has applied."""
        self.applied: set[tuple[str, str]] = set()
        self.ready: list[tuple[str, str, int, int, int, frozenset[PromptRef]]] = []
        """Every seal that ever was READY, as a slow controller may still send it to its world."""
        self.seen: dict[int, str] = {}
        """The nonce of every entry, by number."""
        self.newest = 0
        self.news = 0
        self.on = 0
        pending = Versioned(JobStatus(phase=JobPhase.PENDING), 0)
        running = JobStatus(phase=JobPhase.RUNNING)
        self.cluster.transact((), (Put(KEYS.state, pending.record.encode()),))
        base = chain.base_entry(2, "w0", self.writer())
        start = transactions.start(KEYS, Versioned(pending.record, self.cluster.revision), base, plan("w0", 1), running)
        assert self.run(start)
        self.views = [self.fresh() for _ in range(3)]

    def writer(self) -> ChainWriter:
        self.news += 1
        return ChainWriter("a", str(self.news))

    def run(self, txn: Transaction) -> bool:
        return self.cluster.transact(txn.compares, txn.writes).won

    def fresh(self) -> JobMirror:
        listing = self.cluster.listing(KEYS.prefix)
        events = tuple(WatchEvent("put", kv) for kv in listing.kvs)
        return JobMirror(KEYS).fold(WatchBatch(events, listing.revision, reset=True))

    def step(self) -> None:
        """One thing happens; a controller acts on a view that may be old."""
        number = self.chance.randrange(3)
        if self.chance.random() < 0.6:
            self.views[number] = self.fresh()
        view = self.views[number]
        deeds: tuple[Callable[[JobMirror], None], ...] = (self.seal, self.ready_, self.apply, self.commit)
        if self.chance.random() < 0.12:
            deeds = (self.go_on, self.go_on, self.go_on, self.go_back, self.account)
        self.chance.choice(deeds)(view)
        self.check()

    def seal(self, view: JobMirror) -> None:
        slots = view.open_slots
        assert slots is not None
        assert view.plan is not None
        head = slots.head.record
        slot = slots.slots.get(head.step + 1)
        if slot is not None and slot.record.state is not SealState.OPEN:
            return
        refs = [PromptRef(0, shard, seq) for seq in range(40) for shard in range(2)]
        due = [ref for ref in refs if not head.cursors.is_terminal(SHAPE, ref)][:2]
        if not due:
            return
        groups = tuple(
            SealedGroup(
                ref=ref,
                digest=f"d{ref}",
                prompt_tokens=1,
                response_tokens=(1,),
                versions=(Version(head.lineage, head.step),),
                holder="a",
            )
            for ref in due
        )
        self.run(transactions.seal(KEYS, slots, SealStep(groups, ()), view.plan.record, 1, "a"))

    def ready_(self, view: JobMirror) -> None:
        slots = view.open_slots
        assert slots is not None
        head = slots.head.record
        slot = slots.slots.get(head.step + 1)
        if slot is None or slot.record.state is not SealState.SEALED:
            return
        if self.run(transactions.ready(KEYS, slots, head.step + 1)):
            seal = slot.record
            refs = frozenset(group.ref for group in seal.groups)
            self.ready.append((seal.world, str(seal.token), seal.lineage, seal.step, seal.attempt, refs))

    def apply(self, view: JobMirror) -> None:
        """A world gets the READY step: it trains it once, and only if it follows its own state."""
        if not self.ready:
            return
        name, token, lineage, step, attempt, refs = self.chance.choice(self.ready[-4:])
        held, done = self.worlds[name]
        if (name, token) in self.applied or step != done + 1:
            return
        self.applied.add((name, token))
        self.worlds[name] = (held | refs, step)
        called = StateName(name, lineage, step, attempt)
        assert called not in self.states, "two states under one name"
        self.states[called] = held | refs

    def commit(self, view: JobMirror) -> None:
        slots = view.open_slots
        assert slots is not None
        head = slots.head.record
        slot = slots.slots.get(head.step + 1)
        if slot is None or slot.record.state is not SealState.READY:
            return
        if (slot.record.world, str(slot.record.token)) in self.applied:
            keep = self.chance.random() < 0.5
            self.run(transactions.commit(KEYS, slots, SHAPE, self.writer(), keep_cursors=keep, stats={}))

    def account(self, view: JobMirror) -> None:
        slots = view.open_slots
        assert slots is not None
        if slots.slots:
            return
        head = slots.head.record
        refs = [PromptRef(0, 1, seq) for seq in range(40)]
        due = [ref for ref in refs if not head.cursors.is_terminal(SHAPE, ref)][-1:]
        outcomes = tuple(EndedRef(ref=ref, kind="failed", reason="r") for ref in due)
        self.run(transactions.account(KEYS, slots, chain.account_entry(head, outcomes, SHAPE, self.writer())))

    def go_on(self, view: JobMirror) -> None:
        """The world is lost, or is believed to be; copies of head's state are at hand, as far as this view knows."""
        slots = view.open_slots
        assert slots is not None
        assert view.plan is not None
        assert view.checkpoints is not None
        head = slots.head.record
        names = head_state_names(head, {seq: stored.record for seq, stored in view.log.items()})
        name = next((one for one in names if one in self.states), None)
        if name is None:
            return
        state = WorldState(**name._asdict(), shards=1)
        world = f"w{len(self.worlds)}"
        advance = chain.reform_entry(head, state, world, self.writer(), "a rank died")
        new = plan(world, view.plan.record.generation + 1)
        gently = self.chance.random() < 0.5
        won = self.run(
            transactions.rollback(KEYS, slots, view.checkpoints, advance, view.plan, new, slots_as_seen=gently)
        )
        self.worlds[world] = (self.states[name], head.step)
        self.on += won
        if won and self.chance.random() < 0.7:  # else it dies while it loads
            self.states[StateName(world, advance.head.lineage, head.step, 0)] = self.states[name]

    def go_back(self, view: JobMirror) -> None:
        """To the base, as if there were neither copies nor checkpoints."""
        slots = view.open_slots
        assert slots is not None
        assert view.plan is not None
        assert view.checkpoints is not None
        if self.chance.random() < 0.5:
            return
        head, base = slots.head.record, view.log[0].record
        world = f"w{len(self.worlds)}"
        advance = chain.rollback_entry(head, base, world, self.writer(), "all died")
        new = plan(world, view.plan.record.generation + 1)
        self.run(transactions.rollback(KEYS, slots, view.checkpoints, advance, view.plan, new))
        self.worlds[world] = (frozenset(), 0)

    def check(self) -> None:
        """The chain has no gap and ends nothing twice; whatever head's state is called holds exactly what the chain trained."""
        mirror = self.fresh()
        assert mirror.head is not None
        head = mirror.head.record
        log = {seq: stored.record for seq, stored in mirror.log.items()}
        trained = check_chain(head, log)
        for seq, one in log.items():
            assert self.seen.setdefault(seq, one.nonce) == one.nonce, "an entry was written over"
        if head.seq != self.newest:
            base = log[head.seq].kind == "rollback" and log[head.seq].parent == 0 and log[head.seq].state is None
            assert base or log[head.seq].parent == self.newest, "what was committed is left out"
            self.newest = head.seq
        for name in head_state_names(head, log):
            if name in self.states:
                assert self.states[name] == trained
        held, done = self.worlds[head.world]
        seal = mirror.seals.get(head.step + 1)
        if done == head.step:
            assert held == trained
        else:
            assert seal is not None
            assert seal.record.state is SealState.READY, "only what is READY may be ahead of the chain"
            assert held == trained | {group.ref for group in seal.record.groups}


def check_chain(head: Head, log: Mapping[int, LogEntry]) -> frozenset[PromptRef]:
    """What the chain trained."""
    walk: list[LogEntry] = []
    seq: int | None = head.seq
    while seq is not None:
        walk.append(log[seq])
        seq = log[seq].parent
    ended: set[PromptRef] = set()
    trained: set[PromptRef] = set()
    step = 0
    for one in reversed(walk):
        assert one.step == step + (one.kind == "train")
        step = one.step
        for ref in (end.ref for end in one.delta):
            assert ref not in ended, "ended twice"
            ended.add(ref)
        trained |= {end.ref for end in one.delta if end.kind == "trained"}
    assert step == head.step
    assert head.cursors.terminal_count == len(ended)
    return frozenset(trained)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_world_that_resumes_from_copies_holds_the_state_of_the_chain(chance: Random) -> None:
    story = Story(chance)
    for _ in range(120):
        story.step()


def test_the_stories_have_worlds_that_go_on_from_copies_steps_and_worlds_that_lost_their_compare() -> None:
    stories = [Story(Random(seed)) for seed in range(12)]
    for story in stories:
        for _ in range(200):
            story.step()
    assert sum(story.on for story in stories) >= 12
    heads = [story.fresh().head for story in stories]
    assert sum(head.record.step for head in heads if head is not None) >= 12
    assert any(
        len(story.worlds) > 1 + (head.record.lineage if head else 0) for story, head in zip(stories, heads, strict=True)
    )


def test_a_commit_and_a_new_world_that_were_decided_on_the_same_view_cannot_both_be_made() -> None:
    for first in ("commit", "go on"):
        story = Story(Random(0))
        for deed in (story.seal, story.ready_, story.apply, story.commit, story.seal, story.ready_, story.apply):
            deed(story.fresh())
            story.check()
        view = story.fresh()
        assert view.head is not None
        assert view.head.record.step == 1
        deeds = (story.commit, story.go_on) if first == "commit" else (story.go_on, story.commit)
        for deed in deeds:
            deed(view)
            story.check()
        after = story.fresh().head
        assert after is not None
        assert (after.record.step, after.record.lineage) == ((2, 0) if first == "commit" else (1, 1))


def test_a_world_that_is_well_is_not_given_up_for_a_larger_one_once_a_step_is_ready() -> None:
    story = Story(Random(0))
    for deed in (story.seal, story.ready_, story.apply, story.commit, story.seal):
        deed(story.fresh())
    view = story.fresh()
    story.ready_(view)
    slots = view.open_slots
    assert slots is not None
    assert view.checkpoints is not None
    assert view.plan is not None
    state = WorldState(world="w0", lineage=0, step=1, attempt=1, shards=1)
    advance = chain.reform_entry(slots.head.record, state, "w9", ChainWriter("a", "x"), "two ranks instead of one")
    made = [
        transactions.rollback(KEYS, slots, view.checkpoints, advance, view.plan, plan("w9", 2), slots_as_seen=between)
        for between in (True, False)
    ]
    assert [story.run(txn) for txn in made] == [False, True]
    assert Compare(KEYS.seal(2), slots.slots[2].revision) in made[0].compares
