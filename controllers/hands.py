"""What actions are carried out with, and the small things that several of them need. Decides nothing, writes nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from controllers.engines import EngineBook
from controllers.forming import models_of, placeable
from controllers.holdings import Holdings
from controllers.ranks import RankLinks
from controllers.view import JobView
from gcore.clock import Clock
from gcore.ledger import chain, transactions
from gcore.ledger.guarded import Ledger, Transaction, TxnOutcome
from gcore.ledger.job import Plan, Trouble
from gcore.ledger.placing import SplitPart
from gcore.ledger.transactions import OpenSlots
from gcore.store.types import Store
from placement.live import Moving, placed, too_few
from placement.moves import split_from
from placement.plan import Wanted, first_plan

if TYPE_CHECKING:
    from controllers.judge_engines import JudgeEngines
    from controllers.own_files import OwnFolder


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of an action: a code that is counted, a sentence that is logged."""

    outcome: TxnOutcome
    sentence: str
    revision: int = 0


@dataclass(frozen=True)
class Hands:
    """What actions are carried out with."""

    store: Store
    ledger: Ledger
    lease: int
    address: str
    ranks: RankLinks
    engines: EngineBook
    holdings: Holdings
    clock: Clock
    stats: Callable[[JobView], dict[str, float]]
    """Numbers for the log entry of the step that is committed."""
    run_dir: Path
    tell: Callable[[str, str], None] = lambda topic, sentence: None
    """Tells people of a trouble, by topic, once while it lasts; an empty sentence: it is over."""
    away: Callable[[], str] = str
    """Why this node does not see the run's folder any more, or nothing. Blocks."""
    own: OwnFolder | None = None
    """This node's own folder of the run, where nodes share none."""
    memory_dir: Path | None = None
    """Where copies of the job's train states lie in this node's memory."""
    judges: JudgeEngines | None = None
    """The engines of the job's judges."""


def place(view: JobView, world: str, *, generation: int, split: SplitPart | None = None) -> Plan:
    """A plan over the nodes that may take a train world now. Raises SpecError while they are too few. `split`: what a policy wants."""
    if view.spec.placement.is_live:
        stored = view.mirror.plan
        wanted = None if split is None else split_from(split)
        there, job = placeable(view), Moving.by(view.spec, models_of(view.mirror))
        current = None if stored is None or stored.record.stands_still else stored.record
        plan = placed(
            there, job, world=world, generation=generation, current=current, wanted=wanted, pin=view.mirror.pin
        )
        if plan is None:
            raise too_few(there)
        return plan
    return first_plan(placeable(view), Wanted.by(view.spec), world=world, generation=generation)


def slots(view: JobView) -> OpenSlots:
    """What stands at head and at the step after it; it must be there."""
    slots = view.mirror.open_slots
    assert slots is not None
    return slots


def writer(view: JobView) -> chain.Writer:
    """Me, with a name for this one transaction."""
    return chain.Writer(view.me, uuid.uuid4().hex[:16])


def warning(view: JobView, topic: str, sentence: str, time: float) -> Transaction:
    """Tells people what went wrong beside the run; nothing if somebody else has told something of the topic meanwhile. `time`:
    now, in seconds since the epoch."""
    mirror = view.mirror
    trouble = Trouble(topic=topic, node=view.node, sentence=sentence, time=time)
    return transactions.warn(
        mirror.keys, mirror.written(mirror.keys.trouble(topic), mirror.troubles.get(topic)), trouble
    )


def new_world() -> str:
    """A name that no train world had."""
    return uuid.uuid4().hex[:12]
