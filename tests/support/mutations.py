"""gcore without one compare or one rule of the step protocol: the simulations and the tests must detect each removal.

Each mutation is a patch of production's modules. `caught_by` names the unit tests that detect it too: no simulation can detect
an outcome that is only worse (a lost hint), or a rule that another one covers. Only the mutation tests import this module.

A test must detect the mutation's effect. A mutation that raises an unrelated error would fail every test that reaches
it: that counts as Broken, not as detected.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gcore.store.keys import ROOT as STORE

RULES, DECIDE = "tests/unit/ledger/test_protocol_rules.py", "tests/unit/controllers/rules/test_decide.py"
PARTS, BEGUN = "tests/unit/ledger/test_balance_parts.py", "tests/unit/train/test_rank_feed_parts.py"
DECIDED = "tests/unit/controllers/rules/test_parts_decided.py"
AUDIT = "tests/unit/ledger/test_audit.py"
SHARES = "tests/unit/ledger/test_share_transactions.py"
HINTS, ENDS = (
    "tests/unit/ledger/test_transactions_of_hints.py",
    "tests/unit/ledger/test_transactions_of_beginnings_and_ends.py",
)
OTHERS = {"warn": HINTS, "take_stock": HINTS, "say_folder": HINTS, "spend": HINTS, "start": ENDS, "delete_rest": ENDS}
OTHERS |= dict.fromkeys(("give_back", "set_claim", "share_out", "set_quotas"), SHARES)
"""Where else than among the rules a transaction's compares are shown."""


class Broken(Exception):
    """A mutation has raised an unrelated error, so no test can detect its effect."""


@dataclass(frozen=True)
class Mutation:
    """`rule`: what is taken out. `patches`: "module:name" and what it becomes, made from what it was."""

    name: str
    rule: str
    patches: tuple[tuple[str, Callable[[Any], Any]], ...]
    caught_by: str

    @contextlib.contextmanager
    def applied(self) -> Iterator[list[str]]:
        """gcore is wrong meanwhile. Gives the errors that are the mutation's own; raises Broken in the end if there are any."""
        faults: list[str] = []
        with contextlib.ExitStack() as stack:
            for where, change in self.patches:
                path, _, name = where.partition(":")
                owner: Any = importlib.import_module(path)
                *outer, last = name.split(".")
                for part in outer:
                    owner = getattr(owner, part)
                stack.enter_context(mock.patch.object(owner, last, _watched(change(owner.__dict__[last]), faults)))
            try:
                yield faults
            finally:
                if faults:
                    raise Broken(f"the mutation {self.name!r} is itself wrong: {faults[0]}")


ROOT = Path(__file__).parents[2]


class _Watch:
    """Record errors raised by the code in these files, even if they are caught."""

    def __init__(self, files: frozenset[str], faults: list[str]) -> None:
        self._files = files
        self._faults = faults

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, kind: Any, error: BaseException | None, found: Any) -> None:
        if not isinstance(error, Exception):
            return
        # What a library raises is the fault of who called it; what the project's code raises may be what the mutation does.
        ours = [
            f
            for f in traceback.extract_tb(found)
            if Path(f.filename).is_relative_to(ROOT) and ".venv" not in f.filename
        ]
        if ours and ours[-1].filename in self._files:
            self._faults.append(f"line {ours[-1].lineno}: {type(error).__name__}: {error}")


def _watched(mutated: Any, faults: list[str]) -> Any:
    """The same; its own errors are noted."""
    if isinstance(mutated, classmethod):
        return classmethod(_watched(mutated.__func__, faults))
    if isinstance(mutated, type):
        return mutated
    watch = _Watch(frozenset({__file__, mutated.__code__.co_filename}), faults)
    if inspect.iscoroutinefunction(mutated):

        async def awaited(*args: Any, **more: Any) -> Any:
            with watch:
                return await mutated(*args, **more)

        return awaited
    if inspect.isgeneratorfunction(mutated):

        def walked(*args: Any, **more: Any) -> Iterator[Any]:
            with watch:
                yield from mutated(*args, **more)

        return walked

    @functools.wraps(mutated)
    def called(*args: Any, **more: Any) -> Any:
        with watch:
            return mutated(*args, **more)

    return called


def kind_of(keys: Any, key: str) -> str:
    """The name of a key of the store in `COMPARED`: without the job's prefix and without its instance."""
    name, slash, _ = key.removeprefix(keys.prefix).removeprefix(STORE).partition("/")
    return name + slash


