"""The dashboard of judges. The meaning of each metric is in `gcore/observability`."""

from __future__ import annotations

from deploy.tools.dashboard import RATE, Dashboard, Row, heatmap, line

BY_JUDGE = '{judge=~"$judge"}'
JUDGES = Dashboard(
    "judges",
    "judges",
    "Do judges keep up, do they say something, and what do they cost?",
    ["judge"],
    [
        Row(
            "Questions",
            [
                line(
                    "Questions",
                    "A second, by result. `remembered` was asked before and is not asked again.",
                    "none",
                    (
                        f"sum by (judge, result) (rate(gcore_judge_questions_total{BY_JUDGE}{RATE}))",
                        "{{judge}} {{result}}",
                    ),
                    least=0,
                ),
                line(
                    "Open",
                    "Questions that controllers wait for.",
                    "none",
                    (f"sum by (judge) (gcore_judge_open_questions{BY_JUDGE})", "{{judge}}"),
                    least=0,
                ),
                line(
                    "Seconds of an answer",
                    "Median and 95th percentile.",
                    "s",
                    (
                        f"histogram_quantile(0.5, sum by (judge, le) (rate(gcore_judge_seconds_bucket{BY_JUDGE}{RATE})))",
                        "{{judge}} median",
                    ),
                    (
                        f"histogram_quantile(0.95, sum by (judge, le) (rate(gcore_judge_seconds_bucket{BY_JUDGE}{RATE})))",
                        "{{judge}} 95th",
                    ),
                    least=0,
                ),
            ],
        ),
        Row(
            "What they say",
            [
                line(
                    "Verdict",
                    "The median, as it goes into rewards. A judge that always says the same teaches nothing.",
                    "none",
                    (
                        f"histogram_quantile(0.5, sum by (judge, le) (rate(gcore_judge_verdict_bucket{BY_JUDGE}{RATE})))",
                        "{{judge}}",
                    ),
                ),
                heatmap(
                    "Verdicts",
                    "How many of each.",
                    "none",
                    f"sum by (le) (increase(gcore_judge_verdict_bucket{BY_JUDGE}{RATE}))",
                ),
                line(
                    "Not readable",
                    "Share of the answers in which no verdict was found.",
                    "percentunit",
                    (
                        f'sum by (judge) (rate(gcore_judge_unreadable_total{BY_JUDGE}{RATE})) / sum by (judge) (rate(gcore_judge_questions_total{{judge=~"$judge", result="answered"}}{RATE}))',
                        "{{judge}}",
                    ),
                    least=0,
                    most=1,
                ),
                line(
                    "Disagreement",
                    "Pairwise judges: share of pairs in which the two orders contradict each other.",
                    "percentunit",
                    (
                        f"sum by (judge) (rate(gcore_judge_disagreement_ratio_sum{BY_JUDGE}{RATE})) / sum by (judge) (rate(gcore_judge_disagreement_ratio_count{BY_JUDGE}{RATE}))",
                        "{{judge}}",
                    ),
                    least=0,
                    most=1,
                ),
            ],
        ),
        Row(
            "What they take",
            [
                line(
                    "Tokens",
                    "A second, of questions and of answers.",
                    "none",
                    (f"sum by (judge, part) (rate(gcore_judge_tokens_total{BY_JUDGE}{RATE}))", "{{judge}} {{part}}"),
                    least=0,
                ),
                line(
                    "Cost",
                    "So far, in the unit of the spec's prices. Judges that others serve only.",
                    "none",
                    (f"sum by (judge) (gcore_judge_cost_total{BY_JUDGE})", "{{judge}}"),
                    least=0,
                ),
                line(
                    "Held back",
                    "Share of the time in which the next request was held back, by cause. Judges that others serve only.",
                    "percentunit",
                    (
                        f"sum by (judge, cause) (rate(gcore_judge_held_seconds_total{BY_JUDGE}{RATE}))",
                        "{{judge}} {{cause}}",
                    ),
                    least=0,
                ),
            ],
        ),
    ],
)
