"""Generator of files derived from code: Grafana's dashboards and docs/reference/metrics.md.

`dashboard` defines the parts of a dashboard and their JSON. `fleet`, `job`, `placement`, `control` and `judges` define one
dashboard each. `metrics_page` writes the list of all metrics. Run it as `python -m deploy.tools`. The alerts and recording
rules in `deploy/prometheus/rules` are written by hand; `python -m tools.lint deploy` checks them.
"""
