"""What a rank has of a streamed step while its parts come: everything but the update, which waits for the last of them.

Gradients add up under a divisor that is only a guess, the same on every rank: the first part's own. The true one is known when
the batch is closed, and gradients and loss are multiplied by the one over the other once, before they are clipped. Guessed or
not makes no difference to float32 or bfloat16, which keep their precision at any size; it only must not overflow.

It is dropped with its process: a part that a rank has begun is READY, and then there is only the step's end or another world.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from gcore.train.counted import Count
from gcore.train.cut_step import Place, Step
from gcore.train.feed_state import Work
from gcore.train.loss import Losses
from gcore.train.report import PhaseTimer
from gcore.train.tally import Tally


@dataclass
class Streamed:
    """The parts of one step so far."""

    timer: PhaseTimer
    tally: Tally
    tokens: int = 0
    sequences: int = 0
    provisional: float = 0.0
    """What losses are divided by; 0: nothing was trained yet."""
    flushed: bool = False
    """Whether the gradients of the last part are with the optimizer."""
    steps: list[Step] = field(default_factory=list)
    """Kept only where the step's samples are shown to people, like `advantages`."""
    advantages: dict[Place, Tensor] = field(default_factory=dict)

    def add(self, count: Count, losses: Losses) -> None:
        """What one more part trains, over all ranks."""
        self.tokens += count.tokens
        self.sequences += count.sequences
        if not self.provisional and count.tokens:
            self.provisional = losses.denominator(tokens=count.tokens, sequences=count.sequences)

    def keep(self, step: Step, advantages: dict[Place, Tensor]) -> None:
        """A part, for people."""
        number = len(self.steps)
        self.steps.append(step)
        self.advantages |= {Place(number, place.micro_batch): value for place, value in advantages.items()}

    def whole(self, work: Work) -> Step:
        """All parts that were kept, as one step."""
        plans = tuple(plan for step in self.steps for plan in step.plans)
        batches = tuple(batch for step in self.steps for batch in step.batches)
        groups = {digest: group for step in self.steps for digest, group in step.work.groups.items()}
        return Step(replace(work, groups=groups, begun=0), plans, batches)

    def factor(self, losses: Losses, padding_scale: float) -> float:
        """What gradients and loss are to be multiplied by."""
        return self.provisional / (losses.denominator(tokens=self.tokens, sequences=self.sequences) * padding_scale)
