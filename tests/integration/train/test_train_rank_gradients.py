"""The gradient of a whole step through DeepSpeed equals that of a plain loop, for every ZeRO stage and number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from rank_splits import FSDP2, grouped_cases, named
from rank_worlds import RUNS, STAGES, WHOLE, WORLDS, run_worlds
from safetensors.numpy import load_file

PROGRAM = Path(__file__).with_name("train_rank_program.py")
CASES = [
    "engine",
    "recompute",
    "norm",
    "tis",
    "rows",
    "again",
    "masked",
    "masked-reward",
    "gspo",
    "cispo",
    "plus",
    "dual",
    "remax",
    "mis",
    "padded",
    "sft",
]
CROSSING = ["engine", "recompute", "norm", "masked-reward", "plus", "dual", "mis", "padded", "updates", "lonely"]
CROSSING += [f"streamed-{case}" for case in ("engine", "masked-reward", "mis", "padded", "half")]
"""Cases in which ranks exchange more than gradients, or have unequal work: what two ranks run at ZeRO 3; with `make test-large` all."""
OF_BACKEND = ["engine", "recompute", "updates", "lonely", "streamed-engine", "streamed-half"]
"""Cases about the backend's own work, which is to accumulate, scale and clip gradients: what two ranks run with FSDP2."""
CASES_OF_TWO = {3: CROSSING, FSDP2: OF_BACKEND}
STREAMED = ["engine", "norm", "masked", "masked-reward", "gspo", "remax", "mis", "padded"]
HALF_MASKED = ("masked", "masked-reward", "cispo", "plus", "mis")
REFERRED = ("engine", "masked-reward", "plus", "dual", "remax", "mis", "sft")
OFF_POLICY = ("engine", "gspo", "cispo", "dual", "padded")
FEW = [pytest.param(size, stage, id=f"{size} x ZeRO {stage}") for size, stage in ((1, 1), (1, 3), (2, 1), (2, 2))]
"""What is run at these stages too: a step of one update, and one of many."""
BETA1 = 0.9
CLOSE = {"gspo": 1e-5, "plus": 1e-5}
"""Where float32 rounds more than elsewhere: a bonus of entropy, whitened advantages of penalties."""


def runs(size: int, stage: int, case: str) -> bool:
    """Whether so many ranks run the case at this stage."""
    return WHOLE or size == 1 or case in CASES_OF_TWO[stage]


def runs_of(cases: Sequence[str], prefix: str = "") -> list[ParameterSet]:
    """Size of the world, ZeRO stage and case."""
    return [
        pytest.param(size, stage, case, id=f"{named(size, stage)}-{case}")
        for size, stage in WORLDS
        for case in cases
        if runs(size, stage, prefix + case)
    ]


GROUPED = [
    pytest.param(4, stage, case, id=f"{named(4, stage)}-{case}")
    for stage in STAGES
    for case in grouped_cases(stage, few=not WHOLE)
]
"""What four ranks run in sequence groups of two: number of ranks, ZeRO stage and case."""


pytestmark = pytest.mark.timeout(1200)  # everything is run once, for the first test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything run once: the plain loop, one rank, and two; on a machine without a compiler."""
    folder = tmp_path_factory.mktemp("gradients")
    run_worlds(PROGRAM, folder, limit_s=900, crossing=CASES_OF_TWO)
    return folder


@pytest.mark.parametrize(("size", "stage", "case"), runs_of(CASES))
def test_the_gradient_of_a_step_is_that_of_a_plain_loop(folder: Path, case: str, stage: int, size: int) -> None:
    check_gradient(folder, case, stage, size)


@pytest.mark.parametrize(("size", "stage"), FEW)
def test_so_it_is_at_the_other_stages(folder: Path, stage: int, size: int) -> None:
    check_gradient(folder, "engine", stage, size)


