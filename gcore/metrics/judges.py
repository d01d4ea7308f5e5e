"""Judges, by their names in specs: what they are asked, how they answer, what that takes and costs.

What an answer says stands nowhere here.
"""

from __future__ import annotations

from gcore.metrics.declared import WORK_BUCKETS_S, Declared

VERDICT_BUCKETS = (-1.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds for verdicts: most judges say 0 to 1, some a mark up to 10. As they may be negative, Prometheus has no sum of them."""


RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RESULTS = ("answered", "remembered", "away", "timeout", "refused")


class JudgeMetrics(Declared):
    """Of the questions that this process puts."""

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
        """Its counters are there from now on, at 0."""
        for result in RESULTS:
            self.judge_questions.labels(judge, result)
        self.judge_unreadable.labels(judge)
