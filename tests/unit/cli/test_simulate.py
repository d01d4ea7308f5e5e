"""`gcore simulate`: a scenario file or a run's records as input, a table or JSON as output; each mistake is one sentence."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from typer.testing import CliRunner

from controllers.cli.commands import plan as simulate_verb
from controllers.cli.main import app
from gcore import plugins
from gcore.errors import SpecError, UsageError
from gcore.ledger import archive as store_copy
from gcore.ledger.records.job import JobRecord
from gcore.ledger.records.slot_accounting import AccountLine, EngineSums, Span, StepAccount, append_line
from gcore.observability import samples as samples_folder
from gcore.observability.samples import KeptGroup, KeptSample, KeptText
from gcore.store.keys import JobKeys
from gcore.store.types import KeyListing, KeyValue
from gcore.types import PromptRef, Version
from placement.policies.base import Decision, PolicyStart, Situation
from placement.simulator.replay import ReplayedJob, read_run
from placement.simulator.scenario import MOST_SLOTS, MOST_STEPS, read_scenario

SMALL = """
name: small
what: a small job
slots: 5
steps: 4
groups: 4
samples: 4
lengths: {mean: 120}
training: {sizes: [1, 2]}
"""
PLAYED = """
name: small
what: a small job
slots: 8
steps: 4
groups: 4
samples: 4
lengths: {mean: 120}
training: {sizes: [1, 2]}
colocated: false
judging: {tokens: 900}
rollout: {running: 8}
"""


def said(*words: str) -> str:
    """What the command prints. Raises what it raises."""
    result = CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """A scenario that is played in no time."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def a_run(folder: Path, steps: int = 8, slots: int = 3, **more: float) -> Path:
    """A run's folder: two rollout engines at a hundredth of a second a token, a judge, a rank. `more`: of its metrics."""
    folder.mkdir()
    lines = [{"kind": "start", "seq": 0}]
    for step in range(1, steps + 1):
        metrics = {"seconds": 4.0, "tokens": 1600.0, "response_length": 80.0, "samples": 16.0, "train_s": 1.0}
        metrics |= {"exchange_s": 0.1, "publish_s": 0.2} | more
        lines.append({"kind": "step", "seq": step, "lineage": 0, "step": step, "metrics": metrics})
        sums = {"active_s": 2.0, "running_s": 12.8, "tokens": 1280, "requests": 16}
        judge = {"active_s": 1.0, "running_s": 4.0, "tokens": 160, "requests": 16}
        book = StepAccount(
            version=Version(0, step),
            began=0.0,
            seconds=4.0,
            slots=slots,
            booked={},
            engines={"rollout": EngineSums(**sums), "reward": EngineSums(**judge)},
            switches={"none>rollout": (9.0,), "rollout>reward": (1.5,)},
        )
        spans = {
            "cpu:0": [Span(0.0, 4.0, {"busy rollout": 2.0})],
            "cpu:1": [Span(0.0, 1.0, {"busy train": 1.0})],
        }
        append_line(folder, AccountLine("node-0", book, (), spans))
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + '\n{"kind": "step", "seq": 99, "li')  # killed while it wrote
    return folder


def test_a_scenario_is_played_with_every_policy(scenario: Path) -> None:
    told = said(str(scenario), "--cost", "1")
    for name in (
        "static",
        "colocated",
        "hill_climb",
        "threshold",
        "dynamic",
        "a small job",
        "4 steps on 5 slots, strict",
    ):
        assert name in told


def test_as_json_each_move_has_its_reason(scenario: Path) -> None:
    tree = json.loads(said(str(scenario), "--policy", "hill_climb", "--cost", "0", "--slots", "8", "-o", "json"))
    assert tree["slots"] == 8
    rows = {row["policy"]: row for row in tree["rows"]}
    assert "dynamic" not in rows
    assert all(move["reason"] for move in rows["hill_climb"]["moves"])
    assert all(row["step_s"] == pytest.approx(row["seconds"] / 4) for row in rows.values())


def test_too_few_slots_for_what_the_scenario_says_are_told(scenario: Path) -> None:
    scenario.write_text(SMALL + "colocated: false\n")
    with pytest.raises(UsageError, match="2 slots cannot hold a train world"):
        said(str(scenario), "--slots", "2")
    scenario.write_text(SMALL + "losses: [{at: 1, until: 2, slots: 5}]\n")
    with pytest.raises(UsageError, match="0 slots cannot hold a train world"):
        said(str(scenario))


