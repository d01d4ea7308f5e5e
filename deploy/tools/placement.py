"""The dashboard of placement: what do the slots do, and were the moves worth it? The meaning of each metric is in `gcore/observability`."""

from __future__ import annotations

from deploy.tools.dashboard import NODE, OF_JOB, RATE, Dashboard, Row, areas, line, of_job

PLACEMENT = Dashboard(
    "placement",
    "placement",
    "What do the slots do, what was moved, and was it worth it?",
    ["job", "node"],
    [
        Row(
            "The split",
            [
                line(
                    "Slots of each pool",
                    "By the plan. Pools that take turns on the same slots count them each.",
                    "none",
                    (f"max by (job, pool) (gcore_split_slots{OF_JOB})", "{{job}} {{pool}}"),
                    least=0,
                ),
                line(
                    "Moves",
                    "So far, by kind and state. `wanted` and `would` moved nothing.",
                    "none",
                    ("sum by (kind, state) (gcore_placement_moves_total)", "{{kind}} {{state}}"),
                    least=0,
                ),
            ],
        ),
        Row(
            "Worth it?",
            [
                line(
                    "Gain of the newest move",
                    "Seconds by which steps were expected to become shorter, and did. Below 0: they became longer.",
                    "s",
                    (f"max by (job, kind, measure) (gcore_move_gain_seconds{OF_JOB})", "{{job}} {{kind}} {{measure}}"),
                ),
                line(
                    "What moves take",
                    "Seconds that the newest move of each kind was expected to take, and took.",
                    "s",
                    (f"max by (job, kind, measure) (gcore_move_seconds{OF_JOB})", "{{job}} {{kind}} {{measure}}"),
                    least=0,
                ),
                line(
                    "Taken and expected",
                    "Seconds of the last step, and what was expected of it. Far apart for long: do not trust the moves.",
                    "s",
                    (of_job("gcore_step_took_seconds"), "{{job}} taken"),
                    (of_job("gcore_step_expected_seconds"), "{{job}} expected"),
                    least=0,
                ),
            ],
        ),
        Row(
            "The books",
            [
                areas(
                    "Busy slots",
                    "How many slots' worth of time each pool worked.",
                    "none",
                    (
                        f'sum by (pool) (rate(gcore_slot_seconds_total{{state="busy", node=~"$node"}}{RATE}))',
                        "{{pool}}",
                    ),
                ),
                areas(
                    "Idle slots",
                    "By pool and cause. docs/operate/monitoring.md#slot-accounting says what each cause is, and what helps.",
                    "none",
                    (
                        f'sum by (pool, cause) (rate(gcore_slot_seconds_total{{state="idle", node=~"$node"}}{RATE}))',
                        "{{pool}} {{cause}}",
                    ),
                ),
                areas(
                    "Neither",
                    "Slots that change their role, take weights, have failed, or are nobody's.",
                    "none",
                    (
                        f'sum by (state, pool) (rate(gcore_slot_seconds_total{{state!~"busy|idle", node=~"$node"}}{RATE}))',
                        "{{state}} {{pool}}",
                    ),
                ),
            ],
        ),
        Row(
            "Engines",
            [
                line(
                    "Requests open",
                    "That controllers wait for, by pool: the queue and what runs.",
                    "none",
                    (f"sum by (pool) (gcore_engine_open_requests{NODE})", "{{pool}}"),
                    least=0,
                ),
                line(
                    "Requests",
                    "A second, by pool and result.",
                    "none",
                    (f"sum by (pool, result) (rate(gcore_engine_requests_total{NODE}{RATE}))", "{{pool}} {{result}}"),
                    least=0,
                ),
                line(
                    "Seconds of a request",
                    "Median and 95th percentile.",
                    "s",
                    (
                        f"histogram_quantile(0.5, sum by (pool, le) (rate(gcore_engine_request_seconds_bucket{NODE}{RATE})))",
                        "{{pool}} median",
                    ),
                    (
                        f"histogram_quantile(0.95, sum by (pool, le) (rate(gcore_engine_request_seconds_bucket{NODE}{RATE})))",
                        "{{pool}} 95th",
                    ),
                    least=0,
                ),
            ],
        ),
    ],
)
