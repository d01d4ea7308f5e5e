"""Metrics of steps, engines and judges, and the mapping from a committed step's statistics to gauges.

A declared number may be absent from a step, because flows differ. Facts about a job are gauges of its last committed step. Counters belong to
the process: the controller that wrote a log entry counts it. Engine metrics are from the view of the controller that uses them; an engine's own
view is in its own `/metrics`. Judges are labelled with their names in specs; outputs of judges are never in metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

from gcore.observability.registry import WORK_BUCKETS_S, MetricsBase


class GenerationMetrics(MetricsBase):
    """Metrics of this process's generation requests, and of the groups that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = self._counter("gcore_samples_total", "Samples generated for this process.")
        self.generated_tokens = self._counter("gcore_generated_tokens_total", "Tokens generated for this process.")
        self.kept_tokens = self._counter(
            "gcore_kept_tokens_total", "Tokens of unfinished responses that were kept when their engine was lost."
        )
        self.engine_requests = self._counter(
            "gcore_engine_requests_total",
            "Requests to engines by pool and result (ok, aborted, refused, unreachable).",
            "pool",
            "result",
            known=product(("rollout", "reward"), ("ok", "aborted", "refused", "unreachable")),
        )
        self.engine_seconds = self._histogram(
            "gcore_engine_request_seconds", "Seconds a request to an engine took.", WORK_BUCKETS_S, "pool"
        )
        self.engine_open = self._gauge(
            "gcore_engine_open_requests", "Requests to engines that this process waits for now, by pool.", "pool"
        )
        self.groups_in_flight = self._gauge(
            "gcore_groups_in_flight", "Groups this process has started and not finished.", "job"
        )
        self.oldest_seconds = self._gauge(
            "gcore_oldest_in_flight_seconds", "Seconds since the oldest prompt in flight here was begun.", "job"
        )
        self.oldest_steps = self._gauge(
            "gcore_oldest_in_flight_steps",
            "Steps committed since the oldest prompt in flight here was begun; rollout.staleness bounds it.",
            "job",
        )
        self.groups_offered = self._gauge(
            "gcore_groups_offered", "Finished groups this process holds and offers.", "job"
        )


VERDICT_BUCKETS = (-1.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0, 5.0, 10.0)
"""Bucket bounds for verdicts: most judges return 0 to 1, some a mark up to 10. Verdicts may be negative, so Prometheus has no sum of them."""

RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RESULTS = ("answered", "remembered", "away", "timeout", "refused")


class JudgeMetrics(MetricsBase):
    """Metrics of this process's requests to judges."""

    def __init__(self) -> None:
        super().__init__()
        self.judge_questions = self._counter(
            "gcore_judge_questions_total",
            "Questions to judges by result (answered, remembered, away, timeout, refused); a try counts as a question.",
            "judge",
            "result",
        )
        self.judge_open = self._gauge("gcore_judge_open_questions", "Questions that this process has open.", "judge")
        self.judge_seconds = self._histogram(
            "gcore_judge_seconds", "Seconds from a question to its answers.", WORK_BUCKETS_S, "judge"
        )
        self.judge_tokens = self._counter(
            "gcore_judge_tokens_total", "Tokens of questions and of answers.", "judge", "part"
        )
        self.judge_verdicts = self._histogram(
            "gcore_judge_verdict", "Verdicts, as they go into rewards.", VERDICT_BUCKETS, "judge"
        )
        self.judge_unreadable = self._counter(
            "gcore_judge_unreadable_total", "Answers in which no verdict could be read.", "judge"
        )
        self.judge_cost = self._counter(
            "gcore_judge_cost_total",
            "What answers of judges that others serve cost, in the unit of the spec's prices.",
            "judge",
        )
        self.judge_held = self._counter(
            "gcore_judge_held_seconds_total",
            "Seconds in which the next request to a judge that others serve was held back, by cause (pace, server, away, key, cost).",
            "judge",
            "cause",
        )
        self.judge_disagreement = self._histogram(
            "gcore_judge_disagreement_ratio",
            "Share of a group's pairs in which a pairwise judge contradicts itself when the two are swapped, 0 to 1.",
            RATIO_BUCKETS,
            "judge",
        )

    def know_judge(self, judge: str) -> None:
        """Create the judge's counters at 0."""
        for result in RESULTS:
            self.judge_questions.labels(judge, result)
        self.judge_unreadable.labels(judge)


