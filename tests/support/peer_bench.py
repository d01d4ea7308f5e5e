"""The real peer over a store in memory, and the shipped fake, behind one interface for one test suite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from controllers.changes import ChangeSignal
from controllers.flow.curriculum_orders import CurriculumOrders
from controllers.flow.evaluation import LedgerEvaluations
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.job_data import make_job_data
from controllers.flow.peer import JobPeer
from controllers.flow.peer_collectives import PeerCollectives
from controllers.rules.view import JobView
from controllers.telemetry.notices import PluginErrorLog, WarningLog
from controllers.telemetry.step_stats import StepTimer
from gcore.config import new_spec
from gcore.data.stream import open_prompts
from gcore.flows import Peer, find_filters
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment, Checkpoint, Checkpoints, Member
from gcore.ledger.records.job import JobPhase, JobStatus, Plan
from gcore.ledger.selection import StreamRules
from gcore.ledger.transactions import TransactionExecutor
from gcore.reward.pool import DirectScorer
from gcore.rollout.client import SamplingParams
from gcore.store.keys import JobKeys
from gcore.store.types import Put, WatchBatch, WatchEvent
from gcore.system.clock import SystemClock
from gcore.testing import MemoryCluster, MemoryStore, PerfectNetwork
from gcore.testing.flows import AnswerScript, Asked, FakeCluster, make_spec, sample_of
from gcore.testing.models import save_tokenizer
from gcore.types import Outcome, PromptRef, Sample, Version


class PeerBench(Protocol):
    """What the suite needs beside the peer."""

    peer: Peer
    asked: list[Asked]

    def kept(self) -> Mapping[PromptRef, int]:
        """The groups that were finished, and how many samples each has."""
        ...

    def ended(self) -> Mapping[PromptRef, Outcome]:
        """The prompts that ended without a group."""
        ...


class FakeBench:
    """`gcore.testing.flows`."""

    def __init__(
        self, entries: Sequence[Mapping[str, Any]], script: AnswerScript, folder: Path, **sections: Any
    ) -> None:
        self.cluster = FakeCluster(entries, script, **sections)
        self.peer: Peer = self.cluster.peers[0]
        self.asked = self.cluster.asked

    def kept(self) -> Mapping[PromptRef, int]:
        """What the cluster holds."""
        return {ref: len(group.samples) for ref, group in self.cluster.held.items()}

    def ended(self) -> Mapping[PromptRef, Outcome]:
        """What the cluster noted."""
        return self.cluster.outcomes


class RealBench:
    """`controllers.flow.peer`, with a store in memory and a script in place of engines. Nobody seals: a step never ends."""

    def __init__(
        self, entries: Sequence[Mapping[str, Any]], script: AnswerScript, folder: Path, **sections: Any
    ) -> None:
        model, data = folder / "model", folder / "data.jsonl"
        model.mkdir()
        save_tokenizer(model, ends=True)
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
        data.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
        tree = make_spec(**sections).model_dump(mode="json")
        tree |= {"model": {"path": str(model)}, "data": {"path": str(data), "shards": 1}}
        self.spec = new_spec(tree)
        self.script, self.asked = script, list[Asked]()
        self.clock, self.changes, self.buffer = SystemClock(), ChangeSignal(), GroupBuffer()
        self.store_side = MemoryCluster(self.clock)
        self.store = MemoryStore(self.store_side, network=PerfectNetwork(self.clock))
        self.keys = JobKeys("u")
        self._write_records()
        prompts = open_prompts(self.spec, folder, model)
        self.stream = prompts.stream
        job_data = make_job_data(self.spec, "u", prompts, DirectScorer())
        self.faults = PluginErrorLog(self.store, self.keys, "n")
        self.peer: Peer = JobPeer(
            job_data,
            self.look,
            self.changes,
            self,  # type: ignore[arg-type]
            self.buffer,
            LedgerEvaluations(TransactionExecutor(self.store, self.keys), self.mirror),
            self.clock,
            StepTimer(),
            CurriculumOrders.find(self.spec, job_data.stream, self.changes.notify),
            find_filters(self.spec.flow.filters),
            PeerCollectives(self.store, self.mirror, "me", self.lease, self.changes, self.clock),
            self.faults,
            WarningLog(self.store, self.keys, "n", self.clock),
        )

    def _write_records(self) -> None:
        self.lease = self.store_side.grant(1000)
        records = {
            self.keys.state: JobStatus(phase=JobPhase.RUNNING),
            self.keys.head: chain.base_entry(1, "w", ChainWriter("me", "n")).head,
            self.keys.assign: Assignment(members=("me",), owners=(0,)),
            self.keys.checkpoints: Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""),)),
            self.keys.plan: Plan(generation=1, world="w", ranks=(), engines=()),
            self.keys.member("me"): Member(incarnation="me", node="n", address="h:1"),
        }
        for key, record in records.items():
            self.store_side.transact((), (Put(key, record.encode()),))

    def mirror(self) -> JobMirror:
        """The records as they are."""
        listing = self.store_side.listing(self.keys.prefix)
        events = tuple(WatchEvent("put", kv) for kv in listing.kvs)
        return JobMirror(self.keys).fold(WatchBatch(events, listing.revision, reset=True))

    def look(self) -> JobView:
        """The view now."""
        rules = StreamRules(self.stream.shape, self.spec.data.window, self.spec.flow.groups_per_step)
        return JobView(self.spec, rules, self.mirror(), "me", "n", {}, {})

    async def generate(
        self, version: Version, prompts: Any, params: SamplingParams, seeds: Sequence[int], rid: str, *_: object
    ) -> tuple[Sample, ...]:
        """The script's answers, in place of an engine book."""
        ref = PromptRef.parse("/".join(rid.split("/")[1:4]))
        tries = int(rid.split("/")[4])
        made = []
        for index in range(len(prompts)):
            asked = Asked(self.stream.prompt(ref), index, params.temperature == 0, tries)
            self.asked.append(asked)
            made.append(sample_of(self.script(asked), version, params.max_new_tokens))
        return tuple(made)

    def kept(self) -> Mapping[PromptRef, int]:
        """What the peer holds."""
        return {ref: len(offered.response_tokens) for ref, offered in self.buffer.offers.items()}

    def ended(self) -> Mapping[PromptRef, Outcome]:
        """What the peer ended."""
        return {ref: Outcome(one.kind, one.reason) for ref, one in self.buffer.outcomes.items()}
