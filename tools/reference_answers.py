"""What commands print and which metrics there are, for `reference.py`: help texts, machine-readable answers, the metric list.

The programs are found by the console scripts of the project file; product code is otherwise reached through `tests/support`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT / "tests" / "support", ROOT):
    sys.path.insert(0, str(folder))

import click
import issued
import typer
import yaml
from api_in_thread import served
from played_script import played_script
from served_job import served_job
from typer.testing import CliRunner

from gcore.observability.metrics import Metrics
from tools.own_package import put_on_path

ENTRY_POINTS = put_on_path()
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
WIDTH = "100"
"""Columns of help texts."""
_VARYING: tuple[tuple[str, str], ...] = (
    (r"\b[0-9a-f]{12}\b(?<!0123456789ab)", "UID"),
    (r'(?<="id": ")[a-z0-9]{12}', "ID"),
    (r'(?<="begins": ")[^"]+|(?<="ends": ")[^"]+', "TIME"),
    (r"(?m)^(begins|ends|sha256) .*$", r"\1 VARIES"),
    (r"\d+h\d+m ago", "AGO"),
    (r"(?m)[ \t]+$", ""),
    (r'(?<="sha256": ")[0-9a-f]{64}', "DIGEST"),
    (r"127\.0\.0\.1:\d+|localhost:\d+", "ADDRESS"),
    (r"\bgcore_[A-Za-z0-9_-]{20,}|\b[a-z0-9]{12}_[A-Za-z0-9_-]{20,}", "SECRET"),
)
"""Patterns of what differs from run to run, and what stands for it."""
Tree = dict[str, Any]


def environment(folder: Path) -> dict[str, str]:
    """Of commands: nothing of the person who records."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GCORE_")}
    own = {"COLUMNS": WIDTH, "TERM": "dumb", "NO_COLOR": "1", "HOME": str(folder), "TZ": "UTC"}
    own |= {"GCORE_CONFIG": str(folder / "config.yaml"), "NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **own, "PYTHONPATH": f"{ENTRY_POINTS}{os.pathsep}{ROOT}"}


def call(script: str, words: Sequence[str], folder: Path) -> str:
    """Run a console script in a process of its own: what it prints, and how it ends."""
    module, _, function = SCRIPTS[script].partition(":")
    program = f"import sys; sys.argv[0] = {script!r}; from {module} import {function}; {function}()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True, text=True, env=environment(folder), cwd=folder, timeout=120, check=False,
    )  # fmt: skip
    return f"{done.stdout}{done.stderr}exit code {done.returncode}\n"


@functools.cache
def application() -> typer.Typer:
    """The typer application behind `gcore`."""
    module = import_module(SCRIPTS["gcore"].partition(":")[0])
    found = [one for one in vars(module).values() if isinstance(one, typer.Typer) and one.info.name == "gcore"]
    assert len(found) == 1, f"{module.__name__} holds {len(found)} applications that are called gcore"
    return found[0]


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command of `gcore` and every group, with the words that name it; hidden ones too."""

    def below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        yield words, command
        for name, one in getattr(command, "commands", {}).items():
            yield from below((*words, name), one)

    yield from below((), typer.main.get_command(application()))


def invoke(words: Sequence[str], folder: Path) -> str:
    """Run `gcore` in this process, which is quicker: its standard output, and how it ends. What is told on standard error while
    it goes on depends on how long that takes."""
    with contextlib.chdir(folder):
        result = CliRunner().invoke(application(), list(words), env=environment(folder), prog_name="gcore")
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        if not hasattr(error, "exit_code"):  # a defect: none of gcore's errors
            raise error
        return f"{result.stdout}{error}\nexit code {error.exit_code}\n"
    return f"{result.stdout}exit code {result.exit_code}\n"


def helps() -> Tree:
    """The help of every command of every console script."""
    with tempfile.TemporaryDirectory(prefix="gcore-reference-") as name:
        folder = Path(name)
        found: Tree = {script: call(script, ["--help"], folder) for script in SCRIPTS}
        for words, _ in commands():
            found[" ".join(("gcore", *words, "(in process)"))] = invoke((*words, "--help"), folder)
    return found


def metrics() -> Tree:
    """Every metric of the daemons' registry: type, labels, help."""
    found: Tree = {}
    for collector in list(Metrics().registry._collector_to_names):
        for family in collector.describe() if hasattr(collector, "describe") else collector.collect():
            found[family.name] = {
                "type": family.type,
                "labels": list(getattr(collector, "_labelnames", ())),
                "buckets": [str(bound) for bound in getattr(collector, "_upper_bounds", ())],
                "help": family.documentation,
            }
    return found


