"""Trains one sealed step on one rank: from rewards and tokens to new weights and a report.

A sealed step has a seal: the record that fixes which groups (all samples of one prompt) it trains on and which rank
holds them. All ranks finish a phase before the next, because advantages need complete groups. The phases, in order:

1. all ranks compare the seal and their update counts, and continue only if these are equal;
2. log-probabilities of the reference (the job's initial model), if the KL to it has a weight;
3. old log-probabilities, if π_old is recomputed: before the first update, in the same micro-batches. The first
   mini-batch is skipped if only its own first update needs them, because that update computes the same numbers;
4. the critic's values, if the job has a critic;
5. KL in the reward, then advantages, from the rewards of the whole step, in float64, the same on every rank;
6. epochs × mini-batches of updates of the critic and the policy. Each loss is divided by the update's count of tokens
   or sequences over all ranks. In the critic's warm-up steps the policy is not updated. A streamed step arrives in
   parts: phases 2 to 5 and the gradients run for each part as it arrives, and one update follows the last part;
7. the weights are staged for the engines, and this rank writes its receipt (what it trained, for the audit). If a
   checkpoint is due, the rank takes a snapshot, which is written during the following steps. Each rank copies its state
   into the memory of its node and of another node. Then it returns the report, which is the same on every rank.

An exception leaves the step half applied and the process unusable; the caller ends it. This module does not use gRPC.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gcore.config.spec import SamplesSpec
from gcore.config.train import learning_rate
from gcore.ledger.balance import SampleSlot
from gcore.ledger.records.chain import Seal
from gcore.models.publisher import Publisher
from gcore.observability.samples import KeptAdvantage, advantages_name, choose_groups, write_samples
from gcore.system.clock import Clock
from gcore.system.fault_injection import FaultPoint, fault_point
from gcore.train.advantages import RankReductions, advantages
from gcore.train.algorithms.losses import kl_estimate
from gcore.train.backends.distributed import Collective, SampleReductions
from gcore.train.batching import (
    BatchIndex,
    MicroBatch,
    OutputsOf,
    PrecomputedPasses,
    Scores,
    StepTensors,
)
from gcore.train.checkpoint.replicas import StateReplicator
from gcore.train.checkpoint.run_files import CHECKPOINT, ReceiptWriter
from gcore.train.checkpoint.writer import CheckpointWriter, UpdateCounts
from gcore.train.critic import CriticStep, CriticTrainer
from gcore.train.hf_models import REMEDIES, STATE_REMEDIES, explain_memory_error
from gcore.train.metrics import TrainStepMetrics
from gcore.train.models import RankModels
from gcore.train.objectives import Count, OtherScores, PolicyObjective, Targets, find_plugin_advantage, policy_objective
from gcore.train.offload import MemoryOffloader
from gcore.train.rank.feed import StepInput, StepPartInput, remaining_parts
from gcore.train.rank.launch import PhaseStopwatch, RankLaunch, StepResult
from gcore.types import Version


@dataclass(frozen=True, slots=True, eq=False)
class TrainedMask:
    """The tokens that the updates of a step train, without tokens that the off-policy correction masks.

    `masks`: [b, w] bool by micro-batch of this rank. `counts`: trained tokens and sequences by mini-batch, over all
    ranks.
    """

    masks: Mapping[BatchIndex, Tensor]
    counts: tuple[Count, ...]


def trained_mask(
    step: StepTensors, objective: PolicyObjective, old: Mapping[BatchIndex, Tensor], over_ranks: RankReductions
) -> TrainedMask:
    """Determine which tokens each update trains, and count them over all ranks.

    `old`: old log-probabilities [b, w] by micro-batch; used only if the objective masks tokens (correction `mis`), and
    then this is a collective. The seal gives the tokens of unmasked responses; the tokens that the correction masks
    depend on `old`, so the ranks sum up how many they lose. Advantages and whitening use all tokens of the responses,
    also those that the correction masks.
    """
    counts = [Count(plan.tokens, plan.sequences) for plan in step.plans]
    if "all_old_logprobs" not in objective.needs:
        return TrainedMask({place: objective.trained(step.at(place), None) for place in step.places()}, tuple(counts))
    masks = {place: objective.trained(step.at(place), old[place]) for place in step.places()}
    lost = [[0.0, 0.0] for _ in counts]
    for place, mask in masks.items():
        before = step.at(place).mask
        lost[place.mini_batch][0] += int(before.sum() - mask.sum())
        lost[place.mini_batch][1] += int((before.any(dim=1) & ~mask.any(dim=1)).sum())
    everywhere = iter(over_ranks.sum([number for pair in lost for number in pair]))
    left = [Count(c.tokens - int(next(everywhere)), c.sequences - int(next(everywhere))) for c in counts]
    return TrainedMask(masks, tuple(left))


@dataclass
class PartialStep:
    """A rank's state of a streamed step while its parts arrive: timing, metrics and counts. The update follows the last
    part.

    Gradients accumulate with a provisional divisor, the same on every rank: the first part's own. The true divisor is
    known when the last part has arrived; then gradients and loss are multiplied once by the quotient, before clipping.
    The divisor does not affect precision in float32 or bfloat16, as long as nothing overflows.

    The state is lost if the process ends. That is safe: a part that a rank has begun is READY (every rank has its
    samples), so either this world finishes the step or a new world trains it from the start.
    """

    timer: PhaseStopwatch
    tally: TrainStepMetrics
    tokens: int = 0
    sequences: int = 0
    provisional: float = 0.0
    """Divisor of the losses so far; 0 while no part had a trained token."""
    flushed: bool = False
    """Whether the last part was back-propagated with `last`, so that DeepSpeed has passed all gradients to its
    optimizer.
    """
    steps: list[StepTensors] = field(default_factory=list)
    """The parts so far, kept together with `advantages` only if the step's samples are stored for `gcore samples`."""
    advantages: dict[BatchIndex, Tensor] = field(default_factory=dict)

    def add(self, count: Count, objective: PolicyObjective) -> None:
        """Add one more part's counts of trained tokens and sequences over all ranks; the first with tokens sets the
        divisor.
        """
        self.tokens += count.tokens
        self.sequences += count.sequences
        if not self.provisional and count.tokens:
            self.provisional = objective.denominator(count)

    def keep(self, step: StepTensors, advantages: dict[BatchIndex, Tensor]) -> None:
        """Keep a part's tensors and advantages, to be written for `gcore samples` after the last part."""
        number = len(self.steps)
        self.steps.append(step)
        self.advantages |= {BatchIndex(number, place.micro_batch): value for place, value in advantages.items()}

    def whole(self, work: StepInput) -> StepTensors:
        """All kept parts as one step; part number n becomes mini-batch n."""
        plans = tuple(plan for step in self.steps for plan in step.plans)
        batches = tuple(batch for step in self.steps for batch in step.batches)
        groups = {digest: group for step in self.steps for digest, group in step.work.groups.items()}
        return StepTensors(replace(work, groups=groups, begun=0), plans, batches)

    def factor(self, objective: PolicyObjective, padding_scale: float) -> float:
        """The factor by which gradients and loss must be multiplied to replace the provisional divisor by the true
        one.
        """
        return self.provisional / (objective.denominator(Count(self.tokens, self.sequences)) * padding_scale)


