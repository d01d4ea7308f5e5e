"""Run jobs from Python on a cluster on this machine: `gcore.run` and `gcore.LocalCluster`.

```python
def score(response, fields):
    return float(response.strip() == fields["answer"])

run = gcore.run("grpo.yaml", reward=score)      # starts a cluster, runs the job, stops the cluster
run.metrics()                                   # a data frame if pandas is installed
run.plot()                                      # reward and held-out accuracy, with matplotlib
run.samples()                                   # prompts, responses and rewards of the newest step that is kept
run.export("trained")                           # the model, for `from_pretrained`
```

The cluster is the same as that of `gcore up`: etcd and daemons in separate processes. A reward function is written to a
file with everything that it needs (`gcore.client.function_source`), and the spec names this file as a plug-in.
`gcore.run` checks the function, the spec and its files before it starts anything.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

from gcore.client.client import Client
from gcore.client.function_source import check_is_function, function_name, function_source
from gcore.client.models import Job, Listing, html_table
from gcore.config.load import YamlNotPlain, apply_overrides, dump_explicit, load_spec, new_spec, read_plain
from gcore.config.local_cluster import LocalClusterState, local_home
from gcore.errors import GcoreError, JobFailed, SpecError, UsageError, explain_os_errors
from gcore.ledger.records.job import METRICS_FILE
from gcore.observability.events import JobEvent
from gcore.observability.metrics_file import read_lines
from gcore.observability.samples import find_kept, find_picture, kept_steps, read_groups
from gcore.plugins import file_digest
from gcore.reward.api import REWARDS, is_batch_reward
from gcore.system.files import replace_file

RewardFunction = Callable[..., Any]
Spec = str | Path | Mapping[str, Any]

PROGRAM = "from controllers.cli.main import main; main()"
"""Program text of the command line, for a subprocess: this package must not import `controllers`, and `gcore` on PATH
may be gdb's."""

SHOWN = ("step", "eval", "state", "rollback", "warning", "fault")
"""Kinds of events that a run prints."""

FIRST_STEP_LINES = 10
MOST_STEP_LINES = 50
"""A run prints the first `FIRST_STEP_LINES` steps, and of the others only every n-th, so that about `MOST_STEP_LINES`
are printed."""

NAMES_A_REWARD = ("name", "judge", "parts", "compose", "options")
"""Fields of the spec's section `reward` that must be absent if reward functions are passed."""


class LocalCluster:
    """A cluster on this machine, in the folder `home`. Use it as a context manager.

    If a cluster is already running in `home`, it is used and keeps running. Otherwise this object starts one, and stops
    it in `close`, at the end of the `with` block, or when Python exits.
    """

    def __init__(
        self, home: str | Path | None = None, *, controllers: int | None = None, slots: str | None = None
    ) -> None:
        """`controllers`: number of daemons; `slots`: as for `gcore up`, such as "cpu:2". Raises GcoreError if it cannot start."""
        self.home = _home(home)
        before = _running(self.home)
        options = [] if controllers is None else ["--controllers", str(controllers)]
        options += [] if slots is None else ["--slots", slots]
        try:
            _command(self.home, "up", *options)
            self._started = before is None or before != _running(self.home)
            self.client = Client(home=self.home)
            """The client for all other requests to the cluster."""
        except BaseException:
            if before is None and _running(self.home) is not None:
                _command(self.home, "down")
            raise
        self._is_open = True
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gcore.LocalCluster in {self.home}{'' if self._is_open else ', closed'}>"

    def close(self) -> None:
        """Close the client, and stop the cluster if this object started it. Unfinished jobs continue when it is started
        again."""
        self._is_open = False
        atexit.unregister(self.close)
        self.client.close()
        if self._started:
            self._started = False
            _command(self.home, "down")

    def submit(
        self,
        spec: Spec,
        *,
        reward: RewardFunction | Sequence[RewardFunction] | None = None,
        set: Sequence[str] = (),
        new: bool = False,
    ) -> LocalRun:
        """Submit a job and return it immediately; its method `wait` waits for its end. Arguments and errors as in
        `run`."""
        return self._submit(_prepare(spec, set, reward), new)

    def run(
        self,
        spec: Spec,
        *,
        reward: RewardFunction | Sequence[RewardFunction] | None = None,
        set: Sequence[str] = (),
        new: bool = False,
        progress: bool = True,
    ) -> LocalRun:
        """Submit a job, wait for its end and return it.

        `spec`: a file, a mapping, or YAML text; relative paths in a mapping or text start at the working directory.
        `reward`: a function, or several that are added up; the spec then names no reward. It takes the response, or the
        response and the fields, or also the `RewardSpec`. `set`: changes `section.field=value`. `new`: create a new job
        instead of continuing an interrupted one. `progress`: print the job's events. Raises JobFailed if the job fails
        or is cancelled, SpecError, UsageError.
        """
        return self.submit(spec, reward=reward, set=set, new=new).wait(progress=progress)

    def _submit(self, prepared: _Prepared, new: bool) -> LocalRun:
        tree = prepared.write_functions(self.home / "functions")
        job = self.client.submit(tree, new=new)
        return LocalRun(job, self)

    def _job(self, job: Job) -> Job:
        """Fetch the job's present state; return `job` itself if it has ended or the client is closed."""
        return self.client.get(job.uid) if self._is_open and not job.has_ended else job


