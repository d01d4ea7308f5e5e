"""One sealed step on one rank: from rewards and tokens to new weights and a report.

In this order (each phase on all ranks before the next, because advantages need all of a group):

1. all ranks show what they are about to apply, and go on only if it is the same;
2. log-probabilities of the reference (the job's model as it was), where the KL to it has a weight;
3. old log-probabilities, where π_old is recomputed: before the first update, in the same micro-batches. The first
   mini-batch is left out where nothing else needs it: its first update computes the very same numbers;
4. the KL inside the reward, then advantages, from the outcomes of the whole step, in float64, the same on every rank;
5. epochs × mini-batches of updates, each divided by its own global count;
6. weights for engines, a checkpoint if one is due, this rank's receipt; then the report, the same on every rank.

An exception anywhere leaves the step half applied and the process unusable; the caller ends it. Does not know gRPC.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gcore.clock import Clock
from gcore.train.advantages import advantages
from gcore.train.algorithms.kl import kl_estimate
from gcore.train.algorithms.schedule import learning_rate
from gcore.train.batch import LogitsOf, MicroBatch, Scores, score
from gcore.train.collective import Collective
from gcore.train.cut_step import Known, Place, Step, cut_step
from gcore.train.feed_state import Work
from gcore.train.launch import RankLaunch
from gcore.train.loss import Losses, Targets
from gcore.train.memory import explained
from gcore.train.models import Models
from gcore.train.receipts import ReceiptBook
from gcore.train.report import PhaseTimer, StepResult
from gcore.train.saving import Progress, Saved, Saver
from gcore.train.shown import show_advantages
from gcore.train.tally import Tally
from gcore.types import Version

Tell = Callable[[str], None]
"""Told the phase whenever there is progress."""
DIGEST_BYTES = 32
REMEDIES = ("micro_batch_tokens", "activation_checkpointing", "zero_stage", "offload_reference")
"""What helps against too little memory in a micro-batch, in this order."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A micro-batch's part of its update. `untouched`: no update of the step was made yet."""

    divisor: float
    last: bool
    untouched: bool


@dataclass(frozen=True, slots=True)
class _Written:
    weights_file: str
    checkpoint: Saved


