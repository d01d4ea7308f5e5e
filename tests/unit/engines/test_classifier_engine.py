"""The torch engine's classifier in the test's own process: its values, and refused model folders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_core import LLAMA_LIKE, SMALL
from safetensors.torch import load_file, save_file
from tiny_classifiers import make_liking_classifier, make_tiny_classifier

from gcore.engines.torch.classifier import Classifier, ClassifierCore, ClassifierRequest, load_classifier
from gcore.engines.torch.model import stage_weights
from gcore.errors import DataError, EngineError
from gcore.testing.models import CHARACTERS, SPECIAL, VOCABULARY

ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA_LIKE),
    "llama without a padding token": lambda: transformers.LlamaConfig(**LLAMA_LIKE | {"pad_token_id": None}),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA_LIKE, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**LLAMA_LIKE, head_dim=8, sliding_window=16),
    "gpt2 without a padding token": lambda: transformers.GPT2Config(
        **{k: v for k, v in SMALL.items() if k not in ("num_hidden_layers", "pad_token_id")},
        n_layer=2, n_embd=32, n_head=4, n_positions=128,
    ),
    "bert": lambda: transformers.BertConfig(**ENCODER),
    "roberta": lambda: transformers.RobertaConfig(**ENCODER, pad_token_id=1),
    "deberta": lambda: transformers.DebertaV2Config(**ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"]),
}  # fmt: skip


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, **more: Any) -> Classifier:
    return load_classifier(folder, **{"dtype": "float32", "device": "cpu", "context": None, "text": None} | more)


def questions_of(count: int, longest: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Of uneven lengths; some of them end with what may be the padding token."""
    draw = random.Random(seed)
    lengths = [draw.randint(2, longest) for _ in range(count)]
    found = [tuple(draw.randint(2, VOCABULARY - 1) for _ in range(length)) for length in lengths]
    return [(*one[:-1], draw.choice([0, 1, one[-1]])) for one in found]


def plain(folder: Path, question: tuple[int, ...]) -> float:
    """What transformers says of one question alone."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return float(model(torch.tensor([question])).logits[0, 0])


def run(core: ClassifierCore, questions: list[tuple[int, ...]]) -> list[float | None]:
    core.submit([ClassifierRequest(number, f"q-{number}", one) for number, one in enumerate(questions)])
    while core.can_work:
        core.cycle()
    told = {one.number: one.score for one in core.outbox}
    core.outbox = []
    return [told[number] for number in range(len(questions))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_classifier(tmp_path / "model", context=128)


def core_of(folder: Path, slots: int = 8, **more: Any) -> ClassifierCore:
    return ClassifierCore(loaded(folder, **more), slots=slots, chunk=64, version="0.0")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_question_is_given_what_transformers_gives_it_alone(name: str, tmp_path: Path) -> None:
    folder = saved(CONFIGS[name](), tmp_path)
    core = core_of(folder)
    assert core.model.pads, "none of these models needs to be asked one by one"
    assert core.model.context == 126 if name == "roberta" else 128
    # An encoder does not look at what its configuration calls padding where it stands in a question.
    questions = [*questions_of(20, 100), (5,) * (core.model.context - 1), (7,)]
    for question, score in zip(questions, run(core, questions), strict=True):
        assert score == pytest.approx(plain(folder, question), abs=1e-4)


def test_a_model_that_does_not_bear_padding_is_asked_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Classifier.scores

    def refuses(self: Classifier, questions: Any, pictures: Any = ()) -> list[float]:
        if len({len(question) for question in questions}) > 1:
            raise ValueError("only one length at a time")
        return whole(self, questions, pictures)

    monkeypatch.setattr(Classifier, "scores", refuses)
    questions = questions_of(6, 30)
    core = core_of(folder)
    assert not core.model.pads
    assert run(core, questions) == [pytest.approx(plain(folder, one), abs=1e-4) for one in questions]


def test_the_classifier_that_is_made_by_hand_counts_what_it_likes(tmp_path: Path) -> None:
    core = core_of(make_liking_classifier(tmp_path, "0123456789"))

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(len(SPECIAL) + CHARACTERS.index(one) for one in text)

    scores = run(core, [tokens(text) for text in ("aaaa", "a0aa", "00aa", "000a", "0000")])
    assert scores == sorted(scores, key=lambda score: score or 0.0)
    assert scores[0] == pytest.approx(-(scores[-1] or 0.0))


def test_nothing_is_scored_while_it_is_paused_and_what_is_aborted_has_no_score(folder: Path) -> None:
    core = core_of(folder)
    core.pause("retract")
    core.submit([ClassifierRequest(0, "a", (5, 6)), ClassifierRequest(1, "b", (7,)), ClassifierRequest(2, "c", (8,))])
    assert not core.can_work
    core.abort(lambda question: question.rid == "b")
    assert [(one.number, one.score, one.ending.kind) for one in core.outbox] == [(1, None, "abort")]
    core.outbox = []
    core.resume()
    core.cycle()
    assert sorted(one.number for one in core.outbox) == [0, 2]
    core.outbox = []
    core.submit([ClassifierRequest(3, "d", (5,))])
    core.pause("abort")
    assert [one.ending.message for one in core.outbox] == ["aborted by a pause"]


def test_other_weights_are_served_from_the_next_pass_on_and_never_older_ones(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_classifier(tmp_path / "other", seed=1, context=128)
    core = core_of(folder)
    questions = questions_of(3, 20)
    core.change_weights(stage_weights(core.model, other), "0.3", flush=True, abort=False)
    assert run(core, questions) == [pytest.approx(plain(other, one), abs=1e-4) for one in questions]
    with pytest.raises(EngineError, match=r"version 0\.1 is older than the served version 0\.3"):
        core.change_weights(stage_weights(core.model, folder), "0.1", flush=True, abort=False)
    with pytest.raises(EngineError, match="the folder has no weights"):
        stage_weights(core.model, tmp_path)


def test_asleep_it_scores_nothing_and_awake_the_same(folder: Path) -> None:
    core = core_of(folder)
    questions = questions_of(3, 20)
    before = run(core, questions)
    core.release(frozenset({"weights", "kv_cache"}))
    core.submit([ClassifierRequest(9, "q", (5,))])
    assert not core.can_work
    core.abort_all()
    core.outbox = []
    core.wake(frozenset({"weights", "kv_cache"}))
    assert run(core, questions) == before


def told(**more: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | more
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def lose_the_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            told(architectures=["LlamaForCausalLM"]),
            r"no sequence-classification head \(config\.json has LlamaForCausalLM\)",
            id="a model that writes",
        ),
        pytest.param(told(architectures=None), "config.json has no architecture", id="no architecture"),
        pytest.param(
            told(id2label={"0": "bad", "1": "good"}), "head returns 2 numbers, but a reward is one", id="two labels"
        ),
        pytest.param(told(id2label=None, label2id=None), "head returns 2 numbers", id="labels that nobody names"),
        pytest.param(lose_the_head, r"the model's weights lack score\.weight", id="no head in the weights"),
        pytest.param(told(hidden_size=48), "cannot load this model", id="weights of another shape"),
    ],
)
def test_a_folder_without_a_head_of_one_number_is_refused(
    change: Callable[[Path], None], said: str, folder: Path
) -> None:
    change(folder)
    with pytest.raises(DataError, match=said):
        loaded(folder)


def test_a_shorter_context_than_the_models_may_be_asked_for(folder: Path) -> None:
    assert (loaded(folder, context=50).context, loaded(folder, context=5000).context) == (50, 128)
