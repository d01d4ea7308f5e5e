"""Metrics of steps, engines and judges.

A gauge of a job shows a statistic of its last committed step. Not every flow has all statistics. Counters belong to
this process: the controller that wrote a log entry counts it. Engine metrics are measured by the calling controller;
engines also export their own `/metrics`. Judges are labelled with their names in specs. No metric contains the text of
an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

from gcore.observability.registry import WORK_BUCKETS_S, MetricsBase


class GenerationMetrics(MetricsBase):
    """Metrics of this process's engine requests and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = self._counter("gcore_samples_total", "Samples generated for this process.")
        self.generated_tokens = self._counter("gcore_generated_tokens_total", "Tokens generated for this process.")
        self.kept_tokens = self._counter(
            "gcore_kept_tokens_total", "Tokens of unfinished responses that were kept when their engine failed."
        )
        self.engine_requests = self._counter(
            "gcore_engine_requests_total",
            "Requests to engines by pool and result (ok, aborted, refused, unreachable).",
            "pool",
            "result",
            known=product(("rollout", "reward"), ("ok", "aborted", "refused", "unreachable")),
        )
        self.engine_seconds = self._histogram(
            "gcore_engine_request_seconds", "Duration of engine requests in seconds.", WORK_BUCKETS_S, "pool"
        )
        self.engine_open = self._gauge(
            "gcore_engine_open_requests", "Open requests of this process to engines, by pool.", "pool"
        )
        self.groups_in_flight = self._gauge(
            "gcore_groups_in_flight", "Groups that this process has started but not finished.", "job"
        )
        self.oldest_seconds = self._gauge(
            "gcore_oldest_in_flight_seconds", "Seconds since this process started its oldest prompt in flight.", "job"
        )
        self.oldest_steps = self._gauge(
            "gcore_oldest_in_flight_steps",
            "Steps committed since this process started its oldest prompt in flight; rollout.staleness limits it.",
            "job",
        )
        self.groups_offered = self._gauge("gcore_groups_offered", "Finished groups that this process offers.", "job")


VERDICT_BUCKETS = (-1.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0, 5.0, 10.0)
"""Histogram buckets for judges' verdicts: most judges use 0 to 1, some up to 10. Verdicts may be negative, so
Prometheus has no sum of them.
"""

RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RESULTS = ("answered", "remembered", "away", "timeout", "refused")


class JudgeMetrics(MetricsBase):
    """Metrics of this process's questions to judges."""

    def __init__(self) -> None:
        super().__init__()
        self.judge_questions = self._counter(
            "gcore_judge_questions_total",
            "Questions to judges by result (answered, remembered, away, timeout, refused); each attempt counts.",
            "judge",
            "result",
        )
        self.judge_open = self._gauge("gcore_judge_open_questions", "Open questions of this process.", "judge")
        self.judge_seconds = self._histogram(
            "gcore_judge_seconds", "Time from a question to its answers in seconds.", WORK_BUCKETS_S, "judge"
        )
        self.judge_tokens = self._counter(
            "gcore_judge_tokens_total", "Tokens of questions and answers, by part.", "judge", "part"
        )
        self.judge_verdicts = self._histogram(
            "gcore_judge_verdict", "Verdicts, as used in rewards.", VERDICT_BUCKETS, "judge"
        )
        self.judge_unreadable = self._counter(
            "gcore_judge_unreadable_total", "Answers without a readable verdict.", "judge"
        )
        self.judge_cost = self._counter(
            "gcore_judge_cost_total",
            "Cost of answers of external judges, in the unit of the spec's prices.",
            "judge",
        )
        self.judge_held = self._counter(
            "gcore_judge_held_seconds_total",
            "Seconds in which the next request to an external judge was delayed, by cause (pace, server, away, key, cost).",
            "judge",
            "cause",
        )
        self.judge_disagreement = self._histogram(
            "gcore_judge_disagreement_ratio",
            "Share of a group's pairs for which a pairwise judge contradicts itself when the responses are swapped, 0 to 1.",
            RATIO_BUCKETS,
            "judge",
        )

    def know_judge(self, judge: str) -> None:
        """Create the counters of `judge` with value 0, before its first question."""
        for result in RESULTS:
            self.judge_questions.labels(judge, result)
        self.judge_unreadable.labels(judge)


