"""How a job stands on one controller for one incarnation: its records as they were heard, what is held of it, one view of
all that, and the few things that follow from the view and not from a decision: that the job fails, that this controller
leaves it.

What feeds it and what works on it is another's (`controllers.job`; in a simulation, that of made-up ends): here nothing is
started, watched or decided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from controllers.actions import SetPhase
from controllers.apply import apply
from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.deeds import LOOK_AGAIN_S, Deeds
from controllers.engines import EngineBook
from controllers.hands import Hands
from controllers.holdings import Holdings
from controllers.identity import Identity
from controllers.leaving import has_handed_over
from controllers.ranks import RankLinks
from controllers.remembered import Remembered
from controllers.staff import Staff
from controllers.view import EngineView, JobView
from gcore.config import JobSpec
from gcore.ledger.claims import SHARES_CAME, Claim
from gcore.ledger.guarded import TxnOutcome
from gcore.ledger.job import JobPhase
from gcore.ledger.mirror import JobMirror
from gcore.ledger.rules import StreamRules, rules_of
from gcore.reward.pace import Scoring
from gcore.schema import spoken
from gcore.store.keys import JobKeys
from gcore.types import Version
from placement.moves import Accounted, Proposal


class JobStanding(ABC):
    """Mutable; one event loop. Whoever inherits it sets what is declared and not made here, before the first look."""

    _spec: JobSpec
    _staff: Staff
    _ranks: RankLinks
    _engines: EngineBook
    _deeds: Deeds

    def __init__(self, uid: str, identity: Identity, cluster: ClusterMirror, changes: Changes) -> None:
        self.uid = uid
        self.keys = JobKeys(uid)
        self.node = identity.node
        self.changes = changes
        self.mirror = JobMirror(self.keys)
        self.holdings = Holdings()
        self._identity = identity
        self._cluster = cluster
        self._rules: StreamRules | None = None
        self._view: tuple[int, JobView] | None = None
        self._remembered = Remembered()
        self._leaving = False
        self.is_working = False
        """Whether there is a view to look at."""
        self._lacks = ""
        self._scoring: Scoring | None = None
        self._judging: Scoring | None = None
        self._crewing: Scoring | None = None

    @abstractmethod
    def hands(self) -> Hands:
        """What this job's actions are carried out with."""

    @abstractmethod
    def _staged(self) -> frozenset[Version]:
        """The versions whose weights lie in the run's folder."""

    def _brought(self) -> frozenset[str]:
        """The train worlds whose starting checkpoint lies proved in this node's own folder."""
        return frozenset()

    def _judge_views(self) -> Mapping[str, EngineView]:
        """The engines of the job's judges."""
        return {}

    def _proposed(self) -> tuple[Proposal | None, Accounted | None]:
        """What this controller wants to change of the placement, and what it has to tell of earlier changes."""
        return None, None

    def _is_arranging(self) -> bool:
        """Whether a curriculum's order is being worked out."""
        return False

    @property
    def me(self) -> str:
        """This incarnation."""
        return self._identity.incarnation

    @property
    def has_handed_over(self) -> bool:
        """Whether nothing is left that it is worth staying for."""
        return not self.is_working or has_handed_over(self.look())

    def has_more(self) -> bool:
        """Whether there are steps to make. It may be so again after the last: by a rollback."""
        return not self._ended() and self.mirror.head is not None and not self.look().is_over

    def leave(self) -> None:
        """Hand over: this controller is about to end."""
        self._leaving = True
        for ref in list(self.holdings.in_flight):
            self.holdings.in_flight.give_up(ref, stale=False)
        self.changes.notify()

    async def fail(self, reason: str) -> None:
        """End the job as failed, however long the store is away."""
        while not self._ended():
            done = await apply(SetPhase(JobPhase.FAILED, reason), self.look(), self.hands())
            if done.outcome is not TxnOutcome.WON:
                await self.changes.wait(LOOK_AGAIN_S)
            else:
                await self.changes.until(self._ended)

    def look_anew(self) -> None:
        """What is under way has changed, which no record tells."""
        self._view = None

    def look(self) -> JobView:
        """The view now; computed once for each change."""
        if self._view is None or self._view[0] != self.changes.count:
            self._view = (self.changes.count, self._build())
        return self._view[1]

    def _ended(self) -> bool:
        return self.mirror.status is not None and self.mirror.status.record.phase.ended

    def _rules_or_none(self) -> StreamRules | None:
        if self.mirror.job is None:
            return None
        job = self.mirror.job.record
        # A spec is checked whole to give them: too much for whatever is heard.
        return self._remembered.get("rules", (job,), lambda: rules_of(job))

    def _prune(self, before: JobMirror) -> None:
        """Drop what a new head has made terminal, cut off or too old."""
        rules = self._rules_or_none()
        if rules is not None and self.mirror.head is not None and self.mirror.head != before.head:
            self.holdings.prune(rules, self.mirror.head.record)

    def _build(self) -> JobView:
        assert self._rules is not None
        head = self.mirror.head
        return JobView(
            spec=self._spec,
            rules=self._rules,
            mirror=self.mirror,
            me=self.me,
            node=self.node,
            nodes=self._cluster.able(spoken()),
            share=self._cluster.share_of(self.uid) if spoken() >= SHARES_CAME else None,
            claim=self._cluster.claims.get(self.uid, Claim()),
            queued=self._cluster.queue.get(self.uid),
            unable=self._cluster.unable(spoken()),
            workers=self._cluster.workers,
            ranks=self._ranks.views,
            engines=self._engines.views,
            judges=self._judge_views(),
            holdings=self.holdings.offers,
            outcomes=self.holdings.outcomes,
            in_flight=self.holdings.in_flight.versions(head.record) if head is not None else {},
            busy=bool(self.holdings.in_flight),
            under_way=self._deeds.under_way(),
            saved=self._ranks.saved,
            staged=self._staged(),
            brought=self._brought(),
            arranging=self._is_arranging(),
            lacks=self._lacks,
            scoring=self._scoring,
            judging=self._judging,
            crewing=self._crewing,
            hopeless=self._staff.hopeless(self._cluster.workers),
            proposal=self._proposed()[0],
            account=self._proposed()[1],
            remembered=self._remembered,
            leaving=self._leaving,
        )