def run(
    spec: Spec,
    *,
    reward: RewardFunction | Sequence[RewardFunction] | None = None,
    set: Sequence[str] = (),
    home: str | Path | None = None,
    new: bool = False,
    progress: bool = True,
) -> LocalRun:
    """Start a cluster on this machine, run a job until it ends and stop the cluster. Arguments and errors as in
    `LocalCluster.run`.

    The function, the spec and the files that it names are checked before anything starts. An interruption stops the
    cluster; the same call then continues the job. A cluster that was already running in `home` is used and keeps
    running.
    """
    prepared = _prepare(spec, set, reward)
    prepared.check(_home(home))
    with LocalCluster(home) as cluster:
        try:
            return cluster._submit(prepared, new).wait(progress=progress)
        except KeyboardInterrupt:
            left = "Stopping the cluster" if cluster._started else "The cluster was up before and stays up"
            _print(f"interrupted. {left}; the same call continues the job from its newest checkpoint.")
            raise


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """A response that a step was trained on and that was stored as a sample.

    `step`: that step. `answer`: the expected answer, or empty. `parts`: parts of the reward by name. `tokens`: length
    of the response in tokens. `finish_reason`: why it ended, such as "stop" or "length". Long texts are cut off at
    `samples.characters` of the spec. `picture`: file of the picture that the policy generated in place of a text; None if
    there is none, or if it was deleted.
    """

    step: int
    prompt: str
    response: str
    reward: float
    answer: str
    parts: Mapping[str, float]
    tokens: int
    finish_reason: str
    source: str
    picture: Path | None = None


class StepRows(list[dict[str, float]]):
    """The numbers of each step. It prints as the number of steps and some names, because a step has some forty numbers."""

    def __repr__(self) -> str:
        return f"<{len(self)} steps: {', '.join(list(self[-1])[:6])}, ...>" if self else "[]"