def test_the_same_seed_says_the_same(scenario: Path) -> None:
    assert said(str(scenario), "--seed", "3") == said(str(scenario), "--seed", "3")
    assert said(str(scenario), "--seed", "3") != said(str(scenario), "--seed", "4")


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    replay = read_run(a_run(tmp_path / "run"))
    told = replay.scenario
    assert len(replay.steps) == 6  # without its first two
    assert (told.slots, set(replay.trained_on), replay.lend_s) == (3, {1}, 1.5)
    assert told.rollout.token_s + told.rollout.sequence_s * 6.4 == pytest.approx(0.01)
    assert all(work.lengths.size == 16 for work in replay.steps)
    assert all(work.judged.tolist() == [10.0] * 16 for work in replay.steps)
    work = ReplayedJob(replay, 1).work(0)
    assert work is replay.steps[0]


def with_samples(folder: Path, step: int, *lengths: int, observed: int = 0) -> None:
    """Of that step these responses were kept, two of a prompt."""
    groups = []
    for number, pair in enumerate(zip(lengths[::2], lengths[1::2], strict=True)):
        samples = tuple(
            KeptSample(
                response=KeptText(text=""), tokens=one, reward=0.0, finish_reason="stop", observed_tokens=observed
            )
            for one in pair
        )
        ref, text = PromptRef(0, 0, number), KeptText(text="")
        groups.append(
            KeptGroup(
                ref=ref,
                digest=f"{step}-{number}",
                source="s",
                prompt=text,
                prompt_tokens=5,
                holder="h",
                samples=samples,
            )
        )
    samples_folder.write_samples(folder, Version(0, step), "h", groups)


def test_all_responses_of_a_step_that_were_kept_are_replayed_as_they_were(tmp_path: Path) -> None:
    folder, lengths = a_run(tmp_path / "run"), [20 + 8 * number for number in range(16)]
    with_samples(folder, 5, *lengths)
    assert read_run(folder).steps[2].lengths.tolist() == lengths
    with_samples(folder, 6, *(one + 100 for one in lengths), observed=100)
    assert read_run(folder).steps[3].lengths.tolist() == lengths, "what the environment said was not generated"


def test_a_step_of_which_a_part_was_kept_has_as_many_responses_as_it_had(tmp_path: Path) -> None:
    """A quarter of the load is another job than the one that ran, and steps with samples would be quicker than those without."""
    folder = a_run(tmp_path / "run")
    with_samples(folder, 5, 20, 40, 60, 120)
    lengths = read_run(folder).steps[2].lengths
    assert sorted(lengths.tolist()) == sorted([27.0, 53.0, 80.0, 160.0] * 4), (
        "spread as what was kept, with the step's mean"
    )
    assert read_run(folder).steps[2].judged.tolist() == [10.0] * 16
    assert lengths.sum() == pytest.approx(16 * 80, rel=0.01)


def test_filtered_responses_are_replayed_with_and_without_kept_samples(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", filter_rate=0.75, response_length_before_filter=95.0)
    with_samples(folder, 5, 40, 60, 80, 140)
    replay = read_run(folder)
    for work in replay.steps:
        assert work.lengths.size == 64
        assert work.judged.tolist() == [2.5] * 64, "the judges read what was filtered too"
    assert replay.steps[2].lengths.sum() == pytest.approx(64 * 95, rel=0.01)
    assert replay.steps[2].lengths[:16].sum() == pytest.approx(16 * 80, rel=0.01)
    told = replay.scenario
    assert (told.groups * told.samples, told.filtered) == (16, 0.75)
    assert told.prompt == pytest.approx(1600 / 16 - 80.0), "nothing is trained on what was filtered"


def test_the_same_run_is_replayed_the_same_and_what_is_left_over_of_a_step_is_drawn_from_what_was_kept(
    tmp_path: Path,
) -> None:
    folder = a_run(tmp_path / "run", response_length=70.0)
    with_samples(folder, 5, 40, 50, 60, 70, 80, 120)
    first, again = read_run(folder).steps[2].lengths, read_run(folder).steps[2].lengths
    assert first.tolist() == again.tolist()
    assert first.size == 16
    assert set(first.tolist()) == {40.0, 50.0, 60.0, 70.0, 80.0, 120.0}


def test_of_a_run_whose_train_world_changed_each_step_is_known_by_the_world_that_it_had(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    wide = {f"cpu:{number}": [Span(0.0, 1.0, {"busy train": 1.0})] for number in range(3)}
    book = StepAccount(version=Version(0, 8), began=0.0, seconds=4.0, slots=3, booked={})
    append_line(folder, AccountLine("node-1", book, (), wide))
    replay = read_run(folder)
    assert replay.trained_on == (1, 1, 1, 1, 1, 4)
    assert {1, 4} <= set(read_run(folder, slots=8).scenario.training.sizes)


def test_a_run_is_played_on_as_many_slots_as_are_asked_for(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    few, many = (json.loads(said("--run", str(folder), "--slots", slots, "-o", "json")) for slots in ("3", "12"))
    assert few["recorded_s"] == pytest.approx(6 * 4.0)
    assert min(row["seconds"] for row in many["rows"]) < min(row["seconds"] for row in few["rows"])


def test_steps_that_were_rolled_back_are_not_replayed(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text + '\n{"kind": "rollback", "seq": 9, "lineage": 1, "step": 6}\n')
    assert len(read_run(folder).steps) == 4


def test_a_run_without_books_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="slot accounts of 1 steps"):
        read_run(a_run(tmp_path / "short", steps=3))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        read_run(empty)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param([], "takes either a scenario file or --run", id="nothing to play"),
        pytest.param(["FILE", "--run", "x"], "takes either a scenario file or --run", id="both"),
        pytest.param(["--run", "nobody"], "'nobody' is neither a finished run in", id="unknown run"),
        pytest.param(["FILE", "--policy", "clever"], "no placement policy is called 'clever'", id="unknown policy"),
    ],
)
def test_invalid_arguments_are_refused_in_a_sentence(
    words: list[str], sentence: str, scenario: Path, tmp_path: Path
) -> None:
    told = [str(scenario) if word == "FILE" else word for word in words]
    with pytest.raises(UsageError, match=sentence):
        said(*told, "--home", str(tmp_path))


