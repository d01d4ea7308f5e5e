"""The dashboard of the owner of a fleet: is everything there, and is it at work? The meaning of each metric is in `gcore/observability`."""

from __future__ import annotations

from deploy.tools.dashboard import NODE, RATE, Dashboard, Row, areas, line, stat

FLEET = Dashboard(
    "fleet",
    "fleet",
    "Is everything there, is it at work, and what does it wait for?",
    ["node"],
    [
        Row(
            "Now",
            [
                stat(
                    "Controllers at work",
                    "Registered, with a lease. Fewer than there are nodes: see controllers and store.",
                    "none",
                    "sum(gcore_ready)",
                ),
                stat("Jobs", "Those that have not ended.", "none", "max(sum by (node) (gcore_jobs))"),
                stat(
                    "Slots busy",
                    "Share of the slots' time in which they worked.",
                    "percentunit",
                    f'sum(rate(gcore_slot_seconds_total{{state="busy"}}{RATE})) / sum(rate(gcore_slot_seconds_total{RATE}))',
                ),
                stat(
                    "Commits",
                    "Steps of all jobs a minute.",
                    "none",
                    f'60 * sum(rate(gcore_step_seconds_count{{phase="train"}}{RATE}))',
                ),
                stat(
                    "Tokens generated",
                    "A second, by all engines of the policy.",
                    "none",
                    f"sum(rate(gcore_generated_tokens_total{RATE}))",
                ),
            ],
        ),
        Row(
            "Jobs",
            [
                line(
                    "Steps",
                    "The newest committed step of each job. A line that falls is a rollback to a checkpoint.",
                    "none",
                    ("max by (job) (gcore_step)", "{{job}}"),
                ),
                areas(
                    "Jobs by state",
                    "With slots, waiting for some, paused. Many that wait: who has the slots stands beside it.",
                    "none",
                    ("max by (state) (gcore_jobs)", "{{state}}"),
                ),
                areas(
                    "Slots of each job",
                    "That it may use now. A job of a higher priority takes some at the next commit.",
                    "none",
                    ("max by (job) (gcore_job_slots)", "{{job}}"),
                ),
                line(
                    "What jobs wait for",
                    "Jobs that wait, by cause. `groups` is generation, which is the usual one; others hold generation up.",
                    "none",
                    (f"sum by (cause) (rate(gcore_waiting_seconds_total{NODE}{RATE}))", "{{cause}}"),
                    least=0,
                ),
            ],
        ),
        Row(
            "Slots",
            [
                areas(
                    "Slots by what they do",
                    "By the books: how many slots' worth of time went where.",
                    "none",
                    (f"sum by (state, pool) (rate(gcore_slot_seconds_total{NODE}{RATE}))", "{{state}} {{pool}}"),
                ),
                line(
                    "Busy, by node",
                    "Share of the time of a node's slots in which they worked. One node far below the others: look at its workers.",
                    "percentunit",
                    (
                        f'sum by (node) (rate(gcore_slot_seconds_total{{state="busy", node=~"$node"}}{RATE})) / sum by (node) (rate(gcore_slot_seconds_total{NODE}{RATE}))',
                        "{{node}}",
                    ),
                    least=0,
                    most=1,
                ),
                areas(
                    "Workers",
                    "Engines and ranks by pool and state. `failed` for long: see the runbook GcoreWorkersFail.",
                    "none",
                    (f"sum by (pool, state) (gcore_workers{NODE})", "{{pool}} {{state}}"),
                ),
            ],
        ),
        Row(
            "Daemons",
            [
                line(
                    "Memory",
                    "Of each controller. It does not grow with the number of steps.",
                    "bytes",
                    ('process_resident_memory_bytes{job="gcore", node=~"$node"}', "{{node}}"),
                    least=0,
                ),
                line(
                    "CPU",
                    "Cores that each controller uses.",
                    "none",
                    (f'rate(process_cpu_seconds_total{{job="gcore", node=~"$node"}}{RATE})', "{{node}}"),
                    least=0,
                ),
            ],
        ),
    ],
)
