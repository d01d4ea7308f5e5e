"""From a ref to tokens: every entry once an epoch, and none that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gcore.errors import DataError
from gcore.prompts.dataset import Dataset
from gcore.prompts.render import PromptRenderer
from gcore.prompts.shards import ref_of_entry
from gcore.prompts.stream import LengthReport, PromptStream, check_lengths, prompt_limit
from gcore.types import PromptRef

WORDS = {word: number for number, word in enumerate(["?", *map(str, range(30)), "+", "="])}
MakeDataset = Callable[[list[Any]], Dataset]


@pytest.fixture
def renderer() -> PromptRenderer:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PromptRenderer(tokenizer, template=None, special_tokens={}, max_length=64, where="model")


@pytest.fixture
def make_dataset(tmp_path: Path) -> Iterator[MakeDataset]:
    opened: list[Dataset] = []

    def make(prompts: list[Any]) -> Dataset:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps({"q": p, "answer": i}) + "\n" for i, p in enumerate(prompts)))
        opened.append(Dataset.open(path, prompt_field="q"))
        return opened[-1]

    yield make
    for dataset in opened:
        dataset.close()


def test_an_epoch_shows_every_entry_once_with_its_text_tokens_and_fields(
    make_dataset: MakeDataset, renderer: PromptRenderer
) -> None:
    stream = PromptStream(make_dataset([f"{i} + 1 =" for i in range(29)]), renderer, shards=4, seed=3, limit=None)
    for epoch in range(2):
        refs = [PromptRef(epoch, shard, seq) for shard in range(4) for seq in range(stream.shape.lengths[shard])]
        shown = {ref: stream.prompt(ref) for ref in refs}
        assert sorted(prompt.fields["answer"] for prompt in shown.values()) == list(range(29))
        for ref, prompt in shown.items():
            answer = prompt.fields["answer"]
            assert prompt.ref == ref == ref_of_entry(stream.shape, 3, epoch, answer)
            assert prompt.text == f"{answer} + 1 ="
            assert prompt.token_ids == tuple(WORDS[word] for word in prompt.text.split())


def test_the_same_ref_is_the_same_prompt_for_everyone(make_dataset: MakeDataset, renderer: PromptRenderer) -> None:
    dataset = make_dataset([f"{i} + 1 =" for i in range(29)])
    one, other = (PromptStream(dataset, renderer, shards=4, seed=3, limit=9) for _ in range(2))
    assert one.prompt(PromptRef(5, 1, 2)) == other.prompt(PromptRef(5, 1, 2))


def test_a_prompt_that_is_too_long_is_told_with_entry_tokens_and_limit(
    make_dataset: MakeDataset, renderer: PromptRenderer
) -> None:
    stream = PromptStream(make_dataset(["1 + 1 ="] * 3 + ["1 + 1 + 1 ="]), renderer, shards=1, seed=0, limit=4)
    ref = ref_of_entry(stream.shape, 0, 0, 3)
    with pytest.raises(DataError, match=r"data\.jsonl, entry 3: the prompt has 6 tokens, and at most 4") as caught:
        stream.prompt(ref)
    assert caught.value.fix


def test_a_prompt_as_long_as_the_limit_fits(make_dataset: MakeDataset, renderer: PromptRenderer) -> None:
    assert (
        len(
            PromptStream(make_dataset(["1 + 1 ="]), renderer, shards=1, seed=0, limit=4)
            .entry(0, PromptRef(0, 0, 0))
            .token_ids
        )
        == 4
    )


def test_what_the_renderer_refuses_is_told_with_the_entry(make_dataset: MakeDataset, renderer: PromptRenderer) -> None:
    dataset = make_dataset(["1", [{"role": "user", "content": "1"}]])
    with pytest.raises(DataError, match=r"entry 1: .*chat messages.*model\.chat"):
        check_lengths(dataset, renderer, None)


def test_a_prompt_without_tokens_is_refused(make_dataset: MakeDataset, renderer: PromptRenderer) -> None:
    with pytest.raises(DataError, match="has no tokens"):
        check_lengths(make_dataset([" "]), renderer, None)


def test_more_shards_than_prompts_are_refused(make_dataset: MakeDataset, renderer: PromptRenderer) -> None:
    with pytest.raises(DataError, match=r"holds 3 prompts, and data\.shards is 4.*Set data\.shards to 3 or less"):
        PromptStream(make_dataset(["1"] * 3), renderer, shards=4, seed=0, limit=None)


@pytest.mark.parametrize(
    ("context", "new_tokens", "limit"), [(None, 9, None), (64, 16, 48), (64, 63, 1)], ids=["not known", "room", "just"]
)
def test_the_response_is_given_its_room(context: int | None, new_tokens: int, limit: int | None) -> None:
    assert prompt_limit(context, new_tokens) == limit


def test_a_response_that_fills_the_context_is_refused() -> None:
    with pytest.raises(DataError, match=r"max_new_tokens \(64\) leaves no room"):
        prompt_limit(64, 64)


def test_lengths_are_reported(make_dataset: MakeDataset, renderer: PromptRenderer) -> None:
    seen: list[tuple[int, int]] = []
    report = check_lengths(
        make_dataset(["1", "1 + 1 =", "1 ="]), renderer, 4, progress=lambda done, total: seen.append((done, total))
    )
    assert report == LengthReport(checked=3, longest=4, longest_entry=1, mean=7 / 3)
    assert seen == [(3, 3)]


@pytest.mark.parametrize(("sample", "checked"), [(None, 50), (2, 2), (7, 7), (1, 1), (50, 50), (99, 50)], ids=str)
def test_a_sample_is_spread_over_the_file(
    make_dataset: MakeDataset, renderer: PromptRenderer, sample: int | None, checked: int
) -> None:
    dataset = make_dataset(["1"] * 49 + ["1 + 1"])
    report = check_lengths(dataset, renderer, None, sample=sample)
    assert report.checked == checked
    assert report.longest == (1 if sample == 1 else 3), "the last entry is among them"