def without(key: str) -> Callable[[Any], Any]:
    """A transaction that does not compare the keys of the kind `key`."""

    def change(make: Any) -> Any:
        def made(keys: Any, *args: Any, **more: Any) -> Any:
            txn = make(keys, *args, **more)
            kept = tuple(c for c in txn.compares if kind_of(keys, c.key) != key)
            return replace(txn, compares=kept)

        return made

    return change


COMPARED = {
    "create": ("names/", "job", "requests/"),
    "join": ("member/",),
    "leave": ("member/",),
    "assign": ("assign",),
    "offer": ("offer/",),
    "withdraw": (),
    "seal": ("head", "seal/"),
    "reseal": ("head", "seal/"),
    "ready": ("head", "seal/"),
    "commit": ("head", "seal/"),
    "account": ("head", "seal/"),
    "register": ("head", "ckpts", "log/"),
    "retain": ("head", "ckpts"),
    "prune": ("head", "ckpts"),
    "warn": ("trouble/",),
    "take_stock": ("copies/",),
    "say_folder": ("folder/",),
    "spend": ("spent/",),
    "rollback": ("head", "ckpts", "plan", "seal/"),
    "delete_job": ("head", "state"),
    "extend": ("state", "job", "head", "ckpts", "plan", "names/"),
    "change_settings": ("state", "job", "head", "ckpts", "plan", "names/"),
    "delete_rest": ("head", "state"),
    "start": ("state", "head"),
    "set_status": ("state", "head", "seal/"),
    "fail_lost": ("state", "active/", "head"),
    "replan": ("plan",),
    "lead": ("placement/",),
    "place": ("plan", "placement/"),
    "tell_moves": ("placement/",),
    "pin": ("placement/",),
    "begin_epoch": ("head", "ckpts", "epoch/"),
    "sweep": ("head", "ckpts"),
    "forget_evaluations": ("head", "ckpts"),
    "record_part": ("evalpart/", "eval/"),
    "record_evaluation": ("eval/", "head"),
    "give": ("part/",),
    "agree": ("agreed/",),
    "give_back": ("shares", "plan"),
    "set_claim": ("active/",),
    "share_out": ("shares", "active/"),
    "set_quotas": ("pool/",),
    "ask": ("head", "evalask"),
}
"""Every transaction on a job's records, and what it compares: keys of the job, and of the store."""

LEDGER = ("gcore.ledger.transactions",)
ELSEWHERE = {
    "sweep": ("gcore.ledger.retention",),
    "forget_evaluations": ("gcore.ledger.retention",),
    "record_part": ("gcore.ledger.evaluation", "controllers.flow.evaluation"),
    "record_evaluation": ("gcore.ledger.evaluation", "controllers.flow.evaluation"),
    "give": ("gcore.ledger.collectives", "controllers.flow.peer_collectives"),
    "spend": ("gcore.ledger.usage", "controllers.inference.judges"),
    "agree": ("gcore.ledger.collectives", "controllers.flow.peer_collectives"),
    "give_back": ("gcore.ledger.transactions",),
    "set_claim": ("gcore.ledger.transactions",),
    "share_out": ("gcore.ledger.transactions",),
    "set_quotas": ("gcore.ledger.transactions",),
    "ask": ("gcore.ledger.evaluation", "controllers.api.jobs"),
}
"""The modules that know a transaction by its name, of those that are not among `gcore.ledger.transactions`."""


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *args, **more: value


def _with(**fields: Any) -> Callable[[Any], Any]:
    """What a function of the chain makes, with other fields."""
    return lambda make: lambda *args, **more: make(*args, **more).model_copy(update=fields)


def _resealed_from_anything(make: Any) -> Any:
    from gcore.ledger.records.chain import SealState

    return lambda slot, sealer: make(slot.model_copy(update={"state": SealState.SEALED}), sealer)


def _reseals_ready(make: Any) -> Any:
    """From READY too."""
    from controllers.rules.actions import GiveUpBatch, Intent
    from gcore.ledger.records.chain import SealState

    def exchanging(view: Any) -> Iterator[Any]:
        yield from make(view)
        if view.seal is not None and view.seal.state is SealState.READY:
            yield Intent(GiveUpBatch(view.seal.step, "mutated"), "mutated reseal")

    return exchanging


def _ready_at_once(make: Any) -> Any:
    """READY before the ranks hold anything."""
    from controllers.rules.actions import Intent, MarkBatchReady
    from gcore.ledger.records.chain import SealState

    def exchanging(view: Any) -> Iterator[Any]:
        yield from make(view)
        if view.seal is not None and view.seal.state is SealState.SEALED:
            yield Intent(MarkBatchReady(view.seal.step), "mutated ready")

    return exchanging