JSON = ("-o", "json")
RECORDED = (
    "list",
    "describe sums",
    "nodes --workers",
    "shards sums",
    "samples sums",
    "samples sums --step 5",
    "checkpoints sums",
    "audit sums",
    "top sums --once",
    "usage --since 2023-11-01 --by namespace --by job --by owner --by pool",
    "quota",
    "placement show sums",
    "placement explain sums",
    "placement history sums",
    "logs sums",
    "logs sums --role train",
    "whoami",
    "token list",
    "token create eve --role viewer --days 3",
    "drain node-0",
    "drain node-0 --undo",
    "update sums --priority 7",
    "eval sums",
    "placement pin sums --freeze",
    "quota research 4",
    "pause sums",
    "resume sums",
    "submit job.yaml --request-id nightly",
    "cancel second",
    "retry second",
    "cancel second",
    "describe nosuch",
)
"""Commands for the real API with a recorded job under way; the second job is that of the written spec."""
SHOWN = (
    "list", "describe sums", "nodes --workers", "shards sums", "samples sums", "checkpoints sums", "audit sums", "top sums --once",
    "usage --since 2023-11-01", "quota", "placement show sums", "placement explain sums", "placement history sums",
    "logs sums", "whoami", "token list", "trace sums --step 5 --to -",
)  # fmt: skip
"""The same as people read it; they change nothing."""
ENDED = (
    "list",
    "describe sums",
    "events sums",
    "events sums --kind step",
    "logs sums",
    "audit sums",
    "checkpoints sums",
)
LEFT = (
    "describe sums", "samples sums", "checkpoints sums", "audit sums", "top --once", "placement history sums",
    "placement explain sums", "logs sums", "events sums",
)  # fmt: skip
"""Commands for a run that ended, from its folder, with no cluster up."""
SCRIPTED = (
    "list", "describe sums", "events sums", "logs sums", "nodes --workers", "shards sums", "usage", "drain node-0",
    "pause sums", "resume sums", "cancel sums", "update sums --priority 7", "eval sums", "audit sums", "placement show sums",
)  # fmt: skip
LOCAL = (
    "validate job.yaml",
    "plan job.yaml --cluster cluster.yaml",
    "simulate scenario.yaml --cost 0",
    "simulate --run home/runs/sums-0123456789ab --slots 4",
    "certs show ca/n1",
    "context list",
)
MACHINE = (
    "up --home up --controllers 1 --slots cpu:1",
    "doctor --home up",
    "gc --home up --dry-run",
    "nodes --home up",
)
"""Commands whose answers are of this machine: only their form is recorded, but for the names of `NAMED`."""
NAMED = {"name", "check"}
"""Fields of which the text is recorded in a form."""


def answers() -> Tree:
    """What commands answer with `-o json`, and what they show people; fails if a command that has the option is called nowhere."""
    found: Tree = {}
    with tempfile.TemporaryDirectory(prefix="gcore-reference-") as name:
        folder = Path(name)
        write_local(folder)

        def ask(about: str, lines: Sequence[str], more: Sequence[str], keep: Callable[[str], Any]) -> None:
            for number, line in enumerate(lines):
                text = invoke((*line.split(), *more), folder)
                found[f"{about} {number:02d}: gcore {line}"] = keep(text)

        steady = functools.partial(without_varying, folder=folder)
        with served_job(folder) as job:
            at = ("--address", job.address)
            ask("shown", SHOWN, at, steady)
            ask("recorded", RECORDED, (*at, *JSON), steady)
            job.end()
            ask("ended", ENDED, (*at, *JSON), steady)
        ask("left", LEFT, ("--home", str(folder / "home"), *JSON), steady)
        with served(played_script()) as (server,):
            ask("scripted", SCRIPTED, ("--address", server.address, *JSON), steady)
        contexts = {"current": "lab", "contexts": {"lab": {"addresses": ["127.0.0.1:7700"]}}}
        (folder / "config.yaml").write_text(yaml.safe_dump(contexts))
        ask("local", LOCAL, JSON, steady)
        ask("local, shown", (*LOCAL, "schema"), (), steady)
        try:
            ask("machine", MACHINE, JSON, form_of)
        finally:
            invoke(("down", "--home", "up"), folder)
    called = {tuple(name.partition("gcore ")[2].split()[:2]) for name in found}
    lacking = [
        " ".join(words)
        for words, command in commands()
        if any("-o" in one.opts for one in command.params) and not any(words == one[: len(words)] for one in called)
    ]
    assert not lacking, f"no answer of {', '.join(lacking)} is recorded: add a call"
    return found


def write_local(folder: Path) -> None:
    """What local commands read: a spec with model and data, a cluster, a scenario, certificates."""
    from gcore.testing.models import make_tiny_model

    make_tiny_model(folder / "model", seed=1)
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(9) for b in range(9)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    spec = {
        "name": "second",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 8},
        "train": {"copies_gb": 0},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    (folder / "cluster.yaml").write_text((ROOT / "deploy" / "local" / "clusters" / "two-cores.yaml").read_text())
    scenario = {
        "name": "small", "what": "a small job", "slots": 5, "steps": 4, "groups": 4, "samples": 4,
        "lengths": {"mean": 120}, "training": {"sizes": [1, 2]},
    }  # fmt: skip
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    issued.node(issued.authority(folder / "ca"), "n1")


def without_varying(text: str, folder: Path) -> str:
    """The answer without what differs from run to run: the folder, times of the recording, drawn names, addresses."""
    text = text.replace(str(folder), "FOLDER")
    for pattern, word in _VARYING:
        text = re.sub(pattern, word, text)
    return text


def form_of(text: str) -> Any:
    """Of a JSON answer: fields, and of each value only its type, but for what names a thing; of anything else the text."""
    body, _, code = text.rpartition("exit code ")
    try:
        return {"exit code": code.strip(), "form": _form(json.loads(body))}
    except ValueError:
        return text


def _form(tree: Any, name: str = "") -> Any:
    if isinstance(tree, dict):
        return {key: _form(value, key) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_form(one) for one in tree]
    return tree if name in NAMED or isinstance(tree, bool) else type(tree).__name__
