"""Run jobs from Python on a cluster of this machine: `gcore.run` and `gcore.LocalCluster`.

```python
def score(response, fields):
    return float(response.strip() == fields["answer"])

run = gcore.run("grpo.yaml", reward=score)      # starts a cluster, runs the job, stops the cluster
run.metrics()                                   # a data frame if pandas is installed
run.plot()                                      # reward and held-out accuracy, with matplotlib
run.samples()                                   # prompts, responses and rewards of the newest step that is kept
```

The cluster is the one of `gcore up`, in processes of its own. A function is written to a file with what it needs
(`gcore.client.function_source`) and named in the spec as a plug-in file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gcore.client.client import Client
from gcore.client.function_source import function_source
from gcore.client.models import Job
from gcore.config.load import dump_explicit, load_spec, new_spec
from gcore.errors import GcoreError, JobFailed, UsageError, explain_os_errors
from gcore.ledger.records.job import METRICS_FILE
from gcore.observability.events import JobEvent
from gcore.observability.metrics_file import read_lines
from gcore.observability.samples import KeptGroup, kept_steps, read_groups
from gcore.plugins import file_digest
from gcore.system.files import replace_file

RewardFunction = Callable[..., Any]

PROGRAM = "from controllers.cli.main import main; main()"
"""The command line as a program of its own: this package imports nothing above it, and `gcore` on PATH may be gdb's."""

SHOWN = ("step", "eval", "state", "rollback", "warning")
"""Kinds of events that a run prints."""