def _commits_at_once(make: Any) -> Any:
    """Committed before the ranks have applied it."""
    from controllers.rules.actions import CommitStep, Intent
    from gcore.ledger.records.chain import SealState

    def training(view: Any) -> Iterator[Any]:
        yield from make(view)
        if view.seal is not None and view.seal.state is SealState.READY:
            yield Intent(CommitStep(view.seal.step), "mutated commit")

    return training


def _without_range(make: Any) -> Any:
    """A rollback that leaves the open slots."""
    from gcore.store.types import Delete

    def made(*args: Any, **more: Any) -> Any:
        txn = make(*args, **more)
        return replace(txn, writes=tuple(w for w in txn.writes if not (isinstance(w, Delete) and w.prefix)))

    return made


def _first_attempt(make: Any) -> Any:
    """The attempt number restarts with each seal."""
    return lambda slot, *args, **more: make(None, *args, **more)


def _in_flight_known_for_ever(make: Any) -> Any:
    """A value that was returned once is never returned again."""
    seen: dict[int, set[Any]] = {}

    def due(self: Any) -> Any:
        mine = seen.setdefault(id(self), set())
        found = [ref for ref in make(self) if ref not in mine]
        mine.update(found)
        return found

    return due


def _own_only(make: Any) -> Any:
    """Only the owner's groups are sealed."""

    def collect(cls: Any, rules: Any, head: Any, offers: Any, *more: Any) -> Any:
        members = sorted(offer.incarnation for offer in offers)
        mine = [
            offer.model_copy(
                update={
                    "groups": tuple(g for g in offer.groups if members[g.ref.shard % len(members)] == offer.incarnation)
                }
            )
            for offer in offers
        ]
        return make.__func__(cls, rules, head, mine, *more)

    return classmethod(collect)


def _older_token_too(make: Any) -> Any:
    """A rank takes whatever comes for whichever attempt, and trains on it."""

    def feed(state: Any, name: Any, token: Any, groups: Any) -> Any:
        if state.holding is not None and state.holding.step == token.step and token < state.holding:
            state = replace(state, holding=None)
        return make(state, name, token, groups)

    return feed


def _any_world(make: Any) -> Any:
    """A rank does not ask for whose world a call is."""
    return lambda state, name, token=None: None


def _any_seal(make: Any) -> Any:
    return lambda state, token, seal: ""


def _applies_twice(make: Any) -> Any:
    """A token that was applied is applied again."""

    def apply(state: Any, name: Any, token: Any, seal: Any) -> Any:
        if state.applied == token and state.holding == token:
            state = replace(state, applied=None, done=token.step - 1, groups=_LAST.get(id(name), {}))
        answer = make(state, name, token, seal)
        if type(answer).__name__ == "Begin":
            _LAST[id(name)] = dict(answer.work.groups)
        return answer

    return apply


_LAST: dict[int, Any] = {}


def _never(make: Any) -> Any:
    """A rule of `decide` that yields nothing."""

    def rule(view: Any) -> Iterator[Any]:
        return iter(())

    return rule


