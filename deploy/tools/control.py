"""The dashboard of the people who run the daemons and the store. The meaning of each metric is in `gcore/observability`."""

from __future__ import annotations

from deploy.tools.dashboard import NODE, OF_JOB, RATE, Dashboard, Row, line, of_job

CONTROL = Dashboard(
    "control",
    "controllers and store",
    "Do controllers agree quickly, does the store keep up, and who asks the API for what?",
    ["node", "job"],
    [
        Row(
            "Controllers",
            [
                line(
                    "Ready",
                    "1 while a controller has its lease and is registered.",
                    "none",
                    (f"gcore_ready{NODE}", "{{node}}"),
                    least=0,
                    most=1,
                ),
                line(
                    "Lives",
                    "Of the present process. Each but the first followed a lost lease.",
                    "none",
                    (f"gcore_incarnations_total{NODE}", "{{node}}"),
                    least=0,
                ),
                line(
                    "Shards",
                    "How the prompt stream is shared out.",
                    "none",
                    (f"sum by (job, node) (gcore_shards_owned{OF_JOB})", "{{job}} {{node}}"),
                    least=0,
                ),
            ],
        ),
        Row(
            "Transactions",
            [
                line(
                    "Won",
                    "A second, by kind.",
                    "none",
                    (
                        f'sum by (kind) (rate(gcore_transactions_total{{result="won", node=~"$node"}}{RATE}))',
                        "{{kind}}",
                    ),
                    least=0,
                ),
                line(
                    "Not won",
                    "Stale: somebody else was faster, which is as it should be. Unknown: the store broke off.",
                    "none",
                    (
                        f'sum by (kind, result) (rate(gcore_transactions_total{{result!="won", node=~"$node"}}{RATE}))',
                        "{{kind}} {{result}}",
                    ),
                    least=0,
                ),
                line(
                    "Commits",
                    "By result. Every controller that sees a step trained tries; one wins.",
                    "none",
                    (
                        f'sum by (result) (rate(gcore_transactions_total{{kind="commit", node=~"$node"}}{RATE}))',
                        "{{result}}",
                    ),
                    least=0,
                ),
            ],
        ),
        Row(
            "The store, as controllers see it",
            [
                line(
                    "Calls",
                    "A second, by operation.",
                    "none",
                    (f"sum by (operation) (rate(gcore_store_call_seconds_count{NODE}{RATE}))", "{{operation}}"),
                    least=0,
                ),
                line(
                    "Latency",
                    "99th percentile, by operation.",
                    "s",
                    (
                        f"histogram_quantile(0.99, sum by (operation, le) (rate(gcore_store_call_seconds_bucket{NODE}{RATE})))",
                        "{{operation}}",
                    ),
                    least=0,
                ),
                line(
                    "No answer",
                    "Calls a second that had no answer in time.",
                    "none",
                    (f"sum by (operation) (rate(gcore_store_unavailable_total{NODE}{RATE}))", "{{operation}}"),
                    least=0,
                ),
            ],
        ),
        Row(
            "What it holds",
            [
                line(
                    "Database",
                    "Of each member: its file, and what of it is in use.",
                    "bytes",
                    ("max by (endpoint) (gcore_store_database_bytes)", "{{endpoint}} file"),
                    ("max by (endpoint) (gcore_store_in_use_bytes)", "{{endpoint}} in use"),
                    least=0,
                ),
                line(
                    "By job",
                    "Bytes, without history. Bounded by the spec, not by the number of steps.",
                    "bytes",
                    (of_job("gcore_store_job_bytes"), "{{job}}"),
                    least=0,
                ),
                line(
                    "Keys by job",
                    "As many as its spec, its nodes and its ranks need.",
                    "none",
                    (of_job("gcore_store_job_keys"), "{{job}}"),
                    least=0,
                ),
            ],
        ),
        Row(
            "etcd itself",
            [
                line(
                    "Puts",
                    "A second, by member.",
                    "none",
                    (f"rate(etcd_mvcc_put_total{RATE})", "{{instance}}"),
                    least=0,
                ),
                line(
                    "Disk",
                    "99th percentile of a write to the log.",
                    "s",
                    (
                        f"histogram_quantile(0.99, sum by (instance, le) (rate(etcd_disk_wal_fsync_duration_seconds_bucket{RATE})))",
                        "{{instance}}",
                    ),
                    least=0,
                ),
                line(
                    "Database",
                    "File and quota.",
                    "bytes",
                    ("etcd_mvcc_db_total_size_in_bytes", "{{instance}} file"),
                    ("etcd_mvcc_db_total_size_in_use_in_bytes", "{{instance}} in use"),
                    least=0,
                ),
                line(
                    "Memory",
                    "Of each member.",
                    "bytes",
                    ('process_resident_memory_bytes{job="etcd"}', "{{instance}}"),
                    least=0,
                ),
            ],
        ),
        Row(
            "The job API",
            [
                line(
                    "Calls",
                    "A second, by method and status.",
                    "none",
                    (f"sum by (method, code) (rate(gcore_api_calls_total{NODE}{RATE}))", "{{method}} {{code}}"),
                    least=0,
                ),
                line(
                    "Latency",
                    "99th percentile of unary calls.",
                    "s",
                    (
                        f"histogram_quantile(0.99, sum by (method, le) (rate(gcore_api_call_seconds_bucket{NODE}{RATE})))",
                        "{{method}}",
                    ),
                    least=0,
                ),
                line(
                    "Open streams",
                    "Followers of events, logs and metrics.",
                    "none",
                    (f"sum by (method) (gcore_api_open_streams{NODE})", "{{method}}"),
                    least=0,
                ),
            ],
        ),
    ],
)
