"""The catalogue of gcore's metrics: every name, label and meaning that Prometheus sees, in one place.

Base units (seconds, bytes; ratios from 0 to 1), `_total` for counters and for nothing else. Labels take few values: a
code, a phase, a result, a pool, the name of a judge. Never a prompt, a request, an instance, an incarnation or a free text. What is known
about a job is a gauge labelled with the job's name, or with a source's or a set's of its spec too, and goes with
`forget_job` when the controller lets go of it.

Each process has one `Metrics` with a registry of its own, handed to whoever counts; no metric lives at module level.
Does not decide what is worth an alert (`deploy/prometheus`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from gcore import __version__
from gcore.errors import UsageError

CALL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds for calls to the store, in seconds."""
WORK_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds for parts of a step and requests to engines, in seconds."""
VERDICT_BUCKETS = (-1.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds for verdicts and shares: most judges say 0 to 1, some a mark up to 10."""

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
        "mismatch_k3": ("gcore_engine_divergence", "The same, by an estimator that is never negative."),
        "mismatch_abs": ("gcore_engine_mismatch_abs", "Mean absolute difference of the two, in nats a token."),
        "mismatch_max": ("gcore_engine_mismatch_max", "Largest absolute difference of the two, in nats."),
        "mismatch_correlation": ("gcore_engine_mismatch_correlation", "Correlation of the two's probabilities."),
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
"""A committed step's numbers, by their name in the step's statistics, and the gauges that show them."""


SOURCE_STATS = MappingProxyType(
    {
        "reward": ("gcore_source_reward", "Mean reward of a source's samples in the last step that had some."),
        "response_length": ("gcore_source_response_tokens", "Mean response length of a source, in tokens."),
        "truncated": ("gcore_source_truncated_ratio", "Share of a source's responses that were cut off, 0 to 1."),
        "accuracy": ("gcore_source_accuracy_ratio", "Newest accuracy on a source's held-out prompts, 0 to 1."),
    }
)
"""A source's numbers and the gauges that show them. As many label values as the job's spec has sources."""


