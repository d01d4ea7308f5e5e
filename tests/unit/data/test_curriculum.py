"""Curricula: the same order on every node, every entry once, and errors in a curriculum."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.changes import ChangeSignal
from controllers.flow.curriculum_orders import CurriculumOrders, check_curriculum, curriculum_view
from gcore import plugins
from gcore.config import JobSpec, parse_spec
from gcore.config.spec import training_sources
from gcore.data.curriculum import (
    CheckedCurriculum,
    CurriculumError,
    CurriculumView,
    SourceStatistics,
    arrange_shard,
    easy_first,
    find_curriculum,
    hard_sources_first,
    shard_keys,
)
from gcore.data.dataset import Dataset
from gcore.data.order import ShardOrder
from gcore.data.stream import PromptSource, PromptStream
from gcore.errors import SpecError
from gcore.ledger.records.chain import EpochRecord, SourceTally
from gcore.types import PromptRef, Version

SHARDS = 3


def make_spec(tmp_path: Path, **data: Any) -> JobSpec:
    """Two sources: 10 sums of difficulty 9, 8, ..., 0, and 7 words of difficulty 0.5, 1.5, ..."""
    for name, count in (("sums", 10), ("words", 7)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for number in range(count):
                level = count - 1 - number if name == "sums" else number + 0.5
                file.write(json.dumps({"prompt": f"{name} {number}", "answer": "x", "level": level}) + "\n")
    sources = [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in ("sums", "words")]
    return parse_spec(
        {
            "name": "t",
            "seed": 5,
            "model": {"path": "m"},
            "data": {"sources": sources, "shards": SHARDS, **data},
            "flow": {"steps": 1},
            "rollout": {"max_new_tokens": 4},
        }
    )


def open_stream(spec: JobSpec, tmp_path: Path) -> PromptStream:
    sources = []
    for source in training_sources(spec):
        dataset = Dataset.open(source.path, prompt_field="prompt", answer_fields=("answer",), cache_dir=tmp_path)
        sources.append(PromptSource(source, dataset, None, None))  # type: ignore[arg-type]
    return PromptStream(sources, shards=SHARDS, seed=spec.seed)


def entries_in_order(stream: PromptStream, epoch: int, shard: int) -> list[tuple[str, int]]:
    found = [stream.found(PromptRef(epoch, shard, seq)) for seq in range(stream.shape.lengths[shard])]
    return [(source.name, entry) for source, entry in found]


# Pure orders.


@given(
    st.integers(0, 2**32),
    st.integers(0, 5),
    st.integers(0, 5),
    st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=40),
)
def test_an_order_has_every_place_once_the_smallest_keys_first_and_equal_ones_as_usual(
    seed: int, epoch: int, shard: int, values: list[float]
) -> None:
    keys = np.array(values, dtype=np.float32)
    order = arrange_shard(seed, epoch, shard, keys)
    places = [order.index(seq) for seq in range(len(values))]
    assert sorted(places) == list(range(len(values)))
    usual = ShardOrder(seed, epoch, shard, len(values))
    assert places == sorted((usual.index(seq) for seq in range(len(values))), key=lambda place: keys[place])
    for outside in (-1, len(values)):
        with pytest.raises(IndexError):
            order.index(outside)


def test_equal_keys_everywhere_are_the_usual_order() -> None:
    order, usual = arrange_shard(1, 2, 3, np.zeros(50, dtype=np.float32)), ShardOrder(1, 2, 3, 50)
    assert [order.index(seq) for seq in range(50)] == [usual.index(seq) for seq in range(50)]


def test_a_key_that_looks_at_the_source_only_reads_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_stream(make_spec(tmp_path), tmp_path)

    def refuse(*_: Any) -> Any:
        raise AssertionError("an entry was read")

    monkeypatch.setattr(Dataset, "entry", refuse)
    keys = shard_keys(stream, lambda source, _: float(source == "sums"), 0, 0)
    assert keys is not None
    assert keys.dtype == np.float32
    assert set(keys.tolist()) == {0.0, 1.0}


def test_keys_are_given_up_when_nobody_wants_them(tmp_path: Path) -> None:
    stream = open_stream(make_spec(tmp_path), tmp_path)
    assert shard_keys(stream, lambda *_: 0.0, 0, 0, stopped=lambda: True) is None


# Those that come with gcore.


def view(epoch: int = 1, options: dict[str, Any] | None = None, **rewards: float | None) -> CurriculumView:
    latest = {name: SourceStatistics(kept=reward is not None, mean_reward=reward) for name, reward in rewards.items()}
    so_far = {name: SourceStatistics() for name in rewards}
    return CurriculumView(0, epoch, options or {}, tuple(rewards), so_far, latest)


def test_easy_first_goes_by_a_field() -> None:
    key = easy_first(view(options={"field": "level"}))
    assert key is not None
    assert sorted([{"level": 3}, {"level": 0.5}, {"level": -1}], key=lambda fields: key("sums", fields)) == [
        {"level": -1},
        {"level": 0.5},
        {"level": 3},
    ]


@pytest.mark.parametrize("fields", [{}, {"level": "3"}, {"level": True}, {"level": None}], ids=str)
def test_easy_first_takes_numbers_only(fields: dict[str, Any]) -> None:
    key = easy_first(view(options={"field": "level"}))
    assert key is not None
    with pytest.raises(CurriculumError, match="level"):
        key("sums", fields)


def test_hard_sources_come_first_and_unknown_ones_before_them() -> None:
    key = hard_sources_first(view(a=0.75, b=0.25, c=None, d=0.75))
    assert key is not None
    assert [key(source, {}) for source in "abcd"] == [2.0, 1.0, 0.0, 2.0]


def test_older_statistics_count_for_sources_without_recent_ones() -> None:
    seen = replace(
        view(a=0.5, b=None), so_far={"a": SourceStatistics(), "b": SourceStatistics(kept=1, mean_reward=0.9)}
    )
    key = hard_sources_first(seen)
    assert key is not None
    assert key("a", {}) < key("b", {})


def test_nothing_is_known_in_the_first_epoch_and_one_source_has_no_order() -> None:
    assert hard_sources_first(view(epoch=0, a=None, b=None)) is None
    assert hard_sources_first(view(epoch=1, a=0.5)) is None


@pytest.mark.parametrize("function", [easy_first, hard_sources_first], ids=lambda f: f.__name__)
def test_only_the_first_epochs_are_ordered_if_so_asked(function: Any) -> None:
    assert function(view(epoch=1, options={"epochs": 2}, a=0.5, b=0.25)) is not None
    assert function(view(epoch=2, options={"epochs": 2}, a=0.5, b=0.25)) is None


@pytest.mark.parametrize("function", [easy_first, hard_sources_first], ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", [{"epochs": 0}, {"epochs": True}, {"epochs": "2"}, {"fields": 1}], ids=str)
def test_options_that_make_no_sense_are_refused(function: Any, options: dict[str, Any]) -> None:
    with pytest.raises(CurriculumError, match=r"epochs|fields"):
        function(view(options=options, a=0.5, b=0.25))


# Foreign code.


class Entry:
    def __init__(self, target: Any) -> None:
        self.name, self.value, self._target = "mine", "some.package:mine", target

    def load(self) -> Any:
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


def provide(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    def found(*, group: str) -> list[Any]:
        assert group == "gcore.curricula"
        return [Entry(target)]

    monkeypatch.setattr(plugins, "entry_points", found)


def test_those_that_come_with_gcore_are_found_by_name() -> None:
    points = {"easy_first": easy_first, "hard_sources_first": hard_sources_first}
    for name, function in points.items():
        assert EntryPoint(name, f"{function.__module__}:{name}", "gcore.curricula").load() is function
        assert isinstance(find_curriculum(name), CheckedCurriculum)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'easy_first'"):
        find_curriculum("easy-first")


@pytest.mark.parametrize("target", [ImportError("no torch"), 3], ids=["does not load", "is no function"])
def test_a_broken_plug_in_is_refused(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    provide(monkeypatch, target)
    with pytest.raises(SpecError, match="mine"):
        find_curriculum("mine")


def raises(*_: Any) -> Any:
    raise ZeroDivisionError


async def asynchronous(view: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (raises, "raised ZeroDivisionError"),
        (lambda view: 3, "returned an int, not a key function"),
        (asynchronous, "returned a coroutine, because it is written with `async def`"),
        (lambda view: raises, "key of curriculum 'mine' raised ZeroDivisionError"),
        (lambda view: lambda source, fields: float("nan"), "nan, which is not finite"),
        (lambda view: lambda source, fields: 1e39, "not finite in float32"),
        (lambda view: lambda source, fields: "x", "ValueError"),
    ],
    ids=["raises", "no key", "asynchronous", "key raises", "not a number", "too large", "text"],
)
def test_curriculum_errors_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Any, said: str
) -> None:
    provide(monkeypatch, target)
    spec = make_spec(tmp_path, curriculum="mine")
    with pytest.raises(CurriculumError, match=said):
        check_curriculum(spec, open_stream(spec, tmp_path), 100)


# On a controller.


def record(epoch: int, version: Version, **rewards: float) -> EpochRecord:
    tallies = {
        name: SourceTally(kept=2, samples=4, tokens=12, truncated=1, reward=2 * r) for name, r in rewards.items()
    }
    return EpochRecord(epoch=epoch, version=version, so_far=tallies, latest=tallies)


def test_the_view_has_every_source_and_means_where_there_is_something(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, curriculum="hard_sources_first", curriculum_options={"epochs": 3})
    seen = curriculum_view(spec, 1, record(1, Version(0, 1), sums=0.5))
    assert (seen.seed, seen.epoch, seen.options, seen.sources) == (5, 1, {"epochs": 3}, ("sums", "words"))
    assert seen.so_far["sums"] == SourceStatistics(kept=2, mean_reward=0.5, mean_length=3.0, truncated=0.25)
    assert seen.latest["words"] == SourceStatistics()
    assert curriculum_view(spec, 0, None).so_far == {"sums": SourceStatistics(), "words": SourceStatistics()}


class OnePeer:
    """A controller's stream and orders."""

    def __init__(self, spec: JobSpec, tmp_path: Path) -> None:
        self.changes = ChangeSignal()
        self.stream = open_stream(spec, tmp_path)
        orders = CurriculumOrders.find(spec, self.stream, self.changes.notify)
        assert orders is not None
        self.orders = orders

    def ready(self, refs: list[PromptRef], begun: dict[int, EpochRecord]) -> list[PromptRef]:
        return self.orders.ready(refs, begun, range(SHARDS))

    async def until_ready(self, refs: list[PromptRef], begun: dict[int, EpochRecord]) -> None:
        await self.changes.until(lambda: len(self.ready(refs, begun)) == len(refs))