class StepTrainer:
    """Applies steps, one after the other. Everything runs in the thread that calls `run`."""

    def __init__(
        self,
        launch: RankLaunch,
        collective: Collective,
        models: Models,
        saver: Saver,
        clock: Clock,
        progress: Progress,
    ) -> None:
        self._launch = launch
        self._train = launch.spec.train
        self._collective = collective
        self._policy = models.policy
        self._reference = models.reference
        self._saver = saver
        self._clock = clock
        self._losses = Losses.of(launch.spec)
        self._receipts = ReceiptBook(launch.run_path, launch.world, launch.rank)
        self.progress = progress

    def run(self, work: Work, tell: Tell) -> StepResult:
        """Train on a step. Raises WorldDiverged, DiskFull, and whatever torch raises."""
        self._agree(work)
        timer, tally = PhaseTimer(self._clock), Tally()
        with timer.phase("cut"):
            step = cut_step(work, self._train, self._policy.feeding)
        with timer.phase("reference"):
            reference = self._reference_pass(step, tell)
        with timer.phase("old_logprobs"):
            old = self._old_pass(step, tally, tell)
        known = Known(self._advantages(step, old, reference, tally), old, reference)
        show_advantages(self._launch.run_path, self._launch.spec.samples, step, known.advantages)
        with timer.phase("update"):
            self._updates(step, known, tally, tell)
        metrics = tally.metrics(self._collective)
        with timer.phase("saving"):
            tell("saving")
            saved = self._save(work.seal.token.step, tell)
            self._receipts.write(work, metrics.get("loss"))
        digest = self._shared_digest(saved.checkpoint.sha256)
        seconds = self._collective.max(list(timer.seconds.values()))  # also waits for rank 0 to have saved
        metrics |= {f"{name}_seconds": value for name, value in zip(timer.seconds, seconds, strict=True)}
        return StepResult(metrics, saved.weights_file, saved.checkpoint.file, digest)

    def _agree(self, work: Work) -> None:
        seal = int.from_bytes(hashlib.sha256(work.seal.encode()).digest()[:7], "big")
        self._collective.agree(
            "what they apply (lineage, step, attempt, seal, updates, skipped)",
            (*work.seal.token, seal, self.progress.updates, self.progress.skipped),
        )

    @torch.no_grad()
    def _reference_pass(self, step: Step, tell: Tell) -> dict[Place, Tensor]:
        if self._reference is None:
            return {}
        with self._reference.awake() as logits_of:
            return self._score(logits_of, step, step.places(), "reference", tell)

    @torch.no_grad()
    def _old_pass(self, step: Step, tally: Tally, tell: Tell) -> dict[Place, Tensor]:
        """The policy's log-probabilities before the first update, where they must be known by then."""
        train = self._train
        everywhere = train.kl_coef > 0 and train.kl_in == "reward" and train.old_logprobs != "engine"
        if not everywhere and train.old_logprobs != "recompute":
            return {}
        places = [place for place in step.places() if everywhere or place.mini_batch > 0]
        found = self._score(self._policy.logits_of, step, places, "old_logprobs", tell)
        for place, logp in found.items():
            tally.mismatch(logp, step.at(place))
        return found

    def _score(
        self, logits_of: LogitsOf, step: Step, places: Iterable[Place], phase: str, tell: Tell
    ) -> dict[Place, Tensor]:
        found = {}
        for place in places:
            tell(phase)
            found[place] = self._scored(logits_of, step.at(place), phase).logp
        return found

    def _scored(self, logits_of: LogitsOf, batch: MicroBatch, phase: str, *, entropic: bool = False) -> Scores:
        with explained(f"{phase}: {_size(batch)}", self._train, REMEDIES):
            return score(logits_of, batch, entropic=entropic)

    def _advantages(
        self, step: Step, old: dict[Place, Tensor], reference: dict[Place, Tensor], tally: Tally
    ) -> dict[Place, Tensor]:
        for slot in step.work.layout.of_rank(step.work.rank):
            tally.sample(step.reward(slot), step.work.seal.groups[slot.group], slot.sample)
        penalties = {}
        for place in step.places():
            batch = step.at(place)
            tally.fed(batch)
            if reference and self._train.kl_in == "reward":
                policy = batch.rollout_logp if self._train.old_logprobs == "engine" else old[place]
                k1 = torch.where(batch.scored, kl_estimate(policy, reference[place], "k1"), 0.0)
                penalties[place] = self._train.kl_coef * k1.double()
        return advantages(step, self._train, penalties, self._collective)

    def _updates(self, step: Step, known: Known, tally: Tally, tell: Tell) -> None:
        for epoch in range(self._train.epochs):
            for number, plan in enumerate(step.plans):
                if not plan.tokens:
                    continue  # only empty or masked responses: nothing to learn, and every rank sees that in the seal
                divisor = self._losses.denominator(plan)
                for k in range(len(plan.micro_batches)):
                    tell("update")
                    place = Place(number, k)
                    untouched = epoch == 0 and number == 0  # the policy is still the one the step began with
                    self._backward(
                        step.at(place), place, known, tally, _Part(divisor, k + 1 == len(plan.micro_batches), untouched)
                    )
                self._update(tally)

    def _backward(self, batch: MicroBatch, place: Place, known: Known, tally: Tally, part: _Part) -> None:
        scores = self._scored(self._policy.logits_of, batch, "update", entropic=self._losses.entropic)
        own = scores.logp.detach()
        if part.untouched and place not in known.old:
            tally.mismatch(own, batch)
        match self._train.old_logprobs:
            case "recompute":
                old = known.old.setdefault(place, own)
            case "current":
                old = own
            case "engine":
                old = batch.rollout_logp
        targets = Targets(batch, known.advantages[place], old, known.reference.get(place))
        loss = self._losses.sum(scores, targets) / part.divisor
        with explained(f"update: {_size(batch)}", self._train, REMEDIES):
            self._policy.backward(loss, last=part.last)
        tally.trained(float(loss.detach()), scores, targets, self._losses)

    def _update(self, tally: Tally) -> None:
        rate = learning_rate(
            self.progress.updates,
            peak=self._train.learning_rate,
            warmup_updates=self._train.warmup_updates,
            schedule=self._train.schedule,
            total_updates=self._launch.total_updates,
        )
        with explained("update: the optimizer", self._train, ("zero_stage", "offload_reference")):
            result = self._policy.update(rate)
        self.progress = Progress(self.progress.updates + 1, self.progress.skipped + (not result.applied))
        tally.updated(result, rate)

    def _save(self, step: int, tell: Tell) -> _Written:
        version = Version(self._launch.lineage, step)

        def saving() -> None:
            tell("saving")

        weights = self._saver.stage(version, saving)
        if step not in self._launch.spec.checkpoint_due:
            return _Written(weights, Saved("", ""))
        return _Written(weights, self._saver.checkpoint(version, self.progress, saving))

    def _shared_digest(self, sha256: str) -> str:
        """The digest that rank 0 knows, on every rank; empty if it knows none."""
        mine = bytes.fromhex(sha256)
        brought = self._collective.sum([float(byte) for byte in mine] or [0.0] * DIGEST_BYTES)
        return bytes(int(value) for value in brought).hex() if any(brought) else ""


def _size(batch: MicroBatch) -> str:
    """Of a micro-batch, for people."""
    longest = max(one.length for one in batch.inputs.rectangles)
    return f"a micro-batch of {len(batch.slots)} samples, {batch.computed} tokens, the longest {longest}"