def _static_shares(make: Any) -> Any:
    """Each peer brings its share of the quota, and no more."""

    def due(self: Any) -> Any:
        view = self.look()
        share = -(-view.rules.quota // max(1, len(view.mirror.members)))
        return make(self)[: max(0, share - len(view.unsealed))]

    return due


def _live_before_commit(make: Any) -> Any:
    """Weights go to the engines as soon as they are staged."""
    from controllers.rules.actions import Intent, PublishWeights
    from gcore.types import Version

    def publishing(view: Any) -> Iterator[Any]:
        yield from make(view)
        early = Version(view.head.lineage, view.head.step + 1)
        if early in view.staged:
            for engine in view.engines.values():
                yield Intent(PublishWeights(engine.instance, early), f"mutated publish {engine.instance} {early}")

    return publishing


def _cursors_stay(make: Any) -> Any:
    """A rollback takes the weights of one record and the cursors of another."""
    return lambda head, target, cursors, *args, **more: make(head, target, head.cursors, *args, **more)


def _files_first(make: Any) -> Any:
    """A checkpoint's files go, then its entry."""

    async def retain(action: Any, view: Any, own: Any) -> Any:
        from controllers.job import effects

        known = {entry.version for entry in view.mirror.checkpoints.record.entries}
        await effects._delete(known - {entry.version for entry in action.kept}, own)
        return await make(action, view, own)

    return retain


def _unknown_is_lost(make: Any) -> Any:
    """A transaction without an answer counts as not executed."""
    from gcore.ledger.transactions import TxnOutcome, TxnReport

    async def find_out(self: Any, txn: Any) -> Any:
        return TxnReport(TxnOutcome.STALE, 0)

    return find_out


def _made_again(make: Any) -> Any:
    """A transaction without an answer is sent once more."""
    from gcore.ledger.transactions import TxnOutcome

    async def run(self: Any, txn: Any) -> Any:
        report = await make(self, txn)
        return await make(self, txn) if report.outcome is TxnOutcome.UNKNOWN else report

    return run


def _begins_at_once(make: Any) -> Any:
    """Ranks are notified of parts during the transfer."""
    from controllers.rules.actions import AccumulateParts, Intent

    def accumulating(view: Any) -> Iterator[Any]:
        yield from make(view)
        seal = view.seal
        for rank in range(seal.world_size if seal is not None and seal.parts else 0):
            known = view.ranks.get(rank)
            if known is not None and view.begun(known) < len(seal.parts):
                yield Intent(AccumulateParts(rank, seal.token), f"mutated accumulate {rank} {len(seal.parts)}")

    return accumulating


def _finds_all_that_is_offered(make: Any) -> Any:
    """Every offered group counts as certain."""

    def find(rules: Any, head: Any, seals: Any, offered: Any, **more: Any) -> Any:
        found = make(rules, head, seals, offered, **more)
        more_groups = [group for ref, group in sorted(offered.groups.items()) if group not in found.groups]
        return replace(found, groups=(*found.groups, *more_groups)[: rules.quota])

    return find


def _takes_what_is_there(make: Any) -> Any:
    """A seal waits for nothing that is older."""
    return lambda rules, head, found: make(rules, head, replace(found, missing=()))


class _Equal(str):
    """A digest that is that of anything."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _names_what_is_asked(make: Any) -> Any:
    return lambda entry: _Equal()


def _never_found(check: Any) -> Any:
    return lambda *_: None


def _without_outcomes(find: Any) -> Any:
    """What a seal's commit will have ended counts as free until then."""
    return lambda seals: frozenset(group.ref for seal in seals for group in seal.groups)


def _one_step_older(accept: Any) -> Any:
    return lambda head, step, versions, staleness: accept(head, step, versions, staleness + 1)


def _any_share(make: Any) -> Any:
    """A plan compares nothing of who has which slots."""
    return lambda share, txn: txn


def _without_media(make: Any) -> Any:
    """A digest that leaves out media."""
    return lambda *args, media=(), **more: make(*args[:5], **more)


def _sample_without_media(make: Any) -> Any:
    """A sample's digest that leaves out media."""
    return lambda sample: make(replace(sample, output=sample.output._replace(media=())))


def _held_without(*lacking: str) -> Callable[[Any], Any]:
    """Samples are held although blobs of the prompt, or their own, are missing."""

    def change(make: Any) -> Any:
        def complete(group: Any, blobs: Any) -> Any:
            if "prompt" in lacking:
                group = replace(group, media=())
            if "samples" in lacking:
                group = replace(group, samples={i: replace(one, media=()) for i, one in group.samples.items()})
            return make(group, blobs)

        return complete

    return change


def _asks_once(make: Any) -> Any:
    """A rank does not ask again for a blob that no store had, when it gets the group again."""
    from gcore.train.rank.feed import FeedTaken

    def feed(state: Any, *args: Any) -> Any:
        answer = make(state, *args)
        if isinstance(answer, FeedTaken):
            return FeedTaken(replace(answer.state, unavailable=state.unavailable & answer.state.wanted.keys()))
        return answer

    return feed


def _nothing_happens(make: Any) -> Any:
    async def done(*args: Any, **more: Any) -> None:
        return None

    return done


def _never_ends(make: Any) -> Any:
    async def wait(*args: Any, **more: Any) -> None:
        await asyncio.Event().wait()

    return wait


def _has_always_room(make: Any) -> Any:
    """No room is reserved for a prompt."""

    async def reserve(media: Any, prompt: Any) -> bool:
        media.keep(prompt.ref, prompt.pictures)
        return True

    return reserve


def _issued_without_room(make: Any) -> Any:
    """A prompt is sampled although the store has no room."""

    async def has_room(peer: Any, prompt: Any, due: Any) -> bool:
        if peer.media is not None:
            await peer.media.reserve(prompt)
        return True

    return has_room


def _takes_no_room(make: Any) -> Any:
    """The oldest prompt waits for room like any other."""

    async def has_room(peer: Any, prompt: Any, due: Any) -> bool:
        return peer.media is None or bool(await peer.media.reserve(prompt))

    return has_room


def _any_takes_room(make: Any) -> Any:
    """A prompt that is not the oldest takes the room of younger groups too."""
    return lambda peer, prompt, due: make(peer, prompt, [prompt.ref])


def _makes_no_room(make: Any) -> Any:
    """A rank without room for blobs of other nodes waits."""

    async def make_room_for_ranks(peer: Any) -> None:
        await asyncio.get_running_loop().create_future()

    return make_room_for_ranks


def _lacks_dropped(make: Any) -> Any:
    """A rank lacks the blobs of groups, too, that were dropped from the seal."""

    def fetching(view: Any, seal: Any, rank: int) -> Any:
        known = view.ranks.get(rank)
        return known.fetching if known is not None and view._holds(known.holding, seal) else {}

    return fetching


def _stays_pinned(make: Any) -> Any:
    """The pins of a group that was dropped to make room stay."""
    return lambda media, ref: media.end_sampling(ref)


def _fetches_without_pin(make: Any) -> Any:
    async def fetch(media: Any, wanted: Any, node: str) -> Any:
        from gcore.media.protocol import Blob

        client = await media._blobs.client_of(media._uid, node)
        return await client.fetch([Blob(one.sha256, one.size) for one in wanted], [media._blobs.node])

    return fetch


def _grants_without_room(make: Any) -> Any:
    """A reservation is granted although the store is full."""

    def reserve(accounts: Any, job: str, holder: str, size: int, until: float, now: float) -> bool:
        bound, accounts.bound = accounts.bound, 1 << 60
        try:
            return bool(make(accounts, job, holder, size, until, now))
        finally:
            accounts.bound = bound

    return reserve


def _without_grace(make: Any) -> Any:
    def begin(accounts: Any, key: Any, blob: Any, now: float) -> None:
        grace, accounts._grace_s = accounts._grace_s, 0.0
        make(accounts, key, blob, now)
        accounts._grace_s = grace

    return begin


def _any_bytes(make: Any) -> Any:
    """A blob is stored under its name whatever its bytes are."""

    def commit(incoming: Any) -> None:
        incoming._hash = SimpleNamespace(hexdigest=lambda: incoming.admission.key.sha256)
        make(incoming)

    return commit


def _sweeps_all(make: Any) -> Any:
    """The folder of a train world is deleted while its rank needs it."""
    return lambda blobs, job, needed: make(blobs, job, lambda: (needed(), ())[1])


def _mutations() -> list[Mutation]:
    ledger, decide, step = "gcore.ledger.transactions", "controllers.rules.decide", "controllers.rules.step"
    made = [
        Mutation(
            f"{txn} without {key.rstrip('/')}",
            f"transactions: {txn} compares {key.rstrip('/')}",
            tuple((f"{module}:{txn}", without(key)) for module in ELSEWHERE.get(txn, LEDGER)),
            caught_by=OTHERS.get(txn, RULES),
        )
        for txn, compared in COMPARED.items()
        for key in compared
    ]
    made += [
        Mutation(
            "1 what is terminal or sealed may be sealed",
            "1",
            (
                (f"{step}:refuse_seal", _always(None)),
                ("gcore.ledger.selection:sealed_refs", _always(frozenset())),
                ("gcore.data.order:ShardCursor.is_terminal", _always(False)),
            ),
            caught_by=RULES,
        ),
        Mutation(
            "1 outcomes of open seals may be sealed again",
            "1",
            (
                ("gcore.ledger.selection:sealed_refs", _without_outcomes),
                ("controllers.rules.view:sealed_refs", _without_outcomes),
                ("gcore.ledger.staleness:sealed_refs", _without_outcomes),
            ),
            caught_by=RULES,
        ),
        Mutation("2 an update before READY", "2", ((f"{decide}:exchange_batch", _ready_at_once),), caught_by=DECIDE),
        Mutation(
            "2 reseal from READY",
            "2",
            ((f"{decide}:exchange_batch", _reseals_ready), ("gcore.ledger.chain:reseal_slot", _resealed_from_anything)),
            caught_by=RULES,
        ),
        Mutation(
            "2 a READY part is given up with the rest",
            "2",
            (("gcore.ledger.chain:reseal_slot", _with(groups=(), parts=(), ready_parts=0)),),
            caught_by=PARTS,
        ),
        Mutation("2 READY parts are told to no rank", "2", ((f"{decide}:train_parts", _never),), caught_by=DECIDED),
        Mutation(
            "2 a part is begun before it is READY",
            "2",
            (
                (f"{decide}:train_parts", _begins_at_once),
                ("gcore.train.rank.feed:_ready_parts", lambda _: lambda seal: len(seal.parts)),
            ),
            caught_by=BEGUN,
        ),
        Mutation(
            "2 parts of another slot are added",
            "2",
            (("gcore.train.rank.feed:_parts_fault", _always("")),),
            caught_by=BEGUN,
        ),
        Mutation(
            "17 a part takes what is there",
            "17",
            (("gcore.ledger.balance:find_groups", _finds_all_that_is_offered),),
            caught_by=PARTS,
        ),
        Mutation(
            "receipts: every rank of a sequence group lists the share",
            "receipts",
            (("gcore.ledger.balance:StepLayout.receipt_of", lambda _: lambda layout, rank: layout.of_rank(rank)),),
            caught_by="tests/unit/ledger/test_balance.py",
        ),
        Mutation(
            "3 the attempt begins anew", "3", (("gcore.ledger.chain:seal_slot", _first_attempt),), caught_by=RULES
        ),
        Mutation(
            "4 a rank asks for no world",
            "4",
            (("gcore.train.rank.feed:check_caller", _any_world), ("gcore.train.rank.feed:_seal_fault", _any_seal)),
            caught_by="tests/unit/train/test_rank_feed.py",
        ),
        Mutation(
            "4 a lower attempt replaces a higher",
            "4",
            (("gcore.train.rank.feed:feed_samples", _older_token_too),),
            caught_by="tests/unit/train/test_rank_feed.py",
        ),
        Mutation(
            "4 a token is applied twice",
            "4",
            (("gcore.train.rank.feed:apply_step", _applies_twice),),
            caught_by="tests/unit/train/test_rank_feed.py",
        ),
        *_mutations_of_blobs(),
        Mutation(
            "5 what was issued once is never issued again",
            "5",
            (("controllers.flow.peer:JobPeer._due_refs", _in_flight_known_for_ever),),
            caught_by="tests/unit/controllers/flow/test_peer.py",
        ),
        Mutation(
            "6 only the owner's groups",
            "6",
            (("gcore.ledger.selection:OffersView.collect", _own_only),),
            caught_by=RULES,
        ),
        Mutation(
            "7 the seal carries no outcomes",
            "7",
            (("gcore.ledger.chain:seal_slot", _with(outcomes=())),),
            caught_by=RULES,
        ),
        Mutation(
            "8 nothing is accounted for without a quota",
            "8",
            (("gcore.ledger.selection:CloseStep", lambda _: _NotNow),),
            caught_by="tests/unit/ledger/test_selection.py",
        ),
        Mutation(
            "9 each peer brings its share of the quota",
            "9",
            (("controllers.flow.peer:JobPeer._due_refs", _static_shares),),
            caught_by="tests/unit/controllers/flow/test_peer.py",
        ),
        Mutation("10 a rollback leaves the slots", "10", ((f"{ledger}:rollback", _without_range),), caught_by=RULES),
        Mutation(
            "11 every version is an ancestor",
            "11",
            (
                ("gcore.ledger.selection:is_ancestor", _always(True)),
                ("gcore.ledger.selection:is_ancestor", _always(True)),
                ("controllers.flow.group_buffer:is_ancestor", _always(True)),
            ),
            caught_by=RULES,
        ),
        Mutation(
            "11 tokens may be of any age",
            "11",
            (("gcore.ledger.selection:is_fresh", _always(True)),),
            caught_by=RULES,
        ),
        Mutation(
            "12 weights go live before their commit",
            "12",
            ((f"{decide}:publish_weights", _live_before_commit), (f"{step}:publish_weights", _live_before_commit)),
            caught_by=RULES,
        ),
        Mutation(
            "13 a checkpoint that is damaged is used",
            "13",
            (("controllers.job.rollback:find_damage", _always("")),),
            caught_by="tests/unit/controllers/job/test_damaged_checkpoints.py",
        ),
        Mutation(
            "13 weights and cursors are of different records",
            "13",
            (("gcore.ledger.chain:rollback_entry", _cursors_stay),),
            caught_by=RULES,
        ),
        Mutation(
            "13 a checkpoint's files go before its entry",
            "13",
            (("controllers.job.executor:retain_checkpoints", _files_first),),
            caught_by="tests/unit/controllers/job/test_executor.py",
        ),
        Mutation(
            "13 the base is forgotten with the others",
            "13",
            (("gcore.ledger.selection:resumable_checkpoints", _always(())),),
            caught_by=RULES,
        ),
        Mutation(
            "14 committed before it is trained", "14", ((f"{decide}:train_step", _commits_at_once),), caught_by=DECIDE
        ),
        Mutation(
            "15 what was not answered was not made",
            "15",
            (("gcore.ledger.transactions:TransactionExecutor._find_out", _unknown_is_lost),),
            caught_by="tests/unit/ledger/test_unknown_answers.py",
        ),
        Mutation(
            "15 what was not answered is sent again",
            "15",
            (("gcore.ledger.transactions:TransactionExecutor.run", _made_again),),
            caught_by="tests/unit/ledger/test_unknown_answers.py",
        ),
        Mutation(
            "16 a sealed group that is lacked is waited for",
            "16",
            ((f"{step}:why_groups_lost", _always("")),),
            caught_by=DECIDE,
        ),
        Mutation(
            "16 nothing that is held is dropped",
            "16",
            (("controllers.flow.group_buffer:GroupBuffer.prune", _always(None)),),
            caught_by=RULES,
        ),
        Mutation(
            "17 a seal takes what is there",
            "17",
            (("gcore.ledger.selection:conclude_choice", _takes_what_is_there),),
            caught_by="tests/unit/ledger/test_selection.py",
        ),
        Mutation(
            "17 what is waited for is never given up",
            "17",
            ((f"{decide}:give_up_stale_prompts", _never), ("controllers.rules.step:give_up_stale_prompts", _never)),
            caught_by="tests/unit/controllers/flow/test_step_off_policy.py",
        ),
        Mutation(
            "17 what no engine here will answer is kept",
            "17",
            (("controllers.rules.step:_stranded_prompts", _always(frozenset())),),
            caught_by="tests/unit/controllers/flow/test_step_off_policy.py",
        ),
        Mutation(
            "17 a prompt is issued for ever",
            "17",
            (("controllers.flow.peer:JobPeer._exhausted_outcome", _always(None)),),
            caught_by="tests/unit/controllers/flow/test_peer_sources.py",
        ),
        Mutation(
            "shares: a plan is made of slots that were given back",
            "shares",
            tuple(
                (f"controllers.job.{module}:keeping_to", _any_share) for module in ("executor", "rollback", "effects")
            ),
            caught_by=SHARES,
        ),
        Mutation(
            "shares: slots are left while a step is trained",
            "shares",
            (("controllers.rules.placement:is_between_steps", _always(True)),),
            caught_by="tests/unit/controllers/rules/test_placement_preemption.py",
        ),
        Mutation(
            "shares: slots are left without a checkpoint",
            "shares",
            (("controllers.rules.placement:is_checkpointed", _always(True)),),
            caught_by="tests/unit/controllers/rules/test_placement_preemption.py",
        ),
        Mutation(
            "going on: a node that still ends a job does not take it up again",
            "going on",
            (("controllers.daemon.incarnation:Incarnation._goes_on", _always(False)),),
            caught_by="tests/sim/test_going_on.py",
        ),
        Mutation(
            "audit: entries are not named by content",
            "audit",
            (("gcore.ledger.audit.chain:entry_digest", _names_what_is_asked),),
            caught_by=AUDIT,
        ),
        Mutation(
            "audit: versions may be a step older",
            "audit",
            (("gcore.ledger.audit.chain:is_acceptable", _one_step_older),),
            caught_by=AUDIT,
        ),
        Mutation(
            "audit: a job that has succeeded need not be over",
            "audit",
            (("gcore.ledger.audit.audit:is_over", _always(True)),),
            caught_by=AUDIT,
        ),
        Mutation(
            "audit: what no entry names may be trained",
            "audit",
            (("gcore.ledger.audit.audit:check_uncommitted", _never_found),),
            caught_by=AUDIT,
        ),
        Mutation(
            "recovery: a world that lost a rank is left", "I6", ((f"{decide}:recover_world", _never),), caught_by=DECIDE
        ),
        Mutation(
            "publishing: engines keep old weights", "12", ((f"{decide}:publish_weights", _never),), caught_by=DECIDE
        ),
        Mutation(
            "assigning: nobody works on what is nobody's", "6", ((f"{decide}:assign_shards", _never),), caught_by=DECIDE
        ),
    ]
    return made


def _mutations_of_blobs() -> list[Mutation]:
    """What keeps pictures and arrays with the groups that name them (`gcore.media`)."""
    feed, messages, media = "gcore.train.rank.feed", "gcore.train.rank.messages", "controllers.workers.job_media"
    accounts, blobs = "gcore.media.accounts:BlobAccounts", "gcore.media.blobs"
    fed, sent = "tests/unit/train/test_rank_feed_blobs.py", "tests/unit/train/test_rank_messages.py"
    kept, counted = "tests/unit/controllers/workers/test_job_media.py", "tests/unit/media/test_accounts.py"
    stored = "tests/unit/media/test_blobs.py"
    rules: list[tuple[str, tuple[tuple[str, Callable[[Any], Any]], ...], str]] = [
        (
            "the digest of a group leaves out its media",
            (("gcore.types:group_digest", _without_media), (f"{messages}:group_digest", _without_media)),
            sent,
        ),
        (
            "the digest of a sample leaves out its media",
            (("gcore.types:Sample.digest", _sample_without_media), (f"{messages}:sample_digest", _without_media)),
            sent,
        ),
        (
            "a sample is held without its blobs",
            ((f"{feed}:TrainGroup.complete", _held_without("prompt", "samples")),),
            fed,
        ),
        ("a sample is held without its prompt's", ((f"{feed}:TrainGroup.complete", _held_without("prompt")),), fed),
        ("a sample is held without its own", ((f"{feed}:TrainGroup.complete", _held_without("samples")),), fed),
        (
            "a group whose blob no store has is kept",
            (("controllers.rules.step:_unavailable", _always(frozenset())),),
            DECIDE,
        ),
        ("a blob that no store has is not reported", ((f"{feed}:miss_blobs", lambda _: lambda state, _: state),), fed),
        ("a blob that no store had is not asked for again", ((f"{feed}:feed_samples", _asks_once),), fed),
        ("prompts that are held have no pins", ((f"{media}:JobMedia.keep", _always(None)),), kept),
        ("pins are not renewed", ((f"{media}:JobMedia._renew_pins", _never_ends),), kept),
        ("a dropped group keeps its pins", ((f"{media}:JobMedia.release", _stays_pinned),), kept),
        ("the store of an engine's node pins nothing", ((f"{media}:JobMedia._fetch", _fetches_without_pin),), kept),
        ("a lost picture of a response is scored", ((f"{media}:JobMedia._bring", _nothing_happens),), kept),
        ("no room is reserved for a prompt", ((f"{media}:JobMedia.reserve", _has_always_room),), kept),
        ("room stays reserved behind the last response", ((f"{media}:JobMedia.end_sampling", _nothing_happens),), kept),
        (
            "prompts are sampled without room",
            (("controllers.flow.peer:JobPeer._has_room", _issued_without_room),),
            kept,
        ),
        ("the oldest prompt takes no room", (("controllers.flow.peer:JobPeer._has_room", _takes_no_room),), kept),
        ("a later prompt takes room too", (("controllers.flow.peer:JobPeer._has_room", _any_takes_room),), kept),
        (
            "a rank gets no room",
            (("controllers.flow.peer:JobPeer.make_room_for_ranks", _makes_no_room),),
            kept,
        ),
        (
            "a rank lacks blobs of dropped groups",
            (("controllers.rules.view:JobView.fetching", _lacks_dropped),),
            DECIDE,
        ),
        ("a full disk keeps what nothing holds", ((f"{blobs}:BlobStore._delete_free", _always(False)),), stored),
        ("duplicates keep their room", (("controllers.flow.peer:JobPeer._duplicate", _always(None)),), kept),
        (
            "the folder of a needed world is deleted",
            (("controllers.workers.blobs:NodeBlobs.sweep_worlds", _sweeps_all),),
            kept,
        ),
        ("a pinned blob is deleted", ((f"{accounts}.pin", _always(None)),), counted),
        ("reserved room is given to others", ((f"{accounts}.reserve", _always(True)),), counted),
        ("room is reserved that is not there", ((f"{accounts}.reserve", _grants_without_room),), counted),
        ("a new blob is deleted at once", ((f"{accounts}._begin_grace", _without_grace),), counted),
        ("a blob may have any bytes", ((f"{blobs}:IncomingBlob.commit", _any_bytes),), stored),
        ("a restarted store trusts its files", ((f"{blobs}:BlobStore._verify", _always(None)),), stored),
    ]
    return [Mutation(f"blobs: {name}", "blobs", patches, caught_by) for name, patches, caught_by in rules]


class _NotNow:
    """Stands where an account entry would: nothing is done with it."""

    def __init__(self, outcomes: Any) -> None:
        self.outcomes = outcomes


MUTATIONS = {mutation.name: mutation for mutation in _mutations()}
