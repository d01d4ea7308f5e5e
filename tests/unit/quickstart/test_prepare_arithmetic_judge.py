"""Preparing the judge of the arithmetic example: a model of the right shape, made once, in a folder of its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from gcore.data.renderer import PromptRenderer
from gcore.errors import DataError
from gcore.models.adapter_checks import check_adapter
from gcore.quickstart import __main__ as command
from gcore.quickstart import __main__ as examples
from gcore.quickstart import arithmetic
from gcore.quickstart import arithmetic as arithmetic_judge
from gcore.quickstart import folder as prepared_folder
from gcore.quickstart.arithmetic import (
    JUDGE_CHARACTERS,
    ArithmeticJudgeManifest,
    VerdictAccuracy,
    prepare_arithmetic_judge,
    prepare_judge_adapter,
    split_sums,
)
from gcore.quickstart.folder import PreparedFolder

UPDATES = 3


def make(to: Path, *, seed: int = 0, must_fit: bool = False) -> PreparedFolder[ArithmeticJudgeManifest]:
    return prepare_arithmetic_judge(to, seed=seed, progress=False, updates=UPDATES, must_fit=must_fit)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> PreparedFolder[ArithmeticJudgeManifest]:
    return make(tmp_path_factory.mktemp("prepared") / "arithmetic-judge")


def test_a_judge_is_a_qwen3_of_about_a_million_parameters_that_reads_its_questions(
    judge: PreparedFolder[ArithmeticJudgeManifest],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(judge.model)
    assert model.config.model_type == "qwen3"
    assert 0.95e6 < sum(p.numel() for p in model.parameters()) < 1.05e6
    tokenizer = AutoTokenizer.from_pretrained(judge.model)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    for text in ("47+8=55?", "9+9==?", "12+7=?", "19:N", JUDGE_CHARACTERS):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert PromptRenderer.load(judge.model, chat=False).max_length == 64


def test_the_manifest_says_what_its_verdicts_are_worth(judge: PreparedFolder[ArithmeticJudgeManifest]) -> None:
    said = json.loads((judge.folder / "manifest.json").read_text())
    assert (said["judge_accuracy"], said["judge_false_yes"]) == (
        judge.manifest.judge_accuracy,
        judge.manifest.judge_false_yes,
    )
    assert said["recipe"] == arithmetic_judge.JUDGE_RECIPE
    assert set(said["files"]) >= {"model/config.json", "model/model.safetensors", "model/tokenizer.json"}


def test_a_second_call_finds_what_the_first_has_made(
    judge: PreparedFolder[ArithmeticJudgeManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_folder, "_make", None)
    again = make(judge.folder)
    assert again.cached
    assert not judge.cached
    assert again.manifest.judge_accuracy == judge.manifest.judge_accuracy


@pytest.mark.large
def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_judge(
    judge: PreparedFolder[ArithmeticJudgeManifest], tmp_path: Path
) -> None:
    def weights(made: PreparedFolder[ArithmeticJudgeManifest]) -> str:
        return hashlib.sha256((made.model / "model.safetensors").read_bytes()).hexdigest()

    assert weights(make(tmp_path / "again")) == weights(judge)
    assert weights(make(tmp_path / "other", seed=1)) != weights(judge)


def test_one_example_does_not_take_the_place_of_another(judge: PreparedFolder[ArithmeticJudgeManifest]) -> None:
    with pytest.raises(DataError, match=r"something other than the prepared example arithmetic\."):
        arithmetic.prepare_arithmetic(judge.folder, progress=False, warm_updates=1, must_fit=False)
    assert make(judge.folder).cached


def test_a_judge_that_knows_too_little_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not on 90% to 100%.*another seed"):
        make(tmp_path / "arithmetic-judge", must_fit=True)
    assert [path.name for path in tmp_path.iterdir()] == [".arithmetic-judge.lock"]


@pytest.mark.parametrize(
    "marks",
    [
        pytest.param(VerdictAccuracy(accuracy=0.96, false_yes=0.01), id="it is often wrong", marks=pytest.mark.large),
        pytest.param(
            VerdictAccuracy(accuracy=0.98, false_yes=0.03), id="it lets wrong answers pass", marks=pytest.mark.large
        ),
    ],
)
def test_a_judge_whose_verdicts_are_not_good_enough_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: VerdictAccuracy
) -> None:
    from gcore.quickstart import pretraining as teaching

    monkeypatch.setattr(teaching._Look, "fits", lambda *_: True)
    monkeypatch.setattr(arithmetic_judge, "score_verdicts", lambda *_: marks)
    with pytest.raises(DataError, match=r"needs at least 97% and at most 2%.*another seed"):
        make(tmp_path / "arithmetic-judge", must_fit=True)
    assert [path.name for path in tmp_path.iterdir()] == [".arithmetic-judge.lock"]


def test_the_judge_as_an_adapter_fits_its_base_in_gcore_and_in_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = prepare_judge_adapter(tmp_path / "made", progress=False, warm_updates=1, updates=2, must_fit=False)
    check_adapter(made.folder / "adapter", made.model)  # compares the base's digests too
    base = AutoModelForCausalLM.from_pretrained(made.model)
    tokens = torch.tensor([[1, 2, 3]])
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, made.folder / "adapter")
    assert not torch.equal(adapted(tokens).logits, before), "two updates changed B"
    assert (made.folder / "train.jsonl").read_text().count("\n") == len(split_sums(0).train)
    again = prepare_judge_adapter(made.folder, progress=False, warm_updates=1, updates=2, must_fit=False)
    assert again.cached


def test_the_command_knows_every_example_and_says_what_there_is(
    judge: PreparedFolder[ArithmeticJudgeManifest], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arithmetic_judge, "prepare_arithmetic_judge", lambda to, *, seed: judge)
    assert set(examples.EXAMPLES) == {
        "arithmetic",
        "arithmetic-judge",
        "arithmetic-judge-adapter",
        "calculator",
        "counting",
        "counting-judge",
        "pictures",
        "pictures-ddim",
        "pictures-judge",
        "zoom",
    }
    assert command.main(["arithmetic-judge", "--to", str(judge.folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{judge.folder}: {judge.manifest.judge_accuracy:.1%} of verdicts right, ")
