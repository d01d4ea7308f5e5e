"""An emulated judge's answers are valid for each of gcore's parsers; an unsupported parser is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gcore.config.reward import VerdictSpec
from gcore.engines.detokenizer import Detokenizer
from gcore.engines.emulated.responses import Vocabulary, find_emulated_verdict
from gcore.errors import DataError
from gcore.quickstart.arithmetic import JUDGE_CHARACTERS as SUMS_AND_VERDICTS
from gcore.quickstart.lessons import Alphabet, save_tokenizer
from gcore.reward.judges.parsers import find_parser

CHARACTERS = 'abcdefghijklmnopqrstuvwxyzYNGr0123456789 .,:{}"'


def text_of(characters: str) -> Detokenizer:
    words = {"<unk>": 0} | {c: i + 1 for i, c in enumerate(dict.fromkeys(characters))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>"])
    return Detokenizer(tokenizer)


def words_of(characters: str) -> Vocabulary:
    count = len(dict.fromkeys(characters)) + 1
    return Vocabulary(count, tuple(range(1, count)), (), 512)


@pytest.mark.parametrize(
    ("told", "best", "worst"),
    [
        ({"parser": "words", "words": {"Y": 1, "N": 0}}, 1.0, 0.0),
        ({"parser": "words", "after": ":", "words": {"Y": 0.5, "N": 0.25}}, 0.5, 0.25),
        ({"parser": "number", "most": 10, "scale": True}, 1.0, 0.0),
        ({"parser": "number", "after": "Grade:", "least": 1, "most": 5}, 5.0, 1.0),
        ({"parser": "json", "field": "score", "most": 7}, 7.0, 0.0),
        ({"parser": "json", "words": {"Y": 1, "N": 0}}, 1.0, 0.0),
    ],
    ids=["words", "words after", "number scaled", "number after", "json", "json words"],
)
def test_the_parser_reads_the_best_and_the_worst_verdict_behind_whatever_stands_before(
    told: dict[str, Any], best: float, worst: float
) -> None:
    spec, text, words = VerdictSpec.model_validate(told), text_of(CHARACTERS), words_of(CHARACTERS)
    found = find_emulated_verdict("j", spec, words, text)
    parse = find_parser(spec.parser)
    for before in words.ordinary:
        said = [
            parse(text.decode((7, before, *tokens), skip_special_tokens=True), spec)
            for tokens in (found.best, found.worst)
        ]
        assert said == [best, worst]


def test_a_judge_whose_tokens_cannot_say_a_verdict_is_refused_by_name() -> None:
    spec = VerdictSpec(parser="words", words={"Y": 1.0, "N": 0.0})
    with pytest.raises(DataError, match="parser 'words' accepts no verdict that judge 'tutor' can express"):
        find_emulated_verdict("tutor", spec, words_of("abc "), text_of("abc "))
    with pytest.raises(DataError, match="no tokenizer"):
        find_emulated_verdict("tutor", spec, words_of("abc "), None)


def test_the_judge_of_the_arithmetic_example_has_a_verdict_though_its_tokenizer_cannot_spell_a_space(
    tmp_path: Path,
) -> None:
    save_tokenizer(Alphabet(SUMS_AND_VERDICTS), tmp_path)
    text = Detokenizer.load(tmp_path)
    assert text is not None
    with pytest.raises(Exception, match="UNK"):
        text.encode(" :Y")
    spec = VerdictSpec(parser="words", after=":", words={"Y": 1.0, "N": 0.0})
    words = Vocabulary(len(SUMS_AND_VERDICTS) + 2, tuple(range(len(SUMS_AND_VERDICTS))), (), 64)
    found = find_emulated_verdict("sums", spec, words, text)
    assert [text.decode(one, skip_special_tokens=True) for one in (found.best, found.worst)] == [":Y", ":N"]