class LocalRun:
    """A job of a local cluster, and the files in its run folder. Files can be read while the job runs, and later also
    without the cluster."""

    def __init__(self, job: Job, cluster: LocalCluster) -> None:
        self._job = job
        self._cluster = cluster
        self.folder = Path(job.run_dir)
        """The run folder: metrics, samples, checkpoints, logs."""

    @property
    def job(self) -> Job:
        """The job's present state; after the cluster was closed, the last known one."""
        self._job = self._cluster._job(self._job)
        return self._job

    def wait(self, *, progress: bool = True) -> LocalRun:
        """Wait until the job has ended, and return this object if it succeeded. `progress`: print the job's events, one
        per line.

        Raises JobFailed if the job fails or is cancelled. An interruption ends the wait, not the job.
        """
        every = max(1, -(-self._job.steps // MOST_STEP_LINES))
        with contextlib.closing(self._cluster.client.events(self._job)) as events:
            for event in events:
                if progress and event.kind in SHOWN and not (event.kind == "step" and self._is_skipped(event, every)):
                    _print(_line(event))
        if self.job.state != "SUCCEEDED":
            raise JobFailed(
                f"job {self._job.name!r} is {self._job.state}: {self._job.reason}", fix=f"See {self.folder}/logs"
            )
        return self

    def metrics(self) -> Any:
        """The metrics of each committed step: a pandas data frame with the index `step` and one column per metric;
        without pandas a list of dicts.

        Columns and units: docs/use/reading-a-run.md; seconds end in `_s`. Empty before the first step. Raises
        UsageError if the file cannot be read.
        """
        rows = StepRows({"step": step, **values} for step, values in sorted(self._steps().items()))
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    def evaluations(self) -> list[dict[str, float]]:
        """The evaluations on held-out prompts, ascending by step. Each has `step`, `accuracy` (0 to 1), mean `reward`
        and other metrics."""
        found: dict[int, dict[str, float]] = {}
        for line in self._lines():
            if line["kind"] == "eval":
                found[line["step"]] = {"step": line["step"], **line["metrics"]}
        return [found[step] for step in sorted(found)]

    def samples(self, step: int | None = None) -> Listing[ScoredResponse]:
        """The stored responses of a step; without `step`, of the newest step that has some. Empty if no step has stored
        responses yet.

        Raises UsageError if `step` has none; the message lists the steps that have some.
        """
        with explain_os_errors("cannot read the samples", UsageError, where=self.folder, fix="Restore the folder"):
            kept = kept_steps(self.folder)
            if step is None and not kept:
                return Listing()
            version = find_kept(kept, step)
            groups = read_groups(self.folder, version)
        return Listing(
            ScoredResponse(
                version.step, group.prompt.text, sample.response.text, sample.reward, group.answer, dict(sample.parts),
                sample.tokens, str(sample.finish_reason), group.source,
                None if sample.picture is None else find_picture(self.folder, version, sample.picture.sha256),
            )
            for group in groups
            for sample in group.samples
        )  # fmt: skip

    def plot(self) -> Any:
        """Plot training reward and held-out accuracy by step, as a matplotlib figure that a notebook displays.

        Raises UsageError if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UsageError("matplotlib is not installed", fix="pip install matplotlib") from error

        class DisplayedFigure(Figure):  # type: ignore[misc, unused-ignore]
            """A figure that a notebook displays even if pyplot was not imported."""

            def _repr_png_(self) -> bytes:
                image = io.BytesIO()
                self.savefig(image, format="png")
                return image.getvalue()

        figure = DisplayedFigure(figsize=(8, 3), layout="constrained")
        axes: Any = figure.subplots()
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

    def export(self, to: str | Path, *, step: int | None = None, best: bool = False) -> Path:
        """Copy the model of a checkpoint into the new folder `to`, for `from_pretrained`, and return its absolute path.

        `step`: the checkpoint of this step. `best`: the best one by evaluation. Default: the newest one. Raises
        UsageError if there is no such checkpoint or the folder exists.
        """
        options = (["--best"] if best else []) + ([] if step is None else ["--step", str(step)])
        target = Path(to).expanduser().absolute()
        _command(self._cluster.home, "export", self._job.uid, "--to", str(target), *options)
        return target

    def __repr__(self) -> str:
        job = self._known_job()
        return f"<run {job.name!r} ({job.uid}): {job.state}, step {job.step} of {job.steps}, in {self.folder}>"

    def _repr_html_(self) -> str:
        job = self._known_job()
        rows = {
            "run": f"{job.name} ({job.uid})",
            "state": f"{job.state}: {job.reason}" if job.reason else job.state,
            "step": f"{job.step} of {job.steps}",
            "folder": str(self.folder),
        }
        with contextlib.suppress(GcoreError):
            steps = self._steps()
            if steps and "reward" in (newest := steps[max(steps)]):
                rows["reward"] = f"{newest['reward']:.3f}"
            rows["held-out accuracy"] = ", ".join(
                f"{one['accuracy']:.1%} at step {one['step']}" for one in self.evaluations() if "accuracy" in one
            )
        return html_table(("", ""), [(name, value) for name, value in rows.items() if value])

    def _is_skipped(self, event: JobEvent, every: int) -> bool:
        """Whether a step is not printed: neither among the first ones, nor the last, nor a multiple of `every`."""
        step = event.data.get("step")
        return isinstance(step, int) and step > FIRST_STEP_LINES and step % every != 0 and step != self._job.steps

    def _known_job(self) -> Job:
        """The job's present state; if no daemon answers, the last known one instead of an error."""
        try:
            return self.job
        except GcoreError:
            return self._job

    def _steps(self) -> dict[int, dict[str, float]]:
        """The metrics of each step, by step, without steps that a rollback discarded."""
        steps: dict[int, dict[str, float]] = {}
        for line in self._lines():
            if line["kind"] == "step":
                steps[line["step"]] = line["metrics"]
            elif line["kind"] == "rollback":
                steps = {step: values for step, values in steps.items() if step <= line["step"]}
        return steps

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the run's `metrics.jsonl`. Raises UsageError if it cannot be read."""
        file = self.folder / METRICS_FILE
        with (
            contextlib.suppress(FileNotFoundError),  # before the first step
            explain_os_errors("cannot read the run's numbers", UsageError, where=file, fix="Restore the folder"),
        ):
            if not self.folder.is_dir() and self._job.has_ended:
                raise UsageError("the folder of the run does not exist", where=str(self.folder), fix="Restore it")
            if file.exists():
                with file.open("rb") as opened:
                    yield from (line for line, _ in read_lines(opened, 0) if line is not None)


@dataclass(frozen=True)
class _Prepared:
    """A valid spec whose data and model files are not checked yet. `tree`: its sections. `functions`: the reward
    functions as (name, file name, source)."""

    tree: Mapping[str, Any]
    functions: tuple[tuple[str, str, bytes], ...]

    def write_functions(self, folder: Path) -> dict[str, Any]:
        """Write the reward functions into `folder` and return the spec with references to these files."""
        references = []
        for name, file_name, text in self.functions:
            file = folder / file_name
            with explain_os_errors("cannot write the function", where=file, fix="Choose another home"):
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(file, text, mode=0o600)
            references.append((name, f"{file}:{name}"))
        return self._with_rewards(references)

    def check(self, home: Path) -> None:
        """Check the spec and its files in a subprocess, as a daemon does when a job is submitted. Creates no job.
        Raises UsageError."""
        with tempfile.TemporaryDirectory(prefix="gcore-check-") as scratch:
            tree = self.write_functions(Path(scratch))
            file = Path(scratch) / "spec.yaml"
            file.write_text(json.dumps(tree), encoding="utf-8")
            try:
                _command(home, "submit", str(file), "--dry-run")
            except GcoreError as error:
                said = str(error).replace(f"{file}: ", "").replace(f"{scratch}/", "")
                raise UsageError(said) from None

    def _with_rewards(self, references: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """The spec with the reward functions, one alone or several as parts. `references`: (name, FILE:NAME) of each."""
        if not references:
            return dict(self.tree)
        section = dict(self.tree.get("reward", {}))
        if len(references) == 1:
            section["name"] = references[0][1]
        else:
            section["parts"] = [{"name": reference} for _, reference in references]
        return {**self.tree, "reward": section}


def _prepare(spec: Spec, set: Sequence[str], reward: RewardFunction | Sequence[RewardFunction] | None) -> _Prepared:
    """Check the spec and the reward functions of a call, except the spec's files. `set`: overrides of the spec. Raises
    SpecError, UsageError."""
    functions = [] if reward is None else list(reward) if isinstance(reward, Sequence) else [reward]
    if reward is not None and not functions:
        raise UsageError("`reward` is an empty list", fix="Pass at least one function, or leave it out")
    names = [_check_reward(function) for function in functions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two reward functions are called {twice[0]!r}", fix="Rename one of them")
    tree = _spec_tree(spec, set)
    named = [key for key in NAMES_A_REWARD if key in tree.get("reward", {})]
    if functions and named:
        what = f"the spec has `reward.{named[0]}`, and the call has the reward function {names[0]!r}"
        raise UsageError(what, fix="Remove one of them")
    texts = [function_source(function).encode() for function in functions]
    files = [f"{name}_{file_digest(text)[:8]}.py" for name, text in zip(names, texts, strict=True)]
    prepared = _Prepared(tree, tuple(zip(names, files, texts, strict=True)))
    references = [(name, f"/functions/{file}:{name}") for name, file in zip(names, files, strict=True)]
    new_spec(prepared._with_rewards(references))
    return prepared


def _spec_tree(spec: Any, set: Sequence[str]) -> dict[str, Any]:
    """Load and check a spec (file, mapping or YAML text); return its sections with absolute paths. Raises SpecError,
    UsageError."""
    if isinstance(spec, Mapping):
        whole = new_spec(apply_overrides(dict(spec), set), base=Path.cwd())
    elif isinstance(spec, str) and "\n" in spec:
        try:
            tree = read_plain(spec)
        except YamlNotPlain as error:
            raise SpecError(f"not valid YAML: {error.problem}", where=f"spec{error.place}", fix="Correct it") from error
        if not isinstance(tree, dict):
            raise SpecError("the spec is not a mapping of sections", fix="Write `name: ...`, `model: ...` and so on")
        whole = new_spec(apply_overrides(tree, set), base=Path.cwd())
    elif isinstance(spec, str | Path):
        whole = load_spec(Path(spec).expanduser(), set)
    else:
        what = f"a spec is a file, a mapping or YAML text, not an object of type {type(spec).__name__}"
        raise UsageError(what, fix="Pass one of these")
    tree = json.loads(dump_explicit(whole))
    assert isinstance(tree, dict)
    return tree


def _check_reward(function: RewardFunction) -> str:
    """Check that gcore can call the function as a reward, and return its name. Raises UsageError."""
    check_is_function(function)
    name = function_name(function)
    if name in {point.name for point in entry_points(group=REWARDS.group)}:
        raise UsageError(f"the reward function {name!r} has the name of an installed reward", fix="Rename it")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"the reward function {name!r} is asynchronous", fix="Define it with `def`")
    if inspect.isgeneratorfunction(function):
        raise UsageError(f"the reward function {name!r} has `yield`, so it returns no number", fix="Use `return`")
    if is_batch_reward(function):  # its arguments are passed by name
        return name
    kinds = inspect.Parameter
    parameters = list(inspect.signature(function).parameters.values())
    places = [one for one in parameters if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    open_ended = any(one.kind is kinds.VAR_POSITIONAL for one in parameters)
    missing = [one for one in parameters if one.kind is kinds.KEYWORD_ONLY and one.default is kinds.empty]
    missing += [one for one in places[3:] if one.default is kinds.empty]
    if missing:
        what = f"the reward function {name!r} needs the argument {missing[0].name!r}, which gcore does not pass"
        raise UsageError(what, fix="Give it a default after `*`")
    if not places and not open_ended:
        raise UsageError(f"the reward function {name!r} takes no response", fix="Write `def score(response, fields)`")
    for place, passed in zip(places[1:3], ("fields", "spec"), strict=False):
        if place.default is not kinds.empty and place.name != passed:
            what = f"the reward function {name!r} would receive the {passed} of the prompt as {place.name!r}"
            if passed == "spec":
                what = f"the reward function {name!r} would receive the RewardSpec as {place.name!r}"
            raise UsageError(what, fix=f"Write `*` before {place.name!r}")
    return name


def _command(home: Path, *words: str) -> None:
    """Run a `gcore` command for a home folder in a subprocess. A KeyboardInterrupt here interrupts it too, and waits
    until it has cleaned up.

    `words`: command and arguments. Raises UsageError or GcoreError with the command's error message.
    """
    command = [sys.executable, "-P", "-c", PROGRAM, *words, "--home", str(home)]
    forced = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")  # a notebook sets them, and the message is read here
    env = {name: value for name, value in os.environ.items() if name not in forced} | {"NO_COLOR": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env,
        start_new_session=True,
    )  # fmt: skip
    try:
        _, said = process.communicate()
    except KeyboardInterrupt:
        _interrupt(process, home, words[0])
        raise
    if process.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        what = (
            re.sub(r"^gcore: ", "", lines[-1])
            if lines
            else f"`gcore {words[0]}` ended with exit code {process.returncode}"
        )
        raise (UsageError if process.returncode == UsageError.exit_code else GcoreError)(what)


def _interrupt(process: subprocess.Popen[str], home: Path, word: str) -> None:
    """Interrupt a running command and wait for its end. `down` is not interrupted; other commands clean up after
    SIGINT. `word`: the command."""
    try:
        if word != "down":
            process.send_signal(signal.SIGINT)
        process.communicate()
    except KeyboardInterrupt:
        _print(f"interrupted again. Processes of the cluster in {home} may be left: gcore down --home {home}")
        raise


def _running(home: Path) -> tuple[int, int] | None:
    """Process ID and start time of etcd of the cluster that runs in `home`; None if none runs there."""
    state = LocalClusterState.load(home)
    return None if state is None else (state.etcd.pid, state.etcd.started)


def _home(home: str | Path | None) -> Path:
    return local_home(home).expanduser().absolute()


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _line(event: JobEvent) -> str:
    """Format an event as one line: kind, first line of the message, and if known reward, accuracy and number of failed
    prompts."""
    stats = event.data.get("stats")
    values = {**(stats if isinstance(stats, Mapping) else {}), **event.data}
    numbers = [f"{name} {values[name]:.3f}" for name in ("reward", "accuracy") if isinstance(values.get(name), float)]
    if failed := event.data.get("failed"):
        numbers.append(f"{failed} prompts failed")
    first = next(iter(event.message.splitlines()), "")
    return f"{event.kind}: {first}" + (f" ({', '.join(numbers)})" if numbers else "")