@pytest.fixture
def two_peers(tmp_path: Path) -> list[OnePeer]:
    spec = make_spec(tmp_path, curriculum="hard_sources_first")
    return [OnePeer(spec, tmp_path) for _ in range(2)]


ONE = record(1, Version(0, 3), sums=0.1, words=0.9)


async def test_every_peer_finds_the_same_order_with_every_entry_once(
    two_peers: list[OnePeer],
) -> None:
    refs = [PromptRef(epoch, shard, 0) for epoch in (0, 1) for shard in range(SHARDS)]
    orders = []
    for peer in two_peers:
        await peer.until_ready(refs, {1: ONE})
        orders.append([entries_in_order(peer.stream, epoch, shard) for epoch in (0, 1) for shard in range(SHARDS)])
    assert orders[0] == orders[1]
    for epoch in (0, 1):
        seen = [entry for shard in orders[0][epoch * SHARDS : (epoch + 1) * SHARDS] for entry in shard]
        assert sorted(seen) == [("sums", i) for i in range(10)] + [("words", i) for i in range(7)]
    for shard in orders[0][SHARDS:]:
        assert [name for name, _ in shard] == sorted(name for name, _ in shard), "the hard source first"


async def test_nothing_of_an_epoch_is_ready_before_its_statistics_are_fixed(
    two_peers: list[OnePeer],
) -> None:
    peer = two_peers[0]
    stream = peer.stream
    refs = [PromptRef(1, 0, 0), PromptRef(0, 1, 0)]
    await peer.until_ready([refs[1]], {})
    assert peer.ready(refs, {}) == [refs[1]]
    with pytest.raises(RuntimeError, match="before it was computed"):
        stream.found(refs[0])
    await peer.until_ready(refs, {1: ONE})


