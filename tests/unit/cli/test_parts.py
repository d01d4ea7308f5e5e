"""The decisions of the command line: slots, addresses, leftovers, the record, the summary, tables."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from controllers.cli.commands.cluster import check_cluster_matches
from controllers.cli.commands.run import EventFile
from controllers.cli.local import UpRequest, UpResult, classify_process, deal_slots
from controllers.cli.local import start_cluster as local_up
from controllers.cli.main import app
from controllers.cli.output import best_line, format_ranges, job_rows, job_snapshot, job_tree
from controllers.cli.view import summary as summaries
from controllers.cli.view.state import BestPoint, JobSnapshot, SourceFigures, ViewState
from controllers.cli.view.summary import AuditVerdict, find_summary, longer_command, summarize
from gcore.api.v1 import jobs_pb2 as pb
from gcore.client.contexts import find_cluster
from gcore.config import parse_spec
from gcore.config.local_cluster import ControllerProcess, EtcdProcess, LocalClusterState
from gcore.errors import GcoreError, Unreachable, UsageError
from gcore.observability.events import JobEvent
from gcore.testing import FakeClock

HOME = Path("/srv/gcore")


@given(st.integers(1, 64), st.integers(1, 64))
def test_slots_are_dealt_out_completely_and_evenly(slots, controllers):
    if slots < controllers:
        with pytest.raises(UsageError, match="cannot be divided"):
            deal_slots(f"cpu:{slots}", controllers)
        return
    shares = deal_slots(f"cpu:{slots}", controllers)
    assert [slot for share in shares for slot in share] == [f"cpu:{n}" for n in range(slots)]
    assert len(shares) == controllers
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["", "cpu", "cpu:", "cpu:0", "cpu:-1", "cpu:x", "2", "cpu:²"])
def test_invalid_slot_counts_are_refused(text):
    with pytest.raises(UsageError, match="is not KIND:NUMBER"):
        deal_slots(text, 1)


def test_a_kind_of_slot_that_nobody_knows_is_named_with_those_there_are():
    with pytest.raises(UsageError, match=r"no kind of slot 'gpu'\. Use one of cpu, cuda, emulated"):
        deal_slots("gpu:2", 1)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"port": 70000}, r"--port: 70000 is not a port\. Give a port from 1 to 65534"),
        ({"port": 65535}, "--port: there are no 2 ports from 65535 on"),
        ({"etcd_port": 0}, r"--etcd-port: 0 is not a port\. Give a port from 1 to 65535"),
    ],
)
def test_a_port_that_is_none_is_refused_before_anything_is_brought_up(tmp_path, request_, words):
    said = []
    request = UpRequest(tmp_path / "home", 2, "cpu:2", **request_)
    with pytest.raises(UsageError, match=words):
        asyncio.run(local_up(request, clock=FakeClock(), say=said.append))
    assert said == []
    assert not (tmp_path / "home").exists()


def test_a_cluster_that_is_up_and_is_not_what_was_asked_for_is_a_wrong_command():
    there = cluster(HOME)  # two controllers with cpu:7 and cpu:8
    slots = ("cpu:7", "cpu:8")
    check_cluster_matches(there, {"home"}, 3, ("cpu:0",))
    check_cluster_matches(there, {"controllers", "slots"}, 2, slots)
    with pytest.raises(UsageError, match=r"has 2 controllers, not 3\. Stop it with `gcore down`"):
        check_cluster_matches(there, {"controllers"}, 3, slots)
    with pytest.raises(UsageError, match="has the slots cpu:7 cpu:8"):
        check_cluster_matches(there, {"slots"}, 3, ("cuda:7", "cuda:8"))


def test_up_tells_a_number_that_was_given_from_a_default(monkeypatch, tmp_path):
    there = cluster(tmp_path)

    async def up_already(request, **_):
        return UpResult(there, started=False)

    monkeypatch.setattr("controllers.cli.local.start_cluster", up_already)
    home = ["--home", str(tmp_path)]
    assert CliRunner().invoke(app, ["up", "--controllers", "2", *home]).exit_code == 0
    assert CliRunner().invoke(app, ["up", *home]).exit_code == 0
    for words in (["--controllers", "1"], ["--slots", "cpu:3"], ["--controllers", "1", "-o", "json"]):
        assert isinstance(CliRunner().invoke(app, ["up", *words, *home]).exception, UsageError)


def test_emulated_slots_are_dealt_out_as_others_are():
    assert deal_slots("emulated:3", 2) == (("emulated:0",), ("emulated:1", "emulated:2"))


@pytest.mark.parametrize("text", ["cpu:4097", "cuda:99999999", "cpu:" + "9" * 5000])
def test_more_slots_than_any_machine_has_are_refused_before_they_are_counted_out(text):
    with pytest.raises(UsageError, match="exceeds the maximum of 4096 slots"):
        deal_slots(text, 1)


def test_no_controller_at_all_is_refused():
    with pytest.raises(UsageError, match="0 is not a valid number of controllers"):
        deal_slots("cpu:2", 0)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        pytest.param(
            ["python", "-m", "controllers.daemon", "--home", "/srv/gcore", "--config", "x"], "controller", id="daemon"
        ),
        pytest.param(["/bin/python", "/bin/gcore-controller", "--home=/srv/gcore"], "controller", id="script"),
        pytest.param(
            ["python", "-m", "gcore.worker.main", "--home", "/srv/gcore/", "--launch", "x"], "worker", id="worker"
        ),
        pytest.param(
            ["python", "-m", "gcore.emulated.host", "--home", "/srv/gcore", "--launch", "x"], "worker", id="emulated"
        ),
        pytest.param(["/usr/bin/etcd", "--name=gcore", "--data-dir=/srv/gcore/etcd"], "etcd", id="its etcd"),
        pytest.param(["/usr/bin/etcd", "--data-dir=/srv/gcore2/etcd"], None, id="another etcd"),
        pytest.param(["python", "-m", "controllers.daemon", "--home", "/srv/gcore2"], None, id="another home's daemon"),
        pytest.param(["python", "-m", "controllers.daemon"], None, id="a daemon without a home"),
        pytest.param(
            ["python", "-m", "controllers.cli.main", "run", "x", "--home", "/srv/gcore"], None, id="gcore run"
        ),
        pytest.param(["/bin/gcore", "down", "--home", "/srv/gcore"], None, id="gcore down"),
        pytest.param(["vi", "/srv/gcore/logs/node-0.log"], None, id="an editor"),
        pytest.param([], None, id="a kernel thread"),
    ],
)
def test_a_process_belongs_to_the_home_on_its_command_line(command, kind):
    assert classify_process(command, HOME) == kind


def cluster(home: Path) -> LocalClusterState:
    return LocalClusterState(
        home=str(home),
        etcd=EtcdProcess(
            pid=1, started=1, endpoint="127.0.0.1:1", data_dir="d", client_port=1, peer_port=2, binary="etcd"
        ),
        controllers=tuple(
            ControllerProcess(
                name=f"node-{n}", address=f"127.0.0.1:{n}", metrics_address="m", slots=(f"cpu:{n}",), config_file="c",
                pid=1, started=1,
            )
            for n in (7, 8)
        ),
    )  # fmt: skip


def test_a_cluster_is_found_by_its_home(tmp_path):
    (tmp_path / "cluster.json").write_text(cluster(tmp_path).model_dump_json())
    assert LocalClusterState.load(tmp_path) == cluster(tmp_path)
    assert find_cluster(None, tmp_path).addresses == ("127.0.0.1:7", "127.0.0.1:8")


def test_addresses_that_are_given_win_over_the_home(tmp_path):
    assert find_cluster("a:1, b:2", tmp_path).addresses == ("a:1", "b:2")


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x", "a:1,"])
def test_invalid_addresses_are_refused(address, tmp_path):
    with pytest.raises(UsageError, match="is not host:port"):
        find_cluster(address, tmp_path)


def test_without_a_cluster_nobody_can_be_asked(tmp_path):
    with pytest.raises(Unreachable, match="no local cluster is running"):
        find_cluster(None, tmp_path)


def test_missing_cluster_error_explains_that_a_runs_cluster_ends_with_it(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(
        Unreachable, match=r"`gcore up` \(a cluster that `gcore run` started stops with it; its jobs are kept, and .*\)"
    ):
        find_cluster(None, tmp_path)


def test_a_damaged_cluster_file_says_what_to_do(tmp_path):
    (tmp_path / "cluster.json").write_text("{}")
    with pytest.raises(UsageError, match="gcore down"):
        find_cluster(None, tmp_path)


def event(sequence: int) -> JobEvent:
    return JobEvent(sequence, 1.0, "note", "hello")


def test_events_are_written_once_however_often_they_are_followed(tmp_path):
    for upto in (3, 5):
        with EventFile(tmp_path) as record:
            for sequence in range(1, upto + 1):
                record.append(event(sequence))
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [JobEvent.from_line(line).sequence for line in lines] == [1, 2, 3, 4, 5]


@given(cut=st.integers(0, 150))
def test_a_line_that_a_crash_cut_off_is_written_again(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    whole = "".join(event(n).to_line() + "\n" for n in (1, 2, 3))
    (folder / "events.jsonl").write_text(whole[: min(cut, len(whole))])
    with EventFile(folder) as record:
        for sequence in (1, 2, 3):
            record.append(event(sequence))
    assert (folder / "events.jsonl").read_text() == whole


def test_events_that_cannot_be_written_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GcoreError, match="cannot write the events"):
        EventFile(tmp_path / "file")


def finished_state() -> ViewState:
    state = ViewState()
    for one in [
        JobEvent(1, 1.0, "eval", data={"step": 0, "accuracy": 0.45, "count": 10}),
        JobEvent(
            2,
            2.0,
            "step",
            data={"step": 1, "steps": 1, "stats": {"tokens": 50, "seconds": 2}, "groups_by_node": {"node-0": 3}},
        ),
        JobEvent(3, 3.0, "eval", data={"step": 1, "accuracy": 0.94, "count": 10}),
    ]:
        state = state.apply(one)
    return state


JOB = JobSnapshot("sums", "u1", "SUCCEEDED", step=1, steps=1, run_dir="/r", checkpoint="/r/c", created=5.0, ended=9.0)


def test_the_summary_says_what_a_program_asks(tmp_path):
    verdict = AuditVerdict(groups_by_node=(("node-0", 2), ("node-1", 1)))
    summary = summarize(finished_state(), JOB, verdict, 12.3456)
    written = json.loads(summaries.write_summary(summary, tmp_path).read_text())
    assert {key: written[key] for key in list(written)[:17]} == {
        "job": "sums", "uid": "u1", "state": "SUCCEEDED", "reason": "", "steps": 1, "lineage": 0, "rollbacks": 0,
        "eval_accuracy_before": 0.45, "eval_accuracy_after": 0.94, "wall_seconds": 12.346, "job_seconds": 4.0,
        "tokens_per_second": 25.0, "controllers": 2, "groups_by_controller": {"node-0": 2, "node-1": 1},
        "audit": "clean", "run_dir": "/r", "checkpoint": "/r/c",
    }  # fmt: skip
    assert summary.succeeded


SOURCES = (
    SourceFigures("letters", 5, 1, 0, 0.25, 3.5, 0.5, 0.9),
    SourceFigures("sums", 7),
)


def test_the_summary_has_what_came_of_each_source(tmp_path):
    before, after = ({"letters": {"accuracy": share, "count": 5}} for share in (0.4, 0.9))
    state = ViewState()
    for number, by_source in enumerate((before, after)):
        data = {"step": number, "accuracy": 0.5, "count": 5, "by_source": by_source}
        state = state.apply(JobEvent(number + 1, 1.0, "eval", data=data))
    summary = summarize(state, dataclasses.replace(JOB, sources=SOURCES), AuditVerdict(), 1.0)
    written = json.loads(summaries.write_summary(summary, tmp_path).read_text())["sources"]
    assert written["letters"] == {
        "trained": 5, "filtered": 1, "failed": 0, "mean_reward": 0.25, "mean_length": 3.5, "truncated": 0.5,
        "eval_accuracy_before": 0.4, "eval_accuracy_after": 0.9,
        "eval_before": {}, "eval_after": {}, "eval_unscored": 0,
    }  # fmt: skip
    assert written["sums"]["mean_reward"] is None
    shown = summaries.summary_rows(summary)["sources"]
    assert shown == "letters 5 trained, 40.0% → 90.0%; sums 7 trained"
    held_out = dataclasses.replace(summary.sources["letters"], trained=0)  # a source for evaluation alone
    summary = dataclasses.replace(summary, sources=summary.sources | {"letters": held_out})
    assert summaries.summary_rows(summary)["sources"] == "letters 40.0% → 90.0%; sums 7 trained"


def test_the_summary_has_what_was_measured_beside_the_accuracy_and_the_best_state(tmp_path):
    score = {"accuracy": 0.5, "count": 5, "samples": 4, "metrics": {"mean@4": 0.55, "pass@1": 0.5, "pass@4": 0.8}}
    event = JobEvent(1, 1.0, "eval", data={"step": 0, "accuracy": 0.5, "count": 5, "by_source": {"letters": score}})
    best = BestPoint(32, "letters/pass@4", 0.985, "/runs/u1/checkpoints/0-32")
    figures = (dataclasses.replace(SOURCES[0], trained=0, eval_unscored=2), SOURCES[1])
    job = dataclasses.replace(JOB, sources=figures, best=best)
    summary = summarize(ViewState().apply(event), job, AuditVerdict(), 1.0)
    written = json.loads(summaries.write_summary(summary, tmp_path).read_text())
    assert written["sources"]["letters"]["eval_before"] == score["metrics"]
    assert written["best"] == dataclasses.asdict(best)
    shown = summaries.summary_rows(summary)
    assert shown["best"] == "step 32, letters/pass@4 98.5%: /runs/u1/checkpoints/0-32"
    assert shown["sources"] == ("letters 50.0% → -, mean@4 0.550, pass@4 80.0%, 2 responses not scored; sums 7 trained")
    commands = summaries.next_commands(summary, "gcore run x.yaml", "gcore run x.yaml --set flow.steps=4")
    assert commands["export the best"] == "gcore export u1 --best --to sums-u1-best"


@pytest.mark.parametrize(
    ("best", "line"),
    [
        pytest.param(BestPoint(0, "accuracy", 0.4), "step 0, accuracy 40.0%: the initial model", id="the first"),
        pytest.param(
            BestPoint(8, "a/mean@4", 1.25),
            "step 8, a/mean@4 1.250: its checkpoint is not written yet",
            id="not yet there",
        ),
    ],
)
def test_a_best_state_without_a_checkpoint_says_why(best, line):
    assert best_line(best) == line


@pytest.mark.parametrize(
    ("job", "verdict"),
    [
        pytest.param(JobSnapshot("sums", "u1", "FAILED"), AuditVerdict(), id="the job failed"),
        pytest.param(JOB, AuditVerdict(violations=("0/1/2 was trained twice",)), id="the audit found something"),
    ],
)
def test_a_run_has_not_succeeded_when(job, verdict):
    assert not summarize(finished_state(), job, verdict, 1.0).succeeded


def test_without_an_audit_the_groups_are_those_of_the_events():
    assert summarize(finished_state(), JOB, AuditVerdict(), 1.0).groups_by_controller == {"node-0": 3}


def test_the_table_of_a_run_tells_how_to_go_on():
    summary = summarize(finished_state(), JOB, AuditVerdict(), 1.0)
    shown = summaries.summary_rows(summary)
    assert shown["held-out accuracy"] == "45.0% before, 94.0% after"
    assert shown["mean reward"] == "0.450 before, 0.940 after, held out"
    longer = "gcore run x.yaml --set flow.steps=4"
    assert summaries.next_commands(summary, "gcore run x.yaml", longer, ["--home", "/h h"]) == {
        "export the model": "gcore export u1 --to sums-u1 --home '/h h'",
        "read responses": "gcore samples u1 --home '/h h'",
        "train longer": longer,
        "run again": "gcore run x.yaml",
    }


def test_the_summary_has_the_mean_training_reward_of_the_first_and_the_last_steps():
    state = ViewState()
    for step in range(1, 21):
        state = state.apply(
            JobEvent(step, 1.0, "step", data={"step": step, "steps": 20, "stats": {"reward": step / 20}})
        )
    summary = summarize(state, dataclasses.replace(JOB, step=20), AuditVerdict(), 1.0)
    assert summaries.summary_rows(summary)["reward"] == "0.150 in the first 5 steps, 0.900 in the last 5 steps"
    assert summaries.summary_rows(summarize(ViewState(), JOB, AuditVerdict(), 1.0))["reward"] == "-"


@pytest.mark.parametrize(
    ("given", "longer"),
    [
        ("run a.yaml --new", "run a.yaml --set flow.steps=8"),
        ("run a.yaml --set flow.steps=4 --set train.epochs=2", "run a.yaml --set train.epochs=2 --set flow.steps=8"),
        ("run --set=flow.steps=4 a.yaml", "run a.yaml --set flow.steps=8"),
        ("demo --steps 4 --home x", "demo --home x --steps 8"),
    ],
)
def test_the_command_that_trains_longer_is_the_same_with_twice_the_steps(given, longer):
    spec = parse_spec(
        {
            "name": "j",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 4},
            "rollout": {"max_new_tokens": 4},
        }
    )
    assert longer_command(given.split(), spec) == f"gcore {longer}"


def test_a_finished_run_is_found_by_name_and_uid(tmp_path):
    for number, uid in enumerate(["u1", "u2"]):
        folder = tmp_path / f"sums-{uid}"
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"job": "sums", "uid": uid, "checkpoint": f"/c/{uid}"}))
        os.utime(folder / "summary.json", (number, number))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "summary.json").write_text("{")
    first, second = (
        {"job": "sums", "uid": uid, "checkpoint": f"/c/{uid}", "folder": str(tmp_path / f"sums-{uid}")}
        for uid in ("u1", "u2")
    )
    assert find_summary(tmp_path, "u1") == first
    assert find_summary(tmp_path, "sums") == second
    assert find_summary(tmp_path, "other") is None


def test_the_summary_of_generated_pictures_has_pictures_per_second_and_the_contact_sheet(tmp_path):
    stats = {"tokens": 50, "samples": 64, "seconds": 2, "denoising_steps": 5}
    state = ViewState().apply(JobEvent(1, 1.0, "step", data={"step": 1, "steps": 1, "stats": stats}))
    job = dataclasses.replace(JOB, run_dir=str(tmp_path))
    summary = summarize(state, job, AuditVerdict(), 1.0)
    written = json.loads(summaries.write_summary(summary, tmp_path).read_text())
    assert (written["tokens_per_second"], written["pictures_per_second"]) == (None, 32.0)
    shown = summaries.summary_rows(summary)
    assert shown["speed"] == "32.0 pictures/s"
    assert "contact sheet" not in shown
    (tmp_path / "contact_sheet.png").touch()
    assert summaries.summary_rows(summary)["contact sheet"] == str(tmp_path / "contact_sheet.png")
    assert list(summaries.next_commands(summary, "", "")) == [
        "export the model",
        "look at pictures",
        "train longer",
        "run again",
    ]


def test_a_described_job_that_generates_pictures_has_steps_and_no_length():
    spec = '{"rollout": {"engine": "diffusers", "diffusion": {"steps": 10}}}'
    job = pb.Job(uid="u1", name="colours", state=pb.JOB_STATE_RUNNING, spec_json=spec)
    job.sources.add(name="data", trained=5, mean_reward=0.25, mean_length=4.5, truncated=0.0)
    shown = job_rows(job_snapshot(job), 100.0)
    assert shown["source data"] == "5 trained, 0 filtered, 0 failed; reward 0.250, denoising steps 4.5"


def test_a_described_job_says_who_has_which_shards_and_what_is_waited_for():
    job = pb.Job(
        uid="u1", name="sums", state=pb.JOB_STATE_RUNNING, step=2, steps=9, spec_json='{"data": {"shards": 8}}'
    )
    job.shares.add(node="node-0", incarnation="i", shards=[0, 1, 2, 5])
    job.waiting.add(who="node-0", what="an engine", since=90.0)
    job.sources.add(
        name="letters", trained=5, filtered=1, mean_reward=0.25, mean_length=3.5, truncated=0.5, accuracy=0.9
    )
    job.sources.add(name="sums", failed=2)
    job.best.CopyFrom(pb.BestCheckpoint(step=2, metric="accuracy", value=0.9, checkpoint="/c/0-2"))
    found = job_snapshot(job)
    assert job_rows(found, 100.0)["best"] == "step 2, accuracy 90.0%: /c/0-2"
    assert job_tree(found)["best"]["step"] == 2
    shown = job_rows(found, 100.0)
    assert shown["state"] == "RUNNING"
    assert shown["shards of node-0"] == "4: 0-2, 5"
    assert shown["waits (1)"] == "node-0: an engine, for 10s"
    assert shown["source letters"] == (
        "5 trained, 1 filtered, 0 failed; reward 0.250, length 3.5, 50% truncated; accuracy 90.0%"
    )
    assert shown["source sums"] == "0 trained, 0 filtered, 2 failed"
    assert found.shard_count == 8
    assert json.loads(json.dumps(job_tree(found)))["shares"] == {"node-0": [0, 1, 2, 5]}


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_every_number_and_no_other(numbers):
    shown = format_ranges(sorted(numbers))
    named = set()
    for part in [] if shown == "none" else shown.split(", "):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


def test_the_command_line_never_imports_torch_and_its_help_not_even_grpc():
    script = (
        "import sys; sys.argv = ['gcore', '--help']\n"
        "from controllers.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "assert not {'grpc', 'torch', 'transformers', 'numpy', 'httpx'} & set(sys.modules), 'heavy for a help'\n"
        "import pkgutil, importlib, controllers.cli\n"
        "for module in pkgutil.iter_modules(controllers.cli.__path__):\n"
        "    importlib.import_module('controllers.cli.' + module.name)\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize(
    "verb",
    ["run", "submit", "list", "describe", "cancel", "audit", "export", "up", "down", "validate", "schema", "prepare"],
)
def test_every_verb_explains_itself_with_an_example(verb):
    done = CliRunner().invoke(app, [verb, "--help"])
    assert done.exit_code == 0
    assert f"gcore {verb}" in done.stdout.partition("Example")[2]


def test_each_verb_is_listed_with_one_line_of_its_own():
    import typer.main

    group = typer.main.get_command(app)
    broken = [name for name, verb in group.commands.items() if "\n" in verb.help.strip().partition("\n\n")[0]]
    assert broken == [], "a line that is broken in the source is broken in the middle of the list of verbs"


def test_the_mean_reward_stands_beside_the_accuracy_where_rewards_are_graded():
    state = ViewState()
    for number, (share, mean, graded) in enumerate(((0.0, 0.0, False), (0.2, 0.367, True))):
        data = {"step": 10 * number, "accuracy": share, "count": 5, "mean_reward": mean, "graded": graded}
        state = state.apply(JobEvent(number + 1, 1.0, "eval", data=data))
    assert [point.measured for point in state.evals] == ["accuracy 0.0%", "accuracy 20.0%, mean reward 0.367"]
    summary = summarize(state, JOB, AuditVerdict(), 1.0)
    assert (summary.eval_reward_before, summary.eval_reward_after) == (0.0, 0.367)
    shown = summaries.summary_rows(summary)
    assert shown["held-out accuracy"] == "0.0% before, 20.0% after"
    assert shown["mean reward"] == "0.000 before, 0.367 after, held out"
    best = summaries.summary_rows(dataclasses.replace(summary, best=BestPoint(10, "reward", 0.367, "/c")))
    assert best["best"] == "step 10, reward 0.367: /c"


def test_a_missing_optional_package_is_one_sentence_with_the_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from controllers.cli import main

    def lacks(name: str) -> None:
        def fails() -> None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(main, "app", fails)

    lacks("safetensors")
    with pytest.raises(SystemExit):
        main.main()
    said = capsys.readouterr().err
    assert "package safetensors is not installed. Run pip install 'gcore[train,engine,local,math]'" in " ".join(
        said.split()
    )
    lacks("gcore.nothing")
    with pytest.raises(ModuleNotFoundError):
        main.main()
