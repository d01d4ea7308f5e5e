"""The tokens between two answers: the template's text, tokenized to continue the existing tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import DataError

ENDED = "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{{ '<tool_response>' + m.content + '</tool_response>' if m.role == 'tool' else m.content }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
TOLD = [{"role": "tool", "content": "42"}]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[ENDED, "<|im_start|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["what is 12 + 34 = 46"] * 3, trainer)
    return tokenizer


def spaced() -> Tokenizer:
    """As with SentencePiece: a text begins with an additional space."""
    tokenizer = Tokenizer(models.Unigram([("▁", -1.0), *((c, -2.0) for c in "0123456789+=<> a.")]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def renderer(tmp_path: Path, tokenizer: Tokenizer, template: str | None = None) -> PromptRenderer:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": ENDED}))
    (tmp_path / "config.json").write_text("{}")
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return PromptRenderer.load(tmp_path, chat=template is not None, tokenizer=ModelTokenizer.load(tmp_path))


@pytest.mark.parametrize("ended", [True, False])
def test_the_template_writes_what_stands_between_two_answers(ended: bool, tmp_path: Path) -> None:
    ours = renderer(tmp_path, byte_level(), CHATML)
    shown = ours.behind(TOLD, {}, said=(60, *ours.tokenizer.end_token_ids) if ended else (60,))
    between = "\n<|im_start|>user\n<tool_response>42</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert shown == ("" if ended else ENDED) + between


def test_an_answer_and_what_is_behind_it_read_as_the_template_would_write_them_at_once(tmp_path: Path) -> None:
    ours = renderer(tmp_path, byte_level(), CHATML)
    question: list[dict[str, Any]] = [{"role": "user", "content": "12 + 34"}]
    whole = ours.render([*question, {"role": "assistant", "content": "I ask."}, *TOLD])
    assert ours.render(question) + "I ask." + ours.behind(TOLD, {}, said=()) == whole


def test_a_template_that_leaves_answers_out_or_takes_no_tool_is_told_about(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves out the assistant's last message"):
        renderer(tmp_path, byte_level(), "{{ messages[0].content }}").behind(TOLD, {}, said=())
    refusing = CHATML.replace(
        "{% for", "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% for", 1
    )
    with pytest.raises(DataError, match="failed on the prompt"):
        renderer(tmp_path, byte_level(), refusing).behind(TOLD, {}, said=())


def test_a_text_behind_tokens_gets_no_space_that_nobody_wrote(tmp_path: Path) -> None:
    ours = renderer(tmp_path, spaced())
    before = ours.tokenizer.encode("12+34=", add_special_tokens=False)
    ids = ours.encode_behind(before, "46")
    assert ours.decode(before + ids) == "12+34=46"
    assert ours.decode(before + ours.tokenizer.encode("46", add_special_tokens=False)) == "12+34= 46"
    assert ours.decode(before + ours.encode_behind(before, " 46")) == "12+34= 46"


def test_a_text_behind_tokens_is_its_own_tokens_and_changes_none_before_it(tmp_path: Path) -> None:
    ours = renderer(tmp_path, byte_level())
    before = ours.tokenizer.encode("12 + 3", add_special_tokens=False)
    ids = ours.encode_behind(before, "4 = 46")
    assert ids == ours.tokenizer.encode("4 = 46", add_special_tokens=False)
    assert ours.encode_behind((), "4") == ours.tokenizer.encode("4", add_special_tokens=False)


def test_a_text_stands_behind_tokens_whose_text_the_vocabulary_does_not_have(tmp_path: Path) -> None:
    """A token of half a character reads as one that no token stands for."""
    made = Tokenizer(models.WordLevel({"a": 0, "\u2581": 1, "b": 2}, unk_token="<none>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", "?"), decoders.Fuse()])
    ours = renderer(tmp_path, made)
    with pytest.raises(DataError):
        ours.tokenizer.encode("?", add_special_tokens=False)
    assert ours.encode_behind((0, 1), "b") == (2,)
