"""What is measured of a job's steps, for whoever plans its placement. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placement.split import Split


def load_of(running: float) -> int:
    """What is told apart of an engine's load: 0 is 1 request at a time, 1 is 2 and 3, 2 is 4 to 7 and so on."""
    return max(int(running), 1).bit_length() - 1


def least_of(load: int) -> int:
    """Requests that make it that load, at least."""
    return 1 << load


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Of a pool's engines: requests that one ran at a time, and seconds that a token of each took then."""

    pool: str
    running: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One step. Times are None where nobody measured them. `lengths`, `judged`: tokens of each response and of its judgement, those of
    filtered groups too.

    `produce_s`: what a batch takes to be made; `train_s`: of the ranks; `other_s`: what holds the ranks up and is neither. `busy`:
    slot-seconds, by pool. `speed`: of a pool at as many loads as were seen. `step_s`: from commit to commit, where the next batch is made
    meanwhile, so that it is no sum of the others; no batch takes longer to be made. `asked_per_response`: requests to the judges' engines.
    """

    step: int
    split: Split
    lengths: tuple[float, ...]
    judged: tuple[float, ...]
    train_tokens: float
    produce_s: float | None
    train_s: float | None
    other_s: float | None
    speed: tuple[EngineSpeed, ...]
    busy: Mapping[str, float]
    step_s: float | None = None
    asked_per_response: float = 1.0

    @property
    def seconds(self) -> float | None:
        """From commit to commit; None where that was not measured."""
        if self.step_s is not None:
            return self.step_s
        if self.produce_s is None or self.train_s is None or self.other_s is None:
            return None
        return self.produce_s + self.train_s + self.other_s