@pytest.mark.parametrize(("size", "stage", "case"), runs_of(STREAMED, "streamed-"))
def test_a_step_that_comes_in_parts_has_the_gradient_of_the_whole(
    folder: Path, case: str, stage: int, size: int
) -> None:
    check_gradient(folder, case, stage, size, prefix="streamed-")


@pytest.mark.parametrize(("size", "stage", "case"), runs_of(STREAMED, "streamed-"))
def test_a_step_that_comes_in_parts_reports_what_the_whole_does(folder: Path, case: str, stage: int, size: int) -> None:
    run = folder / f"streamed-{case}-{stage}-{size}"
    reports = [json.loads((run / f"metrics-{rank}.json").read_text()) for rank in range(size)]
    assert all(report == reports[0] for report in reports)
    whole = json.loads((folder / f"{case}-{stage}-{size}" / "metrics-0.json").read_text())
    assert reports[0].keys() == whole.keys()
    told = {name for name in whole if not name.endswith("_seconds") and name not in ("padding", "copied_bytes")}
    assert {name: reports[0][name] for name in told} == {
        name: pytest.approx(whole[name], rel=2e-4, abs=2e-6) for name in told
    }
    (receipt,) = (run / "receipts" / "w-0.jsonl").read_text().splitlines()
    (of_whole,) = (folder / f"{case}-{stage}-{size}" / "receipts" / "w-0.jsonl").read_text().splitlines()
    assert [group[:2] for group in json.loads(receipt)["groups"]] == [
        group[:2] for group in json.loads(of_whole)["groups"]
    ] or size > 1


@pytest.mark.parametrize(("size", "stage"), RUNS)
def test_parts_in_half_precision_have_the_gradient_of_the_whole_as_nearly(folder: Path, stage: int, size: int) -> None:
    plain = load_file(folder / "plain-recompute.safetensors")
    run = folder / f"streamed-half-{stage}-{size}"
    gradient = load_file(run / "checkpoints" / "0-1" / "exp_avg.safetensors")
    scale = max(float(np.abs(one).max()) for one in plain.values())
    assert all(np.abs(gradient[name] / (1 - BETA1) - plain[name]).max() < 0.05 * scale for name in plain)


def check_gradient(folder: Path, case: str, stage: int, size: int, prefix: str = "") -> None:
    expected = load_file(folder / f"plain-{case}.safetensors")
    found = load_file(folder / f"{prefix}{case}-{stage}-{size}" / "checkpoints" / "0-1" / "exp_avg.safetensors")
    assert found.keys() == expected.keys()
    scale = max(float(np.abs(gradient).max()) for gradient in expected.values())
    assert scale > 1e-3
    close = CLOSE.get(case, 6e-6 if prefix else 3e-6)  # what comes in parts is scaled once more
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name] / (1 - BETA1), gradient, rtol=0, atol=close * scale, err_msg=name)


@pytest.mark.parametrize(("size", "stage", "case"), GROUPED)
def test_sequence_groups_have_the_gradient_of_a_plain_loop(folder: Path, case: str, stage: int, size: int) -> None:
    # The model has one KV head, fewer than a group has ranks.
    if case == "updates":
        check_updates(folder, case, stage, size)
    else:
        prefix = "streamed-" if case.startswith("streamed-") else ""
        check_gradient(folder, case.removeprefix(prefix), stage, size, prefix)


@pytest.mark.parametrize(("size", "stage", "case"), GROUPED)
def test_sequence_groups_report_what_one_rank_reports(folder: Path, case: str, stage: int, size: int) -> None:
    run = folder / f"{case}-{stage}-{size}"
    reports = [json.loads((run / f"metrics-{rank}.json").read_text()) for rank in range(size)]
    assert all(report == reports[0] for report in reports)
    alone = json.loads((folder / f"{case}-2-1" / "metrics-0.json").read_text())
    told = {name for name in alone if not name.endswith("_seconds") and name not in ("padding", "copied_bytes")}
    assert {name: reports[0][name] for name in told} == {
        name: pytest.approx(alone[name], rel=1e-5, abs=1e-5) for name in told
    }


