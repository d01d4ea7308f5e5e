"""The dashboard for judges. `gcore/observability` defines the metrics."""

from __future__ import annotations

from deploy.tools.dashboard import RATE, Dashboard, Row, heatmap, line

BY_JUDGE = '{judge=~"$judge"}'
JUDGES = Dashboard(
    "judges",
    "judges",
    "Do judges keep up, do their verdicts differ, and what do they cost?",
    ["judge"],
    [
        Row(
            "Questions",
            [
                line(
                    "Questions",
                    "Questions per second, by result. `remembered`: the answer came from the cache.",
                    "none",
                    (
                        f"sum by (judge, result) (rate(gcore_judge_questions_total{BY_JUDGE}{RATE}))",
                        "{{judge}} {{result}}",
                    ),
                    least=0,
                ),
                line(
                    "Open",
                    "Questions without an answer yet.",
                    "none",
                    (f"sum by (judge) (gcore_judge_open_questions{BY_JUDGE})", "{{judge}}"),
                    least=0,
                ),
                line(
                    "Answer time",
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
            "Verdicts",
            [
                line(
                    "Verdict",
                    "Median verdict, as used in rewards. If a judge always gives the same verdict, the policy learns nothing from it.",
                    "none",
                    (
                        f"histogram_quantile(0.5, sum by (judge, le) (rate(gcore_judge_verdict_bucket{BY_JUDGE}{RATE})))",
                        "{{judge}}",
                    ),
                ),
                heatmap(
                    "Distribution",
                    "Number of verdicts per bucket.",
                    "none",
                    f"sum by (le) (increase(gcore_judge_verdict_bucket{BY_JUDGE}{RATE}))",
                ),
                line(
                    "Unreadable",
                    "Share of answers without a readable verdict.",
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
                    "Pairwise judges: share of pairs whose verdicts in both orders contradict each other.",
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
            "Tokens and cost",
            [
                line(
                    "Tokens",
                    "Tokens per second, in questions and in answers.",
                    "none",
                    (f"sum by (judge, part) (rate(gcore_judge_tokens_total{BY_JUDGE}{RATE}))", "{{judge}} {{part}}"),
                    least=0,
                ),
                line(
                    "Cost",
                    "Total cost so far, in the unit of the spec's prices. Only external judges.",
                    "none",
                    (f"sum by (judge) (gcore_judge_cost_total{BY_JUDGE})", "{{judge}}"),
                    least=0,
                ),
                line(
                    "Held back",
                    "Share of time in which the next request was delayed, by cause. Only external judges.",
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