STEP_STATS = MappingProxyType(
    {
        "reward": ("gcore_reward", "Mean reward of the samples of the last committed step."),
        "accuracy": ("gcore_accuracy_ratio", "Newest accuracy on the held-out prompts, 0 to 1."),
        "response_length": ("gcore_response_tokens", "Mean response length in the last committed step, in tokens."),
        "tokens_per_second": ("gcore_tokens_per_second", "Tokens trained per second of the last committed step."),
        "denoising_steps": (
            "gcore_denoising_steps",
            "Mean trained denoising steps of a generated picture in the last committed step.",
        ),
        "pictures_per_second": (
            "gcore_pictures_per_second",
            "Generated pictures trained per second of the last committed step.",
        ),
        "loss": ("gcore_loss", "Policy loss of the last committed step."),
        "kl": ("gcore_kl", "KL divergence in the last committed step, in nats per token."),
        "entropy": ("gcore_entropy", "Entropy of the policy in the last committed step, in nats per token."),
        "clip_fraction": ("gcore_clip_ratio", "Share of tokens with a clipped probability ratio, 0 to 1."),
        "ratio_deviation": (
            "gcore_importance_deviation",
            "Mean distance from 1 of the ratio of policy to old probabilities.",
        ),
        "ratio_mean": ("gcore_importance", "Mean ratio of policy to old token probabilities; 1: on-policy."),
        "ratio_min": ("gcore_importance_min", "Smallest ratio of policy to old token probabilities."),
        "ratio_max": ("gcore_importance_max", "Largest ratio of policy to old token probabilities."),
        "correction_mean": ("gcore_correction_weight", "Mean weight that the off-policy correction gave to a token."),
        "correction_dropped": (
            "gcore_correction_dropped_ratio",
            "Share of tokens to which the correction gave no weight, 0 to 1.",
        ),
        "kl_reference": (
            "gcore_reference_kl",
            "KL divergence from the reference in the last committed step, in nats per token.",
        ),
        "mismatch_kl": ("gcore_engine_mismatch", "Mean of engine minus trainer log-probabilities, in nats per token."),
        "mismatch_k3": (
            "gcore_engine_divergence",
            "Difference of trainer and engine log-probabilities by a non-negative estimator (k3), in nats per token.",
        ),
        "mismatch_abs": (
            "gcore_engine_mismatch_abs",
            "Mean absolute difference of trainer and engine log-probabilities, in nats per token.",
        ),
        "mismatch_max": (
            "gcore_engine_mismatch_max",
            "Largest absolute difference of trainer and engine log-probabilities, in nats.",
        ),
        "mismatch_correlation": (
            "gcore_engine_mismatch_correlation",
            "Correlation of trainer and engine token probabilities.",
        ),
        "staleness": (
            "gcore_staleness_steps",
            "Mean age of the oldest weights per group in the last committed step, in steps.",
        ),
        "staleness_max": (
            "gcore_staleness_max_steps",
            "Age of the oldest weights in the last committed step, in steps.",
        ),
        "mixed_groups": (
            "gcore_mixed_groups",
            "Groups of the last committed step with responses of several weight versions.",
        ),
        "parts": ("gcore_step_parts", "Parts in which the last committed step was sent to the ranks."),
        "wait_for_batch_s": (
            "gcore_wait_for_batch_seconds",
            "Seconds in which ranks waited for a batch in the last step.",
        ),
        "wait_for_weights_s": (
            "gcore_wait_for_weights_seconds",
            "Seconds in which an engine was idle until new weights arrived, in the last step.",
        ),
        "tail_s": (
            "gcore_tail_seconds",
            "Seconds in which an engine was idle while others generated the last responses, in the last step.",
        ),
        "release_s": (
            "gcore_release_seconds",
            "Seconds that the slowest rank needed to release its memory before the last committed step.",
        ),
        "restore_s": (
            "gcore_restore_seconds",
            "Seconds that the slowest rank needed to restore its memory for the last committed step.",
        ),
        "released_bytes": (
            "gcore_released_bytes",
            "Bytes of memory that all ranks released before the last committed step.",
        ),
        "padding": ("gcore_padding_ratio", "Share of padding in the tokens that trainers computed, 0 to 1."),
        "masked_samples": (
            "gcore_masked_samples",
            "Masked samples of the last committed step, excluded from the loss.",
        ),
        "skipped_updates": (
            "gcore_skipped_updates",
            "Updates skipped in the last committed step because the gradient was not finite.",
        ),
        "grad_norm": ("gcore_gradient_norm", "Global gradient norm before clipping in the last committed step."),
        "learning_rate": ("gcore_learning_rate", "Learning rate of the last update."),
        "value_loss": ("gcore_value_loss", "Loss of the critic in the last committed step."),
        "value_mean": (
            "gcore_value",
            "Mean predicted value of the tokens of the last committed step, before its update.",
        ),
        "value_explained_variance": (
            "gcore_value_explained_variance",
            "Share of the returns' variance that the critic explains; 0: no better than the mean.",
        ),
        "value_clip_fraction": ("gcore_value_clip_ratio", "Share of tokens with a clipped value, 0 to 1."),
        "critic_grad_norm": (
            "gcore_critic_gradient_norm",
            "Gradient norm of the critic before clipping in the last step.",
        ),
        "critic_skipped_updates": ("gcore_critic_skipped_updates", "Updates of the critic skipped in the last step."),
        "filter_rate": ("gcore_filtered_ratio", "Share of the last step's prompts that were filtered, 0 to 1."),
        "prompts_per_group": ("gcore_prompts_per_group", "Prompts needed per trained group in the last step."),
        "issue_ratio": (
            "gcore_prompts_issued_per_group",
            "Prompts started at once per group of the quota, in the last step.",
        ),
        "groups_lacking": ("gcore_groups_lacking", "Groups by which the last step missed its quota."),
        "reward_before_filter": (
            "gcore_reward_before_filter",
            "Mean reward of the last step's scored groups, including filtered ones.",
        ),
        "response_length_before_filter": (
            "gcore_response_tokens_before_filter",
            "Mean response length of the last step's scored groups, including filtered ones, in tokens.",
        ),
    }
)
"""Statistics of a committed step that have a gauge: name and help text of the gauge, by name in the log entry."""

