"""Check the files of `deploy/` that no program reads before they are used: dashboards, alerts, images, Compose, the chart.

Dashboards equal the output of their description; each panel has a unit, a sentence and queries of existing metrics. Each
alert names existing metrics, fires in one of its tests, is silent in another, and has a runbook. Every path that images copy and
services mount exists, and every version is pinned. Tests cover the checks that need a program (promtool, Helm).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import gcore
from deploy.tools.files import dashboards, outdated
from tools.monitoring import dashboard_files, panels, rule_files, rules, rules_of, unknown_metrics
from tools.problem import Problem, line_of, main, relative

GRAFANA = "deploy/grafana"
RULE_TESTS = "deploy/prometheus/tests"
RUNBOOKS = "docs/operate/runbooks"
DOCKERFILE = "deploy/docker/Dockerfile"
IGNORED = "deploy/docker/Dockerfile.dockerignore"
COMPOSE = "deploy/compose/compose.yaml"
CHART = "deploy/helm/gcore/Chart.yaml"
VALUES = "deploy/helm/gcore/values.yaml"
UNITS = {"none", "s", "bytes", "percentunit"}
SEVERITIES = ("critical", "warning", "info")
FOREIGN = re.compile(r"\b(?:etcd|process)_\w+|\bup\b")
"""Metrics of other programs that expressions may name."""
USER = "10001:10001"
SECONDS = re.compile(r"histogram_quantile.*_seconds_bucket|gcore_step_\w*seconds\{|gcore_move_\w*seconds")


def check(root: Path) -> Iterator[Problem]:
    yield from dashboards_are_made(root)
    for file in dashboard_files(root):
        yield from dashboard_is_readable(file, root)
    yield from provisioning_fits(root)
    for file in rule_files(root):
        for rule in rules_of(file):
            yield from rule_is_right(rule, file, root)
    yield from alerts_are_tested(root)
    yield from runbooks_are_complete(root)
    yield from images_are_right(root)
    yield from compose_fits(root)
    yield from versions_are_pinned(root)


def dashboards_are_made(root: Path) -> Iterator[Problem]:
    made = dashboards()
    committed = {relative(file, root) for file in dashboard_files(root)}
    for path in sorted({*outdated(made, root), *(committed - made.keys())}):
        message = "the dashboard is not what its description makes: run python -m deploy.tools and commit the result"
        yield Problem(path, 1, message)


def dashboard_is_readable(file: Path, root: Path) -> Iterator[Problem]:
    path, text = relative(file, root), file.read_text()
    tree: dict[str, Any] = json.loads(text)
    known = {variable["name"] for variable in tree["templating"]["list"]}
    expressions = " ".join(target["expr"] for panel in panels(tree) for target in panel["targets"])
    used = set(re.findall(r"\$(\w+)", expressions)) - {"__rate_interval"} | {"source"}
    if used != known:
        message = f"the queries use the variables {sorted(used)}, the dashboard has {sorted(known)}: make them the same"
        yield Problem(path, 1, message)
    if not tree["description"].endswith("?"):
        yield Problem(path, 1, "the description is no question: write the question that the dashboard answers")
    if tree["uid"] != f"gcore-{file.stem}":
        yield Problem(path, 1, f"the uid is {tree['uid']}: make it gcore-{file.stem}")
    for panel in panels(tree):
        line = line_of(text, json.dumps(panel["title"]))
        for message in wrong_panel(panel, root):
            yield Problem(path, line, f"panel {panel['title']!r}: {message}")
    yield from _places(tree, path, text)


def wrong_panel(panel: dict[str, Any], root: Path) -> Iterator[str]:
    if not re.fullmatch(r".{10,}\.", panel["description"]):
        yield "the description is no sentence: say how to read the panel"
    unit = panel["fieldConfig"]["defaults"]["unit"]
    names = " ".join(target["expr"] for target in panel["targets"])
    if unit not in UNITS:
        yield f"the unit {unit!r} is none of {', '.join(sorted(UNITS))}: use one"
    if "_bytes" in names and unit != "bytes":
        yield f"the unit is {unit!r}, the metric is in bytes: use bytes"
    if SECONDS.search(names) and unit != "s":
        yield f"the unit is {unit!r}, the metric is in seconds: use s"
    legends = [target["legendFormat"] for target in panel["targets"]]
    if len(set(legends)) < len(legends):
        yield f"two queries have one legend ({', '.join(legends)}): give each its own"
    for target in panel["targets"]:
        yield from wrong_expression(target["expr"], root)


def wrong_expression(expression: str, root: Path) -> Iterator[str]:
    if "gcore_" not in expression and not FOREIGN.search(expression):
        yield f"{expression} names no metric of gcore, etcd or the process: name one"
    if unknown := unknown_metrics(expression, root):
        yield f"{expression} names {', '.join(sorted(unknown))}, which no metric or recording rule is called: correct it"


def _places(tree: dict[str, Any], path: str, text: str) -> Iterator[Problem]:
    taken: set[tuple[int, int]] = set()
    for panel in tree["panels"]:
        place = panel["gridPos"]
        rows, columns = range(place["y"], place["y"] + place["h"]), range(place["x"], place["x"] + place["w"])
        cells = {(row, column) for row in rows for column in columns}
        if cells & taken or place["x"] + place["w"] > 24:
            message = f"panel {panel['title']!r} overlaps another or leaves the 24 columns: move it"
            yield Problem(path, line_of(text, json.dumps(panel["title"])), message)
        taken |= cells


def provisioning_fits(root: Path) -> Iterator[Problem]:
    path = f"{GRAFANA}/provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load((root / path).read_text())["datasources"]
    if (source["type"], source["uid"]) != ("prometheus", "gcore"):
        yield Problem(path, 1, f"the data source is {source['type']} {source['uid']}: make it prometheus gcore")
    for file in dashboard_files(root):
        variables = json.loads(file.read_text())["templating"]["list"]
        named = [one["current"]["value"] for one in variables if one["name"] == "source"]
        if named != [source["uid"]]:
            message = f"the dashboard reads the data source {named}: make it {source['uid']}, which is provisioned"
            yield Problem(relative(file, root), 1, message)
    path = f"{GRAFANA}/provisioning/dashboards/gcore.yml"
    (provider,) = yaml.safe_load((root / path).read_text())["providers"]
    if provider["type"] != "file":
        yield Problem(path, 1, f"the provider's type is {provider['type']}: make it file")


def rule_is_right(rule: dict[str, Any], file: Path, root: Path) -> Iterator[Problem]:
    text = file.read_text()
    name = rule.get("alert") or rule["record"]
    path, line = relative(file, root), line_of(text, f": {name}\n")
    for message in wrong_expression(rule["expr"], root):
        yield Problem(path, line, f"{name}: {message}")
    if "alert" in rule:
        slug = slug_of(name)
        if rule["annotations"].get("runbook") != f"{RUNBOOKS}/{slug}.md":
            yield Problem(path, line, f"{name}: the runbook is not {RUNBOOKS}/{slug}.md: name it so")
        if rule["labels"].get("severity") not in SEVERITIES:
            yield Problem(path, line, f"{name}: the severity is none of {', '.join(SEVERITIES)}: use one")
        if not rule["annotations"].get("summary", "").endswith("."):
            yield Problem(path, line, f"{name}: the summary is no sentence: write one")
        yield from runbook_is_right(name, slug, rule, root)


def slug_of(alert: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", alert).lower()


def runbook_is_right(name: str, slug: str, rule: dict[str, Any], root: Path) -> Iterator[Problem]:
    path, severity = f"{RUNBOOKS}/{slug}.md", rule["labels"].get("severity", "")
    if not (root / path).exists():
        yield Problem(path, 1, f"the alert {name} has no runbook: write it")
        return
    page = (root / path).read_text()
    if not page.startswith(f"# {name}\n\n**{severity.capitalize()}.** "):
        yield Problem(path, 1, f"it does not begin with '# {name}' and '**{severity.capitalize()}.**': write both")
    if f"```promql\n{rule['expr']}\n```" not in page:
        yield Problem(path, line_of(page, "```promql"), "it shows another expression than the rule: copy the rule's")
    for heading in ("\n## Look at\n", "\n## Do\n\n1. "):
        if heading not in page:
            yield Problem(path, 1, f"it has no '{heading.split(chr(10))[1]}' with its list: write it")
    if f"]({slug}.md) | {severity} |" not in (root / RUNBOOKS / "index.md").read_text():
        yield Problem(f"{RUNBOOKS}/index.md", 1, f"it does not list {slug}.md with the severity {severity}: add it")


def runbooks_are_complete(root: Path) -> Iterator[Problem]:
    slugs = {f"{slug_of(rule['alert'])}.md" for rule in rules("alert", root)}
    for page in sorted((root / RUNBOOKS).glob("*.md")):
        if page.name not in slugs | {"index.md"}:
            yield Problem(relative(page, root), 1, "there is no such alert any more: delete the page")


def alerts_are_tested(root: Path) -> Iterator[Problem]:
    """Each alert fires in one test and is silent on the same metrics in another."""
    files = sorted((root / RULE_TESTS).glob("*.yml"))
    cases = [case for file in files for case in yaml.safe_load(file.read_text())["tests"]]
    for rule in rules("alert", root):
        fires, silent = set[str](), set[str]()
        for case in cases:
            given = {re.split(r"[{\s]", series["series"])[0] for series in case["input_series"]}
            for one in case.get("alert_rule_test", ()):
                if one["alertname"] == rule["alert"]:
                    (fires if one["exp_alerts"] else silent).update(given)
        if not fires or fires != silent:
            message = f"{rule['alert']} fires in tests on {sorted(fires)} and is silent on {sorted(silent)}: test both"
            yield Problem(f"{RULE_TESTS}/alerts.yml", 1, message)
    text = (root / RULE_TESTS / "alerts.yml").read_text()
    for case in yaml.safe_load(text)["tests"]:
        for series in case["input_series"]:
            name = series["series"].partition("{")[0]
            if ":" in name:
                message = f"an alert is tested on {name}, which is recorded: give what is scraped"
                yield Problem(f"{RULE_TESTS}/alerts.yml", line_of(text, series["series"]), message)


def images_are_right(root: Path) -> Iterator[Problem]:
    text = (root / DOCKERFILE).read_text()
    ignored = (root / IGNORED).read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    lines = re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    copied = {source for line in lines for source in line.split()[:-1]}
    if ignored[1:2] != ["*"]:
        yield Problem(IGNORED, 2, "it does not begin with *: ignore everything but what is copied")
    for source in sorted(copied):
        if not (root / source).exists():
            yield Problem(DOCKERFILE, line_of(text, source), f"{source} is copied and is not there: correct it")
    for source in sorted(copied ^ sent):
        yield Problem(IGNORED, 1, f"{source} is copied or sent to the builder, not both: make them the same")
    for install in re.findall(r"pip install ([^\n\\]+)", text):
        if "-c constraints" not in install and "${SGLANG}" not in install:
            yield Problem(DOCKERFILE, line_of(text, install), f"pip install {install} is not pinned: use constraints")
    if not re.search(r"^ARG SGLANG=sglang==\d", text, re.MULTILINE):
        yield Problem(DOCKERFILE, line_of(text, "ARG SGLANG"), "SGLang is not pinned: name its version")
    for base in re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.MULTILINE):
        if not re.search(r":\d+\.\d+\.\d+-", base):
            yield Problem(DOCKERFILE, line_of(text, base), f"the base {base} names no version: name it")
    for target in ("cpu", "cuda"):
        stage = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL)
        body, line = (stage[1], line_of(text, stage[0])) if stage else ("", 1)
        if re.findall(r"^USER (\S+)$", body, re.MULTILINE) != [USER]:
            yield Problem(DOCKERFILE, line, f"the image {target} does not end as user {USER}: set it once")
        if "HEALTHCHECK" not in body or 'ENTRYPOINT ["tini", "--", "/opt/gcore/node/run.sh"]' not in body:
            yield Problem(
                DOCKERFILE, line, f"the image {target} has no probe or does not start run.sh by tini: add both"
            )


def compose_fits(root: Path) -> Iterator[Problem]:
    """Mounted paths of services exist. Ports are bound to loopback only. Grafana and Prometheus find their files."""
    text = (root / COMPOSE).read_text()
    tree: dict[str, Any] = yaml.safe_load(text)
    services = tree["services"]
    for name, service in services.items():
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            there = (root / COMPOSE).parent.joinpath(source).exists() if source[0] == "." else source in tree["volumes"]
            if not there:
                yield Problem(COMPOSE, line_of(text, mount), f"{name} mounts {source}, which is not there: correct it")
        for port in service.get("ports", ()):
            if not str(port).startswith("127.0.0.1:"):
                yield Problem(COMPOSE, line_of(text, str(port)), f"{name} opens {port} to all: bind it to 127.0.0.1")
    grafana, prometheus = services["grafana"], services["prometheus"]
    line = line_of(text, "  grafana:\n")
    (provider,) = yaml.safe_load((root / GRAFANA / "provisioning/dashboards/gcore.yml").read_text())["providers"]
    if provider["options"]["path"] not in {mount.split(":")[1] for mount in grafana["volumes"]}:
        yield Problem(COMPOSE, line, f"nothing is mounted at {provider['options']['path']}: mount the dashboards there")
    (source,) = yaml.safe_load((root / GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    url = grafana["environment"].get(source["url"].strip("${}"), "")
    if url.removeprefix("http://").partition(":")[0] not in services:
        yield Problem(COMPOSE, line, f"Grafana's {source['url']} is {url!r}: name a service")
    scraping_path = "deploy/compose/prometheus.yml"
    scraping = yaml.safe_load((root / scraping_path).read_text())
    mounts = {mount.split(":")[1] for mount in prometheus["volumes"]}
    for pattern in scraping["rule_files"]:
        if str(Path(pattern).parent) not in mounts:
            yield Problem(scraping_path, 1, f"nothing is mounted at {Path(pattern).parent}: mount the rules there")
    configs = [one for scrape in scraping["scrape_configs"] for one in scrape["static_configs"]]
    hosts = sorted(target.partition(":")[0] for one in configs for target in one["targets"])
    scraped = sorted(name for name in services if name.startswith(("etcd-", "node-")))
    if hosts != scraped:
        yield Problem(scraping_path, 1, f"it scrapes {hosts}, the services are {scraped}: scrape each once")


def versions_are_pinned(root: Path) -> Iterator[Problem]:
    text = (root / COMPOSE).read_text()
    images = {service["image"]: COMPOSE for service in yaml.safe_load(text)["services"].values()}
    etcd = yaml.safe_load((root / VALUES).read_text())["etcd"]["image"]
    images.setdefault(f"{etcd['repository']}:{etcd['tag']}", VALUES)
    for image, path in images.items():
        if image != "gcore:cpu" and not re.search(r":v?\d+\.\d+\.\d+$", image):
            line = line_of((root / path).read_text(), image if path == COMPOSE else "tag:")
            yield Problem(path, line, f"the image {image} names no version: name it")
    if len(names := sorted(image for image in images if "etcd" in image)) != 1:
        yield Problem(
            VALUES, 1, f"Compose and the chart run different versions of etcd ({', '.join(names)}): choose one"
        )
    chart = yaml.safe_load((root / CHART).read_text())
    if chart["appVersion"] != gcore.__version__:
        text = (root / CHART).read_text()
        message = f"appVersion is {chart['appVersion']}, gcore's version is {gcore.__version__}: make it the same"
        yield Problem(CHART, line_of(text, "appVersion"), message)


if __name__ == "__main__":
    sys.exit(main({"deploy": check}, __doc__))