def test_the_first_split_of_a_replay_is_chosen_by_the_runs_own_lengths(tmp_path: Path) -> None:
    told = read_run(a_run(tmp_path / "run")).scenario
    assert told.lengths.mean == pytest.approx(80.0, rel=0.1)
    assert told.judging is not None
    assert told.judging.tokens == pytest.approx(10.0)
    assert told.prompt == pytest.approx(1600 / 16 - told.lengths.mean, abs=5)


def test_bound_rows_name_their_splits_and_moves(scenario: Path) -> None:
    pytest.importorskip("numba")
    scenario.write_text(SMALL + "losses: [{at: 1, until: 3, slots: 2}]\n")
    tree = json.loads(said(str(scenario), "--policy", "static", "--cost", "0", "-o", "json"))
    each, fixed, static = tree["rows"]
    assert (each["policy"], fixed["policy"]) == ("best split for each step", "best static split")
    assert all(row["first"] for row in tree["rows"])
    assert {move["step"] for move in fixed["moves"]} >= {1, 3}  # slots go, and come back
    assert {move["step"] for move in each["moves"]} >= {1, 3}
    assert static["first"] in said(str(scenario), "--policy", "static", "--cost", "0")


def with_spec(folder: Path, **rollout: Any) -> None:
    """The run is of a job with these settings of its rollout."""
    spec = {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d.jsonl"},
        "flow": {"steps": 8},
        "reward": {"name": "exact"},
        "rollout": {"max_new_tokens": 8} | rollout,
    }
    record = JobRecord(uid="u", name="j", spec=spec, run_dir=str(folder), created=0.0, prompts=9)
    kv = KeyValue(JobKeys("u").job, record.encode(), 1, 1)
    store_copy.write_copy(folder, "node-0", "u", KeyListing((kv,), 1))


