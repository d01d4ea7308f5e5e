"""Every command and Python block of the documents runs and ends with 0, except what `tools/commands.toml` names.

Each page has a checkout of its own, in which its commands run in their order. Two clusters serve all pages: a real one, on which
the job `arithmetic` has ended, and one with eight emulated slots, on which the job `judge-slow` runs. Changed are only names of
jobs, nodes, folders and ports (`WORDS`), and the number of training steps.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_run import cluster_up, gcore, processes_of
from documented import Checkout, commands_run_by, shortened
from documents import ROOT, blocks, mismatch

from gcore.config.local_cluster import LocalClusterState
from gcore.engines.emulated.launch import LAW_FILE
from gcore.quickstart.counting import prepare_counting
from tools.check_commands import commands_of_test
from tools.documents import Typed

pytestmark = [pytest.mark.serial, pytest.mark.documents, pytest.mark.timeout(1200)]
DEFAULT = "integration/cli/test_documented_commands.py"
STEPS = 13
"""Of the ended job: pages show its step 12."""
ON_A_RUNNING_JOB = re.compile(r"gcore (cancel|delete|drain|eval|pause|placement|resume|update)\b")
WORDS = {r"\bNODE\b|\bgpu-7\b": "node-1", r"\bFOLDER\b": "ca/gpu-1", r"\bAUTHORITY\b": "ca", r"--step N\b": "--step 12"}
WORDS |= {r"\bSPEC\b": "grpo.yaml", r"\.venv/bin/gcore": "gcore", r"--tail N\b": "--tail 5"}
"""Placeholders of all pages, and what they stand for."""
FROM_THE_ROOT = "cd deploy/prometheus"
"""A command that a page gives in several blocks, each for a shell in the checkout."""
LAST = ("retry", "cancel", "delete")
"""Commands in running text that end or begin jobs; the others run before."""


@dataclass(frozen=True)
class Clusters:
    """The two clusters. `ended`: the uid of the real job, of which later jobs may have the name."""

    real: LocalClusterState
    emulated: LocalClusterState
    ended: str

    @property
    def run_folder(self) -> Path:
        """Of the ended job."""
        return Path(self.real.home) / "runs" / f"arithmetic-{self.ended}"


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory, example: Path, judge: Path) -> Iterator[Clusters]:
    """Both clusters with their jobs."""
    folder = tmp_path_factory.mktemp("documented")
    with cluster_up(folder / "real") as real:
        spec = ROOT / "examples" / "arithmetic" / "grpo.yaml"
        small = [
            f"flow.steps={STEPS}",
            "flow.groups_per_step=16",
            "eval.every=6",
            "checkpoint.every=4",
            "checkpoint.keep=9",
        ]
        changed = [word for field in small for word in ("--set", field)]
        gcore("run", str(spec), "--home", real.home, "--plain", *changed)
        (run,) = (Path(real.home) / "runs").glob("arithmetic-*")
        home = folder / "emulated"
        law = folder / "law.json"
        law.write_text(
            json.dumps({"speedup": 0.25, "load_s": 0.2})
        )  # slow, so that the commands have the machine's cores
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(LAW_FILE, str(law))
            gcore("up", "--home", str(home), "--controllers", "2", "--slots", "emulated:8")
        try:
            emulated = LocalClusterState.load(home)
            assert emulated is not None
            submit_running(emulated)
            yield Clusters(real, emulated, run.name.removeprefix("arithmetic-"))
        finally:
            gcore("down", "--home", str(home), check=None)
        assert processes_of(home) == []


def submit_running(cluster: LocalClusterState) -> None:
    """A job that moves slots between rollout and a judge and has no end; waits for its first step.

    Called again, it finds the job, or begins another if commands of a page have ended it or drained a node.
    """
    gcore("drain", "node-1", "--undo", "--home", cluster.home)
    spec = ROOT / "examples" / "arithmetic" / "judge.yaml"
    fields = [
        "name=judge-slow",
        "flow.steps=100000",
        "placement.policy=dynamic",
        "placement.reward=1",
        "placement.train=2",
    ]
    changed = [word for field in [*fields, "train.ranks=2", "eval.every=1000"] for word in ("--set", field)]
    gcore("submit", str(spec), "--home", cluster.home, *changed)
    until_step(cluster, "judge-slow", 1)


def until_step(cluster: LocalClusterState, job: str, step: int, patience_s: float = 200) -> None:
    """Wait until a job has committed a step."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        found = json.loads(gcore("describe", job, "--home", cluster.home, "-o", "json").stdout)
        if int(found.get("step", 0)) >= step:
            return
        assert found["state"] in ("PENDING", "QUEUED", "RUNNING"), found
        time.sleep(0.5)
    raise AssertionError(f"job {job} has not committed step {step} within {patience_s} s")


@pytest.fixture
def checkout(tmp_path: Path, clusters: Clusters, example: Path) -> Iterator[Checkout]:
    """A checkout of which the local cluster is the real one, with the files that pages name without showing how they came."""
    found = Checkout(tmp_path, {"GCORE_HOME": clusters.real.home})
    spec = (
        (ROOT / "examples" / "arithmetic" / "grpo.yaml")
        .read_text()
        .replace("../../.cache/examples/arithmetic", str(example))
    )
    for name in ("grpo", "again"):
        (found.folder / f"{name}.yaml").write_text(spec.replace("name: arithmetic", f"name: page-{name}", 1))
    yield found
    found.close()


