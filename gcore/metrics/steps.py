"""Steps and what came of them: the chain, prompts, phases, learning curves, evaluations, sources, parts of rewards.

What is known about a job is a gauge of its last committed step. Counters are of this process: each entry of the chain
is counted by the one controller that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gcore.metrics.declared import WORK_BUCKETS_S, Declared
from gcore.metrics.step_stats import SOURCE_STATS, STEP_STATS

PHASES = MappingProxyType(
    {"publish_s": "publish", "collect_s": "collect", "exchange_s": "exchange", "train_s": "train"}
)
"""The phases of a step, by their names in its statistics, as they follow each other."""


class StepMetrics(Declared):
    """Of the jobs' chains."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_outcomes = self._counter(
            "gcore_prompt_outcomes_total",
            "Prompts that reached their outcome (trained, filtered, failed) in entries this process wrote.",
            "outcome",
            known=[("trained",), ("filtered",), ("failed",)],
        )
        self.step = self._gauge("gcore_step", "The newest committed step.", "job")
        self.lineage = self._gauge("gcore_lineage", "The current lineage: the number of rollbacks so far.", "job")
        self.step_seconds = self._histogram(
            "gcore_step_seconds",
            "Seconds of a step by phase (collect, exchange, train, publish, ...).",
            WORK_BUCKETS_S,
            "phase",
        )
        self.checkpoints = self._counter(
            "gcore_checkpoints_total",
            "Checkpoints by what this process did or told of them: registered, forgotten, failed (not written).",
            "result",
            known=[("registered",), ("forgotten",), ("failed",)],
        )
        self._step_stats = {key: self._gauge(name, help_, "job") for key, (name, help_) in STEP_STATS.items()}
        self._source_stats = {
            key: self._gauge(name, help_, "job", "source") for key, (name, help_) in SOURCE_STATS.items()
        }
        self._reward_part = self._gauge(
            "gcore_reward_part", "Mean of a part of the rewards of the last committed step.", "job", "part"
        )
        self._source_prompts = self._gauge(
            "gcore_source_prompts",
            "Prompts of a source on the job's chain by outcome (trained, filtered, failed).",
            "job",
            "source",
            "outcome",
        )
        self._eval = self._gauge(
            "gcore_eval",
            "The newest evaluation of a held-out set: accuracy (share of correct responses), mean@N (mean reward), pass@K, "
            "and unscored (responses that the reward could not score).",
            "job",
            "set",
            "metric",
        )
        self._phase = self._gauge(
            "gcore_step_phase_seconds",
            "Seconds of the last committed step by phase (publish, collect, exchange, train).",
            "job",
            "phase",
        )
        self._took = self._gauge("gcore_step_took_seconds", "Seconds of the last committed step, all phases.", "job")
        self.expected = self._gauge(
            "gcore_step_expected_seconds",
            "Seconds that the placement policy expected of the step after the newest decision, where it says so.",
            "job",
        )

    def show_stats(self, job: str, stats: Mapping[str, float]) -> None:
        """Set the gauges of `STEP_STATS` that `stats` names; other statistics have no metric."""
        for key, value in stats.items():
            if key in self._step_stats:
                self._step_stats[key].labels(job).set(value)
        for key, phase in PHASES.items():
            if key in stats:
                self._phase.labels(job, phase).set(stats[key])
        if "seconds" in stats:
            self._took.labels(job).set(stats["seconds"])

    def show_source(
        self, job: str, source: str, stats: Mapping[str, float], prompts: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Set a source's gauges: those of `SOURCE_STATS` that `stats` names, and prompts by outcome."""
        for key, value in stats.items():
            if key in self._source_stats:
                self._source_stats[key].labels(job, source).set(value)
        for outcome, count in prompts.items():
            self._source_prompts.labels(job, source, outcome).set(count)

    def show_evaluation(self, job: str, name: str, values: Mapping[str, float]) -> None:
        """Set what the newest evaluation of a set measured, metric by metric."""
        for metric, value in values.items():
            self._eval.labels(job, name, metric).set(value)

    def show_parts(self, job: str, parts: Mapping[str, float]) -> None:
        """Set the gauges of what a step's rewards are made of."""
        for part, value in parts.items():
            self._reward_part.labels(job, part).set(value)
