"""The dashboard for placement: what do the slots do, and did the moves help? `gcore/observability` defines the metrics."""

from __future__ import annotations

from deploy.tools.dashboard import NODE, OF_JOB, RATE, Dashboard, Row, areas, line, of_job

PLACEMENT = Dashboard(
    "placement",
    "placement",
    "What do the slots do, which moves were made, and did they help?",
    ["job", "node"],
    [
        Row(
            "The split",
            [
                line(
                    "Slots of each pool",
                    "Slots per pool in the plan. Slots that pools share in turn count for each of them.",
                    "none",
                    (f"max by (job, pool) (gcore_split_slots{OF_JOB})", "{{job}} {{pool}}"),
                    least=0,
                ),
                line(
                    "Moves",
                    "Number of moves so far, by kind and state. `wanted` and `would` moved nothing.",
                    "none",
                    ("sum by (kind, state) (gcore_placement_moves_total)", "{{kind}} {{state}}"),
                    least=0,
                ),
            ],
        ),
        Row(
            "Effect of moves",
            [
                line(
                    "Gain of the newest move",
                    "Expected and measured reduction of the step time. Below 0 steps became longer.",
                    "s",
                    (f"max by (job, kind, measure) (gcore_move_gain_seconds{OF_JOB})", "{{job}} {{kind}} {{measure}}"),
                ),
                line(
                    "Duration of moves",
                    "Expected and measured duration of the newest move of each kind.",
                    "s",
                    (f"max by (job, kind, measure) (gcore_move_seconds{OF_JOB})", "{{job}} {{kind}} {{measure}}"),
                    least=0,
                ),
                line(
                    "Step time and forecast",
                    "Duration of the last step, and its forecast. If they differ for long, do not trust the moves.",
                    "s",
                    (of_job("gcore_step_took_seconds"), "{{job}} taken"),
                    (of_job("gcore_step_expected_seconds"), "{{job}} expected"),
                    least=0,
                ),
            ],
        ),
        Row(
            "Slot accounting",
            [
                areas(
                    "Busy slots",
                    "Number of busy slots of each pool.",
                    "none",
                    (
                        f'sum by (pool) (rate(gcore_slot_seconds_total{{state="busy", node=~"$node"}}{RATE}))',
                        "{{pool}}",
                    ),
                ),
                areas(
                    "Idle slots",
                    "Number of idle slots by pool and cause. docs/operate/monitoring.md#slot-accounting explains each cause and what helps.",
                    "none",
                    (
                        f'sum by (pool, cause) (rate(gcore_slot_seconds_total{{state="idle", node=~"$node"}}{RATE}))',
                        "{{pool}} {{cause}}",
                    ),
                ),
                areas(
                    "Other states",
                    "Slots that change their role, load weights, have failed, or are unallocated.",
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
                    "Open requests",
                    "Queued and running requests, by pool.",
                    "none",
                    (f"sum by (pool) (gcore_engine_open_requests{NODE})", "{{pool}}"),
                    least=0,
                ),
                line(
                    "Requests",
                    "Requests per second, by pool and result.",
                    "none",
                    (f"sum by (pool, result) (rate(gcore_engine_requests_total{NODE}{RATE}))", "{{pool}} {{result}}"),
                    least=0,
                ),
                line(
                    "Request time",
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