async def test_after_a_rollback_the_order_is_the_new_records(two_peers: list[OnePeer]) -> None:
    peer = two_peers[0]
    stream = peer.stream
    refs = [PromptRef(1, shard, 0) for shard in range(SHARDS)]
    await peer.until_ready(refs, {1: ONE})
    before = entries_in_order(stream, 1, 0)
    other = record(1, Version(1, 2), sums=0.9, words=0.1)
    assert peer.ready(refs, {1: other}) == []
    await peer.until_ready(refs, {1: other})
    after = entries_in_order(stream, 1, 0)
    assert sorted(before) == sorted(after)
    assert [name for name, _ in after] == sorted((name for name, _ in before), reverse=True)


async def test_orders_of_finished_epochs_and_foreign_shards_are_dropped(two_peers: list[OnePeer]) -> None:
    peer = two_peers[0]
    stream = peer.stream
    await peer.until_ready([PromptRef(0, shard, 0) for shard in range(SHARDS)], {1: ONE})
    await peer.until_ready([PromptRef(1, 0, 0)], {1: ONE})
    peer.orders.ready([PromptRef(1, 0, 0)], {1: ONE}, [0, 1])
    stream.found(PromptRef(1, 0, 0))
    stream.found(PromptRef(0, 1, 0))  # mine, and nothing newer of it is due
    for gone in (PromptRef(0, 0, 0), PromptRef(0, 2, 0)):
        with pytest.raises(RuntimeError, match="before it was computed"):
            stream.found(gone)