def test_a_run_is_played_as_far_ahead_of_training_as_it_was_unless_that_is_said_otherwise(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    assert json.loads(said("--run", str(folder), "--policy", "static", "-o", "json"))["staleness"] == 0
    with_spec(folder, staleness=1, correction="tis")
    assert json.loads(said("--run", str(folder), "--policy", "static", "-o", "json"))["staleness"] == 1
    assert "one step ahead (staleness 1" in said("--run", str(folder), "--policy", "static")
    told = json.loads(said("--run", str(folder), "--policy", "static", "--staleness", "0", "-o", "json"))
    assert told["staleness"] == 0


def test_engines_of_a_run_that_span_several_slots_do_so_in_the_simulator(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", slots=8)
    alone = json.loads(said("--run", str(folder), "--policy", "static", "-o", "json"))["rows"][-1]["seconds"]
    with_spec(folder, engine="sglang", slots_per_engine=4)
    wide = json.loads(said("--run", str(folder), "--policy", "static", "-o", "json"))["rows"][-1]["seconds"]
    assert wide > alone  # the speed that was measured is that of an engine, of which there are a quarter as many


class Still:
    """A policy of another package: it takes the first split and stays."""

    def __init__(self, start: PolicyStart) -> None:
        self._first = start.first

    def plan(self, situation: Situation) -> Decision:
        return Decision(situation.now or self._first, "it is good enough")


class Broken(Still):
    def plan(self, situation: Situation) -> Decision:
        raise ZeroDivisionError("no slots")


def test_a_policy_of_another_package_is_played_too_and_one_that_raises_is_told_of(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*, group: str) -> list[EntryPoint]:
        assert group == "gcore.placement"
        return [EntryPoint(name, f"{__name__}:{name.title()}", group) for name in ("still", "broken")]

    monkeypatch.setattr(plugins, "entry_points", found)
    tree = json.loads(said(str(scenario), "--policy", "still", "--policy", "static", "-o", "json"))
    rows = {row["policy"]: row for row in tree["rows"]}
    assert rows["still"]["seconds"] == rows["static"]["seconds"]
    with pytest.raises(UsageError, match="policy 'broken' failed in the simulator \\(ZeroDivisionError: no slots"):
        said(str(scenario), "--policy", "broken")


@pytest.mark.parametrize(
    "more",
    [
        "wake_s: .inf",
        "wake_s: .nan",
        "noise: {measured: .inf}",
        "noise: {measured: 1.0e+300, replica: 1.0e+300}",
        "rollout: {token_s: .inf}",
        "training: {rate: 1.0e-320}",
        "lengths: {mean: 1.0e+300, spread: 1.0e+300}",
        "filtered: 0.999999999999",
        "samples: 1000000000000",
        "groups: 1000000",
        "steps: 1000000000000",
        "slots: 1000000000",
        "name: 2024-13-45",
        "steps: " + "9" * 5000,
        "what: " + "[" * 20_000,
        "what: " + "x" * 2_000_000,
    ],
    ids=lambda more: more[:40],
)
def test_numbers_that_no_job_has_and_what_is_no_yaml_are_told_in_a_sentence(scenario: Path, more: str) -> None:
    key = more.partition(":")[0]
    scenario.write_text(
        "\n".join(line for line in SMALL.splitlines() if not line.startswith(f"{key}:")) + f"\n{more}\n"
    )
    with pytest.raises(SpecError) as refused:
        read_scenario(scenario)
    assert len(str(refused.value)) < 1000


def test_a_file_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(SpecError, match="larger than"):
        read_scenario(Path("/dev/zero"))


def test_scenario_name_is_not_interpreted_as_markup(scenario: Path) -> None:
    scenario.write_text(SMALL.replace("name: small", "name: '[/red]'"))
    assert "[/red]: a small job" in said(str(scenario), "--policy", "static")


@pytest.mark.parametrize("cost", ["nan", "inf", "-1"])
def test_a_cost_that_is_none_is_refused(scenario: Path, cost: str) -> None:
    with pytest.raises((SystemExit, UsageError)):
        said(str(scenario), "--policy", "static", "--cost", cost)


def test_the_most_slots_and_steps_of_the_command_are_those_of_a_scenario() -> None:
    assert (simulate_verb.MOST_SLOTS, simulate_verb.MOST_STEPS) == (MOST_SLOTS, MOST_STEPS)


def test_damaged_lines_of_a_run_are_passed_over(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", steps=9)
    whole = read_run(folder)
    book = (folder / "books" / "node-0.jsonl").read_text().splitlines()[-1]
    with (folder / "books" / "node-0.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n" + book.replace('"slots":3', '"slots":' + "1" * 31) + "\n")
    with (folder / "metrics.jsonl").open("ab") as raw:
        raw.write(b"\n\xff\xfe\n" + b"[" * 100_000 + b"\n")
        for metrics in ({"seconds": "x"}, None, [1], {"seconds": 4.0, "tokens": 1e300, "response_length": 80.0}):
            raw.write(json.dumps({"kind": "step", "lineage": 0, "step": 9, "metrics": metrics}).encode() + b"\n")
        raw.write(json.dumps({"kind": "rollback", "step": "x"}).encode() + b"\n")
    assert read_run(folder).scenario == whole.scenario


def test_a_runs_records_that_no_job_can_have_are_told_in_a_sentence(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", slots=60_000)
    with pytest.raises(UsageError, match="valid job: slots"):
        read_run(folder)


def test_the_policy_that_the_page_on_placement_shows_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "operate" / "scheduling.md").read_text()
    code: dict[str, Any] = {}
    example = page.split("```python\n")[1].split("```")[0]
    exec(compile(example, "docs/operate/scheduling.md#placement", "exec", dont_inherit=True), code)
    monkeypatch.setattr("placement.simulator.run.find_policy", lambda name: code["idle_first"])
    scenario = tmp_path / "small.yaml"
    scenario.write_text(PLAYED)
    words = ["simulate", str(scenario), "--policy", "idle_first", "--cost", "0", "-o", "json"]
    row = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)["rows"][-1]
    assert row["policy"] == "idle_first"
    assert row["moves"]
    assert all(move["reason"].startswith("judges were busy for ") for move in row["moves"])
