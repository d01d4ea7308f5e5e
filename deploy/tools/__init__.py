"""Makes the files of the repository that are derived from code: Grafana's dashboards and docs/reference/metrics.md.

`dashboard` holds what a dashboard consists of and its JSON; `fleet`, `job`, `placement`, `control` and `judges` hold one
dashboard each; `metrics_page` writes the page of all metrics. Run it as `python -m deploy.tools`. The alerts and recording
rules in `deploy/prometheus/rules` are written by hand; `python -m tools.lint deploy` checks them.
"""
