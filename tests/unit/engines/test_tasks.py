"""Waiting tasks, spans of versions, and a row's bookkeeping."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.engines.request import GenerationRequest, RequestSampling, SequenceState, is_older
from gcore.engines.torch.scheduler import PhiloxStreams, RunningBatch, WaitingQueue, plan_compaction


def work(number: int, limit: int = 50, **sampling: object) -> SequenceState:
    return SequenceState(
        GenerationRequest(number, f"r{number}", (1, 2, 3), RequestSampling(limit, seed=number, **sampling))
    )  # type: ignore[arg-type]


def numbers(works: list[SequenceState]) -> list[int]:
    return [w.task.number for w in works]


@given(st.lists(st.integers(0, 99), unique=True), st.integers(0, 20), st.sets(st.integers(0, 99)))
def test_queue_is_in_order_and_returned_tasks_come_first(order: list[int], count: int, unwanted: set[int]) -> None:
    waiting = WaitingQueue()
    waiting.put(work(n) for n in order)
    taken = waiting.take(count)
    assert numbers(taken) == order[:count]
    waiting.put_back(taken)
    dropped = waiting.drop(lambda task: task.number in unwanted)
    assert numbers(dropped) == [n for n in order if n in unwanted]
    assert numbers(waiting.take(len(order))) == [n for n in order if n not in unwanted]


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["0.1", "0.2", "1.0"])), min_size=1), st.integers(0, 9))
def test_spans_cover_all_tokens_without_gap_or_overlap(steps: list[tuple[int, str]], extra: int) -> None:
    one, count, made = work(0), 0, []
    for tokens, version in steps:
        one.mark(version, count)
        made += [version] * tokens
        count += tokens
    spans = one.spans(count)
    assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
    assert spans[-1].end == count
    assert [s.version for s in spans for _ in range(s.start, s.end)] == made
    assert all(s.start < s.end for s in spans) or len(spans) == 1


@pytest.mark.parametrize(
    ("offered", "served", "older"),
    [
        pytest.param("0.9", "0.10", True, id="steps are numbers"),
        pytest.param("1.0", "0.10", False, id="a later lineage is newer"),
        pytest.param("0.10", "1.0", True, id="an earlier lineage is older"),
        pytest.param("0.3", "0.3", False, id="the same is not older"),
        pytest.param("default", "0.3", False, id="names have no order"),
        pytest.param("0.3", "default", False, id="nor has what follows them"),
    ],
)
def test_only_versions_that_read_lineage_and_step_have_an_order(offered: str, served: str, older: bool) -> None:
    assert is_older(offered, served) is older


@given(st.integers(0, 2**128 - 1), st.integers(0, 200))
def test_uniforms_are_the_philox_stream_of_the_key_whatever_was_drawn_before(key: int, count: int) -> None:
    uniforms = PhiloxStreams()
    uniforms.draw(key ^ 1, 3)
    expected = np.random.Generator(np.random.Philox(key=key)).random(count)
    np.testing.assert_array_equal(uniforms.draw(key, count), np.minimum(expected, 1 - 2.0**-40))


@given(st.data())
def test_rows_keep_their_tokens_when_others_come_and_go(data: st.DataObject) -> None:
    rows, history, started = RunningBatch(), {}, 0
    for _ in range(data.draw(st.integers(1, 12))):
        if rows.active == 0 or data.draw(st.booleans()):
            new = [work(started + i, limit=data.draw(st.integers(20, 90))) for i in range(data.draw(st.integers(1, 5)))]
            started += len(new)
            rows.join(new)
            history |= {w.task.number: [] for w in new}
        else:
            leaving = data.draw(st.lists(st.integers(0, rows.active - 1), unique=True))
            for row in leaving:
                saved = rows.save(row)
                assert saved.tokens == history[saved.task.number]
            rows.refill(plan_compaction(leaving, rows.active))
        if rows.active:
            tokens = np.array([data.draw(st.integers(0, 40)) for _ in range(rows.active)])
            rows.record(0, tokens, tokens.astype(np.float32))
            for w, token in zip(rows.works, tokens.tolist(), strict=True):
                history[w.task.number].append(token)
            assert rows.pending().tolist() == tokens.tolist()
    for row, w in enumerate(rows.works):
        assert rows.tail(row, 1000) == history[w.task.number]


def test_a_row_ends_by_count_or_by_token_and_is_suspected_of_a_stop_string() -> None:
    rows = RunningBatch()
    rows.know_stop_strings((";",), np.array([False, False, False, False, True]))
    rows.join(
        [work(0, limit=1), work(1, stop_token_ids=(3, 2)), work(2, stop=(";",)), work(3)],
    )
    ended = rows.record(0, np.array([4, 2, 4, 4]), np.zeros(4, np.float32))
    assert ended.by_count.tolist() == [0]
    assert ended.by_token.tolist() == [1]
    assert ended.suspects.tolist() == [2]


def test_a_row_below_its_minimum_may_not_draw_a_stop_token() -> None:
    rows = RunningBatch()
    rows.join([work(0), work(1, min_new_tokens=1, stop_token_ids=(3, 2))])
    assert rows.forbidden(0) == [(1, 3), (1, 2)]
    assert rows.forbidden(1) == [(0, 3), (0, 2)]
    rows.record(0, np.array([5, 5]), np.zeros(2, np.float32))
    assert rows.forbidden(0) == []
