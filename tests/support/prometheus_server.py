"""A real Prometheus for tests: it scrapes the given targets once a second and answers queries over HTTP.

It runs under the rules of `deploy/prometheus`, so every series of a dashboard or an alert exists.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
START_S = 60.0
Series = dict[tuple[tuple[str, str], ...], list[float]]


class PrometheusServer:
    """Use it as a context, in tests with the mark `needs("prometheus")`. `folder`: for its data; `scraped`: instead of what `scrape` names."""

    def __init__(self, folder: Path, scraped: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._folder = folder
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        scraped = scraped or [
            {"job_name": name, "honor_labels": name == "gcore", "file_sd_configs": [_files(folder, name)]}
            for name in ("gcore", "etcd")
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES / "*.yml")],
            "scrape_configs": scraped,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.began = time.time()
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self._address}", "--log.level=warn"]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> PrometheusServer:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5) as answer:
                    if answer.status == 200:
                        return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"Prometheus is not ready:\n{(self._folder / 'log').read_text()}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)

    def scrape(self, job: str, targets: Mapping[str, str]) -> None:
        """From now on these addresses, by the node's name."""
        tree = [{"targets": [address], "labels": {"node": node}} for node, address in targets.items()]
        new = self._folder / f"{job}.new"
        new.write_text(json.dumps(tree))
        new.rename(self._folder / f"{job}.json")

    def ask(self, expression: str) -> Series:
        """The value of an expression for every second since the start, without non-numbers."""
        asked = {"query": expression, "start": str(self.began), "end": str(time.time()), "step": "1"}
        found = self._get("query_range", asked)
        series: Series = {}
        for one in found["result"]:
            labels = tuple(sorted(one["metric"].items()))
            series[labels] = [float(value) for _, value in one["values"] if value not in ("NaN", "+Inf", "-Inf")]
        return series

    def _get(self, what: str, asked: Mapping[str, str]) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                tree = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{asked['query']}: {error.read().decode()}") from error
        return tree["data"]


def _files(folder: Path, name: str) -> dict[str, object]:
    return {"files": [str(folder / f"{name}.json")], "refresh_interval": "1s"}


def changes(series: Series) -> bool:
    """Whether there are data, and any of them changed."""
    return any(len(set(values)) > 1 for values in series.values())