class Metrics:
    """One process's metrics. Count with e.g. `metrics.transactions.labels(kind="seal", result="won").inc()`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_start_time_seconds, _resident_memory_bytes, ...
        self._gauge("gcore_build_info", "Always 1; the version is in the label.", "version").labels(__version__).set(1)
        self._store()
        self._chain()
        self._generation()
        self._judges()
        self._membership()

    def _store(self) -> None:
        """The store, and what goes through it."""
        self.transactions = self._counter(
            "gcore_transactions_total",
            "Guarded transactions by kind (seal, reseal, ready, commit, account, rollback, ...) "
            "and result (won, lost, unknown).",
            "kind",
            "result",
        )
        self.store_seconds = self._histogram(
            "gcore_store_call_seconds",
            "Seconds a call to the store took, answered or not.",
            CALL_BUCKETS_S,
            "operation",
        )
        self.store_unavailable = self._counter(
            "gcore_store_unavailable_total", "Calls to the store that had no answer in time.", "operation"
        )

    def _chain(self) -> None:
        """Steps and what came of the prompts."""
        self.prompt_outcomes = self._counter(
            "gcore_prompt_outcomes_total",
            "Prompts that reached their outcome (trained, filtered, failed) in entries this process wrote.",
            "outcome",
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
        )
        self.moves = self._counter(
            "gcore_placement_moves_total",
            "Moves of the placement that this process decided, by kind (split, world, lend, return, mend) and state (done, wanted, would).",
            "kind",
            "state",
        )
        self._step_stats = {key: self._gauge(name, help_, "job") for key, (name, help_) in STEP_STATS.items()}
        self._source_stats = {
            key: self._gauge(name, help_, "job", "source") for key, (name, help_) in SOURCE_STATS.items()
        }
        self._reward_part = self._gauge(
            "gcore_reward_part", "Mean of a part of the rewards of the last committed step.", "job", "part"
        )
        self._reward_parts: dict[str, set[str]] = {}
        self._source_prompts = self._gauge(
            "gcore_source_prompts",
            "Prompts of a source on the job's chain by outcome (trained, filtered, failed).",
            "job",
            "source",
            "outcome",
        )
        self._sources: dict[str, set[str]] = {}
        self._eval = self._gauge(
            "gcore_eval",
            "The newest evaluation of a held-out set: accuracy (share of correct responses), mean@N (mean reward), pass@K, "
            "and unscored (responses that the reward could not score).",
            "job",
            "set",
            "metric",
        )
        self._evaluated: dict[str, set[tuple[str, str]]] = {}

    def _judges(self) -> None:
        """Judges, by their names in specs."""
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
            VERDICT_BUCKETS,
            "judge",
        )

    def _generation(self) -> None:
        """Engines and what they make."""
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
        )
        self.engine_seconds = self._histogram(
            "gcore_engine_request_seconds", "Seconds a request to an engine took.", WORK_BUCKETS_S, "pool"
        )
        self.slot_seconds = self._counter(
            "gcore_slot_seconds_total",
            "Seconds of this node's slots by what they were: busy and idle (with cause) of a pool, switching (to the pool, from the one "
            "in cause), syncing, failed, unallocated; unbooked is what nobody can say.",
            "pool",
            "state",
            "cause",
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

    def _membership(self) -> None:
        """Who is there, who works on what, and what is waited for."""
        self._nodes = self._gauge("gcore_nodes", "Controllers registered in the cluster.")
        self.members = self._gauge("gcore_members", "Controllers that work on the job.", "job")
        self.shards_owned = self._gauge("gcore_shards_owned", "Shards assigned to this process.", "job")
        self._workers = self._gauge(
            "gcore_workers",
            "Workers of this node by pool and state (starting, serving, stopping, failed).",
            "pool",
            "state",
        )
        self._waiting = self._gauge("gcore_waiting", "Jobs that wait in this process now, by cause.", "cause")
        self._job_waits = self._gauge(
            "gcore_job_waiting_seconds",
            "Seconds that the job has been waiting for something, as this process sees it, by cause.",
            "job",
            "cause",
        )
        self._waited: dict[str, Mapping[str, float]] = {}
        self.stalls = self._counter(
            "gcore_stalls_total",
            "Waits of which nothing had moved for so long that an event tells it, by cause.",
            "cause",
        )
        self._waiting_seconds = self._counter(
            "gcore_waiting_seconds_total", "Seconds that jobs waited in this process, by cause.", "cause"
        )

    def show_cluster(self, nodes: int, workers: Mapping[tuple[str, str], int]) -> None:
        """Set how many controllers there are, and how many workers of this node by pool and state."""
        self._nodes.set(nodes)
        self._workers.clear()
        for (pool, state), count in workers.items():
            self._workers.labels(pool, state).set(count)

    def show_stats(self, job: str, stats: Mapping[str, float]) -> None:
        """Set the gauges of `STEP_STATS` that `stats` names; other statistics have no metric."""
        for key, value in stats.items():
            if key in self._step_stats:
                self._step_stats[key].labels(job).set(value)

    def show_source(
        self, job: str, source: str, stats: Mapping[str, float], prompts: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Set a source's gauges: those of `SOURCE_STATS` that `stats` names, and prompts by outcome."""
        self._sources.setdefault(job, set()).add(source)
        for key, value in stats.items():
            if key in self._source_stats:
                self._source_stats[key].labels(job, source).set(value)
        for outcome, count in prompts.items():
            self._source_prompts.labels(job, source, outcome).set(count)

    def show_evaluation(self, job: str, name: str, values: Mapping[str, float]) -> None:
        """Set what the newest evaluation of a set measured, metric by metric."""
        for metric, value in values.items():
            self._evaluated.setdefault(job, set()).add((name, metric))
            self._eval.labels(job, name, metric).set(value)

    def show_waits(self, job: str, seconds: Mapping[str, float]) -> None:
        """Set for how long the job has been waiting, by cause; of a cause that is over nothing is shown."""
        before = self._waited.get(job, {})
        self._waited[job] = dict(seconds)
        for cause in before.keys() - seconds.keys():
            self._job_waits.remove(job, cause)
        for cause, held in seconds.items():
            self._job_waits.labels(job, cause).set(held)
            # Less than before: it was over, and has begun again.
            more = held - before.get(cause, 0.0)
            self._waiting_seconds.labels(cause).inc(more if more >= 0 else held)
        for cause in before.keys() | seconds.keys():
            waiting = sum(cause in causes for causes in self._waited.values())
            self._waiting.labels(cause).set(waiting)

    def show_parts(self, job: str, parts: Mapping[str, float]) -> None:
        """Set the gauges of what a step's rewards are made of."""
        for part, value in parts.items():
            self._reward_parts.setdefault(job, set()).add(part)
            self._reward_part.labels(job, part).set(value)

    def forget_job(self, job: str) -> None:
        """Take away everything that is about `job`."""
        self.show_waits(job, {})
        self._waited.pop(job, None)
        for part in self._reward_parts.pop(job, ()):
            self._reward_part.remove(job, part)
        for name, metric in self._evaluated.pop(job, ()):
            self._eval.remove(job, name, metric)
        for source in self._sources.pop(job, ()):
            for gauge in self._source_stats.values():
                with contextlib.suppress(KeyError):
                    gauge.remove(job, source)
            for outcome in ("trained", "filtered", "failed"):
                with contextlib.suppress(KeyError):
                    self._source_prompts.remove(job, source, outcome)
        gauges = (self.step, self.lineage, self.groups_in_flight, self.groups_offered, self.members, self.shards_owned)
        for gauge in (*gauges, self.oldest_seconds, self.oldest_steps, *self._step_stats.values()):
            with contextlib.suppress(KeyError):
                gauge.remove(job)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(name, help_, labels, registry=self.registry)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(name, help_, labels, registry=self.registry)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, help_, labels, buckets=buckets, registry=self.registry)


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """Metrics being served. `address`: host:port, the port as the system chose it if 0 was asked for."""

    address: str
    _server: WSGIServer

    def close(self) -> None:
        """Stop serving; blocks until the server's thread has stopped (half a second at most)."""
        self._server.shutdown()
        self._server.server_close()


def serve_metrics(metrics: Metrics, host: str = "127.0.0.1", port: int = 0) -> MetricsServer:
    """Serve `metrics` over HTTP at /metrics, in a thread of its own. Raises UsageError if the address cannot be had."""
    try:
        server, _ = start_http_server(port, addr=host, registry=metrics.registry)
    except OSError as error:
        raise UsageError(
            f"metrics cannot be served on {host}:{port} ({error.strerror or error})",
            fix="Choose another port; 0 takes a free one",
        ) from error
    shown = f"[{host}]" if ":" in host else host
    return MetricsServer(f"{shown}:{server.server_port}", server)