async def test_of_what_is_held_the_order_stays_though_its_epoch_is_over_or_its_shard_went_elsewhere(
    two_peers: list[OnePeer],
) -> None:
    peer = two_peers[0]
    await peer.until_ready([PromptRef(0, shard, 0) for shard in range(SHARDS)], {1: ONE})
    held = [PromptRef(0, 0, 0), PromptRef(0, 2, 0)]
    peer.orders.ready([PromptRef(1, 0, 0)], {1: ONE}, [0, 1], held)
    for ref in held:
        peer.stream.found(ref)
    peer.orders.ready([PromptRef(1, 0, 0)], {1: ONE}, [0, 1])
    for ref in held:
        with pytest.raises(RuntimeError, match="before it was computed"):
            peer.stream.found(ref)


async def test_curriculum_exception_reaches_the_flow(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, curriculum="easy_first", curriculum_options={"field": "nothing"})
    peer = OnePeer(spec, tmp_path)
    with pytest.raises(CurriculumError, match="has no field 'nothing'"):
        await peer.until_ready([PromptRef(0, 0, 0)], {})
    await peer.orders.close()


def test_a_job_without_a_curriculum_has_no_orders(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    stream = open_stream(spec, tmp_path)
    assert CurriculumOrders.find(spec, stream, ChangeSignal().notify) is None
    assert stream.reorder is None


def test_a_spec_whose_data_have_no_such_field_is_refused_at_submission(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, curriculum="easy_first", curriculum_options={"field": "hardness"})
    with pytest.raises(CurriculumError, match=r"sums\.jsonl, entry \d+: the entry has no field 'hardness'") as caught:
        check_curriculum(spec, open_stream(spec, tmp_path), 4)
    assert caught.value.exit_code == 2, "the spec is wrong, and nothing was started"


def test_the_guides_example_does_what_it_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "use" / "data.md").read_text()
    names: dict[str, Any] = {}
    example = page.split("```python")[1].split("```")[0]
    exec(
        compile(example, "docs/use/data.md#order-cut-off-responses-figures-by-source", "exec", dont_inherit=True), names
    )
    short_first = CheckedCurriculum("short_first", names["short_first"])
    key = short_first(view(epoch=1, a=0.95, b=0.5, c=None))
    assert key is not None
    short, long = {"prompt": "x"}, {"prompt": "xxx"}
    assert key("b", short) < key("b", long) < key("a", short) < key("a", long)
    assert key("c", long) == key("b", long)
    assert short_first(view(epoch=3, a=0.5)) is None
