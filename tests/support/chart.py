"""Helm's rendering of the chart, and third-party checks of `deploy/`, in a separate environment (`make test-deploy`) that
GCORE_DEPLOY_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "gcore"
CHECKS = ROOT / "tests" / "support" / "deploy_checks.py"
Manifest = dict[str, Any]


def checks(*words: str, given: object = None) -> Any:
    """What another package says."""
    python = os.environ.get("GCORE_DEPLOY_PYTHON", str(ROOT / ".venv-deploy" / "bin" / "python"))
    text = None if given is None else json.dumps(given)
    done = subprocess.run([python, str(CHECKS), *words], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rendered(values: Manifest, release: str = "gcore") -> list[Manifest]:
    """The manifests."""
    found = checks("helm", str(CHART), release, given=values)
    assert "refused" not in found, found
    return list(found["manifests"])


def one(manifests: list[Manifest], kind: str, name: str = "gcore") -> Manifest:
    """The only one of that kind and name."""
    (found,) = (m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


def container(manifest: Manifest, name: str) -> Manifest:
    """One of a workload's pod, whichever kind it is of."""
    pod = manifest["spec"]["template"]["spec"]
    (found,) = (c for c in (*pod["initContainers"], *pod["containers"]) if c["name"] == name)
    return dict(found)
