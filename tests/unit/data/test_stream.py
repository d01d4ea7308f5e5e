"""From a ref to tokens: every entry as often as its source's weight says, and none that is too long."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompt_sources import WORDS, open_source

from gcore.data.order import KeyedPermutation, Mixture, SourceEntry, SourceShare, entry_index, ref_of_entry
from gcore.data.stream import EvalPromptSource, PromptFiltered, PromptStream, check_lengths, cut_shards, prompt_limit
from gcore.errors import DataError
from gcore.types import PromptRef


def refs_of(stream: PromptStream, epoch: int) -> list[PromptRef]:
    lengths = stream.shape.lengths
    return [PromptRef(epoch, shard, seq) for shard in range(len(lengths)) for seq in range(lengths[shard])]


GOLDEN = [0, 15, 30, 25, 45, 40, 35, 50, 20, 10, 5, 36]
GOLDEN_HASH = "fb92565a3fd32bc9"


# --- one source


def test_an_epoch_shows_every_entry_once_with_its_text_tokens_fields_and_source(tmp_path: Path) -> None:
    stream = PromptStream([open_source(tmp_path, [f"{i} + 1 =" for i in range(29)])], shards=4, seed=3)
    for epoch in range(2):
        shown = {ref: stream.prompt(ref) for ref in refs_of(stream, epoch)}
        assert sorted(prompt.fields["answer"] for prompt in shown.values()) == list(range(29))
        for ref, prompt in shown.items():
            answer = prompt.fields["answer"]
            assert prompt.ref == ref == ref_of_entry(stream.shape, 3, epoch, answer)
            assert prompt.source == "data"
            assert prompt.text == f"{answer} + 1 ="
            assert prompt.token_ids == tuple(WORDS[word] for word in prompt.text.split())


def test_the_same_ref_is_the_same_prompt_for_everyone(tmp_path: Path) -> None:
    source = open_source(tmp_path, [f"{i} + 1 =" for i in range(29)], limit=9)
    one, other = (PromptStream([source], shards=4, seed=3) for _ in range(2))
    assert one.prompt(PromptRef(5, 1, 2)) == other.prompt(PromptRef(5, 1, 2))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_one_source_of_weight_one_is_its_own_epoch(entries: int, shards: int, seed: int, epoch: int) -> None:
    mixture = Mixture([SourceShare("data", entries)], seed)
    assert mixture.refs == entries
    assert [mixture.at(epoch, place) for place in range(entries)] == [SourceEntry(0, i) for i in range(entries)]


def test_the_order_of_one_source_never_changes_between_versions(tmp_path: Path) -> None:
    # Taken from the code before there were several sources: committed figures and running jobs depend on it.
    stream = PromptStream([open_source(tmp_path, ["1"] * 53)], shards=5, seed=7)
    orders = [[stream.found(ref)[1] for ref in refs_of(stream, epoch)] for epoch in range(3)]
    assert orders[0][:12] == GOLDEN
    assert hashlib.sha256(repr(orders).encode()).hexdigest()[:16] == GOLDEN_HASH
    assert orders == [[entry_index(stream.shape, 7, ref) for ref in refs_of(stream, epoch)] for epoch in range(3)]


def test_more_shards_than_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 3 prompts, but data\.shards is 4.*Set data\.shards to 3 or less"):
        PromptStream([open_source(tmp_path, ["1"] * 3)], shards=4, seed=0)


@pytest.mark.parametrize(
    "ref", [PromptRef(0, 2, 0), PromptRef(0, -1, 0), PromptRef(0, 0, 5), PromptRef(0, 0, -1)], ids=str
)
def test_a_ref_outside_the_stream_is_refused(tmp_path: Path, ref: PromptRef) -> None:
    stream = PromptStream([open_source(tmp_path, ["1"] * 9)], shards=2, seed=0)
    with pytest.raises(IndexError):
        stream.prompt(ref)
    with pytest.raises(IndexError):
        stream.at(ref.data_epoch, ref.shard, ref.seq)


# --- several sources

weights = st.one_of(st.sampled_from([0.01, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]), st.floats(0.01, 5))


@given(
    st.lists(st.tuples(st.integers(1, 60), weights), min_size=1, max_size=4),
    st.integers(0, 2**63 - 1),
    st.integers(0, 1000),
    st.integers(1, 6),
)
def test_over_any_epochs_in_a_row_no_two_entries_of_a_source_are_shown_more_than_once_apart(
    sizes: list[tuple[int, float]], seed: int, first: int, epochs: int
) -> None:
    shares = [SourceShare(f"s{number}", entries, weight) for number, (entries, weight) in enumerate(sizes)]
    mixture = Mixture(shares, seed)
    assert mixture.refs == sum(max(1, round(s.weight * s.entries)) for s in shares)
    shown = Counter(mixture.at(epoch, place) for epoch in range(first, first + epochs) for place in range(mixture.refs))
    for number, share in enumerate(shares):
        times = [shown[SourceEntry(number, entry)] for entry in range(share.entries)]
        assert sum(times) == epochs * share.refs
        least, rest = divmod(epochs * share.refs, share.entries)
        assert min(times) == least
        assert max(times) == least + (rest > 0)


@pytest.mark.parametrize("seed", range(3))
def test_weight_one_half_shows_one_half_and_then_the_other_and_not_the_first_half_of_the_file(seed: int) -> None:
    mixture = Mixture([SourceShare("a", 100, 0.5)], seed)
    first, second = ({mixture.at(epoch, place).entry for place in range(50)} for epoch in (0, 1))
    assert first | second == set(range(100))
    assert not first & second
    assert 10 < len(first & set(range(50))) < 40, "a sorted file must not be halved in the middle"


def test_another_source_does_not_change_the_order_of_the_first() -> None:
    alone, among = Mixture([SourceShare("a", 60, 0.7)], 5), Mixture([SourceShare("a", 60, 0.7), SourceShare("b", 9)], 5)
    assert [alone.at(3, place) for place in range(42)] == [among.at(3, place) for place in range(42)]


@pytest.mark.parametrize("place", [-1, 12])
def test_a_place_outside_the_epoch_is_refused(place: int) -> None:
    with pytest.raises(IndexError, match="an epoch has 12 prompts"):
        Mixture([SourceShare("a", 4), SourceShare("b", 4, 2.0)], 0).at(0, place)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(shards=st.integers(1, 12), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 9))
def test_an_epoch_of_several_sources_shows_each_as_often_as_its_weight_says(
    tmp_path: Path, shards: int, seed: int, epoch: int
) -> None:
    sources = [
        open_source(tmp_path, ["1 + 1 ="] * 10, name="sums"),
        open_source(tmp_path, ["2"] * 7, name="twice", weight=2),
        open_source(tmp_path, ["3"] * 20, name="half", weight=0.5),
    ]
    stream = PromptStream(sources, shards=shards, seed=seed)
    prompts = [stream.prompt(ref) for ref in refs_of(stream, epoch)]
    assert len(prompts) == 34
    assert Counter(prompt.source for prompt in prompts) == {"sums": 10, "twice": 14, "half": 10}
    shown = Counter((prompt.source, prompt.fields["answer"]) for prompt in prompts)
    assert {times for (name, _), times in shown.items() if name == "twice"} == {2}
    assert {times for (name, _), times in shown.items() if name != "twice"} == {1}
    assert [stream.prompt(prompt.ref) for prompt in prompts] == prompts


def test_the_sources_are_mixed_within_an_epoch(tmp_path: Path) -> None:
    sources = [open_source(tmp_path, ["1"] * 100, name=name) for name in ("a", "b")]
    stream = PromptStream(sources, shards=4, seed=1)
    by_position = sorted(refs_of(stream, 0), key=lambda ref: (ref.seq, ref.shard))
    for start in range(0, 200, 50):
        names = Counter(stream.found(ref)[0].name for ref in by_position[start : start + 50])
        assert min(names["a"], names["b"]) >= 10, "no part of an epoch is one source alone"


# --- a curriculum


def test_a_curriculum_may_order_a_shard_and_leaves_the_others(tmp_path: Path) -> None:
    source = open_source(tmp_path, [f"{i % 30}" for i in range(40)])
    plain = PromptStream([source], shards=4, seed=1)

    class Descending:
        def index(self, seq: int) -> int:
            return 9 - seq

    stream = PromptStream(
        [source], shards=4, seed=1, reorder=lambda epoch, shard: Descending() if (epoch, shard) == (1, 2) else None
    )
    assert [stream.found(PromptRef(1, 2, seq))[1] for seq in range(10)] == [38 - 4 * seq for seq in range(10)]
    assert [stream.at(1, 2, place)[1] for place in range(10)] == [2 + 4 * place for place in range(10)]
    for epoch, shard in ((0, 2), (1, 1)):
        refs = [PromptRef(epoch, shard, seq) for seq in range(10)]
        assert [stream.found(ref) for ref in refs] == [plain.found(ref) for ref in refs]


# --- length


def test_a_prompt_that_is_too_long_is_told_with_entry_tokens_and_limit(tmp_path: Path) -> None:
    source = open_source(tmp_path, ["1 + 1 ="] * 3 + ["1 + 1 + 1 ="], limit=4)
    stream = PromptStream([source], shards=1, seed=0)
    ref = ref_of_entry(stream.shape, 0, 0, 3)
    with pytest.raises(DataError, match=r"data\.jsonl, entry 3: the prompt has 6 tokens, but at most 4") as caught:
        stream.prompt(ref)
    assert caught.value.fix


def test_a_prompt_as_long_as_the_limit_fits(tmp_path: Path) -> None:
    assert len(open_source(tmp_path, ["1 + 1 ="], limit=4).prompt(0, PromptRef(0, 0, 0)).token_ids) == 4


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (0, "the prompt is shorter than min_prompt_tokens (3)"),
        (1, None),
        (2, None),
        (3, "the prompt is longer than max_prompt_tokens (6)"),
    ],
)
def test_prompts_outside_their_sources_bounds_are_filtered_with_the_bound(
    tmp_path: Path, entry: int, reason: str | None
) -> None:
    prompts = ["1 =", "1 + =", "1 + 1 + 1 =", "1 + 1 + 1 + 1 ="]
    source = open_source(tmp_path, prompts, limit=6, min_prompt_tokens=3, max_prompt_tokens=6)
    stream = PromptStream([source], shards=1, seed=0)
    ref = ref_of_entry(stream.shape, 0, 0, entry)
    if reason is None:
        assert stream.prompt(ref).fields["answer"] == entry
    else:
        with pytest.raises(PromptFiltered) as caught:
            stream.prompt(ref)
        assert caught.value.what == reason, "one reason for all of a kind, so that outcomes can be counted"


def test_too_long_prompts_without_a_filter_are_errors(tmp_path: Path) -> None:
    source = open_source(tmp_path, ["1 + 1 ="], limit=3, max_prompt_tokens=4)
    with pytest.raises(DataError, match="has 4 tokens, but at most 3"):
        source.prompt(0, PromptRef(0, 0, 0))


def test_an_evaluation_prompt_has_its_index_for_a_ref(tmp_path: Path) -> None:
    held_out = EvalPromptSource(open_source(tmp_path, ["1", "2"], name="held"))
    assert len(held_out) == 2
    prompt = held_out.prompt(1)
    assert (prompt.ref, prompt.source, prompt.text) == (PromptRef(0, 0, 1), "held", "2")
    assert held_out.source.name == "held"


def test_renderer_errors_name_the_entry(tmp_path: Path) -> None:
    source = open_source(tmp_path, ["1", [{"role": "user", "content": "1"}]])
    with pytest.raises(DataError, match=r"entry 1: .*chat messages.*model\.chat"):
        check_lengths(source)


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no tokens"):
        check_lengths(open_source(tmp_path, [" "]))


@pytest.mark.parametrize(
    ("context", "new_tokens", "limit"), [(None, 9, None), (64, 16, 48), (64, 63, 1)], ids=["not known", "room", "just"]
)
def test_the_response_is_given_its_room(context: int | None, new_tokens: int, limit: int | None) -> None:
    assert prompt_limit(context, new_tokens) == limit


def test_a_response_that_fills_the_context_is_refused() -> None:
    with pytest.raises(DataError, match=r"max_new_tokens \(64\) leaves no room"):
        prompt_limit(64, 64)


def test_lengths_are_reported(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = open_source(tmp_path, ["1", "1 + 1 =", "1 x"], limit=4)
    report = check_lengths(source, progress=lambda done, total: seen.append((done, total)))
    assert (report.checked, report.entries, report.longest, report.longest_entry) == (3, 3, 4, 1)
    assert report.mean == 7 / 3
    assert [report.percentile(percent) for percent in (1, 50, 95, 100)] == [1, 2, 4, 4]
    assert report.unknown == 1, "one prompt has a word that the tokenizer does not know"
    assert (report.first.text, report.filtered) == ("1", {})
    assert seen == [(3, 3)]


def test_filtered_prompts_are_counted_by_reason_and_not_measured(tmp_path: Path) -> None:
    prompts = ["1", "1 + 1 =", "1", "1 + 1 + 1 =", "1 ="]
    report = check_lengths(open_source(tmp_path, prompts, limit=5, min_prompt_tokens=2, max_prompt_tokens=5))
    assert report.filtered == {
        "the prompt is shorter than min_prompt_tokens (2)": 2,
        "the prompt is longer than max_prompt_tokens (5)": 1,
    }
    assert report.tokens.tolist() == [4, 2]
    assert report.first.text == "1 + 1 ="


def test_filters_that_leave_no_prompt_are_refused(tmp_path: Path) -> None:
    source = open_source(tmp_path, ["1", "2"], min_prompt_tokens=2)
    with pytest.raises(DataError, match=r"exclude every prompt: of all, 2: the prompt is shorter"):
        check_lengths(source)


@pytest.mark.parametrize(("sample", "checked"), [(None, 50), (2, 2), (7, 7), (1, 1), (50, 50), (99, 50)], ids=str)
def test_a_sample_is_spread_over_the_file(tmp_path: Path, sample: int | None, checked: int) -> None:
    report = check_lengths(open_source(tmp_path, ["1"] * 49 + ["1 + 1"]), sample=sample)
    assert (report.checked, report.entries) == (checked, 50)
    assert report.longest == (1 if sample == 1 else 3), "the last entry is among them"


def test_cutting_needs_no_data() -> None:
    assert cut_shards(10, 3).lengths == (4, 3, 3)


def test_a_keyed_permutation_follows_from_its_key_alone() -> None:
    one, same, other = (KeyedPermutation(key, 64) for key in (b"a", b"a", b"b"))
    assert [one.index(i) for i in range(64)] == [same.index(i) for i in range(64)]
    assert [one.index(i) for i in range(64)] != [other.index(i) for i in range(64)]