@pytest.mark.parametrize(("size", "stage", "case"), GROUPED)
def test_the_receipts_of_sequence_groups_list_each_sample_once(folder: Path, case: str, stage: int, size: int) -> None:
    receipts = (folder / f"{case}-{stage}-{size}" / "receipts").glob("*.jsonl")
    groups = {path.stem: json.loads(path.read_text())["groups"] for path in receipts}
    assert [bool(groups[f"w-{rank}"]) for rank in range(size)] == [True, False, True, False]
    samples = [(ref, index) for listed in groups.values() for ref, _, indexes in listed for index in indexes]
    assert len(samples) == len(set(samples)) == 9


@pytest.mark.parametrize(("size", "stage", "case"), runs_of(CASES))
def test_every_rank_reports_the_same_and_the_plain_loss(folder: Path, case: str, stage: int, size: int) -> None:
    run = folder / f"{case}-{stage}-{size}"
    reports = [json.loads((run / f"metrics-{rank}.json").read_text()) for rank in range(size)]
    assert all(report == reports[0] for report in reports)
    assert reports[0]["loss"] == pytest.approx(
        json.loads((folder / f"plain-{case}.json").read_text()), abs=2e-6, rel=1e-6
    )
    assert ("kl_reference" in reports[0]) == (case in REFERRED)
    assert reports[0]["masked_samples"] == (3 if case in HALF_MASKED else 0)
    compared = {"mismatch_kl", "mismatch_abs", "mismatch_k3", "mismatch_max", "ratio_mean", "clip_fraction", "kl"}
    assert compared & reports[0].keys() == (set() if case == "sft" else compared)
    assert "padding" in reports[0]


@pytest.mark.parametrize(("size", "stage", "case"), runs_of([case for case in CASES if case != "sft"]))
def test_ratios_are_exactly_one_in_the_first_update_and_not_against_the_engine(
    folder: Path, case: str, stage: int, size: int
) -> None:
    metrics = json.loads((folder / f"{case}-{stage}-{size}" / "metrics-0.json").read_text())
    if case in OFF_POLICY:
        assert metrics["ratio_min"] < metrics["ratio_mean"] < metrics["ratio_max"]
        assert not 0.8 < metrics["ratio_min"] < metrics["ratio_max"] < 1.2
        assert metrics["clip_fraction"] > 0
    else:
        assert (metrics["ratio_min"], metrics["ratio_mean"], metrics["ratio_max"]) == (1.0, 1.0, 1.0)
        assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize(("size", "stage"), RUNS)
def test_metrics_report_the_effect_of_a_correction(folder: Path, stage: int, size: int) -> None:
    found = {}
    cases = ("tis", "plus", "remax", "mis", "engine")
    for case in (case for case in cases if runs(size, stage, case)):
        metrics = json.loads((folder / f"{case}-{stage}-{size}" / "metrics-0.json").read_text())
        found[case] = {name: metrics.get(f"correction_{name}") for name in ("mean", "dropped")}
    assert found["engine"] == {"mean": None, "dropped": None}
    if "tis" in found:
        assert 0 < found["tis"]["mean"] <= 1.5
        assert (found["tis"]["dropped"], found["remax"]["dropped"]) == (0, 0)
        assert found["remax"]["mean"] > found["tis"]["mean"]
    for case in found.keys() & {"plus", "mis"}:
        assert 0 < found[case]["dropped"] < 1
    if "mis" in found:
        assert found["mis"]["mean"] == pytest.approx(1 - found["mis"]["dropped"])