def files_of_readme(checkout: Checkout, clusters: Clusters) -> None:
    """The two files that the page shows, and the model and data that they name."""
    for language in ("python", "yaml"):
        for block in blocks(ROOT / "README.md", language):
            name = block.text.splitlines()[0].removeprefix("# ")
            (checkout.folder / name).write_text(block.text.replace("max_new_tokens: 64", "max_new_tokens: 4"))
    example = ROOT / ".cache" / "examples" / "arithmetic"
    (checkout.folder / "my-model").symlink_to(example / "model")
    (checkout.folder / "train.jsonl").symlink_to(example / "train.jsonl")


def certificates(checkout: Checkout, clusters: Clusters) -> None:
    """An authority and the certificates of two nodes, in `ca` and as `certs`."""
    checkout.run("gcore certs init --authority ca && gcore certs issue gpu-1 --host gpu-1 --authority ca")
    checkout.run("gcore certs issue gpu-2 --host gpu-2 --authority ca && cp -r ca certs")


def certificates_of_ada(checkout: Checkout, clusters: Clusters) -> None:
    """The folder that an admin carries from the authority to her machine."""
    authority = checkout.folder.parent / "carried"
    checkout.run(
        f"gcore certs init --authority {authority} && gcore certs issue ada --for user --role admin --authority {authority}"
    )
    shutil.copytree(authority / "ada", checkout.folder / "ada")


def job_with_a_checkpoint(checkout: Checkout, clusters: Clusters) -> None:
    """A running job of the real cluster that has a checkpoint."""
    checkout.run("gcore submit grpo.yaml --new --set name=costly --set flow.steps=1000 --set checkpoint.every=1")
    until_step(clusters.real, "costly", 2)


def run_of_sorting(checkout: Checkout, clusters: Clusters) -> None:
    """The run folder of a job as if it were of the project `sorting`, and its metrics here."""
    runs = checkout.folder / ".gcore" / "runs"
    runs.mkdir(parents=True)
    (runs / "sorting-08d8f27366e5").symlink_to(clusters.run_folder)
    shutil.copy(clusters.run_folder / "metrics.jsonl", checkout.folder)


def counting_example(checkout: Checkout, clusters: Clusters) -> None:
    """The model that the page prepares, which takes minutes, from the cache."""
    example = ROOT / ".cache" / "examples" / "counting"
    prepare_counting(example, progress=False)
    shutil.copytree(example, checkout.folder / "largest" / "counting")


def pictures_of_80_steps(checkout: Checkout, clusters: Clusters) -> None:
    """The job of the page with all its steps and few pictures, and the files of the page's own job with tiny ones."""
    checkout.run("gcore prepare pictures")
    few = "--set flow.groups_per_step=2 --set flow.samples_per_prompt=2 --set eval.limit=8"
    spec = checkout.folder / "examples" / "pictures" / "flow_grpo.yaml"
    checkout.run(f"gcore run {spec} --home {checkout.own_cluster} --plain --slots cpu:2 {few}")
    page = ROOT / "docs" / "use" / "generated-pictures.md"
    for language in ("python", "yaml"):
        block = blocks(page, language)[0]
        tiny = re.sub(r"(height|width): 512", r"\1: 8", block.text).replace("groups_per_step: 48", "groups_per_step: 2")
        name = block.text.splitlines()[0].removeprefix("# ")
        (checkout.folder / name).write_text(tiny.replace("samples_per_prompt: 24", "samples_per_prompt: 2"))
    for name in ("model", "train.jsonl", "eval.jsonl"):
        (checkout.folder / name).symlink_to(ROOT / ".cache" / "examples" / "pictures" / name)


def cluster_in_the_checkout(checkout: Checkout, clusters: Clusters) -> None:
    """The home folder of the page's own cluster is the checkout's, with the run folder of `sorting`."""
    checkout.own_cluster = checkout.folder / ".gcore"
    run_of_sorting(checkout, clusters)


def package_mine(checkout: Checkout, clusters: Clusters) -> None:
    """The package of the page beside the checkout."""
    mine = checkout.folder.parent / "mine"
    (mine / "src" / "my_package").mkdir(parents=True)
    page = ROOT / "docs" / "use" / "plugins.md"
    (mine / "pyproject.toml").write_text(next(b.text for b in blocks(page, "toml") if "[build-system]" in b.text))
    (mine / "src" / "my_package" / "__init__.py").touch()
    (agent,) = (b.text for b in blocks(ROOT / "docs" / "use" / "environments.md", "python") if "def solver" in b.text)
    (mine / "src" / "my_package" / "agents.py").write_text(agent)


