"""How the panels' queries select: by the dashboard's variables, and over the window that Grafana takes for the resolution."""

from __future__ import annotations

RATE = "[$__rate_interval]"
OF_JOB = '{job=~"$job"}'
NODE = '{node=~"$node"}'


def of_job(metric: str) -> str:
    """What every controller tells of a job is the same, or about to be: the greatest is the newest."""
    return f"max by (job) ({metric}{OF_JOB})"
