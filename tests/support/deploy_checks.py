"""What checks the files of `deploy/` with other people's code, in an environment without gcore (`make test-deploy`).

python tests/support/deploy_checks.py helm CHART [RELEASE]    values as JSON on standard input; the manifests as JSON, or the refusal
python tests/support/deploy_checks.py lint CHART    what Helm's linter says, as JSON
python tests/support/deploy_checks.py kubernetes    manifests as JSON on standard input; what is wrong with them
python tests/support/deploy_checks.py compose FILE  what is wrong with it, or nothing
"""

from __future__ import annotations

import json
import sys
from typing import Any

import yaml

KUBERNETES = "1.33"
OTHERS = ("monitoring.coreos.com",)
"""Kinds of others, of which Kubernetes has no schema."""


def helm(chart: str, release: str = "gcore") -> None:
    """Print {"manifests": [...], "notes": "..."} or {"refused": "..."}."""
    from helm_python import Chart, HelmError

    values = json.load(sys.stdin)
    try:
        rendered = Chart.load(chart).render(values, name=release, namespace="rl")
    except HelmError as error:
        print(json.dumps({"refused": str(error)}))
        return
    notes = next(text for name, text in rendered.items() if name.endswith("NOTES.txt"))
    found = [
        one
        for name, text in sorted(rendered.items())
        if name.endswith(".yaml")
        for one in yaml.safe_load_all(text)
        if one is not None
    ]
    print(json.dumps({"manifests": found, "notes": notes}))


def lint(chart: str) -> None:
    """Print what Helm's linter says."""
    from helm_python import lint as linted

    print(json.dumps(linted(chart, {}, strict=True)))


def kubernetes() -> None:
    """Print a list of sentences."""
    import kubernetes_validate

    problems = []
    for manifest in json.load(sys.stdin):
        if manifest["apiVersion"].partition("/")[0] in OTHERS:
            continue
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{manifest['kind']} {manifest['metadata']['name']}: {error.message}")
    print(json.dumps(problems))


def compose(file: str) -> None:
    """Print the services, or raise."""
    from compose_spec import PyCompose

    with open(file, encoding="utf-8") as text:
        tree: Any = yaml.safe_load(text)
    tree = {key: value for key, value in tree.items() if not key.startswith("x-")}
    print(json.dumps(PyCompose.from_yaml(json.dumps(tree)).service_names()))


def main(what: str, *words: str) -> None:
    """One of them."""
    match what:
        case "helm":
            helm(*words)
        case "lint":
            lint(*words)
        case "kubernetes":
            kubernetes()
        case "compose":
            compose(*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