log = logging.getLogger(__name__)


def show_advantages(
    run_dir: Path, spec: SamplesSpec, step: StepTensors, advantages: Mapping[BatchIndex, Tensor]
) -> None:
    """Write the advantages of this rank's samples in the groups that are stored for `gcore samples`.

    `advantages`: [b, 1] or [b, w] by micro-batch. Does nothing in steps whose samples are not stored. A write error is
    logged and the step continues. The values are those that the updates use, written before the updates.
    """
    token = step.work.seal.token
    if not spec.due(token.step):
        return
    wanted = {group.digest for group in choose_groups(step.work.seal, spec.groups)}
    found = list(_advantages(step, advantages, wanted))
    try:
        write_samples(run_dir, Version(token.lineage, token.step), advantages_name(step.work.rank), found)
    except OSError as error:
        log.warning("cannot write the advantages of step %d: %s", token.step, error)


def _advantages(
    step: StepTensors, advantages: Mapping[BatchIndex, Tensor], wanted: set[str]
) -> Iterator[KeptAdvantage]:
    seen: set[SampleSlot] = set()  # a picture whose steps are in several micro-batches has one advantage
    for place in step.places():
        batch, values = step.at(place), advantages[place].detach()
        for row, slot in enumerate(batch.slots):
            digest = step.work.seal.groups[slot.group].digest
            scored = batch.scored[row]
            if digest not in wanted or slot in seen or not bool(scored.any()):
                continue
            seen.add(slot)
            own = values[row].expand(scored.shape)[scored].double()
            least, most = float(own.min()), float(own.max())
            mean = float(own.mean())
            if least == most:
                yield KeptAdvantage(digest=digest, sample=slot.sample, mean=least)
            else:
                yield KeptAdvantage(digest=digest, sample=slot.sample, mean=mean, least=least, most=most)


