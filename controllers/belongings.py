"""What a daemon keeps from one life to the next, and where it is reached. What it does with them is `controllers.life`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controllers.job_groups import JobGroups
from controllers.own_files import OwnFolders
from controllers.slot_health import SlotHealth
from gcore.clock import Clock
from gcore.config import NodeConfig
from gcore.ledger.facts import NodeFacts
from gcore.metrics import Metrics
from gcore.otel import StepTraces
from gcore.tls.connecting import PLAIN, Connector

if TYPE_CHECKING:
    from controllers.cluster import ClusterMirror
    from controllers.job import JobRunner


@dataclass
class Belongings:
    """What a daemon keeps from one life to the next."""

    config: NodeConfig
    clock: Clock
    metrics: Metrics = field(default_factory=Metrics)
    connector: Connector = PLAIN
    """How others are reached."""
    folders: OwnFolders = field(init=False)
    runners: dict[str, JobRunner] = field(default_factory=dict)
    """Of the jobs that this life works on, by uid."""
    cluster: ClusterMirror | None = None
    """What this life, or the last, hears of the cluster; None: none has begun."""
    spoken: int = 0
    """The schema version that is written; 0: it is not known yet which everybody reads."""
    facts: NodeFacts | None = None
    """What the node is."""
    looked: bool = False
    """Whether that was looked at: once."""
    health: SlotHealth = field(init=False)
    """Which of its slots are sick."""
    groups: JobGroups = field(init=False)
    """Where its jobs' processes run."""
    traces: StepTraces | None = field(init=False)
    """Where steps are told as spans; None: nowhere."""

    def __post_init__(self) -> None:
        self.traces = None if self.config.collector is None else StepTraces(self.config.collector, self.config.node)
        self.folders = OwnFolders(self.connector)
        self.health = SlotHealth(self.config.node, self.config.slots, self.clock)
        self.groups = JobGroups(self.config.limits)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a daemon answers, host:port each. `peers` empty: where people ask, too."""

    people: str
    metrics: str
    peers: str = ""
