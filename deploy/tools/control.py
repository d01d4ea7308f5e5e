"""The dashboard for operators of the daemons and the store. `gcore/observability` defines the metrics."""

from __future__ import annotations

from deploy.tools.dashboard import NODE, OF_JOB, RATE, Dashboard, Row, line, of_job

CONTROL = Dashboard(
    "control",
    "controllers and store",
    "Are commits quick, does the store keep up, and which API methods are called?",
    ["node", "job"],
    [
        Row(
            "Controllers",
            [
                line(
                    "Ready",
                    "1 while a controller holds its lease and is registered.",
                    "none",
                    (f"gcore_ready{NODE}", "{{node}}"),
                    least=0,
                    most=1,
                ),
                line(
                    "Incarnations",
                    "Incarnations of the current process. Each one after the first follows a lost lease.",
                    "none",
                    (f"gcore_incarnations_total{NODE}", "{{node}}"),
                    least=0,
                ),
                line(
                    "Shards",
                    "Shards of the prompt stream assigned to each controller.",
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
                    "Applied",
                    "Successful transactions per second, by kind.",
                    "none",
                    (
                        f'sum by (kind) (rate(gcore_transactions_total{{result="won", node=~"$node"}}{RATE}))',
                        "{{kind}}",
                    ),
                    least=0,
                ),
                line(
                    "Not applied",
                    "Transactions per second. Stale: another controller was faster, which is normal. Unknown: the connection to the store broke.",
                    "none",
                    (
                        f'sum by (kind, result) (rate(gcore_transactions_total{{result!="won", node=~"$node"}}{RATE}))',
                        "{{kind}} {{result}}",
                    ),
                    least=0,
                ),
                line(
                    "Commits",
                    "Commit attempts per second, by result. Every controller that sees a trained step tries to commit it; one succeeds.",
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
                    "Store calls per second, by operation.",
                    "none",
                    (f"sum by (operation) (rate(gcore_store_call_seconds_count{NODE}{RATE}))", "{{operation}}"),
                    least=0,
                ),
                line(
                    "Latency",
                    "99th percentile of store calls, by operation.",
                    "s",
                    (
                        f"histogram_quantile(0.99, sum by (operation, le) (rate(gcore_store_call_seconds_bucket{NODE}{RATE})))",
                        "{{operation}}",
                    ),
                    least=0,
                ),
                line(
                    "Timeouts",
                    "Store calls per second without an answer in time, by operation.",
                    "none",
                    (f"sum by (operation) (rate(gcore_store_unavailable_total{NODE}{RATE}))", "{{operation}}"),
                    least=0,
                ),
            ],
        ),
        Row(
            "Content of the store",
            [
                line(
                    "Database",
                    "Size of each member's database file, and the part in use.",
                    "bytes",
                    ("max by (endpoint) (gcore_store_database_bytes)", "{{endpoint}} file"),
                    ("max by (endpoint) (gcore_store_in_use_bytes)", "{{endpoint}} in use"),
                    least=0,
                ),
                line(
                    "Bytes by job",
                    "Without history. Bounded by the spec, not by the number of steps.",
                    "bytes",
                    (of_job("gcore_store_job_bytes"), "{{job}}"),
                    least=0,
                ),
                line(
                    "Keys by job",
                    "Bounded by the job's spec, nodes and ranks.",
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
                    "Writes per second, by member.",
                    "none",
                    (f"rate(etcd_mvcc_put_total{RATE})", "{{instance}}"),
                    least=0,
                ),
                line(
                    "Disk",
                    "99th percentile of the fsync of the write-ahead log.",
                    "s",
                    (
                        f"histogram_quantile(0.99, sum by (instance, le) (rate(etcd_disk_wal_fsync_duration_seconds_bucket{RATE})))",
                        "{{instance}}",
                    ),
                    least=0,
                ),
                line(
                    "Database",
                    "Size of the database file, and the part in use.",
                    "bytes",
                    ("etcd_mvcc_db_total_size_in_bytes", "{{instance}} file"),
                    ("etcd_mvcc_db_total_size_in_use_in_bytes", "{{instance}} in use"),
                    least=0,
                ),
                line(
                    "Memory",
                    "Resident memory of each member.",
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
                    "API calls per second, by method and status.",
                    "none",
                    (f"sum by (method, code) (rate(gcore_api_calls_total{NODE}{RATE}))", "{{method}} {{code}}"),
                    least=0,
                ),
                line(
                    "Latency",
                    "99th percentile of unary API calls, by method.",
                    "s",
                    (
                        f"histogram_quantile(0.99, sum by (method, le) (rate(gcore_api_call_seconds_bucket{NODE}{RATE})))",
                        "{{method}}",
                    ),
                    least=0,
                ),
                line(
                    "Open streams",
                    "Open streams of events, logs and metrics, by method.",
                    "none",
                    (f"sum by (method) (gcore_api_open_streams{NODE})", "{{method}}"),
                    least=0,
                ),
            ],
        ),
    ],
)