STEP_STATS = MappingProxyType(
    {
        "reward": ("gcore_reward", "Mean reward of the samples of the last committed step."),
        "accuracy": ("gcore_accuracy_ratio", "Newest accuracy on the held-out prompts, 0 to 1."),
        "response_length": ("gcore_response_tokens", "Mean response length in the last committed step, in tokens."),
        "tokens_per_second": ("gcore_tokens_per_second", "Tokens trained per second of the last committed step."),
        "loss": ("gcore_loss", "Policy loss of the last committed step."),
        "kl": ("gcore_kl", "KL divergence of the last committed step, in nats a token."),
        "entropy": ("gcore_entropy", "Entropy of the policy in the last committed step, in nats a token."),
        "clip_fraction": ("gcore_clip_ratio", "Share of tokens whose ratio was clipped, 0 to 1."),
        "ratio_deviation": (
            "gcore_importance_deviation",
            "Mean distance from 1 of the policy's over old probabilities.",
        ),
        "ratio_mean": ("gcore_importance", "Mean of the policy's over the old probabilities of tokens; 1: on-policy."),
        "ratio_min": ("gcore_importance_min", "The smallest of the policy's over the old probabilities."),
        "ratio_max": ("gcore_importance_max", "The largest of the policy's over the old probabilities."),
        "correction_mean": ("gcore_correction_weight", "Mean weight that the correction gave to a token."),
        "correction_dropped": ("gcore_correction_dropped_ratio", "Share of tokens without any weight, 0 to 1."),
        "kl_reference": ("gcore_reference_kl", "KL from the reference in the last committed step, in nats a token."),
        "mismatch_kl": ("gcore_engine_mismatch", "Trainer's against engine's log-probabilities, in nats a token."),
        "mismatch_k3": (
            "gcore_engine_divergence",
            "Trainer's against engine's log-probabilities by an estimator that is never negative, in nats a token.",
        ),
        "mismatch_abs": (
            "gcore_engine_mismatch_abs",
            "Mean absolute difference of trainer's and engine's log-probabilities, in nats a token.",
        ),
        "mismatch_max": (
            "gcore_engine_mismatch_max",
            "Largest absolute difference of trainer's and engine's log-probabilities, in nats.",
        ),
        "mismatch_correlation": (
            "gcore_engine_mismatch_correlation",
            "Correlation of trainer's and engine's probabilities.",
        ),
        "staleness": ("gcore_staleness_steps", "Mean age of the oldest weights in a group of the last committed step."),
        "staleness_max": (
            "gcore_staleness_max_steps",
            "Age of the oldest weights in the last committed step, in steps.",
        ),
        "mixed_groups": ("gcore_mixed_groups", "Groups of the last committed step that several versions made."),
        "parts": ("gcore_step_parts", "Parts in which the last committed step came to the ranks, if it did."),
        "wait_for_batch_s": (
            "gcore_wait_for_batch_seconds",
            "Seconds of the last step in which ranks waited for a batch.",
        ),
        "wait_for_weights_s": (
            "gcore_wait_for_weights_seconds",
            "Seconds of the last step in which an engine had nothing to do until new weights were there.",
        ),
        "tail_s": (
            "gcore_tail_seconds",
            "Seconds of the last step in which an engine had nothing to do while others had the last responses.",
        ),
        "release_s": (
            "gcore_release_seconds",
            "Seconds that the slowest rank took to give its memory back before the last committed step.",
        ),
        "restore_s": (
            "gcore_restore_seconds",
            "Seconds that the slowest rank took to take its memory again for the last committed step.",
        ),
        "released_bytes": (
            "gcore_released_bytes",
            "Bytes of memory that all ranks had given back before the last committed step.",
        ),
        "padding": ("gcore_padding_ratio", "Share of the tokens trainers computed that were padding, 0 to 1."),
        "masked_samples": ("gcore_masked_samples", "Samples of the last committed step left out of its loss."),
        "skipped_updates": (
            "gcore_skipped_updates",
            "Updates of the last committed step skipped: gradient not finite.",
        ),
        "grad_norm": ("gcore_gradient_norm", "Global gradient norm before clipping, last committed step."),
        "learning_rate": ("gcore_learning_rate", "Learning rate of the last update."),
        "value_loss": ("gcore_value_loss", "Loss of the critic in the last committed step."),
        "value_mean": ("gcore_value", "Mean value of the last committed step's tokens, before it was trained."),
        "value_explained_variance": (
            "gcore_value_explained_variance",
            "How much of the returns' variance the critic explains: 1 is all, 0 no more than their mean.",
        ),
        "value_clip_fraction": ("gcore_value_clip_ratio", "Share of tokens whose value was held back, 0 to 1."),
        "critic_grad_norm": ("gcore_critic_gradient_norm", "The critic's gradient norm before clipping, last step."),
        "critic_skipped_updates": ("gcore_critic_skipped_updates", "Updates of the critic skipped in the last step."),
        "filter_rate": ("gcore_filtered_ratio", "Share of the last step's prompts that were filtered, 0 to 1."),
        "prompts_per_group": ("gcore_prompts_per_group", "Prompts that a trained group took in the last step."),
        "issue_ratio": (
            "gcore_prompts_issued_per_group",
            "Prompts issued at once for each group wanted, in the last step.",
        ),
        "groups_lacking": ("gcore_groups_lacking", "Groups that the last step had fewer than its quota."),
        "reward_before_filter": (
            "gcore_reward_before_filter",
            "Mean reward of the last step's scored groups, the filtered ones too.",
        ),
        "response_length_before_filter": (
            "gcore_response_tokens_before_filter",
            "Mean response length of the last step's scored groups, the filtered ones too, in tokens.",
        ),
    }
)
"""Gauges of a committed step's statistics, by name in the statistics."""