SOURCE_STATS = MappingProxyType(
    {
        "reward": ("gcore_source_reward", "Mean reward of a source's samples in the newest step that had any."),
        "response_length": ("gcore_source_response_tokens", "Mean response length of a source, in tokens."),
        "truncated": ("gcore_source_truncated_ratio", "Share of a source's responses that were truncated, 0 to 1."),
        "accuracy": ("gcore_source_accuracy_ratio", "Newest accuracy on a source's held-out prompts, 0 to 1."),
    }
)
"""Statistics of a source that have a gauge: name and help text of the gauge, by name of the statistic."""

PHASES = MappingProxyType(
    {"publish_s": "publish", "collect_s": "collect", "exchange_s": "exchange", "train_s": "train"}
)
"""Phases of a step, in order: value of the label `phase`, by name in the step's statistics."""


class ChainMetrics(MetricsBase):
    """Metrics of steps, sources, evaluations and checkpoints of the jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_outcomes = self._counter(
            "gcore_prompt_outcomes_total",
            "Prompts by outcome (trained, filtered, failed) in log entries that this process wrote.",
            "outcome",
            known=[("trained",), ("filtered",), ("failed",)],
        )
        self.step = self._gauge("gcore_step", "The newest committed step.", "job")
        self.lineage = self._gauge("gcore_lineage", "The current lineage: the number of rollbacks so far.", "job")
        self.step_seconds = self._histogram(
            "gcore_step_seconds",
            "Duration of a step's phases in seconds (collect, exchange, train, publish, ...).",
            WORK_BUCKETS_S,
            "phase",
        )
        self.checkpoints = self._counter(
            "gcore_checkpoints_total",
            "Checkpoints by result in this process: registered, forgotten (removed), failed (not written).",
            "result",
            known=[("registered",), ("forgotten",), ("failed",)],
        )
        self._step_stats = {key: self._gauge(name, help_, "job") for key, (name, help_) in STEP_STATS.items()}
        self._source_stats = {
            key: self._gauge(name, help_, "job", "source") for key, (name, help_) in SOURCE_STATS.items()
        }
        self._reward_part = self._gauge(
            "gcore_reward_part", "Mean of a reward part in the last committed step.", "job", "part"
        )
        self._source_prompts = self._gauge(
            "gcore_source_prompts",
            "Prompts of a source on the job's current branch by outcome (trained, filtered, failed).",
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
            "Duration of each phase of the last committed step in seconds (publish, collect, exchange, train).",
            "job",
            "phase",
        )
        self._took = self._gauge(
            "gcore_step_took_seconds", "Duration of the last committed step in seconds, all phases.", "job"
        )
        self.expected = self._gauge(
            "gcore_step_expected_seconds",
            "Step time in seconds that the placement policy predicted at its newest decision.",
            "job",
        )

    def show_stats(self, job: str, stats: Mapping[str, float]) -> None:
        """Set a job's gauges from the statistics of its last committed step. Names not in `STEP_STATS` are ignored."""
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
        """Set a source's gauges. `stats`: by names of `SOURCE_STATS`. `prompts`: number of prompts by outcome."""
        for key, value in stats.items():
            if key in self._source_stats:
                self._source_stats[key].labels(job, source).set(value)
        for outcome, count in prompts.items():
            self._source_prompts.labels(job, source, outcome).set(count)

    def show_evaluation(self, job: str, name: str, values: Mapping[str, float]) -> None:
        """Set the gauges of the newest evaluation of the held-out set `name`; `values` by metric."""
        for metric, value in values.items():
            self._eval.labels(job, name, metric).set(value)

    def show_parts(self, job: str, parts: Mapping[str, float]) -> None:
        """Set the gauges of the mean reward parts of a job's last committed step, by part."""
        for part, value in parts.items():
            self._reward_part.labels(job, part).set(value)