PREPARED: dict[str, Callable[[Checkout, Clusters], None]] = {
    "README.md": files_of_readme,
    "docs/operate/deploy.md": certificates_of_ada,
    "docs/operate/upgrade-and-backup.md": certificates,
    "docs/use/generated-pictures.md": pictures_of_80_steps,
    "docs/use/judges.md": job_with_a_checkpoint,
    "docs/use/pictures.md": counting_example,
    "docs/use/plugins.md": package_mine,
    "docs/use/reading-a-run.md": run_of_sorting,
    "docs/use/troubleshooting.md": cluster_in_the_checkout,
}
"""What pages suppose to be there."""
JOBS = {"docs/use/judges.md": "costly"}
"""What JOB stands for on a page, where it is not the ended job."""
OWN_CLUSTER = ("docs/use/generated-pictures.md", "docs/use/troubleshooting.md", "examples/pictures/README.md")
"""Pages of which all commands are called beside a cluster of their own."""
SOME_TOKEN = "$(gcore token list -o json | python -c \"import json, sys; print(json.load(sys.stdin)[0]['id'])\")"
"""The id of a token, in the shell."""
DRAWN_AT_RANDOM = ("docs/use/reading-a-run.md",)
"""Pages that show responses of a model, which differ from run to run."""
NEEDED = {"docs/operate/monitoring.md": "promtool"}
"""Programs of the machine."""
PAGES = sorted({command.page for command in commands_of_test(ROOT, DEFAULT) if command.kind != "inline"})


def typed_here(command: Typed, checkout: Checkout, clusters: Clusters) -> str:
    """The command with the names of this test's jobs, nodes, folders and ports."""
    text = command.text
    running = ON_A_RUNNING_JOB.search(text) and command.page not in JOBS and "--home" not in text
    job = "judge-slow" if running else JOBS.get(command.page, clusters.ended)
    words = {
        **WORDS,
        r"\bJOB\b": job,
        r"(?<=gcore )(?!prepare)([a-z]+) arithmetic\b": rf"\1 {job}",
        r"127\.0\.0\.1:PORT\b": clusters.real.controllers[0].metrics_address,
        r"\bADDRESS\b": clusters.emulated.controllers[0].metrics_address,
        r"\bDIR\b": f"exported-{Path(command.page).stem}-{command.line}",
        r"\bk3j9x2m4q8w1\b": SOME_TOKEN,
        r"/(tmp|secure)/": f"{checkout.folder.parent}/",
        r"checkpoints/0-24\b": f"checkpoints/0-{STEPS}",
    }
    if (own := LocalClusterState.load(checkout.own_cluster)) is not None:
        words[r"127\.0\.0\.1:2379\b"] = own.etcd.endpoint
    for pattern, word in words.items():
        text = re.sub(pattern, word, text)
    return shortened(text)


def shown_here(command: Typed) -> tuple[str, ...]:
    """The lines that the page shows below the command, with the names of this test's nodes."""
    return tuple(re.sub(r"\bgpu-7\b", "node-1", line) for line in command.printed)


def home_of(command: Typed, checkout: Checkout, clusters: Clusters) -> str:
    """The cluster on which a command runs: one of its own if the command starts it."""
    if "--slots " in command.text or command.page in OWN_CLUSTER:
        return str(checkout.own_cluster)
    if ON_A_RUNNING_JOB.search(command.text) and command.page not in JOBS:
        return clusters.emulated.home
    return clusters.real.home


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.needs(NEEDED[page])] if page in NEEDED else []) for page in PAGES]
)
def test_each_command_of_a_page_ends_with_0_and_prints_what_the_page_shows(
    page: str, checkout: Checkout, clusters: Clusters
) -> None:
    if prepare := PREPARED.get(page):
        prepare(checkout, clusters)
    with commands_run_by(DEFAULT, page, ("console", "python")) as walk:
        if page not in JOBS and any(ON_A_RUNNING_JOB.search(command.text) for command in walk.commands):
            submit_running(clusters.emulated)
        for command in walk.commands:
            if command.kind == "python":
                checkout.run_python(shortened(command.text))
            else:
                if command.text == FROM_THE_ROOT:
                    checkout.run(f"cd {checkout.folder}")
                text = typed_here(command, checkout, clusters)
                printed = checkout.run(text, {"GCORE_HOME": home_of(command, checkout, clusters)})
                compared = command.printed and page not in DRAWN_AT_RANDOM
                wrong = mismatch(shown_here(command), printed) if compared else None
                assert wrong is None, f"{text} does not print {wrong!r}:\n{printed}"
            walk.passed(command)


def test_each_command_in_running_text_ends_with_0(checkout: Checkout, clusters: Clusters) -> None:
    certificates(checkout, clusters)
    submit_running(clusters.emulated)
    ran: set[str] = set()
    with commands_run_by(DEFAULT, kinds=("inline",)) as walk:
        for command in sorted(walk.commands, key=lambda command: (_order(command.text), command.text)):
            if command.text not in ran:
                text = typed_here(command, checkout, clusters)
                checkout.run(text, {"GCORE_HOME": home_of(command, checkout, clusters)})
                ran.add(command.text)
            walk.passed(command)


def _order(text: str) -> int:
    verb = text.split()[1]
    return LAST.index(verb) if verb in LAST else -1
