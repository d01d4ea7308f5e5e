"""What becomes of the questions that this controller puts to judges, counted and told: metrics, what waits, and one event for answers
that cannot be read. Of judges that others serve also what they cost, and what holds requests back. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gcore.metrics import Metrics
from gcore.reward.generative.asking import Why
from gcore.reward.generative.gate import Cause
from gcore.reward.pace import Scoring

TOLD_AT = 10
"""Unreadable answers are told at the first, and each time that there are so many times as many."""
READABLE = "Let its template ask for what its verdict.parser reads, or change the parser"


class JudgeCounts:
    """Of one job, on one controller. Implements `gcore.reward.generative.asking.Seen`, and `Told` of its `gate`."""

    def __init__(self, metrics: Metrics, tell: Callable[[str, str], None]) -> None:
        """`tell`: notes an event, by topic."""
        self._metrics = metrics
        self._tell = tell
        self._open: Counter[str] = Counter()
        self._answered = 0
        """What is tried in vain is no progress: a wait for a server that refuses everything must be told."""
        self._unreadable: Counter[str] = Counter()
        self._next_told: dict[str, int] = {}
        self._waits: dict[str, str] = {}
        """By judge: why its requests are held back."""

    @property
    def scoring(self) -> Scoring:
        """What is waited for now."""
        waiting = sum(self._open.values())
        names = " and ".join(sorted(repr(name) for name, count in self._open.items() if count > 0))
        count = "1 question waits" if waiting == 1 else f"{waiting} questions wait"
        why = "".join(f"; {one}" for _, one in sorted(self._waits.items()))
        return Scoring(waiting, self._answered, f"{count} for judge {names}{why}")

    def begun(self, judge: str) -> None:
        """A question is put."""
        if judge not in self._open:
            self._metrics.know_judge(judge)
        self._open[judge] += 1
        self._metrics.judge_open.labels(judge).set(self._open[judge])

    def ended(self, judge: str) -> None:
        """A question that was put has an answer, or will have none."""
        self._open[judge] -= 1
        self._metrics.judge_open.labels(judge).set(self._open[judge])

    def asked(self, judge: str, seconds: float, tokens_in: int, tokens_out: int) -> None:
        """A question was answered."""
        self._answered += 1
        self._metrics.judge_seconds.labels(judge).observe(seconds)
        self._metrics.judge_questions.labels(judge, "answered").inc()
        self._metrics.judge_tokens.labels(judge, "question").inc(tokens_in)
        self._metrics.judge_tokens.labels(judge, "answer").inc(tokens_out)

    def failed(self, judge: str, why: Why) -> None:
        """A try was in vain."""
        self._metrics.judge_questions.labels(judge, why).inc()

    def verdict(self, judge: str, value: float) -> None:
        """A question was judged."""
        self._metrics.judge_verdicts.labels(judge).observe(value)

    def unreadable(self, judge: str, example: str, why: str) -> None:
        """An answer could not be read."""
        self._metrics.judge_unreadable.labels(judge).inc()
        self._unreadable[judge] += 1
        count = self._unreadable[judge]
        if count >= self._next_told.get(judge, 1):
            self._next_told[judge] = count * TOLD_AT
            many = "an answer" if count == 1 else f"{count} answers"
            sentence = f"judge {judge!r} gave {many} that cannot be read, such as {example!r}: {why}. {READABLE}"
            self._tell(f"judge-{judge}", sentence)

    def remembered(self, judge: str) -> None:
        """A question was not asked, for its verdict was known."""
        self._metrics.judge_questions.labels(judge, "remembered").inc()

    def disagreed(self, judge: str, share: float) -> None:
        """In this share of a group's pairs, the two orders contradicted each other."""
        self._metrics.judge_disagreement.labels(judge).observe(share)

    def paid(self, judge: str, cost: float) -> None:
        """A request was answered, and costs that."""
        self._metrics.judge_cost.labels(judge).inc(cost)

    def held(self, judge: str, cause: Cause, seconds: float) -> None:
        """The next request was held back for so long."""
        self._metrics.judge_held.labels(judge, cause).inc(seconds)

    def waits(self, judge: str, why: str) -> None:
        """The next request waits, and why; nothing: it does not."""
        if why:
            self._waits[judge] = why
        else:
            self._waits.pop(judge, None)

    def trouble(self, judge: str, topic: str, sentence: str) -> None:
        """To be told in an event."""
        self._tell(f"judge-{topic}-{judge}", sentence)