class LocalCluster:
    """A cluster of this machine, in the folder `home`. Use it as a context manager: a cluster that it started stops at the end.

    A cluster that is up in `home` already is used and stays up.
    """

    def __init__(
        self, home: str | Path = ".gcore", *, controllers: int | None = None, slots: str | None = None
    ) -> None:
        """`controllers`: number of daemons; `slots`: as for `gcore up`, such as "cpu:2". Raises GcoreError if it cannot start."""
        self.home = Path(home).absolute()
        was_up = (self.home / "cluster.json").exists()
        options = [] if controllers is None else ["--controllers", str(controllers)]
        options += [] if slots is None else ["--slots", slots]
        self._command("up", *options)
        self._started = not was_up
        self.client = Client(home=self.home)
        """The client of the job API."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client and stop the cluster if this object started it. Jobs that have not ended go on at the next start."""
        self.client.close()
        if self._started:
            self._started = False
            self._command("down")

    def run(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        reward: RewardFunction | Sequence[RewardFunction] | None = None,
        set: Sequence[str] = (),
        new: bool = False,
        progress: bool = True,
    ) -> FinishedRun:
        """Submit a job, wait for its end and return it. `spec`: a file, or a mapping whose relative paths start at the working directory.

        `reward`: a function, or several that are added up, in place of the spec's reward. `set`: `section.field=value`, for a file. `progress`:
        print what happens. Raises JobFailed if the job fails, SpecError, UsageError.
        """
        return self._run(_spec_json(spec, set, reward, self.home), new=new, progress=progress)

    def _run(self, spec_json: str, *, new: bool, progress: bool) -> FinishedRun:
        job = self.client.submit(json.loads(spec_json), new=new)
        for event in self.client.events(job):
            if progress and event.kind in SHOWN:
                sys.stdout.write(f"{_line(event)}\n")
        ended = self.client.get(job.uid)
        if ended.state != "SUCCEEDED":
            raise JobFailed(f"job {ended.name!r} is {ended.state}: {ended.reason}", fix=f"See {ended.run_dir}/logs")
        return FinishedRun(ended, Path(ended.run_dir))

    def _command(self, *words: str) -> None:
        command = [sys.executable, "-c", PROGRAM, *words, "--home", str(self.home)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            what = re.sub(r"^gcore: ", "", said[-1]) if said else f"exit code {done.returncode}"
            raise GcoreError(f"`gcore {words[0]}` failed: {what}", where=str(self.home))


def run(
    spec: str | Path | Mapping[str, Any],
    *,
    reward: RewardFunction | Sequence[RewardFunction] | None = None,
    set: Sequence[str] = (),
    home: str | Path = ".gcore",
    new: bool = False,
    progress: bool = True,
) -> FinishedRun:
    """Start a cluster of this machine, run a job to its end and stop the cluster. Arguments and errors as in `LocalCluster.run`.

    The spec and the functions are checked before anything starts.
    """
    spec_json = _spec_json(spec, set, reward, Path(home).absolute())
    with LocalCluster(home) as cluster:
        return cluster._run(spec_json, new=new, progress=progress)


def _spec_json(
    spec: str | Path | Mapping[str, Any],
    set: Sequence[str],
    reward: RewardFunction | Sequence[RewardFunction] | None,
    home: Path,
) -> str:
    """The spec to submit. Functions are written to files in `home`. Raises SpecError, UsageError; then nothing was written."""
    if isinstance(spec, Mapping):
        if set:
            raise UsageError("`set` changes a spec file; change the mapping itself", fix="Leave `set` out")
        whole = new_spec(dict(spec), base=Path.cwd())
    else:
        whole = load_spec(Path(spec), set)
    tree = json.loads(dump_explicit(whole))
    if reward is not None:
        tree["reward"] = _reward_section(list(reward) if isinstance(reward, Sequence) else [reward], home)
    return json.dumps(tree)


def _reward_section(functions: Sequence[RewardFunction], home: Path) -> dict[str, Any]:
    if not functions:
        raise UsageError("`reward` is an empty list", fix="Pass at least one function, or leave it out")
    sources = [(function, function_source(function).encode()) for function in functions]
    names = [function.__name__ for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{names.count(twice)} reward functions are called {twice!r}", fix="Rename all but one")
    references = [_write_function(function.__name__, text, home) for function, text in sources]
    if len(references) == 1:
        return {"name": references[0]}
    return {"parts": [{"name": reference} for reference in references]}


def _write_function(name: str, text: bytes, home: Path) -> str:
    """Write the source of a function to a file in the home; the reference to it."""
    file = home / "functions" / f"{name}_{file_digest(text)[:8]}.py"
    with explain_os_errors("cannot write the function", where=file, fix="Choose another home"):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text, mode=0o600)
    return f"{file}:{name}"


@dataclass(frozen=True)
class FinishedRun:
    """A job that has succeeded, and the folder with its files. The cluster need not be up."""

    job: Job
    folder: Path

    def metrics(self) -> Any:
        """The numbers of each step: a pandas data frame indexed by step, or a list of mappings if pandas is not installed."""
        rows = [{"step": step, **values} for step, values in sorted(self._steps().items())]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()

    def evaluations(self) -> list[dict[str, float]]:
        """The evaluations on held-out prompts, by step."""
        found: dict[int, dict[str, float]] = {}
        for line in self._lines():
            if line["kind"] == "eval":
                found[line["step"]] = {"step": line["step"], **line["metrics"]}
        return [found[step] for step in sorted(found)]

    def samples(self, step: int | None = None) -> list[KeptGroup]:
        """The prompts, responses and rewards that were kept of a step; without `step`, of the newest one that was kept."""
        kept = [version for version in kept_steps(self.folder) if step is None or version.step == step]
        return read_groups(self.folder, max(kept)) if kept else []

    def plot(self) -> Any:
        """Reward by step and held-out accuracy; a matplotlib figure. Raises UsageError if matplotlib is not installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UsageError("matplotlib is not installed", fix="pip install matplotlib") from error
        figure = Figure(figsize=(8, 3), layout="constrained")
        axes = figure.subplots()
        steps = sorted(self._steps().items())
        axes.plot([step for step, _ in steps], [values.get("reward") for _, values in steps], label="reward")
        evaluations = [one for one in self.evaluations() if "accuracy" in one]
        if evaluations:
            axes.plot(
                [one["step"] for one in evaluations],
                [one["accuracy"] for one in evaluations],
                "o-",
                label="held-out accuracy",
            )
        axes.set_xlabel("step")
        axes.legend()
        return figure

    def _steps(self) -> dict[int, dict[str, float]]:
        """By step; a step that was discarded by a rollback counts no more."""
        steps: dict[int, dict[str, float]] = {}
        for line in self._lines():
            if line["kind"] == "step":
                steps[line["step"]] = line["metrics"]
            elif line["kind"] == "rollback":
                steps = {step: values for step, values in steps.items() if step <= line["step"]}
        return steps

    def _lines(self) -> Iterator[dict[str, Any]]:
        file = self.folder / METRICS_FILE
        with (
            explain_os_errors("cannot read the run's numbers", UsageError, where=file, fix="Restore the folder"),
            file.open("rb") as opened,
        ):
            yield from (line for line, _ in read_lines(opened, 0) if line is not None)


def _line(event: JobEvent) -> str:
    numbers = ", ".join(
        f"{name} {event.data[name]:.3f}" for name in ("reward", "accuracy") if isinstance(event.data.get(name), float)
    )
    return f"{event.kind}: {event.message}" + (f" ({numbers})" if numbers else "")
