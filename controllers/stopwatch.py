"""Where a step's time went, as this controller saw it. For people; nothing is decided by it.

`wait_for_batch_s` is how long the ranks had nothing to train: from the commit before to the moment when each has its part, less what
they trained by then of a step that comes in parts (`streamed_s`). How long engines had nothing to do stands beside it
(`controllers.engine_waits`): the two name what holds steps up.
"""

from __future__ import annotations

from collections.abc import Mapping

from controllers.before_filter import sampling_stats
from controllers.by_source import by_source, truncated_share, without_rewards
from controllers.engine_waits import EngineWaits
from controllers.reward_parts import part_stats
from controllers.view import JobView
from gcore.ledger.carried import staleness_stats
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records import SealState

PHASES = ("cut", "reference", "old_logprobs", "values", "update", "saving", "copies")
"""Of a rank's step: what it does from READY on, or of a streamed one before that."""


class Stopwatch:
    """Notes when head moved, and when the batch was sealed and ready. All in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._sealed: float | None = None
        self._ready: float | None = None
        self._producing: float | None = None
        self.engines = EngineWaits()

    def note(self, before: JobMirror, after: JobMirror, now: float) -> None:
        """A change of the job's records."""
        if after.head is None:
            return
        slot = after.seals.get(after.head.record.step + 1)
        if before.head is None or before.head.record.version != after.head.record.version:
            # Who comes back in the middle of a step does not know since when it is under way.
            is_late = before.head is None and slot is not None
            self._began, self._sealed, self._ready, self._producing = None if is_late else now, None, None, None
            self.engines.begin(now)
        if slot is None or slot.record.collects:
            self._sealed = self._ready = None
            return
        self._sealed = now if self._sealed is None else self._sealed
        if slot.record.state is SealState.READY and self._ready is None:
            self._ready = now

    def produced(self, now: float) -> None:
        """The weights were published, and the first prompt of the step is issued."""
        if self._producing is None:
            self._producing = now

    def stats(self, view: JobView, now: float) -> dict[str, float]:
        """Numbers for the log entry of the READY step, committed now."""
        seal = view.seal
        if seal is None or view.mirror.head is None:
            return {}
        sampled = sampling_stats(view.rules, view.mirror.head.record, seal)
        if not seal.groups:
            return sampled
        samples = [n for group in seal.groups for n in group.own_tokens]
        computed = sum(n for group in seal.groups for n in group.response_tokens)
        tokens = computed + sum(group.prompt_tokens * len(group.response_tokens) for group in seal.groups)
        stats = {
            "reward": sum(group.reward for group in seal.groups) / len(seal.groups),
            "samples": float(len(samples)),
            "tokens": float(tokens),
            "response_length": sum(samples) / len(samples),
            "truncated": truncated_share(seal.groups),
        } | sampled
        stats |= {"parts": float(len(seal.parts))} if seal.parts else {}
        stats |= staleness_stats(seal) if view.rules.staleness else {}
        stats |= by_source(seal.groups, seal.outcomes, several=len(view.spec.data.sources) > 1)
        stats |= part_stats(seal.groups)
        if view.spec.train.loss == "sft":
            stats = without_rewards(stats)
        ranks = [view.ranks[rank] for rank in sorted(view.ranks)]
        if ranks:
            stats = dict(ranks[0].metrics) | stats
        if self._began is not None and self._sealed is not None and self._ready is not None:
            # A batch that was carried may be closed before anything is begun for later ones.
            producing = min(self._producing if self._producing is not None else self._began, self._sealed)
            seconds = max(now - self._began, 1e-9)
            streamed = _streamed_s(stats, now - self._ready, self._ready - self._began) if seal.parts else 0.0
            stats |= {"streamed_s": streamed} if seal.parts else {}
            stats |= {
                "seconds": seconds,
                "publish_s": producing - self._began,
                "collect_s": self._sealed - producing,
                "exchange_s": self._ready - self._sealed,
                "train_s": now - self._ready,
                "wait_for_batch_s": self._ready - self._began - streamed,
                "tokens_per_second": tokens / seconds,
            } | self.engines.stats(now)
        return stats


def _streamed_s(stats: Mapping[str, float], after: float, before: float) -> float:
    """Seconds that ranks trained within the `before` ones until the batch was READY, of a step whose rest took `after`."""
    trained = sum(stats.get(f"{phase}_seconds", 0.0) for phase in PHASES)
    return min(max(trained - after, 0.0), before)
