"""The dashboard for operators of a cluster: are all nodes present and busy? `gcore/observability` defines the metrics."""

from __future__ import annotations

from deploy.tools.dashboard import NODE, RATE, Dashboard, Row, areas, line, stat

FLEET = Dashboard(
    "fleet",
    "fleet",
    "Are all nodes present, are they busy, and what do jobs wait for?",
    ["node"],
    [
        Row(
            "Now",
            [
                stat(
                    "Controllers ready",
                    "Controllers with a lease. If there are fewer than nodes, see the dashboard controllers and store.",
                    "none",
                    "sum(gcore_ready)",
                ),
                stat("Jobs", "Jobs that have not ended.", "none", "max(sum by (node) (gcore_jobs))"),
                stat(
                    "Slots busy",
                    "Share of slot time in which slots were busy.",
                    "percentunit",
                    f'sum(rate(gcore_slot_seconds_total{{state="busy"}}{RATE})) / sum(rate(gcore_slot_seconds_total{RATE}))',
                ),
                stat(
                    "Commits",
                    "Committed steps of all jobs per minute.",
                    "none",
                    f'60 * sum(rate(gcore_step_seconds_count{{phase="train"}}{RATE}))',
                ),
                stat(
                    "Tokens generated",
                    "Tokens per second of all rollout engines.",
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
                    "The newest committed step of each job. A falling line is a rollback to a checkpoint.",
                    "none",
                    ("max by (job) (gcore_step)", "{{job}}"),
                ),
                areas(
                    "Jobs by state",
                    "Running, queued and paused jobs. If many are queued, the next panel shows which jobs have the slots.",
                    "none",
                    ("max by (state) (gcore_jobs)", "{{state}}"),
                ),
                areas(
                    "Slots of each job",
                    "Slots that each job may use now. A job with a higher priority takes slots at the next commit.",
                    "none",
                    ("max by (job) (gcore_job_slots)", "{{job}}"),
                ),
                line(
                    "What jobs wait for",
                    "Number of waiting jobs, by cause. `groups` is generation and normal; other causes delay generation.",
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
                    "Number of slots in each state, from slot accounting.",
                    "none",
                    (f"sum by (state, pool) (rate(gcore_slot_seconds_total{NODE}{RATE}))", "{{state}} {{pool}}"),
                ),
                line(
                    "Busy, by node",
                    "Share of a node's slot time that was busy. If one node is far below the others, check its workers.",
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
                    "Engines and train ranks by pool and state. If `failed` persists, see the runbook GcoreWorkersFail.",
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
                    "Resident memory of each controller. It does not grow with the number of steps.",
                    "bytes",
                    ('process_resident_memory_bytes{job="gcore", node=~"$node"}', "{{node}}"),
                    least=0,
                ),
                line(
                    "CPU",
                    "Number of cores that each controller uses.",
                    "none",
                    (f'rate(process_cpu_seconds_total{{job="gcore", node=~"$node"}}{RATE})', "{{node}}"),
                    least=0,
                ),
            ],
        ),
    ],
)