Tell = Callable[[str], None]
"""Called with the name of the current phase whenever the rank has made progress; feeds the watchdog."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One micro-batch's share of an update.

    `mask` [b, w] bool: its trained tokens. `divisor`: of the loss. `last`: the update follows this micro-batch.
    `untouched`: the policy still has its weights from the start of the step.
    """

    mask: Tensor
    divisor: float
    last: bool
    untouched: bool


class StepTrainer:
    """Trains the steps of one rank, one after another. Everything runs in the thread that calls `run`."""

    def __init__(
        self,
        launch: RankLaunch,
        collective: Collective,
        models: RankModels,
        saver: CheckpointWriter,
        publisher: Publisher,
        clock: Clock,
        progress: UpdateCounts,
        copier: StateReplicator | None = None,
        start_s: float = 0.0,
    ) -> None:
        """`progress`: update counts of the state that was loaded. `copier`: makes in-memory replicas; None: none are
        made. `start_s`: how long this rank took to start, in seconds, reported with each step as the cost of replacing
        a world.
        """
        self._launch = launch
        self._train = launch.spec.train
        self._collective = collective
        self._over_samples = SampleReductions(collective, models.policy.feeding.group)
        self._policy = models.policy
        self._reference = models.reference
        self._follower = models.follower
        self._saver = saver
        self._publisher = publisher
        self._offloader = MemoryOffloader(models, launch.spec.train, collective.device, clock)
        self._copier = copier
        self._start_s = start_s
        self._clock = clock
        self._objective = models.objective or policy_objective(launch.spec)
        self._estimator = find_plugin_advantage(launch.spec.train)
        critic = models.critic
        self._critique = None if critic is None else CriticTrainer(critic, launch)
        self._receipts = ReceiptWriter(launch.run_path, launch.world, launch.rank, saver.writer.folder)
        self.progress = progress
        self._streamed: PartialStep | None = None

    @property
    def released(self) -> frozenset[str]:
        """The released parts of the rank's memory: `optimizer`, `weights`, or both. Thread-safe."""
        return self._offloader.released

    def rest(self, what: Collection[str], tell: Tell) -> None:
        """Release the memory parts in `what` and restore all others. Raises like `MemoryOffloader.rest`."""
        self._offloader.rest(what, tell)

    def leave(self) -> None:
        """Leave the process group."""
        self._collective.leave()

    def accumulate(self, part: StepPartInput, tell: Tell) -> None:
        """Restore the rank's memory, and add the gradients of one READY part of the next step, without an update.
        Raises like `run`.
        """
        self.rest((), tell)
        if self._streamed is None:
            self._streamed = PartialStep(PhaseStopwatch(self._clock), TrainStepMetrics())
        self._learn_part(part, self._streamed, tell, last=False)

    def run(self, work: StepInput, tell: Tell) -> StepResult:
        """Restore the rank's memory, train a step, stage its weights, and write receipt, checkpoint and replicas.

        Raises WorldDiverged, WriteRefused, and any torch exception.
        """
        self.rest((), tell)
        fault_point(FaultPoint.STEP, "before")
        if not work.seal.parts:
            self._agree(work)
        if self._copier is not None:
            self._copier.begin(work.seal.step)
        streamed, self._streamed = self._streamed or PartialStep(PhaseStopwatch(self._clock), TrainStepMetrics()), None
        timer, tally = streamed.timer, streamed.tally
        critic = None
        if work.seal.parts:
            self._learn_rest(work, streamed, tell)
        elif work.seal.groups:  # the last step of a job may be empty and only write a checkpoint
            critic = self._learn(work, timer, tally, tell)
        if self._follower is not None and work.seal.groups:
            with timer.phase("update"):
                self._follower.follow(work.seal.step - 1, partial(tell, "update"))
        fault_point(FaultPoint.STEP, "after")
        metrics = tally.metrics(self._over_samples) | (critic.metrics(self._over_samples) if critic is not None else {})
        with timer.phase("saving"):
            tell("saving")
            version = Version(self._launch.lineage, work.seal.step)
            fault_point(FaultPoint.STAGE, "before")
            weights = self._publisher.stage(version, partial(tell, "saving"))
            fault_point(FaultPoint.STAGE, "after")
            fault_point(FaultPoint.RECEIPT, "before")
            self._write_receipt(work, metrics.get("loss"), partial(tell, "saving"))
            fault_point(FaultPoint.RECEIPT, "after")
        self._checkpoint(work.seal, version, timer, tell)
        if self._copier is not None and self._copier.wanted:
            with timer.phase("copies"):
                size = self._copier.keep(work.seal.step, work.seal.attempt, self.progress, partial(tell, "copying"))
            metrics |= {"copied_bytes": self._collective.sum([float(size)])[0]}
        timer.seconds["start"] = self._start_s
        seconds = self._collective.max(list(timer.seconds.values()))  # also waits until rank 0 has saved
        metrics |= {f"{name}_seconds": value for name, value in zip(timer.seconds, seconds, strict=True)}
        return StepResult({**metrics, **self._offloader.costs(self._collective)}, weights)

    def _learn(self, work: StepInput, timer: PhaseStopwatch, tally: TrainStepMetrics, tell: Tell) -> CriticStep | None:
        """Train a step that is not streamed, from tensors to the last update. Returns the critic's part of the step, if
        any.
        """
        with timer.phase("cut"):
            step = self._policy.feeding.cut(work, self._train)
        known, critic = self._know(step, timer, tally, tell)
        show_advantages(self._launch.run_path, self._launch.spec.samples, step, known.advantages)
        kept = trained_mask(step, self._objective, known.old_logp, self._over_samples)
        with timer.phase("update"):
            self._updates(step, known, kept, critic, tally, tell)
        return critic

    def _learn_part(self, part: StepPartInput, streamed: PartialStep, tell: Tell, *, last: bool) -> None:
        """Add the gradients of one part of a streamed step. `last`: it is the step's last part."""
        self._agree(part.work)
        timer, tally = streamed.timer, streamed.tally
        with timer.phase("cut"):
            step = self._policy.feeding.cut(part.work, self._train)
        known, _ = self._know(step, timer, tally, tell)
        kept = trained_mask(step, self._objective, known.old_logp, self._over_samples)
        streamed.add(kept.counts[0], self._objective)
        if self._launch.spec.samples.due(part.work.seal.step):
            streamed.keep(step, known.advantages)
        if kept.counts[0].tokens:
            with timer.phase("update"):
                self._gradients(step, 0, known, kept, tally, tell, divisor=streamed.provisional, last=last)
            streamed.flushed = last

    def _learn_rest(self, work: StepInput, streamed: PartialStep, tell: Tell) -> None:
        """Train the parts that are not begun yet, then apply one update for all parts.

        Ranks may have begun different numbers of parts: they agree on each part, and on the whole step after the last.
        """
        parts = len(work.seal.parts)
        for part in remaining_parts(work):
            if work.seal.parts[part.number]:
                self._learn_part(part, streamed, tell, last=part.number + 1 == parts)
        self._agree(work)
        if streamed.steps:
            show_advantages(self._launch.run_path, self._launch.spec.samples, streamed.whole(work), streamed.advantages)
        if not streamed.tokens:
            return
        with streamed.timer.phase("update"):
            tell("update")
            if not streamed.flushed:
                self._policy.flush()
            factor = streamed.factor(self._objective, work.seal.padding_scale)
            self._policy.scale_gradients(factor)
            streamed.tally.rescaled(factor)
            self._update(work.seal, streamed.tally)

    def _know(
        self, step: StepTensors, timer: PhaseStopwatch, tally: TrainStepMetrics, tell: Tell
    ) -> tuple[PrecomputedPasses, CriticStep | None]:
        """Compute everything that the updates need: reference and old log-probabilities, critic values, and
        advantages.
        """
        with timer.phase("reference"):
            reference = self._reference_pass(step, tell)
        with timer.phase("old_logprobs"):
            old = self._old_pass(step, tally, tell)
        penalties, critic = self._penalties(step, old, reference, tally), None
        if self._critique is not None:
            with timer.phase("values"):
                critic = self._critique.begin(step, penalties, self._over_samples, tell)
        targets = None if critic is None else critic.targets
        found = advantages(step, self._train, penalties, self._over_samples, targets, self._estimator)
        return PrecomputedPasses(found, old, reference), critic

    def _agree(self, work: StepInput) -> None:
        seal = int.from_bytes(hashlib.sha256(work.seal.encode()).digest()[:7], "big")
        self._collective.agree(
            "the step to apply (lineage, step, attempt, seal, updates and skipped updates of policy and critic)",
            (*work.seal.token, seal, *dataclasses.astuple(self.progress)),
        )

    @torch.no_grad()
    def _reference_pass(self, step: StepTensors, tell: Tell) -> dict[BatchIndex, Scores]:
        if "reference" not in self._objective.needs:
            return {}
        assert self._reference is not None
        with self._reference.awake() as outputs_of:
            return self._score(outputs_of, step, step.places(), "reference", tell)

    @torch.no_grad()
    def _old_pass(self, step: StepTensors, tally: TrainStepMetrics, tell: Tell) -> dict[BatchIndex, Scores]:
        """The policy's log-probabilities before the first update, only for the mini-batches that need a pass of their
        own.
        """
        train = self._train
        needs = self._objective.needs
        # In warm-up no policy update computes the old log-probabilities of the first mini-batch.
        warming = self._warms_up(step)
        everywhere = warming or "all_old_logprobs" in needs or (train.rewards_kl and train.old_logprobs != "engine")
        if "old_logprobs" not in needs or (not everywhere and train.old_logprobs != "recompute"):
            return {}
        places = [place for place in step.places() if everywhere or place.mini_batch > 0]
        found = self._score(self._policy.outputs_of, step, places, "old_logprobs", tell)
        for place, scores in found.items():
            tally.mismatch(scores.logp, step.at(place))
        return found

    def _score(
        self, outputs_of: OutputsOf, step: StepTensors, places: Iterable[BatchIndex], phase: str, tell: Tell
    ) -> dict[BatchIndex, Scores]:
        found = {}
        for place in places:
            tell(phase)
            found[place] = self._scored(outputs_of, step.at(place), phase).kept()
        return found

    def _scored(self, outputs_of: OutputsOf, batch: MicroBatch, phase: str, *, entropic: bool = False) -> Scores:
        with explain_memory_error(f"{phase}: {batch.size}", self._train, REMEDIES):
            return self._policy.feeding.score(outputs_of, batch, entropic=entropic)

    def _penalties(
        self,
        step: StepTensors,
        old: dict[BatchIndex, Scores],
        reference: dict[BatchIndex, Scores],
        tally: TrainStepMetrics,
    ) -> dict[BatchIndex, Tensor]:
        """Amounts by which the KL to the reference reduces each token's reward, [b, w] float64; empty without KL in the
        reward.

        Also counts this rank's samples and micro-batches in `tally`.
        """
        for slot in step.work.layout.of_rank(step.work.rank):
            tally.sample(step.reward(slot), step.work.seal.groups[slot.group], slot.sample)
        penalties = {}
        for place in step.places():
            batch = step.at(place)
            tally.fed(batch)
            if reference and self._train.rewards_kl:
                policy = batch.rollout_logp if self._train.old_logprobs == "engine" else old[place].logp
                kl = kl_estimate(policy, reference[place].logp, self._train.kl_kind, most=self._train.kl_max)
                kl = torch.where(batch.scored, kl, 0.0)
                penalties[place] = self._train.kl_coef * kl.double()
        return penalties

    def _warms_up(self, step: StepTensors) -> bool:
        return self._critique is not None and self._critique.warms_up(step.work.seal.step)

    def _updates(
        self,
        step: StepTensors,
        known: PrecomputedPasses,
        kept: TrainedMask,
        critic: CriticStep | None,
        tally: TrainStepMetrics,
        tell: Tell,
    ) -> None:
        warming = self._warms_up(step)
        for epoch in range(self._train.epochs):
            for number in range(len(step.plans)):
                if critic is not None:
                    self._update_critic(critic, number, tell)
                count = kept.counts[number]
                if warming or not count.tokens:
                    continue  # only empty or masked responses: nothing to train, and every rank sees the same counts
                divisor = self._objective.denominator(count)
                # Groups missing from the quota count as masked groups, if the job pads its steps.
                divisor *= step.work.seal.padding_scale
                untouched = epoch == 0 and number == 0  # the policy has its weights from the start of the step
                self._gradients(step, number, known, kept, tally, tell, divisor=divisor, untouched=untouched)
                self._update(step.work.seal, tally)

    def _gradients(
        self,
        step: StepTensors,
        number: int,
        known: PrecomputedPasses,
        kept: TrainedMask,
        tally: TrainStepMetrics,
        tell: Tell,
        *,
        divisor: float,
        last: bool = True,
        untouched: bool = True,
    ) -> None:
        """Compute the gradients of mini-batch `number`. `last`: an update follows. `untouched`: the policy has made
        none yet.
        """
        count = len(step.plans[number].micro_batches)
        for k in range(count):
            tell("update")
            place = BatchIndex(number, k)
            part = _Part(kept.masks[place], divisor, last and k + 1 == count, untouched)
            self._backward(step.at(place), place, known, tally, part)

    def _update_critic(self, critic: CriticStep, number: int, tell: Tell) -> None:
        now = self.progress
        result = critic.update(number, now.critic_updates, tell)
        if result is not None:
            more, skipped = now.critic_updates + 1, now.critic_skipped + (not result.applied)
            self.progress = dataclasses.replace(now, critic_updates=more, critic_skipped=skipped)

    def _backward(
        self, batch: MicroBatch, place: BatchIndex, known: PrecomputedPasses, tally: TrainStepMetrics, part: _Part
    ) -> None:
        scores = self._scored(
            self._policy.outputs_of, batch, "update", entropic="entropy_gradient" in self._objective.needs
        )
        own = scores.kept()
        compares = "old_logprobs" in self._objective.needs
        if part.untouched and place not in known.old and compares:
            tally.mismatch(own.logp, batch)
        before = own
        if compares and self._train.old_logprobs == "recompute":
            before = known.old.setdefault(place, own)
        old = batch.rollout_logp if compares and self._train.old_logprobs == "engine" else before.logp
        reference = known.reference.get(place)
        others = OtherScores(before, reference, self._served_scores(batch))
        compared = None if reference is None else reference.logp
        targets = Targets(batch, known.advantages[place], old, compared, part.mask, others)
        loss = self._objective.loss(scores, targets) / part.divisor
        with explain_memory_error(f"update: {batch.size}", self._train, REMEDIES):
            self._policy.backward(loss, last=part.last)
        tally.trained(float(loss.detach()), self._objective.metrics(scores, targets))

    @torch.no_grad()
    def _served_scores(self, batch: MicroBatch) -> Scores | None:
        """The scores of the network that engines serve, if the objective compares with it."""
        if "served" not in self._objective.needs:
            return None
        assert self._follower is not None
        return self._scored(self._follower.outputs_of, batch, "served").kept()

    def _update(self, seal: Seal, tally: TrainStepMetrics) -> None:
        rate = learning_rate(
            self.progress.updates,
            peak=self._train.learning_rate,
            warmup_updates=self._train.warmup_updates,
            schedule=self._train.schedule,
            total_updates=self._launch.total_updates(seal.planned_steps),
        )
        with explain_memory_error("update: the optimizer", self._train, STATE_REMEDIES):
            result = self._policy.update(rate)
        now = self.progress
        self.progress = dataclasses.replace(now, updates=now.updates + 1, skipped=now.skipped + (not result.applied))
        tally.updated(result, rate)

    def _write_receipt(self, work: StepInput, loss: float | None, tell: Callable[[], None]) -> None:
        """Write this rank's receipt, with retries until all ranks have written theirs. A collective."""
        left = [work]

        def write() -> None:
            if left:
                self._receipts.write(left[0], loss)
                left.clear()

        what, where = f"the receipt of step {work.seal.step}", self._receipts.file.parent
        self._saver.insisting.until_taken(what, where, write, self._collective.max, tell)

    def _checkpoint(self, seal: Seal, version: Version, timer: PhaseStopwatch, tell: Tell) -> None:
        """If a checkpoint is due, wait until the previous one is written, take a snapshot, and start writing it."""
        spec = self._launch.spec
        last = seal.last or seal.step == spec.flow.steps
        if not spec.checkpoints_after(seal.step, last=last, asked=seal.checkpoint):
            return
        with timer.phase("checkpoint_wait"):
            tell(CHECKPOINT)
            self._saver.drain(self._collective.max, partial(tell, CHECKPOINT))
        with timer.phase("checkpoint"), explain_memory_error("copying the state for a checkpoint", self._train, ()):
            self._saver.checkpoint(version, self.progress, partial(tell, CHECKPOINT), insist=last)