@pytest.mark.parametrize(("size", "stage"), RUNS)
def test_ten_updates_have_the_losses_of_a_plain_loop(folder: Path, stage: int, size: int) -> None:
    expected = json.loads((folder / "plain-ten.json").read_text())
    found = json.loads((folder / f"ten-{stage}-{size}" / "losses.json").read_text())
    assert len(found) == 10
    assert abs(expected[0] - expected[-1]) > 1e-2, "something was learned"
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("size", "stage", "case"), runs_of(["updates", "lonely"]))
def test_many_updates_of_one_step_lead_to_the_weights_of_a_plain_loop(
    folder: Path, case: str, stage: int, size: int
) -> None:
    # In the lonely case a rank has nothing to do in one mini-batch, and nobody in another.
    check_updates(folder, case, stage, size)


@pytest.mark.parametrize(("size", "stage"), FEW)
def test_so_they_do_at_the_other_stages(folder: Path, stage: int, size: int) -> None:
    check_updates(folder, "updates", stage, size)


def check_updates(folder: Path, case: str, stage: int, size: int) -> None:
    before = load_file(folder / "model" / "model.safetensors")
    expected = load_file(folder / f"plain-{case}.safetensors")
    run = folder / f"{case}-{stage}-{size}"
    found = load_file(run / "checkpoints" / "0-1" / "model.safetensors")
    moved = np.sqrt(sum(float(((expected[name] - before[name]) ** 2).sum()) for name in before))
    apart = np.sqrt(sum(float(((expected[name] - found[name]) ** 2).sum()) for name in before))
    assert apart < 1e-3 * moved
    metrics = json.loads((run / "metrics-0.json").read_text())
    assert metrics["clip_fraction"] > 0
    assert metrics["ratio_min"] < 0.8 < 1.2 < metrics["ratio_max"], "the clip acts on what earlier updates changed"
    assert metrics["learning_rate"] == pytest.approx(2e-2 / 4 if case == "updates" else 2e-2 * 3 / 4)
    assert metrics["skipped_updates"] == 0


@pytest.mark.parametrize(("size", "stage"), RUNS)
def test_a_last_step_without_groups_leaves_the_weights_and_a_checkpoint(folder: Path, stage: int, size: int) -> None:
    run = folder / f"empty-{stage}-{size}"
    first = load_file(folder / "model" / "model.safetensors")
    last = load_file(run / "checkpoints" / "0-1" / "model.safetensors")
    assert all((value == first[name]).all() for name, value in last.items())
    assert len((run / "receipts" / "w-0.jsonl").read_text().splitlines()) == 1
    assert "loss" not in json.loads((run / "metrics-0.json").read_text())


@pytest.mark.parametrize(("size", "stage"), RUNS)
def test_a_learning_rate_of_zero_leaves_every_bit_of_the_weights(folder: Path, stage: int, size: int) -> None:
    before = load_file(folder / "model" / "model.safetensors")
    run = folder / f"still-{stage}-{size}"
    for after in (run / "weights" / "0-1", run / "checkpoints" / "0-1"):
        found = load_file(after / "model.safetensors")
        assert found.keys() == before.keys()
        assert all(np.array_equal(found[name], before[name]) for name in before)


@pytest.mark.parametrize(("size", "stage"), RUNS)
def test_half_precision_arithmetic_keeps_the_weights_in_full_precision(folder: Path, stage: int, size: int) -> None:
    before = load_file(folder / "model" / "model.safetensors")
    found = load_file(folder / f"half-{stage}-{size}" / "checkpoints" / "0-1" / "model.safetensors")
    # Adam's first update moves no weight further than the learning rate; rounding the weights would (0.2 · 2^-9).
    assert all(np.abs(found[name] - before[name]).max() <= 1.01e-3 for name in before if before[name].ndim > 1)
    plain = load_file(folder / "plain-recompute.safetensors")
    gradient = load_file(folder / f"half-{stage}-{size}" / "checkpoints" / "0-1" / "exp_avg.safetensors")
    scale = max(float(np.abs(one).max()) for one in plain.values())
    assert all(np.abs(gradient[name] / (1 - BETA1) - plain[name]).max() < 0.05 * scale for name in plain)