SOURCE_STATS = MappingProxyType(
    {
        "reward": ("gcore_source_reward", "Mean reward of a source's samples in the last step that had some."),
        "response_length": ("gcore_source_response_tokens", "Mean response length of a source, in tokens."),
        "truncated": ("gcore_source_truncated_ratio", "Share of a source's responses that were cut off, 0 to 1."),
        "accuracy": ("gcore_source_accuracy_ratio", "Newest accuracy on a source's held-out prompts, 0 to 1."),
    }
)
"""Gauges of a source's statistics. The number of label values is the number of sources in the job's spec."""

PHASES = MappingProxyType(
    {"publish_s": "publish", "collect_s": "collect", "exchange_s": "exchange", "train_s": "train"}
)
"""Phases of a step in order, by name in its statistics."""


class ChainMetrics(MetricsBase):
    """Metrics of the jobs' chains: their steps and statistics."""

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
        """Set the gauges of `STEP_STATS` that `stats` has; other statistics have no metric."""
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
        """Set a source's gauges: those of `SOURCE_STATS` that `stats` has, and prompts by outcome."""
        for key, value in stats.items():
            if key in self._source_stats:
                self._source_stats[key].labels(job, source).set(value)
        for outcome, count in prompts.items():
            self._source_prompts.labels(job, source, outcome).set(count)

    def show_evaluation(self, job: str, name: str, values: Mapping[str, float]) -> None:
        """Set the metrics of the newest evaluation of a set."""
        for metric, value in values.items():
            self._eval.labels(job, name, metric).set(value)

    def show_parts(self, job: str, parts: Mapping[str, float]) -> None:
        """Set the gauges of the parts of a step's rewards."""
        for part, value in parts.items():
            self._reward_part.labels(job, part).set(value)
